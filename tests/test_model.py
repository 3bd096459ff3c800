"""Tests of the model's plumbing: refusals, memory, long prompts, caches, edits."""
import math

import pytest
import torch

import multiscreen as ms
from multiscreen import Config, Multiscreen
from support.check import maps_of
from support.fast import choose_screen
from support.models import build_model
from support.windowed import WindowCache, screen_windowed
from tests.helpers import CPU_SCREEN
from tests.inputs import INF, correlated, draw_tokens, random, small, use_products_of


@pytest.mark.parametrize("sizes", [
    {"psi": 0}, {"N_L": 0}, {"d_K": 1}, {"vocab_size": 0}, {"w_th": 1.0}, {"w_th": math.nan}])
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="expected more than"):
        Config(**sizes)


def test_logits_are_never_kept_for_backward():
    model = small(1)
    model.config.vocab_size = 2**25 // 7                                   # chunks of 7 tokens
    tokens = draw_tokens(1, 71)
    kept = []

    def keep(x):
        kept.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        model.loss(tokens[:, :-1], tokens[:, 1:])
    assert kept
    assert not {(7, 50), (70, 50)} & set(kept)


@torch.no_grad()
@pytest.mark.parametrize("tokens, chunks", [(7, [7]), (8, [7, 1]), (15, [7, 7, 1])])
def test_logits_beyond_2_to_the_25th_come_in_chunks(tokens, chunks):
    """Up to there they are computed at once."""
    model, sizes = small(1), []
    model.config.vocab_size = 2**25 // 7
    logits = model.logits
    model.logits = lambda x, head: sizes.append(len(x)) or logits(x, head)
    model.loss(draw_tokens(1, tokens), draw_tokens(1, tokens))
    assert sizes == chunks


def test_an_edit_of_logits_acts_in_training(monkeypatch):
    """`loss` hands the head to `logits`, in one chunk and in several."""
    tokens = draw_tokens(2, 41)
    x, y = tokens[:, :-1], tokens[:, 1:]
    right = Multiscreen.logits
    for vocab_size in (50, 2**25 // 7):                # one chunk; chunks of 4 tokens
        model = small(1, moved=True)
        model.config.vocab_size = vocab_size
        before = model.loss(x, y).item()
        monkeypatch.setattr(Multiscreen, "logits", lambda self, *args: 0.5 * right(self, *args))
        assert abs(model.loss(x, y).item() - before) > 0.01
        monkeypatch.undo()


@pytest.mark.parametrize("screen", [ms.screen, screen_windowed, CPU_SCREEN])
def test_relevances_are_float32_in_an_autocast(screen):
    """With r = 0.01 and products of 16 bits h would be another one: nearly equal q and k."""
    q, _, v = (x.float() for x in correlated(1, 1, 2, 200, 200))
    k = ms.unit(q + 0.01 * torch.randn(q.shape, generator=random(2)))
    w, r = torch.tensor([9.0, INF]), torch.tensor([0.01, 0.01])
    with torch.autocast("cpu", torch.bfloat16):
        h, alpha_d = screen(q, k, v, w, r), ms.relevance(q, k, w, r)
    assert torch.equal(h, screen(q, k, v, w, r))
    assert torch.equal(alpha_d, ms.relevance(q, k, w, r))


@pytest.mark.parametrize("screen", [ms.screen, screen_windowed, CPU_SCREEN])
def test_a_step_in_an_autocast_is_one_with_products_of_16_bits(screen):
    """The loss and every gradient, for tiles with r = 0.01 whose queries find their own keys."""
    model, tokens = small(1, moved=True), draw_tokens(2, 151)
    for tile in model.layers:
        tile.W_K.data.copy_(tile.W_Q)
        tile.s_r.data.fill_(math.log(0.01 / 0.99))
    model.screen, found = screen, []
    for dtype in (torch.bfloat16, None):
        use_products_of(model, dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is None):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
        model.zero_grad()
    for wanted, x in zip(*found):
        assert (x - wanted).norm() < 0.1 * wanted.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_parameters_of_16_bits_are_refused_in_one_line(dtype):
    with pytest.raises(TypeError, match="keep them in float32") as e:
        small().to(dtype)(draw_tokens(1, 5))
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("shape", [(5,), (0,), (1, 0), (0, 5), (1, 5, 2)])
def test_tokens_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match="expected \\(B, T\\)"):
        small()(torch.zeros(shape, dtype=torch.long))


@torch.no_grad()
def test_a_long_prompt_goes_through_in_pieces():
    model, sizes = small(1, moved=True), []
    tokens = draw_tokens(1, 100)

    def screen(q, k, *others):
        sizes.append(q.shape[2])
        return ms.screen(q, k, *others)

    model.screen, model.tokens_at_once = screen, 40
    whole = model.hidden(tokens)
    caches = model.new_caches()
    parts = [model.hidden(piece, caches) for piece in tokens.split(40, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-3, atol=1e-4)
    sizes.clear()
    model.generate(tokens, 2)
    assert sizes[:: model.config.N_L] == [40, 40, 20, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad, n_tokens", [(0, 0), (3, 8)])
def test_logits_that_are_not_finite_are_reported_at_once_or_at_the_end(
        monkeypatch, temperature, bad, n_tokens):
    """Those of the prompt at once. To look at each new token's, the CPU would wait for the GPU."""
    right = ms.Multiscreen.logits

    def logits(self, x, head):
        calls.append(x)
        return right(self, x, head) * (math.nan if len(calls) == bad + 1 else 1.0)

    monkeypatch.setattr(ms.Multiscreen, "logits", logits)
    calls, seen = [], []
    with pytest.raises(FloatingPointError, match="not finite"):
        for tokens in small(1).stream(draw_tokens(1, 5), 9, temperature):
            seen.append(tokens)
    assert len(seen) == n_tokens


class Nearby(torch.nn.Module):
    """What a layer needs, and no more: the mean of three tokens' values."""

    def __init__(self):
        super().__init__()
        self.W_V = torch.nn.Parameter(torch.randn(24, 24, generator=random(1)))

    def window(self):
        return torch.tensor(3.0)

    def forward(self, x, screen, cache):
        v, T = (x @ self.W_V)[:, None], x.shape[1]
        if cache:
            _, v = cache.append(v[..., :1], v, self.window())
        S = v.shape[2]
        d = torch.arange(S - T, S)[:, None] - torch.arange(S)
        p = ((d >= 0) & (d < 3)).to(x)
        return x + (p / p.sum(-1, keepdim=True) @ v)[:, 0]


@torch.no_grad()
def test_a_layer_of_your_own_needs_no_more_than_the_model_says():
    model = small(1)
    model.layers = torch.nn.ModuleList([Nearby(), Nearby()])
    # The layers do not look beyond their windows.
    tokens, caches = draw_tokens(2, 2200), [WindowCache(), WindowCache()]
    whole = model(tokens)
    parts = [model(part, caches) for part in tokens.split([1100, 1090, *[1] * 10], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)
    assert caches[0].n < caches[0].end
    assert torch.equal(model.generate(tokens, 1)[:, 0], whole[:, -1].argmax(-1))
    assert maps_of(model, tokens[:, :9]) == []


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("build", [
    lambda: small(1, moved=True), lambda: build_model("transformer:2,2,8", {"vocab_size": 50})])
def test_gradients_flow_through_caches(build, forgets):
    """The loss of pieces, each with the caches of those before, has the gradients of one pass."""
    model, tokens = build(), draw_tokens(2, 151)
    if forgets:
        choose_screen(model, "windowed")
    for layer in model.layers:
        if hasattr(layer, "s_w"):
            layer.s_w.data.clamp_(max=3.0)                                 # windows up to 21
    x, y = tokens[:, :-1], tokens[:, 1:]

    def gradients(lengths, between=lambda cache: None):
        caches, loss = model.new_caches(), 0
        for part, targets in zip(x.split(lengths, 1), y.split(lengths, 1)):
            logits = model(part, caches)
            loss = loss + torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(),
                                                            reduction="sum")
            for cache in caches:
                between(cache)
        return torch.autograd.grad(loss, list(model.parameters()))

    def detach(cache):
        cache.k, cache.v = cache.k.detach(), cache.v.detach()

    whole = gradients([150])
    for a, b in zip(gradients([70, 1, 79]), whole):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4 * b.abs().max().item())
    truncated = gradients([70, 1, 79], detach)
    assert all(x.isfinite().all() for x in truncated)
    assert not all(torch.allclose(a, b, rtol=1e-2) for a, b in zip(truncated, whole))

    # A prompt may go through without gradients: what follows has those of truncation.
    caches = model.new_caches()
    with torch.no_grad():
        model(x[:, :70], caches)
    losses = []
    for n in range(70, 73):
        losses.append(model(x[:, n : n + 1], caches).square().sum())
    with torch.no_grad():
        model(x[:, 73:], caches)
    sum(losses).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kernel, kept", [
    ("definition", 2130), ("windowed", 9 + 1030), ("auto", 9 + 1030)])
@torch.no_grad()
def test_a_full_cache_forgets_what_no_window_reaches_but_nothing_with_the_definition(kernel, kept):
    model = small(2, moved=True, N_L=2)
    for tile in model.layers:
        tile.s_w.fill_(math.log(8.0))                                      # windows of 9
    choose_screen(model, kernel)
    caches, tokens = model.new_caches(), draw_tokens(1, 2130)
    parts = [model(part, caches) for part in tokens.split([1100, 1030], 1)]
    assert [getattr(cache, "n", cache.end) for cache in caches] == [kept] * 2
    whole = model(tokens)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_a_screen_of_your_own_gets_its_own_maps_and_a_cache_that_keeps_all():
    """Whatever its attributes say, and whatever screened before."""
    def everything(q, k, v, w, r, i0=0):
        past = torch.ones(q.shape[2], k.shape[2]).tril(i0)
        return torch.sigmoid(q @ k.transpose(-2, -1)) * past @ v

    model, tokens = small(1, moved=True), draw_tokens(1, 2130)
    choose_screen(model)
    assert isinstance(model.new_caches()[0], WindowCache)
    model.screen = everything
    assert type(model.new_caches()[0]) is ms.KeyCache
    maps = model.relevance_maps(tokens[:, :70])
    assert [alpha_d.shape for alpha_d in maps] == [(1, 3, 70, 70)] * model.config.N_L
    past = torch.ones(70, 70).tril().bool()
    assert all((alpha_d[..., past] > 0.26).all() for alpha_d in maps)      # sigmoid(-1)
    assert all((alpha_d[..., ~past] == 0).all() for alpha_d in maps)

    caches = model.new_caches()
    parts = [model(part, caches) for part in tokens.split([1100, 1030], 1)]
    assert {cache.k.shape[2] for cache in caches} == {2130}
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=1e-3, atol=1e-4)


def test_relevance_maps_follow_an_edit_inside_screen(monkeypatch):
    """Where keys compete, the weights sum to less than 1."""
    right = ms.screen

    def compete(q, k, v, w, r, i0=0):
        alpha_d = ms.relevance(q, k, w, r, i0)
        return alpha_d / (alpha_d.sum(-1, keepdim=True) + 0.1) @ v

    model, tokens = small(1, moved=True), draw_tokens(2, 60)
    before = model.relevance_maps(tokens)
    for chosen in (screen_windowed, compete):          # both follow the edit
        monkeypatch.setattr(ms, "screen", compete)
        model.screen = chosen
        maps = model.relevance_maps(tokens)
        assert not torch.allclose(maps[0], before[0])
        assert maps[0].sum(-1).max() < 1
        monkeypatch.setattr(ms, "screen", right)
        wanted = before if chosen is screen_windowed else maps
        torch.testing.assert_close(model.relevance_maps(tokens), wanted)


def test_without_targets_the_loss_is_zero_and_so_is_its_gradient():
    model = small(1, moved=True)
    tokens = draw_tokens(2, 41)
    loss = model.loss(tokens, torch.full_like(tokens, -100))
    loss.backward()
    assert loss == 0
    assert all((p.grad == 0).all() for p in model.parameters())


def test_what_the_model_does_not_take_is_refused():
    model, x = small(1), draw_tokens(2, 8)
    for sizes in ({"psi": 0}, {"N_L": 0}, {"vocab_size": 0}, {"d_K": 1}, {"w_th": 1.0}):
        with pytest.raises(ValueError, match="expected more than"):
            Config(**sizes)
    for wrong in (x[0], x[:, :0], x[:, :, None]):
        with pytest.raises(ValueError, match="tokens has shape"):
            model(wrong)
        with pytest.raises(ValueError, match="tokens has shape"):
            model.generate(wrong, 1)
    with pytest.raises(ValueError, match="targets has shape"):
        model.loss(x, x.flatten())
    with pytest.raises(ValueError, match="shorter"):                       # than the layers
        model(x, model.new_caches()[:2])
    with pytest.raises(ValueError, match="'sum'"):
        model.loss(x, x, "sum")
    for options in ({"temperature": -1.0}, {"temperature": 1e-5}, {"top_k": 0}):
        with pytest.raises(ValueError, match="expected"):
            model.generate(x, 1, **options)
    with pytest.raises(TypeError, match="keep them in float32"):
        small(1).half()(x)
    model.s_F.data.fill_(math.nan)
    with pytest.raises(FloatingPointError, match="not finite"):
        model.generate(x, 1)


def test_the_definition_screens_until_another_screen_is_assigned(monkeypatch):
    """As it stands when it is called: so an edit in a notebook acts on a model that exists."""
    model, inputs = Multiscreen(Config(2, vocab_size=7)), object()
    monkeypatch.setattr(ms, "screen", lambda *given: given)
    assert model.screen(*[inputs] * 5, i0=3) == (*[inputs] * 5, 3)
    model.screen = screen_windowed
    assert model.screen is screen_windowed
    assert vars(model)["screen"] is screen_windowed            # no property, no second name

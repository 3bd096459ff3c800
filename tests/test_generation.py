"""Using a trained model: caches, generation, sampling, window expansion, relevance maps."""
import math

import pytest
import torch

import multiscreen as ms
from support.windowed import screen_windowed
from tests.inputs import INF, draw_tokens, random, small


def with_small_windows(model):
    """The model with windows of 2.6, 21.1 and 8.4 in each layer, and a screen that stays inside."""
    for tile in model.layers:
        tile.s_w.data = torch.tensor([0.5, 3.0, 2.0]).to(tile.s_w)
    model.screen = screen_windowed
    return model


@torch.no_grad()
def test_a_cache_drops_keys_that_no_later_query_sees_and_no_others():
    model = with_small_windows(small(2, moved=True))
    tokens, caches = draw_tokens(2, 4120), model.new_caches()
    pieces = tokens.split([1500, 1, 10, 1200, 1, 1, 1407], 1)
    parts = torch.cat([model(piece, caches) for piece in pieces], 1)
    torch.testing.assert_close(parts, model(tokens), rtol=1e-3, atol=1e-4)
    # The last piece, a window, and spare room.
    assert all(cache.k.shape[2] < 1407 + 22 + 1024 for cache in caches)


def test_gradients_flow_through_caches_that_drop_keys():
    model = with_small_windows(small(2, moved=True).double())
    tokens = draw_tokens(2, 151)
    x, y = tokens[:, :-1], tokens[:, 1:]
    wanted = torch.autograd.grad(model.loss(x, y), list(model.parameters()))
    caches = model.new_caches()
    logits = torch.cat([model(piece, caches) for piece in x.split([70, 1, 5, 74], 1)], 1)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
    torch.testing.assert_close(torch.autograd.grad(loss, list(model.parameters())), wanted)


@torch.no_grad()
@pytest.mark.parametrize("s_w, stays_in_its_windows", [(INF, True), (0.0, False)])
def test_a_cache_keeps_all_keys_if_a_window_or_the_screen_reaches_them(s_w, stays_in_its_windows):
    model, seen = small(1, N_L=1), []
    model.layers[0].s_w[1] = s_w

    def screen(q, k, v, w, r, i0=0):
        seen.append((i0, k.shape[2]))
        return v[:, :, -q.shape[2]:]

    model.screen = screen
    if stays_in_its_windows:
        screen.cache = screen_windowed.cache
    caches = model.new_caches()
    for n in (70_000, 1, 2_000):
        model(draw_tokens(1, n), caches)
    assert seen == [(0, 70_000), (70_000, 70_001), (70_001, 72_001)]


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_generation_equals_recomputation_of_the_whole_text(temperature):
    model = with_small_windows(small(2, moved=True).double())
    tokens, generator = draw_tokens(4, 33), random(3)
    seen = tokens
    for _ in range(30):
        z = model(seen)[:, -1]
        if temperature == 0:
            new = z.argmax(-1, keepdim=True)
        else:
            new = torch.multinomial((z / temperature).softmax(-1), 1, generator=generator)
        seen = torch.cat((seen, new), 1)
    found = model.generate(tokens, 30, temperature=temperature, generator=random(3))
    assert torch.equal(found, seen[:, 33:])
    assert model.generate(tokens, 0).shape == (4, 0)


@torch.no_grad()
def test_the_whole_of_a_long_prompt_is_read():
    model, n_read = small(1, N_L=1), 0
    model.layers[0].s_w.fill_(INF)

    def screen(q, k, v, w, r, i0=0):
        nonlocal n_read
        assert i0 == n_read
        n_read += q.shape[2]
        assert k.shape[2] == n_read
        return v[:, :, -q.shape[2]:]

    model.screen = screen
    model.generate(draw_tokens(1, 9000), 2)
    assert n_read == 9001                              # the first new token, too


def test_sampling_respects_the_temperature_and_the_generator():
    model = small(2, moved=True)
    tokens = draw_tokens(1, 9)

    def sample(seed, **options):
        return model.generate(tokens, 12, generator=random(seed), **options)

    greedy = model.generate(tokens, 12)
    assert torch.equal(sample(0, temperature=1.0, top_k=1), greedy)
    assert torch.equal(sample(1, temperature=1e-4), greedy)
    first, again, other = (sample(seed, temperature=2.0, top_k=20) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("temperature, top_k", [(1.0, None), (2.5, 50), (2.5, 99), (2.5, 30),
                                                (2.5, 5), (0.5, 3)])
def test_tokens_are_drawn_from_the_softmax_of_the_top_k_logits_over_the_temperature(temperature,
                                                                                   top_k):
    model, generator = small(2, moved=True, psi=1, d_K=2, d_V=2), random(0)
    tokens = draw_tokens(2, 9)
    with torch.no_grad():
        z = model(tokens)[:, -1]
    kept = z.topk(min(top_k or 50, 50)).indices
    p = torch.zeros(2, 50).scatter(1, kept, (z.gather(1, kept) / temperature).softmax(1))

    options = {"temperature": temperature}
    if top_k is not None:
        options["top_k"] = top_k
    drawn = model.generate(tokens.repeat(3000, 1), 1, generator=generator, **options)
    drawn = drawn.view(3000, 2)
    share = torch.stack([drawn[:, n].bincount(minlength=50) for n in (0, 1)]) / 3000
    assert ((share - p).abs() <= 5 * (p / 3000).sqrt()).all()


def test_windows_beyond_the_training_length_are_expanded_and_no_others():
    model = small(1, moved=True)
    for tile in model.layers:
        tile.s_w.data = torch.tensor([9.0, 99.0, 99.001]).log()            # w = 10, 100, 100.001
    model.expand_windows(100.0005)
    for tile in model.layers:
        assert ms.window(tile.s_w).isinf().tolist() == [False, False, True]
        tile.s_w.data[1] = 0                                               # w = 2, exactly
    model.expand_windows(2)
    for tile in model.layers:
        assert ms.window(tile.s_w).isinf().tolist() == [True, False, True]
    tokens = draw_tokens(2, 120)
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_relevance_maps_are_zero_outside_the_windows_and_alive_inside():
    model = small(1, moved=True)
    for tile in model.layers:
        tile.s_w.data = torch.tensor([math.log(9.0), math.log(99.0), INF])         # w = 10, 100
    maps = model.relevance_maps(draw_tokens(2, 120))
    assert [alpha_d.shape for alpha_d in maps] == [(2, 3, 120, 120)] * 3
    distance = torch.arange(120)[:, None] - torch.arange(120)
    for alpha_d in maps:
        assert (alpha_d >= 0).all()
        assert (alpha_d <= 1 + 1e-5).all()
        assert (alpha_d[..., distance < 0] == 0).all()
        assert (alpha_d[:, 0][:, distance >= 10] == 0).all()
        assert alpha_d.diagonal(dim1=-2, dim2=-1).amax() > 0
    assert any((alpha_d[:, 2][:, distance >= 101] > 0).any() for alpha_d in maps)


def test_a_model_keeps_its_screen_when_its_maps_fail():
    """As when a notebook's tokens are not in the vocabulary."""
    model = small(1)
    model.screen = screen_windowed
    with pytest.raises(IndexError):
        model.relevance_maps(torch.tensor([[50]]))
    assert model.screen is screen_windowed


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_relevance_maps_are_the_weights_that_the_models_own_screen_gives(factor):
    model, tokens, given = small(1, moved=True), draw_tokens(2, 140), []

    def screen(q, k, v, w, r, i0=0):
        given.append((q, k, w, r))
        return factor * ms.screen(q, k, v, w, r, i0)

    model.screen = screen
    model(tokens)
    wanted = [factor * ms.relevance(*inputs) for inputs in given]
    if factor == 1:
        model.screen = screen_windowed                 # the same weights
    for alpha_d, right in zip(model.relevance_maps(tokens), wanted, strict=True):
        torch.testing.assert_close(alpha_d, right, rtol=1e-3, atol=1e-5)

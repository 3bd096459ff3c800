"""Tests of --compile: the numbers stay, other models too, and failure leaves an eager model."""
import copy
import inspect
import random
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import multiscreen as ms
from support import choose, compiled
from support.choose import Choice, make_fast
from support.cli import UsageError
from support.compiled import compile_model, try_to_compile, try_to_record
from support.distributed import recompute
from support.windowed import screen_windowed
from tests.helpers import draw_tokens, small
from tests.pretended import Pretended

COMPILE = torch.compile
ISOLATED = "isolate_recompiles" in inspect.signature(COMPILE).parameters        # from torch 2.12


def of_a_step(model, tokens):
    """The loss, and the gradients by name, of one step."""
    model.zero_grad()
    loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters()}


def make():
    model = small(1, moved=True, N_L=2)
    model.screen = screen_windowed
    return model


@pytest.fixture
def model():
    return make()


@pytest.fixture
def graphs(monkeypatch):
    """Record each graph that torch.compile makes, as names of operators; run it eagerly."""
    made = []

    def backend(graph, inputs, **options):
        made.append({node.name for node in graph.graph.nodes})
        return graph.forward

    torch.compiler.reset()                             # without isolation models share graphs
    monkeypatch.setattr(torch, "compile", partial(COMPILE, backend=backend))
    return made


class Graph(TorchDispatchMode):
    """Stands in for a CUDA graph, on a CPU: operators, which read and write where they first did.

    No Python code of a pass runs again, and no tensor that has since taken another's place is seen.
    """
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operator, types, inputs=(), options=None):
        options = options or {}
        results = operator(*inputs, **options)

        # The memory of what is there now, whatever becomes of its tensor.
        def keep(x):
            return x.detach() if torch.is_tensor(x) else x

        self.calls.append((operator, *(tree_map(keep, x) for x in (inputs, options, results))))
        return results

    @torch.no_grad()
    def replay(self):
        for operator, inputs, options, results in self.calls:
            new = operator(*inputs, **options)
            for x, y in zip(tree_leaves(results), tree_leaves(new)):
                if torch.is_tensor(x) and x.data_ptr() != y.data_ptr():      # no view, not in place
                    x.copy_(y)


def record_on_a_cpu(model, monkeypatch):
    """Let `compiled.record` make a Graph."""
    def graph(new, stream):
        # What is left of an earlier pass would break a recording on a GPU.
        assert not any("passed" in get_gradient_edge(p).node.metadata
                       for p in model.parameters() if p.requires_grad)
        return new

    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(compiled, "require_no_wait", nullcontext)
    for name, stand_in in [("CUDAGraph", Graph), ("Stream", lambda: stream), ("graph", graph),
                           ("current_stream", lambda: stream),
                           ("stream", lambda _: nullcontext())]:
        monkeypatch.setattr(torch.cuda, name, stand_in)


@pytest.fixture
def recorded(monkeypatch):
    """(a model, compiled on a GPU if there is one, and the list of played passes)."""
    played, record = [], compiled.record
    model = small(1, moved=True, N_L=2)
    if torch.cuda.is_available():
        compile_model(model.to("cuda"))
    else:
        loss = ms.Multiscreen.loss

        def mark(self, *inputs, **options):
            found = loss(self, *inputs, **options)
            for p in filter(lambda p: p.requires_grad, self.parameters()):
                get_gradient_edge(p).node.metadata["passed"] = True
            return found

        monkeypatch.setattr(ms.Multiscreen, "loss", mark)
        record_on_a_cpu(model, monkeypatch)

    def record_and_count(*inputs):
        play = record(*inputs)
        return lambda *tokens: played.append(tokens) or play(*tokens)

    monkeypatch.setattr(compiled, "record", record_and_count)
    return model, played


def record_model(recorded):
    """Record the model of the fixture, and forget the pass that was played to try it."""
    model, played = recorded
    assert try_to_record(model, 2, 30).startswith("training passes are recorded")
    assert len(played) == 1
    played.clear()


@pytest.fixture
def passes(recorded):
    """Two different ones, as functions of a model that return the loss."""
    def make(n):
        tokens = draw_tokens(2, 31, seed=n).to(recorded[0].W_E.device)
        return lambda model: model.loss(tokens[:, :-1], tokens[:, 1:])

    return [make(n) for n in range(2)]


def fails(*inputs, **options):
    raise RuntimeError("PyTorch raised:\nno\ncompiler")


@torch._dynamo.config.patch(recompile_limit=2)
def test_compiling_a_model_changes_no_other(model, graphs):
    """No class and no setting of torch changes. Runs first, as changed settings would stay."""
    def state():
        configs = torch._dynamo.config, torch.fx.experimental._config
        return ([vars(x).copy() for x in vars(ms).values() if inspect.isclass(x)],
                [config.save_config() for config in configs])

    tokens, before = draw_tokens(2, 20), state()
    compile_model(model)
    of_a_step(model, tokens)
    made, other = len(graphs), make()
    attributes = [*vars(other)]
    of_a_step(other, tokens)
    other.generate(tokens, 3)
    assert len(graphs) == made
    assert [*vars(other)] == attributes
    assert state() == before
    for _ in range(2):
        another = make()
        compile_model(another)
        of_a_step(another, tokens)
    assert len(graphs) == 3 * made or not ISOLATED


def test_a_compiled_model_gives_the_numbers_of_an_eager_one(model, graphs):
    """Layers share graphs, and the trial has made every graph that a step needs."""
    tokens = draw_tokens(2, 180)
    eager = of_a_step(model, tokens)
    assert try_to_compile(model, True, 2, 179) == "compiled by torch.compile"
    assert all(p.grad is None for p in model.parameters())
    assert len(graphs) == 5                            # three parts of a layer, head, nats
    assert not any("embedding" in name for names in graphs for name in names)
    for name, x in of_a_step(model, tokens).items():
        torch.testing.assert_close(x, eager[name], rtol=1e-4, atol=1e-6)
    of_a_step(model, draw_tokens(3, 150))              # another size, of the same graphs
    assert len(graphs) == 5


@pytest.mark.parametrize("screen, parts", [(ms.screen, 1), (screen_windowed, 0)])
def test_a_layer_that_recomputes_is_compiled_where_it_is_one_graph(model, graphs, screen, parts):
    """The loss recomputes, too: it comes in chunks of 256 and 102 tokens, of a graph each."""
    tokens = draw_tokens(2, 180)
    model.screen = screen
    eager = of_a_step(model, tokens)
    model.config.vocab_size = 2**25 // 300
    recompute(model)
    compile_model(model)
    first, second = of_a_step(model, tokens), of_a_step(model, tokens)
    for name, x in first.items():
        torch.testing.assert_close(x, eager[name], rtol=1e-4, atol=1e-6)
        assert torch.equal(x, second[name])
    assert len(graphs) == parts + 3


def test_training_and_evaluation_of_all_sizes_keep_their_graphs(model, graphs):
    """Each comes twice, in turns, and the second time finds the graph that it has made."""
    def losses(batch):
        tokens = draw_tokens(batch, 21)
        model.loss(tokens[:, :-1], tokens[:, 1:])
        with torch.no_grad():
            model.loss(tokens[:, :-1], tokens[:, 1:], "none")
        return len(graphs)

    model.screen = ms.screen                           # a layer is one graph
    compile_model(model)
    assert [losses(batch) for batch in 2 * (4, 3, 2)] == [6, *5 * [10]]


@torch._dynamo.config.patch(recompile_limit=1)
def test_one_graph_too_many_is_an_error_not_an_eager_pass(model, graphs):
    """Two layers may make two: here one for each pass, of two sizes."""
    def loss(batch):
        tokens = draw_tokens(batch, 21)
        return model.loss(tokens[:, :-1], tokens[:, 1:])

    model.screen = ms.screen
    compile_model(model)
    kept = loss(4), loss(3)
    made = len(graphs)
    with torch.no_grad(), pytest.raises(UsageError, match="made 2 graphs .*use --no-compile$"):
        loss(4)
    assert (loss(4), loss(3)) == kept
    assert len(graphs) == made


def two_steps(model, passes):
    found = []
    for f in passes:
        model.zero_grad()
        loss = f(model)
        loss.backward()
        found += [loss, *(p.grad for p in model.parameters())]
    return found                                       # not copied: each has memory of its own


def added_up(model, passes):
    model.zero_grad()
    for f in passes:
        (f(model) / 2).backward()
    return [p.grad for p in model.parameters()]


def of_the_sum(model, passes):
    first, second = (f(model) for f in passes)
    return [first, second, *torch.autograd.grad(first + second, model.parameters())]


def of_each(model, passes):
    losses = [f(model) for f in passes]
    found = [torch.autograd.grad(loss, model.parameters()) for loss in losses]
    return [*losses, *found[0], *found[1]]


@pytest.mark.parametrize("run", [two_steps, added_up, of_the_sum, of_each])
def test_a_recorded_pass_gives_the_same_bits(recorded, passes, run):
    """Whatever is done with it, and also after a step, when the weights are others.

    Backward through a sum of two passes adds their gradients up in an order of its own.
    """
    model, played = recorded
    before = copy.deepcopy(model)
    record_model(recorded)
    for scale in (1.0, 0.9):
        with torch.no_grad():
            for weights in (*model.parameters(), *before.parameters()):
                weights.mul_(scale)
        for a, b in zip(run(model, passes), run(before, passes), strict=True):
            close = 1e-5 if run is of_the_sum else 0
            torch.testing.assert_close(a, b, rtol=close, atol=close)
    assert len(played) == 4


def test_a_copy_has_its_own_weights(recorded, passes):
    model, played = recorded
    record_model(recorded)
    another = copy.deepcopy(model)
    with torch.no_grad():
        another.W_E.mul_(torch.linspace(0.5, 1.5, another.W_E.shape[1], device=another.W_E.device))
    assert passes[0](another) != passes[0](model) and len(played) == 1


def test_gradients_add_up_beside_a_frozen_embedding(recorded, passes):
    model, played = recorded
    model.W_E.requires_grad_(False)

    def gradient():
        model.zero_grad()
        for f in passes:
            f(model).backward()
        assert model.W_E.grad is None
        return model.s_E.grad.clone()

    wanted = gradient()
    record_model(recorded)
    assert torch.equal(gradient(), wanted) and len(played) == 2


def test_a_weight_that_nothing_uses_gets_no_gradient(recorded, passes):
    model, played = recorded
    model.unused = torch.nn.Parameter(torch.ones(3, device=model.W_E.device))
    record_model(recorded)
    passes[0](model).backward()
    assert len(played) == 1 and model.unused.grad is None
    assert all(p.grad is not None for p in model.parameters() if p is not model.unused)


@pytest.mark.parametrize("change", ["size", "screen", "weights", "data", "frozen", "hook", "eval",
                                    "no_grad", "reduction", "layer_weight", "layer", "pre_hook",
                                    "backward_hook"])
def test_any_other_pass_is_not_the_recorded_one(recorded, change):
    model, played = recorded
    record_model(recorded)
    tokens, options = draw_tokens(2, 31).to(model.W_E.device), {}
    if change == "size":
        tokens = tokens[:, 1:]
    elif change == "screen":
        model.screen = lambda q, k, v, w, r, i0=0: 2 * ms.screen(q, k, v, w, r, i0)
    elif change == "weights":
        model.W_E = torch.nn.Parameter(model.W_E.flip(0))
    elif change == "data":
        model.layers[0].W_Q.data = model.layers[0].W_Q.data.flip(0)
    elif change == "frozen":
        model.layers[0].W_Q.requires_grad_(False)
    elif change == "hook":
        model.layers[0].register_forward_hook(lambda module, inputs, output: 2 * output)
    elif change == "pre_hook":
        model.layers[0].register_forward_pre_hook(lambda module, x: (2 * x[0], *x[1:]))
    elif change == "backward_hook":
        model.layers[0].register_full_backward_hook(lambda module, inputs, outputs: None)
    elif change == "layer_weight":
        model.layers[0].W_Q = torch.nn.Parameter(model.layers[0].W_Q.data)
    elif change == "layer":
        model.layers[0] = copy.deepcopy(model.layers[1])
    elif change == "eval":
        model.eval()
    elif change == "reduction":
        options = {"reduction": "none"}
    with torch.set_grad_enabled(change != "no_grad"):  # compiled, each mode rounds differently
        wanted = type(model).loss(model, tokens[:, :-1], tokens[:, 1:], **options)
        found = model.loss(tokens[:, :-1], tokens[:, 1:], **options)
    assert not played and torch.equal(found, wanted)


def test_a_large_pass_is_not_recorded(recorded, monkeypatch):
    model, played = recorded
    monkeypatch.setattr(compiled, "SMALL", 1000)
    assert try_to_record(model, 2, 30).startswith("not recorded as a CUDA graph: a pass of this ")
    of_a_step(model, draw_tokens(2, 31).to(model.W_E.device))
    assert not played


def test_what_cannot_be_recorded_still_trains(recorded, monkeypatch):
    model, played = recorded
    if model.W_E.is_cuda:
        model.screen = lambda q, *inputs: ms.screen(q * q.max().item(), *inputs)     # waits
    else:
        monkeypatch.setattr(compiled, "record", fails)
    tokens = draw_tokens(2, 31).to(model.W_E.device)
    wanted = of_a_step(model, tokens)
    model.zero_grad()
    assert try_to_record(model, 2, 30).startswith("not recorded as a CUDA graph: ")
    assert all(p.grad is None for p in model.parameters())
    for name, x in of_a_step(model, tokens).items():
        assert torch.equal(x, wanted[name])
    assert not played


def test_the_compiler_is_done_before_the_pass_is_watched(model, graphs, monkeypatch):
    """It waits for the GPU, as a pass that is recorded must not."""
    @contextmanager
    def require_no_compiler():
        made = len(graphs)
        yield
        assert len(graphs) == made > 0

    record_on_a_cpu(model, monkeypatch)
    monkeypatch.setattr(compiled, "require_no_wait", require_no_compiler)
    compile_model(model)
    assert try_to_record(model, 2, 30).startswith("training passes are recorded")


@pytest.mark.parametrize("draw", [lambda: torch.rand(()).item(), random.random])
def test_a_layer_that_draws_random_numbers_on_the_cpu_is_not_recorded(recorded, draw):
    """A graph would hold what was drawn while it was recorded."""
    model, played = recorded
    model.screen = lambda q, *inputs: ms.screen(q if draw() < 0.5 else -q, *inputs)
    assert "draws random numbers on the CPU" in try_to_record(model, 2, 30)
    of_a_step(model, draw_tokens(2, 31).to(model.W_E.device))
    assert not played


def test_a_recording_that_fails_is_told_with_what_may_follow(recorded, monkeypatch):
    """PyTorch may not recover: its allocator and its random numbers believe that it goes on."""
    def record(*inputs):
        raise torch.AcceleratorError("operation not permitted when stream is capturing")

    model, played = recorded
    monkeypatch.setattr(compiled, "record", record)
    assert try_to_record(model, 2, 30).endswith("if a later step fails, use --no-compile)")
    of_a_step(model, draw_tokens(2, 31).to(model.W_E.device))
    assert not played


def test_a_pass_that_gives_other_numbers_when_it_is_played_is_not_recorded(recorded, monkeypatch):
    """Here one gradient is off by a few bits."""
    model, played = recorded
    record = compiled.record

    def record_wrongly(*inputs):
        def play(*tokens):
            loss, (first, *rest) = right(*tokens)
            return loss, [first * (1 + 2**-20), *rest]

        right = record(*inputs)
        return play

    tokens = draw_tokens(2, 31).to(model.W_E.device)
    monkeypatch.setattr(compiled, "record", record_wrongly)
    assert "a recorded pass gives other numbers here" in try_to_record(model, 2, 30)
    played.clear()
    of_a_step(model, tokens)
    assert not played


@torch.no_grad()
def test_decoding_and_relevance_maps_run_eagerly_and_see_the_same(model, graphs):
    tokens = draw_tokens(2, 150)
    wanted = model.generate(tokens, 5), *model.relevance_maps(tokens)
    compile_model(model)
    model.head()                                       # its graph
    before = len(graphs)
    assert model.screen.stays_in_window
    for a, b in zip((model.generate(tokens, 5), *model.relevance_maps(tokens)), wanted):
        torch.testing.assert_close(a, b)
    assert len(graphs) == before


def make_fast_at(model, monkeypatch, capsys, **flags):
    """The lines that `make_fast` prints after that of the screen, which stays."""
    monkeypatch.setattr(choose, "get_screen", lambda model, _: Choice(model.screen, "", True))
    usual = {"compile": None, "recompute": False, "shard": 1, "batch_size": 2, "seq_len": 179}
    make_fast(model, SimpleNamespace(kernel="auto", **usual | flags))
    return capsys.readouterr().out.splitlines()[1:]


@pytest.mark.parametrize("kind, wanted, triton, tried", [
    ("cuda", None, True, True), ("cuda", None, False, False), ("cuda", False, True, False),
    ("mps", None, True, False), ("cpu", None, True, False)])
def test_where_compiling_fails_the_model_is_as_it_was(model, monkeypatch, capsys, kind, wanted,
                                                      triton, tried):
    """Here the last backward fails, after the head has its gradient."""
    def compile_to_fail(f, **options):
        def run(*inputs):
            y = f(*inputs)
            if y.requires_grad and y.ndim == 3:
                y.register_hook(fails)
            return y
        return run

    monkeypatch.setattr(torch, "compile", compile_to_fail)
    monkeypatch.setattr(choose, "has_triton", lambda: triton)
    tokens = draw_tokens(2, 180)
    eager = of_a_step(model, tokens)
    model.zero_grad()
    modules = [model, *model.layers]
    with Pretended(kind):
        model.to(kind)
        before = [vars(module).copy() for module in modules]
        said = ["not compiled: torch.compile fails here (RuntimeError: PyTorch raised: no)"] * tried
        assert make_fast_at(model, monkeypatch, capsys, compile=wanted) == said
        assert [vars(module) for module in modules] == before
        assert model.screen.stays_in_window
        assert all(p.grad is None for p in model.parameters())
        for name, x in of_a_step(model, tokens.to(kind)).items():
            assert torch.equal(x, eager[name].to(kind))


@pytest.mark.parametrize("recompute, processes, recorded", [
    (False, 1, True), (True, 1, False), (False, 2, False)])
def test_only_passes_that_neither_recompute_nor_wait_for_others_are_recorded(
        model, monkeypatch, capsys, recompute, processes, recorded):
    monkeypatch.setattr(choose, "has_triton", lambda: True)
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    monkeypatch.setattr(choose.dist, "world", lambda: processes)
    for name in ("distribute", "recompute"):
        monkeypatch.setattr(choose.dist, name, lambda *inputs: None)
    monkeypatch.setattr(compiled, "try_to_record", lambda *inputs: "recorded")
    with Pretended("cuda"):
        said = make_fast_at(model.to("cuda"), monkeypatch, capsys, recompute=recompute)
    assert said == ["compiled by torch.compile"] + ["recorded"] * recorded


def test_on_a_cpu_nothing_is_recorded(model, monkeypatch, capsys):
    monkeypatch.setattr(torch, "compile", lambda f, **options: f)
    said = make_fast_at(model, monkeypatch, capsys, compile=True)
    assert said == ["compiled by torch.compile"]


def test_what_was_asked_for_and_fails_is_an_error(model, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda f, **options: fails)
    message = r"^--compile: torch.compile fails .*RuntimeError: PyTorch raised: no\)$"
    with pytest.raises(UsageError, match=message):
        try_to_compile(model, True, 2, 30)


@pytest.mark.parametrize("changes", [
    [compile_model], [recompute], [recompute, compile_model]], ids=["compiled", "recomputed", "2"])
def test_a_copy_of_a_compiled_or_recomputed_model_computes_with_its_own_weights(graphs, changes):
    changed, other, tokens = make(), make(), draw_tokens(2, 150)
    original = of_a_step(changed, tokens)
    with torch.no_grad():
        for W in other.parameters():
            W.mul_(1.5)
    wanted, text = of_a_step(other, tokens), other.generate(tokens, 5)
    for change in changes:
        change(changed)
    copied = copy.deepcopy(changed)
    copied.load_state_dict(other.state_dict())
    for model, numbers in ((copied, wanted), (changed, original)):
        for name, x in of_a_step(model, tokens).items():
            torch.testing.assert_close(x, numbers[name], rtol=1e-4, atol=1e-6)
    assert torch.equal(copied.generate(tokens, 5), text)

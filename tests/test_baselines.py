"""Tests of lab/baselines/: the Transformer and the ablations against float64 references."""
import math
from dataclasses import asdict
from functools import partial

import pytest
import torch

import multiscreen
import train
from support.cli import UsageError
from lab import tiles
from lab.baselines import ablations, attention
from support.check import maps_of
from support.measure import rope_factor, scale_rope
from support.models import build_model, count_parameters, has_windows
from support.windowed import screen_windowed
from tests.helpers import (
    args_of,
    assert_same_weights,
    fit,
    moved_model,
    needs_matplotlib,
    read_table,
)
from tests.inputs import draw_tokens
from tests.reference import ABLATIONS, reference_logits, reference_transformer

TINY = {"psi": 3, "N_L": None, "vocab_size": 50}


def parameter_counts(name, config):
    """(parameters, non-embedding parameters) of a model."""
    with torch.device("meta"):
        model = build_model(name, config)
    return count_parameters(model), count_parameters(model) - model.W_E.numel()


# -------------------------------------------------------------------------- the Transformer

def test_transformer_is_initialised_as_gpt_neox():
    torch.manual_seed(0)
    model = build_model("transformer:3,2,160", {"vocab_size": 300})
    for name, p in model.named_parameters():
        if p.ndim == 1:
            assert (p == 1).all()
            continue
        back = name.split(".")[-1] in ("W_O", "W_down")
        std = 2 / (3 * math.sqrt(160)) if back else math.sqrt(2 / (5 * 160))
        assert p.std().item() == pytest.approx(std, rel=0.03), name
        assert abs(p.mean().item()) < 0.05 * std, name
    assert model.layers[0].W_up.shape == (160, 426)                        # floor(8 * 160 / 3)


def transformers(size="2,3,24"):
    """The names of the Transformer and its variants, at one size."""
    return [f"transformer:{size}:{variant}".rstrip(":") for variant in ("", *attention.VARIANTS)]


@pytest.mark.parametrize("variant", ["", "qknorm", "local"])
@pytest.mark.parametrize("scale", ["1", "4", "ntk4"])
@torch.no_grad()
def test_the_positions_of_a_transformer_can_be_scaled(variant, scale):
    name = f"transformer:2,3,24:{variant}".rstrip(":")
    model, x = moved_model(name).double(), draw_tokens(1, 30)
    p = dict(model.named_parameters())
    exact = reference_transformer(p, model.config, x[0], variant, scale)
    scale_rope(model, scale)
    torch.testing.assert_close(model(x)[0], exact, rtol=1e-9, atol=1e-9)
    assert (model.float()(x)[0].double() - exact).norm() < 1e-4 * exact.norm()
    scale_rope(model, "9")
    assert (model(x)[0].double() - exact).norm() > 1e-4 * exact.norm()


@pytest.mark.parametrize("name", [
    *transformers(), *(f"multiscreen:{name}" for name in ablations.VARIANTS)])
@torch.no_grad()
def test_cached_chunks_and_decoding_equal_one_pass(name):
    """So no query sees the future, either."""
    model, x = moved_model(name).double(), draw_tokens(2, 90)
    caches = model.new_caches()
    chunks = torch.cat([model(piece, caches) for piece in x.split((40, 1, 30, 1, 1, 17), 1)], 1)
    torch.testing.assert_close(chunks, model(x), rtol=1e-9, atol=1e-9)
    y = x
    for _ in range(5):
        y = torch.cat((y, model(y)[:, -1].argmax(-1, keepdim=True)), 1)
    assert torch.equal(model.generate(x, 5), y[:, 90:])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_layer_of_the_transformer_compiles_as_one_graph_for_all_lengths():
    model = moved_model("transformer:2,3,24")
    layer = model.layers[0]
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    for T in (20, 33):
        x = model.embed(draw_tokens(1, T))
        torch.testing.assert_close(compiled(x), layer(x))


# ---------------------------------------------------------------------------- the ablations

@pytest.mark.parametrize("variant", ["", *ABLATIONS])
def test_each_ablation_is_the_paper_with_one_thing_changed(variant):
    model = moved_model(f"multiscreen:{variant}".rstrip(":")).double()
    x = draw_tokens(1, 50)
    p = {name: value.detach() for name, value in model.named_parameters()}
    exact = reference_logits(p, model.config, x[0], variant)
    assert (model(x)[0].detach() - exact).norm() < 1e-8 * exact.norm()
    if variant and variant != "no-gate":               # its model has no W_G for the reference
        unchanged = reference_logits(p, model.config, x[0])
        assert (unchanged - exact).norm() > 1e-4 * exact.norm()
    model.loss(x, x).backward()
    learned = {name for name, value in model.named_parameters() if value.grad is not None}
    fixed = {name for name in p if variant == "fixed-r" and name.endswith("s_r")}
    assert learned == p.keys() - fixed


@pytest.mark.parametrize("r", [0.5, 1e-4])
def test_softmax_is_cut_into_pieces_and_finite_where_all_similarities_are_low(r):
    model = moved_model("multiscreen:softmax")
    x, layer = draw_tokens(1, 400), model.layers[0]
    with torch.no_grad():
        for tile in model.layers:
            tile.W_K.copy_(-tile.W_Q)
            tile.s_r.fill_(math.log(r / (1 - r)))

    def gradients():
        found = torch.autograd.grad(model.loss(x, x), [layer.W_V, layer.W_Q, layer.s_w])
        return torch.cat([g.flatten().double() for g in found])

    model.screen = partial(screen_windowed, screen=ablations.exponential)
    cut = gradients()
    model.double().screen = ablations.exponential
    assert (cut - gradients()).norm() < 1e-4 * cut.norm()


@torch.no_grad()
@pytest.mark.parametrize("scale", ["8", "ntk8"])
def test_the_positions_of_the_rope_ablation_can_be_scaled(scale):
    model, x = moved_model("multiscreen:rope").double(), draw_tokens(1, 50)
    scale_rope(model, scale)
    exact = reference_logits(dict(model.named_parameters()), model.config, x[0], "rope", scale)
    torch.testing.assert_close(model(x)[0], exact, rtol=1e-8, atol=1e-8)
    for factor in ("0", "-1", "nan", "ntk", "ntk0", "4ntk", "²"):
        with pytest.raises(UsageError, match="above 0"):
            rope_factor(factor)
    with pytest.raises(UsageError, match="RoPE"):
        scale_rope(moved_model("multiscreen"), "2")


def test_without_a_gate_there_are_19_layers_of_19_tiles_as_in_the_paper():
    with torch.device("meta"):
        model = build_model("multiscreen:no-gate", {"psi": 16, "N_L": None, "vocab_size": 50257})
        again = build_model("multiscreen:no-gate", asdict(model.config))
    assert (model.config.N_L, model.config.N_H, model.config.d_E) == (19, 19, 256)
    assert sum(p.numel() for p in model.parameters()) == 27_653_437
    assert again.config == model.config


# --------------------------------------------------------------------- sizes, names, recipes

@pytest.mark.parametrize("size, counts", [
    ("8M", (7_613_312, 1_180_416)), ("45M", (44_609_024, 18_877_440)),
    ("353M", (353_453_056, 301_989_888)), ("1.3B", (1_310_935_040, 1_208_008_704))])
def test_parameter_counts_are_the_papers(size, counts):
    assert parameter_counts(f"transformer:{size}", {}) == counts


@pytest.mark.parametrize("name, message", [
    ("transformer:9M", "8M, 45M"), ("transformer:2,3", "8M, 45M"),
    ("transformer:2,3,25", "multiple"), ("transformer:8M:norm", "qknorm"),
    ("transformer:0,1,8", "at least 1"), ("multiscreen:moe", "rope, nope"),
    ("mamba", "multiscreen:VARIANT")])
def test_unknown_models_are_explained(name, message):
    with pytest.raises(UsageError, match=message):
        build_model(name, TINY)


def test_every_size_of_the_config_is_a_flag(tmp_path):
    flags = ["--layers", "1", "--tiles", "3", "--d-E", "20", "--d-K", "4", "--d-V", "8"]
    ckpt = fit(tmp_path / "out", *flags, "--steps", "1")
    sizes = {"N_L": 1, "N_H": 3, "d_E": 20, "d_K": 4, "d_V": 8, "w_th": 256.0, "psi": 2,
             "vocab_size": 257}
    assert sizes.items() <= ckpt["config"].items()
    again = fit(tmp_path / "next", "--init", str(tmp_path / "out/ckpt.pt"), "--steps", "1")
    assert again["config"] == ckpt["config"]
    with pytest.raises(UsageError, match="--d-V is for Multiscreen"):
        args_of(["--model", "transformer:2,2,8", "--d-V", "8"])
    with pytest.raises(UsageError, match="RoPE turns pairs"):
        build_model("multiscreen:rope", TINY | {"d_K": 3})


@pytest.mark.parametrize("flags, recipe", [
    (["--model", "multiscreen:nope"], (0.0625, 0.0, 0.0)),
    (["--model", "transformer:8M"], (1e-3, 0.1, 1.0)),
    (["--model", "transformer:45M:qknorm"], (1e-3, 0.1, 1.0)),
    (["--model", "transformer:353M"], (3e-4, 0.1, 1.0)),
    (["--model", "transformer:1.3B"], (2e-4, 0.1, 1.0)),
    (["--model", "transformer:45M", "--weight-decay", "0", "--clip", "0", "--lr", ".25"],
     (0.25, 0.0, 0.0))])
def test_train_takes_the_papers_settings_for_each_model(flags, recipe):
    args = args_of(flags)
    assert (args.lr, args.weight_decay, args.clip) == recipe


@pytest.mark.parametrize("name", [*transformers("1,2,16"),
                                  *(f"multiscreen:{name}" for name in ablations.VARIANTS)])
def test_a_named_model_is_trained_resumed_and_loaded(tmp_path, name):
    whole = fit(tmp_path / "whole", "--model", name, "--steps", "2")
    fit(tmp_path / "parts", "--model", name, "--steps", "1")
    train.main(["--resume", "--out", str(tmp_path / "parts"), "--steps", "2"])
    model, _, parts = train.load_checkpoint(tmp_path / "parts/ckpt.pt")
    assert parts["model"] == name
    assert parts["step"] == 2
    assert_same_weights(parts, whole)
    assert has_windows(model) == ("multiscreen" in name or "screening" in name)
    if has_windows(model):
        maps = maps_of(model, draw_tokens(1, 20))
        assert all(x.shape[-2:] == (20, 20) and x.isfinite().all() for x in maps)


class OwnScreen(multiscreen.GatedScreeningTiles):
    """Screens by itself: all past keys count equally."""

    def screening(self, x, screen, cache=None):
        v = multiscreen.unit(self.project(x, self.W_V))
        return self.bound(v.cumsum(2) / 10)


@needs_matplotlib
def test_a_variant_that_screens_by_itself_has_no_maps(tmp_path, capsys, call):
    name = f"multiscreen:{__name__}.OwnScreen"
    flags = ["--model", name, "--steps", "2", "--eval-every", "1"]
    fit(tmp_path / "out", *flags, "--kernel", "auto")
    assert "alive" not in capsys.readouterr().out
    assert {row["alive"] for row in read_table(tmp_path / "out/log.tsv")} == {""}
    call(tiles, "--ckpt", tmp_path / "out/ckpt.pt")
    said = capsys.readouterr().out
    assert f"no maps: a layer of {name} does not call the screen" in said
    assert (tmp_path / "out/tiles.tsv").exists()


def test_a_gradient_that_overflows_is_seen_before_it_is_saved(tmp_path):
    """The loss is finite; tests/test_training.py makes one NaN."""
    ckpt = fit(tmp_path / "out", "--steps", "1")
    ckpt["weights"]["layers.0.s_O"].fill_(80.0)
    torch.save(ckpt, tmp_path / "large.pt")
    with pytest.raises(UsageError, match="at step 1 grad_norm is inf; nothing was saved"):
        fit(tmp_path / "next", "--init", str(tmp_path / "large.pt"), "--steps", "3")
    assert not (tmp_path / "next/ckpt.pt").exists()

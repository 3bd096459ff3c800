"""Tests of the lab: runs are compared only if they are alike, and a table says what it is of."""
import gzip
import json
import math
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import test_multiscreen as proof
import train
from lab import ablations, measure, perplexity, prepare, sample
from lab.transformer import Transformer, rope, scale_rope
from multiscreen import Config, GatedScreeningTiles, Multiscreen
from tests.helpers import SMALL, TEXT, args_of, moved_model, read_table, write
from tests.reference import rope as rope_of_the_paper

for package in ("pandas", "scipy", "matplotlib"):      # the extra `lab`
    pytest.importorskip(package)
compare = import_module("lab.compare")


@pytest.fixture
def call(monkeypatch, tmp_path, capsys):
    """call(script, *flags) runs its main() in the test's own folder. Returns what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(script, *flags):
        monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, flags)])
        script.main()
        return capsys.readouterr().out

    return run


def message(call, script, *flags):
    """What a command says of a mistake: one line."""
    with pytest.raises(SystemExit) as e:
        call(script, *flags)
    return str(e.value)


# ------------------------------------------------------------------------------- runs to compare

SOURCE = {"multiscreen": "r = sigmoid(s_r)\nq = x\n"}


def write_run(folder, loss=2.0, step=10, source=SOURCE, finished=True, diverged=False, last=True,
              text="text", **flags):
    """A folder as train.py leaves it."""
    folder.mkdir(parents=True)
    seed = int(folder.name.rpartition("-")[2])
    flags = {"model": "multiscreen", "lr": 0.1, "data": ["stdlib"], "out": str(folder),
             "resume": False, "force": False, "seed": seed} | flags
    rows = ["step\tloss\tgrad_norm\tval_loss", "1\t5.5\t1\t5.4", f"{step}\t2.5\t1\t{loss}"]
    log = "\n".join(rows) + "\n"
    if last:
        torch.save({"args": flags, "config": {}, "source": source, "step": step, "log": log,
                    "text": text, "finished": finished, "weights": {"W": torch.zeros(3, 4)}},
                   folder / "ckpt.pt")
    if diverged:
        log += f"{step + 5}\t2.5\t0\t\n"
    (folder / "log.tsv").write_text(log)
    return folder


@pytest.mark.parametrize("different, words", [
    ({"lr": 0.2}, "lr 0.1 | 0.2"), ({"psi": 4}, "psi None | 4"),
    ({"text": "other"}, "text text | other"),
    ({"finished": False, "step": 5}, "finished | stopped at step 5"),
    ({"source": {"multiscreen": "r = exp(s_r) + 1\nq = x\n"}}, "+r = exp(s_r) + 1")])
def test_a_mean_needs_equal_flags_code_and_steps(call, tmp_path, different, words):
    write_run(tmp_path / "a-0")
    write_run(tmp_path / "a-1")
    write_run(tmp_path / "a-2", **different)
    said = message(call, compare, "a")
    assert "a-0 and a-2 differ" in said and words in said and "q = x" not in said


def test_a_mean_minds_neither_comments_nor_the_log_nor_where_a_curriculum_ended(call, tmp_path):
    write_run(tmp_path / "a-0")
    write_run(tmp_path / "a-1", step=20, log_every=5, eval_every=9,
              source={"multiscreen": "# A comment.\n" + SOURCE["multiscreen"]})
    assert "[0, 1]" in call(compare, "a")


def test_a_label_is_no_pattern(call, tmp_path):
    for label in ("mine", "mine-wide", "mine-0"):
        for seed in (0, 1, 2):
            write_run(tmp_path / f"{label}-{seed}", loss=2 + len(label) / 10 + seed / 100)
    out = call(compare, "mine")
    assert "wide" not in out and "mine-0" not in out and "[0, 1, 2]" in out
    assert "mine-wide: +0.5000 nats per token (pairs: 3)" in call(compare, "mine", "mine-wide")
    # All of a folder: three labels.
    assert call(compare, ".").count("[0, 1, 2]") == 3


def test_differences_are_paired_by_seed():
    """By hand: p of t for three differences .5, 1, .5, with two degrees of freedom."""
    found = compare.paired({0: 1.0, 1: 2.0, 2: 3.5, 7: 9.0}, {2: 3.0, 1: 1.0, 0: 0.5, 5: 4.0})
    t = (2 / 3) / (math.sqrt(1 / 12) / math.sqrt(3))
    assert found["n"] == 3
    assert (found["mean"], found["p"]) == pytest.approx((2 / 3, 1 - t / math.sqrt(2 + t**2)))
    assert (found["low"] + found["high"]) / 2 == pytest.approx(found["mean"])
    assert "no difference from a" in compare.in_words("b", "a", found | {"p": 0.04}, 0.08)


def test_differences_that_are_equal_but_for_rounding_have_no_p():
    ours, theirs = {0: 0.3, 1: 0.7, 2: 0.15}, {0: 0.2, 1: 0.6, 2: 0.05}
    assert len({ours[n] - theirs[n] for n in ours}) > 1        # as floating point has it
    found = compare.paired(ours, theirs)
    assert math.isnan(found["low"]) and math.isnan(found["p"])


def test_a_run_that_diverged_is_counted_and_in_no_mean(call, tmp_path):
    for seed, loss in enumerate((2.0, 2.1, 2.3)):
        write_run(tmp_path / f"a-{seed}", loss=loss)
        write_run(tmp_path / f"b-{seed}", loss=loss + 0.1 * (seed + 1), diverged=seed == 2)
    write_run(tmp_path / "b-3", diverged=True, last=False)
    out = call(compare, "a", "b")
    row = next(line for line in out.splitlines() if line.split()[:1] == ["b"])
    assert "[0, 1]" in row and "[2, 3]" in row and f"{(2.1 + 2.3) / 2:.5g}" in row
    assert "+0.1500 nats per token (pairs: 2)" in out


def test_what_cannot_be_compared_is_named(call, tmp_path):
    write_run(tmp_path / "a-0", loss="")
    write_run(tmp_path / "b-0")
    write_run(tmp_path / "b-1", seed=0)
    write_run(tmp_path / "own-0")
    train.save_checkpoint(tmp_path / "own-0/ckpt.pt", Multiscreen(Config(2)), train.get_args([]))
    for name, words in {"a": "a-0 has no validation loss at step 10", "none": "none is no run",
                        "b": "b-0 and b-1 both have the seed 0",
                        "own": "not a checkpoint of train.py"}.items():
        assert words in message(call, compare, name)


def test_flags_and_lines_of_code_that_differ_between_labels_are_shown(call, tmp_path):
    for seed in (0, 1, 2):
        write_run(tmp_path / f"a-{seed}", loss=2 + seed / 7)
        write_run(tmp_path / f"b-{seed}", loss=3 + seed / 8, lr=0.5,
                  source=SOURCE | {"mine": "class Tiles: pass\n"})
    out = call(compare, "a", "b")
    assert "b: the loss is higher than that of a: +0.9821 nats per token (pairs: 3), 95 %" in out
    assert "lr 0.1 | 0.5" in out and "+class Tiles: pass" in out and "sigmoid" not in out


# ---------------------------------------------------------------------------------- an idea

def test_an_idea_is_trained_and_compared(call, tmp_path):
    from lab import idea

    (tmp_path / "text.txt").write_text("".join(f"{n} bottles of beer\n" for n in range(300)))
    small = ["--psi", "2", "--seq-len", "16", "--steps", "2", "--data", "text.txt", "--device",
             "cpu", "--kernel", "multiscreen"]
    assert "first train the code" in message(call, idea, "mine", *small)
    assert "[0, 1, 2]" in call(idea, "original", *small)
    with pytest.raises(SystemExit) as end:
        call(idea, "original", "--stepps", "3")
    assert end.value.code == 2
    mine = ["mine", "--model", f"{__name__}.Doubled"]
    out = call(idea, *mine)                            # all other flags are the original's
    assert f"/mine\n  model multiscreen | {__name__}.Doubled\n  {__name__}.py\n" in out
    assert "pairs: 3" in out

    # What is finished is not trained again, and a name has one recipe and one code.
    assert "mine-2 is finished, at step 2" in call(idea, *mine)
    for flags in ([*mine, "--lr", "0.5"], ["mine"]):
        assert "undo what was changed, or choose another name" in message(call, idea, *flags)
    path = tmp_path / "out/idea/mine-1/ckpt.pt"
    ckpt = train.read_checkpoint(path)
    ckpt["source"]["multiscreen"] += "before = the_edit\n"
    torch.save(ckpt, path)
    assert "undo what was changed, or choose another name" in message(call, idea, *mine)
    out = call(idea, "hot", "--steps", "12", "--lr", "1e12")
    assert "[0, 1, 2]" in next(line for line in out.splitlines() if line.startswith("out/idea/hot"))


class Doubled(GatedScreeningTiles):
    """A variant."""
    def bound(self, h):
        return super().bound(2 * h)


# --------------------------------------------------------------------- measuring a checkpoint

class Alibi(GatedScreeningTiles):
    """Its own weights, which know no window."""
    def screening(self, x, screen, cache=None):
        def alibi(q, k, v, w, r, i0=0):
            i = torch.arange(i0, i0 + q.shape[2])[:, None]
            d = torch.arange(k.shape[2]) - i
            return (q @ k.mT + 0.01 * d).masked_fill(d > 0, -torch.inf).softmax(-1) @ v
        return super().screening(x, alibi, cache)


@pytest.fixture
def checkpoint(tmp_path):
    """checkpoint(*flags of train.py): the path of a new model's checkpoint."""
    def make(*flags):
        text = write(tmp_path, {"text.txt": TEXT[:6000]}) / "text.txt"
        args = args_of([*SMALL, "--seq-len", "16", "--data", text, *flags])
        torch.manual_seed(0)
        model = train.make_model(args, train.get_tokenizer("bytes"))
        train.magnify(model)
        train.save_checkpoint(tmp_path / "ckpt.pt", model, args, step=7)
        return tmp_path / "ckpt.pt"
    return make


def test_a_table_is_written_whole_and_says_what_it_is_of(call, checkpoint):
    path = checkpoint()
    for _ in range(2):                                 # the second one replaces the first
        out = call(perplexity, "--ckpt", path, "--length", "100", "--swe")
    rows = read_table(path.with_name("perplexity.tsv"))
    assert len(rows) == 2 * len(perplexity.positions(100))
    nats = {row["setting"]: row["nats"] for row in rows}           # at the last position
    assert nats.keys() == {"as trained", "SWE"} and nats["as trained"] != nats["SWE"]
    for row in rows:
        assert row["step"] == "7" and row["seq_len"] == "16" and "text.txt" in row["text"]
        assert row["checkpoint"] == rows[0]["checkpoint"] and len(row["checkpoint"]) == 10
        assert row["commit"] == measure.commit()
    assert "nats per token" in out and "wrote" in out


def test_swe_begins_at_the_training_length(checkpoint):
    run = measure.Measurement(SimpleNamespace(
        ckpt=checkpoint("--tiles", "3"), device="cpu", table=None, swe=True, rope_scale=["1"]), "a")
    assert list(run.settings()) == ["as trained", "SWE"]
    assert run.model.layers[0].w.tolist() == [2, math.inf, math.inf]       # 17 > 16, too


def test_each_checkpoint_has_a_table_of_its_own(checkpoint):
    path = checkpoint()
    path = path.rename(path.with_name("mine.pt"))
    run = measure.Measurement(SimpleNamespace(ckpt=path, device="cpu", table=None), "a")
    assert run.path == path.with_name("mine_a.tsv")


def test_the_bench_times_all_three_passes(call):
    call(import_module("lab.bench"), "--models", "--psi 2", "--lengths", 32, "--repeats", 2,
         "--seq-len", 32, "--device", "cpu", "--kernel", "multiscreen")
    rows = read_table(Path("out/latency.tsv"))
    assert {row["what"] for row in rows} == {"train", "decode", "forward"}
    assert all(len(row["ms"].split()) == 2 for row in rows)


@pytest.mark.parametrize("table", ["text.txt/table.tsv", "/proc/table.tsv"])    # it takes no file
def test_a_table_that_cannot_be_written_is_refused_before_measuring(
        table, call, checkpoint, monkeypatch):
    flags = ["--ckpt", checkpoint(), "--table", table]
    monkeypatch.setattr(perplexity, "nats", lambda *_: pytest.fail("it measures"))
    assert "cannot be written" in message(call, perplexity, *flags)


@pytest.mark.parametrize("flags, words", [
    (["--length", "99999"], "no document is longer"), (["--ckpt", "none.pt"], "train a model"),
    (["--length", "99", "--rope-scale", "1", "4"], "the model has none"),
    (["--length", "99", "--rope-scale", "1", "0"], "no factor for RoPE"),
    (["--length", "99", "--rope-scale", "1", "x"], "error: --rope-scale: could not convert")])
def test_what_cannot_be_measured_is_one_line(call, checkpoint, flags, words, monkeypatch):
    path = checkpoint()
    monkeypatch.setattr(perplexity, "nats", lambda *_: pytest.fail("it measures"))
    said = message(call, perplexity, "--ckpt", path, *flags)
    assert words in said and "\n" not in said


def test_the_token_at_position_p_is_predicted_from_the_p_before_it(checkpoint):
    model, _, _ = train.load_checkpoint(checkpoint())
    tokens = np.random.default_rng(0).integers(256, size=1301)
    x = torch.from_numpy(tokens)[None]
    right = model.loss(x[:, :-1], x[:, 1:], "none")[0].detach().numpy()
    np.testing.assert_allclose(perplexity.nats(model, tokens), right, atol=1e-4)
    assert perplexity.positions(100) == [32, 45, 64, 91, 100]
    means = perplexity.window_means(np.arange(1.0, 101), 0.1)
    assert means[0] == np.mean(range(29, 36)) and means[-1] == np.mean(range(90, 101))


def test_tiles_show_all_weight_of_the_screens_own(checkpoint):
    tiles, tokens = pytest.importorskip("lab.tiles"), torch.randint(257, (1, 40))
    model, _, _ = train.load_checkpoint(checkpoint())
    found, maps = tiles.measure(model, tokens)
    for alpha, right in zip(maps, torch.cat(model.relevance_maps(tokens), 1)[0], strict=True):
        np.testing.assert_allclose(alpha.data, right, atol=1e-6)
        assert not np.ma.getmaskarray(alpha)[alpha.data != 0].any()        # no weight is gray
    assert found[0]["w"] == 2 and maps[0].count() == 40 + 39       # what is not gray

    model, _, _ = train.load_checkpoint(checkpoint("--model", f"{__name__}.Alibi"))
    found, maps = tiles.measure(model, tokens)
    for tile, alpha in zip(found, maps, strict=True):
        np.testing.assert_allclose(alpha.data.sum(1), 1, atol=1e-3)
        assert not np.ma.getmaskarray(alpha)[alpha.data != 0].any()
        assert tile["alive"] == 1


def test_tiles_are_drawn(call, checkpoint):
    from lab import tiles

    path = checkpoint("--w-th", "8")                   # windows of 2 and 9 tokens, texts of 16
    out = call(tiles, "--ckpt", path)
    assert len(read_table(path.with_name("tiles.tsv"))) == 4
    names, of_all = (next(line.split() for line in out.splitlines() if word in line)
                     for word in ("w_median", "all "))
    assert of_all[1 + names.index("longer")] == "0"
    for name in ("windows", "maps"):
        assert path.with_name(f"tiles_{name}.png").stat().st_size > 10_000


def test_a_sample_is_printable_text_up_to_end_of_text(call, checkpoint, monkeypatch):
    flags = ["--ckpt", checkpoint(), "--prompt", "1 bottle", "--tokens", 9]
    out = call(sample, *flags)
    assert out.startswith("1 bottle") and out == call(sample, *flags)
    assert "temperature" in message(call, sample, *flags, "--temperature", -1)
    new = torch.tensor([[*"s\x1b€\n".encode(), 256, 98]])
    monkeypatch.setattr(Multiscreen, "generate", lambda *_, **options: new)
    assert call(sample, *flags) == "1 bottles?€\n\n"


# ------------------------------------------------------------------------------- a corpus

def prepared(call, name, content, *flags):
    """(the documents of a prepared file, what was printed)"""
    Path(name).write_bytes(content)
    out = call(prepare, "tokens", name, *flags, "--tokenizer", "bytes")
    tokens = np.fromfile("tokens/train.bin", np.uint16)
    parts = np.split(tokens, np.flatnonzero(tokens == 256) + 1)
    return ["".join(map(chr, part[:-1])) for part in parts[:-1]], out


LINES = b'{"text": "one"}\n{"text": "two", "url": 3}\n'


@pytest.mark.parametrize("name, content, texts", [
    ("a.jsonl", b"no JSON\n", ["no JSON\n"]), ("a.gz", gzip.compress(LINES), ["one", "two"]),
    ("c4.json", LINES, ["one", "two"]), ("a.json", b"[1, 2]", ["[1, 2]"])])
def test_the_first_line_says_what_a_file_holds_and_not_its_name(call, name, content, texts):
    assert prepared(call, name, content)[0] == texts


def test_a_blank_line_in_the_middle_is_skipped_and_named(call):
    one, two = LINES.splitlines(keepends=True)
    texts, out = prepared(call, "c4.json", one + b"\n \n" + two)
    assert texts == ["one", "two"]
    assert "2 blank lines skipped, the first in line 2" in out


def test_a_mark_and_half_a_pair_of_surrogates_are_named(call):
    half = json.dumps({"text": "x\ud83d"}).encode()
    texts, out = prepared(call, "a.json", b"\xef\xbb\xbf" + LINES + half)
    assert texts[:2] == ["one", "two"] and len(texts) == 3
    assert "1 byte order marks skipped, the first in line 1" in out
    assert "1 lone surrogates replaced by U+FFFD, the first in line 3" in out


def test_an_empty_file_among_several_is_said(call):
    Path("empty.txt").write_bytes(b"")
    Path("full.txt").write_bytes(b"text")
    out = call(prepare, "tokens", "empty.txt", "full.txt", "--tokenizer", "bytes")
    assert "empty.txt: 0 documents" in out and "full.txt: 1 documents" in out


@pytest.mark.parametrize("content, words", [
    (LINES + b'{"text": "thr', "or is damaged"), (LINES + b'{"url": 1}', "line 3"),
    (LINES + b'{"text": null}', "line 3"), (gzip.compress(LINES)[:-9], "a.json"),
    (b"", "no document"), (b"\xff\xfe\x00", "a.json"), (b"[\n {}]", "one JSON array")])
def test_a_damaged_file_is_one_line_and_leaves_nothing(call, content, words):
    Path("a.json").write_bytes(content)
    said = message(call, prepare, "tokens", "a.json", "--tokenizer", "bytes")
    assert words in said and "\n" not in said
    assert not Path("tokens").exists() and not Path("tokens.part").exists()


def test_a_folder_of_tokens_is_never_overwritten(call, tmp_path):
    write(tmp_path, {"a.txt": "text", "tokens/train.bin": "kept"})
    assert "tokens exists" in message(call, prepare, "tokens", "a.txt", "--tokenizer", "bytes")


def test_a_zstandard_file_that_was_cut_off_is_refused(call):
    zstandard = pytest.importorskip("zstandard")
    lines = [f'{{"text": "{np.random.default_rng(n).bytes(90).hex()}"}}\n' for n in range(2000)]
    frames = [zstandard.compress("".join(part).encode())
              for part in (lines[:900], lines[900:1500], lines[1500:])]
    Path("b.zst").write_bytes(frames[2])
    # Two of 2,000 documents are in val.bin, one of each file.
    assert len(prepared(call, "a.zst", frames[0] + frames[1], "b.zst")[0]) == 1998
    Path("cut").write_bytes(frames[0][:-9])
    assert "cut: line" in message(call, prepare, "other", "cut", "--tokenizer", "bytes")


# ------------------------------------------------------------------ the Transformer, the ablations

@torch.no_grad()
def test_rope_is_scaled_for_longer_texts():
    """Positions divided by 4 are those of every fourth token; ntk leaves the fastest pair alone."""
    x, i = torch.randn(1, 1, 10, 8, dtype=torch.float64), torch.arange(10)
    torch.testing.assert_close(rope(x, 4 * i, 4.0), rope(x, i))
    ntk = rope(x, 4 * i, 1.0, 4.0)
    torch.testing.assert_close(ntk[..., [0, 4]], rope(x, 4 * i)[..., [0, 4]])
    torch.testing.assert_close(ntk[..., [3, 7]], rope(x, i)[..., [3, 7]])
    model = Transformer(Config(vocab_size=50, N_L=2, N_H=3, d_E=24)).double()
    tokens = torch.randint(50, (1, 30))
    as_trained = model(tokens)
    for factor in ("4", "ntk4"):
        scale_rope(model, factor)
        assert (model(tokens) - as_trained).abs().max() > 1e-6
        scale_rope(model, "1")
        assert torch.equal(model(tokens), as_trained)
    for factor in ("0", "-1", "nan", "ntk", "ntk0", "4ntk"):
        with pytest.raises(ValueError):
            scale_rope(model, factor)


@pytest.mark.parametrize("sizes, lr, counts", [
    ((6, 4, 128), 1e-3, (7_613_312, 1_180_416)), ((6, 8, 512), 1e-3, (44_609_024, 18_877_440)),
    ((24, 16, 1024), 3e-4, (353_453_056, 301_989_888)),
    ((24, 16, 2048), 2e-4, (1_310_935_040, 1_208_008_704))])
def test_parameter_counts_are_the_papers(sizes, lr, counts):
    with torch.device("meta"):
        model = Transformer(Config(50257, 50257, *sizes))
    n = sum(p.numel() for p in model.parameters())
    assert (n, n - model.W_E.numel()) == counts


def compete(s, d, w, r, relevance=proof.paper_relevance):
    alpha_d = relevance(s, d, w, r)
    return alpha_d / (1 + alpha_d.sum())


def softmax(s, d, w, r):
    m = (1 + (math.pi * d / w).cos()) / 2
    return (2 * s / r + m.log()).softmax(0)


# What an ablation puts in place of functions of the paper in the proof.
ROPE = {"paper_mipe": lambda x, w, w_th: rope_of_the_paper(x)}
CHANGED = {ablations.Rope: ROPE, ablations.Nope: {"paper_mipe": lambda x, w, w_th: x},
           ablations.NoTanhNorm: {"paper_tanh_norm": lambda h: h}, ablations.FixedR: {},
           ablations.NoGate: {"paper_gate": torch.ones_like},
           ablations.Compete: {"paper_relevance": compete},
           ablations.Softmax: {"paper_relevance": softmax},
           ablations.SoftmaxRope: ROPE | {"paper_relevance": softmax}}


@torch.no_grad()
@pytest.mark.parametrize("cls, scale", [*((cls, "1") for cls in CHANGED), (ablations.Rope, "8"),
                                        (ablations.Rope, "ntk8")])
def test_each_ablation_is_the_paper_with_one_thing_changed(cls, scale, monkeypatch):
    """Against the paper in float64 loops, with the formula of the ablation as printed."""
    model = moved_model(f"{cls.__module__}.{cls.__name__}").double()
    x, p = torch.randint(50, (1, 50)), dict(model.named_parameters())
    for n, layer in enumerate(model.layers):           # what NoGate has not, its paper multiplies
        p.setdefault(f"layers.{n}.W_G", layer.W_V)
    paper = proof.paper_logits(p, model.config, x[0])
    for name, f in CHANGED[cls].items():
        monkeypatch.setattr(proof, name, f)
    if scale != "1":
        scale_rope(model, scale)
        monkeypatch.setattr(proof, "paper_mipe", lambda x, w, w_th: rope_of_the_paper(x, scale))
    if cls is ablations.FixedR:                        # r = sigmoid(inf) = 1
        p = {name: W + torch.inf if name.endswith("s_r") else W for name, W in p.items()}
    exact = proof.paper_logits(p, model.config, x[0])
    assert (model(x)[0] - exact).norm() < 1e-8 * exact.norm()
    assert (paper - exact).norm() > 1e-4 * exact.norm()


@pytest.mark.parametrize("cls", CHANGED, ids=lambda cls: cls.__name__)
def test_each_ablation_decodes_as_it_reads_and_learns_all_but_what_is_fixed(cls):
    torch.manual_seed(0)
    model = Multiscreen(Config(psi=3, vocab_size=50), tiles=cls)
    train.magnify(model)
    model, x = model.double(), torch.randint(50, (2, 90))
    caches = model.new_caches()
    pieces = torch.cat([model(piece, caches) for piece in x.split((40, 1, 30, 1, 18), 1)], 1)
    torch.testing.assert_close(pieces, model(x), rtol=1e-9, atol=1e-9)
    model.loss(x, x).backward()
    fixed = {name for name, p in model.named_parameters() if p.grad is None}
    assert all(name.endswith("s_r") for name in fixed) and bool(fixed) == (cls is ablations.FixedR)


def test_without_a_gate_more_tiles_make_up_for_the_weights_as_in_the_paper():
    with torch.device("meta"):
        model = Multiscreen(Config(psi=16, N_L=19, N_H=19), tiles=ablations.NoGate)
    assert sum(p.numel() for p in model.parameters()) == 27_653_437


def test_softmax_weights_are_finite_where_all_similarities_are_low():
    q = torch.nn.functional.normalize(torch.randn(1, 1, 30, 16), dim=-1)
    low = ablations.exponential(q, -q, torch.eye(30)[None, None], torch.tensor([12.5]),
                                torch.tensor([0.001]))
    assert low.isfinite().all() and (low.sum(-1) > 0).all()


def test_a_document_ends_at_end_of_text_and_its_middle_is_measured(tmp_path):
    np.array([*range(8), 256, *range(9), 256, *range(20)], "<u2").tofile(tmp_path / "a.bin")
    tokenizer = train.get_tokenizer("bytes")
    documents = perplexity.documents_of(tokenizer, None, [str(tmp_path / "a.bin")])
    assert [len(tokens) for tokens in documents] == [9, 10, 20]
    found = perplexity.middles(documents, 9, 5)
    assert [x.tolist() for x in found] == [[*range(9), 256], [*range(5, 15)]]
    assert len(perplexity.middles([np.arange(30)] * 3, 9, 2)) == 2


def test_the_transformer_is_initialised_as_gpt_neox():
    torch.manual_seed(0)
    model = Transformer(Config(vocab_size=500, N_L=3, N_H=5, d_E=160))
    for name, p in model.named_parameters():
        back = name.endswith(("W_O", "W_down"))
        std = 2 / (3 * math.sqrt(160)) if back else math.sqrt(2 / (5 * 160))
        if p.ndim == 1:
            assert (p == 1).all()
        else:
            assert p.std().item() == pytest.approx(std, rel=0.03), name

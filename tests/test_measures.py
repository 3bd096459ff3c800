"""Tests of what measures a checkpoint, and of what draws its tables."""
import math
import re

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend

import support.timing
import train
from experiments import (
    curves,
    latency,
    latency_curves,
    long_context,
    passkey,
    perplexity,
    relevance_maps,
    retrieval,
    sample,
    windows,
)
from multiscreen import Config, Multiscreen, window
from playground import __main__ as playground
from support.checkpoint import FIXED, KEYS, build_model, load_checkpoint, save_checkpoint
from support.cli import UsageError
from support.data import Sequences, files_of, get_data
from support.retrieval import CELL, Cell
from support.table import RUN, write_rows
from support.tokens import get_tokenizer
from tests.helpers import INF, draw_tokens, needs_matplotlib, read_table

NAN = math.nan


def cells_of(capsys):
    """The printed lines, split where two blanks or more are."""
    lines = capsys.readouterr().out.splitlines()
    return [re.split(" {2,}", line.strip()) for line in lines if line]


@pytest.fixture(autouse=True)
def no_leftovers(checkpoints):
    """Each test begins without the tables and figures of the others."""
    for path in checkpoints.values():
        for made in [*path.parent.glob("*.tsv"), *path.parent.glob("*.png")]:
            made.unlink()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Paths of checkpoints with random weights, by model, as train.py writes them."""
    folder, paths = tmp_path_factory.mktemp("ckpt"), {}
    for name in ("multiscreen", "multiscreen:rope", "multiscreen:fixed-r", "transformer:2,2,8"):
        torch.manual_seed(0)
        model = build_model(name, {"psi": 3, "N_L": 2, "vocab_size": 257})
        with torch.no_grad():
            for W in model.layers.parameters():        # so that layers and positions matter
                W.mul_(6 if W.ndim > 1 else 1)
        args = dict.fromkeys(FIXED, 0) | {"model": name, "tokenizer": "bytes", "data": ["text"],
                                          "seq_len": 16, "kernel": "definition"}
        paths[name] = folder / name.replace(":", "_") / "ckpt.pt"
        paths[name].parent.mkdir()
        empty = {key: kind() for key, kind in KEYS.items()}
        save_checkpoint(paths[name], empty | {
            "model": name, "config": vars(model.config), "weights": model.state_dict(),
            "tokenizer": "bytes", "args": args})
    return paths


@pytest.mark.parametrize("script, flags, message", [
    (latency, ["--lengths", "0"], "at least 1"), (latency, ["--ckpt", "nowhere.pt"], "not exist"),
    (sample, ["--tokens", "0"], "--tokens"), (perplexity, ["--length", "0"], "above 0"),
    (passkey, [], "train a model first"), (windows, ["--ckpt", "nowhere.pt"], "train a model"),
    (latency_curves, ["nowhere.tsv"], "measure a model first"),
    (retrieval, ["nowhere.tsv"], "measure a model first"), (long_context, [], "required"),
    (long_context, ["a.tsv", "--out", "b.tsv"], "name a figure")])
def test_a_mistake_is_told_in_one_line_before_any_work(call, script, flags, message):
    with pytest.raises(UsageError, match=message) as e:
        call(script, *flags)
    assert "\n" not in str(e.value)


# ----------------------------------------------------------------------- long-context perplexity

def test_positions_and_their_windows():
    assert curves.positions(100) == [32, 45, 64, 91, 100]
    assert curves.positions(3) == [3]
    means = perplexity.window_means(np.arange(1.0, 101), 100, 0.1)     # position p has the value p
    assert means[0] == np.mean(range(29, 36))
    assert means[-2:] == [np.mean(range(82, 101)), np.mean(range(90, 101))]


def test_the_middle_of_each_document_that_is_long_enough(tmp_path):
    for name, n in (("a", 5), ("b", 8), ("c", 9), ("d", 20)):
        (tmp_path / name).write_text(name * n)
    tokenizer = get_tokenizer("bytes")
    segments, short = perplexity.get_documents([tmp_path], tokenizer, 8, 5)
    assert [tokenizer.decode(s.tolist()) for s in segments.values()] == ["c" * 9, "d" * 9]
    assert [name.split()[0] for name in segments] == ["c", "d"]
    assert short == 2
    assert len(perplexity.get_documents([tmp_path], tokenizer, 8, 1)[0]) == 1
    assert perplexity.middle(list(range(10)), 3).tolist() == [3, 4, 5, 6]
    with pytest.raises(UsageError, match="longer than 20 tokens, the longest has 20"):
        perplexity.get_documents([tmp_path], tokenizer, 20, 5)


def test_default_documents_are_held_out_from_training():
    tokenizer = get_tokenizer("bytes")
    training, _ = get_data(train.get_parser().parse_args([]), tokenizer,
                           list(files_of(["stdlib"])))
    assert isinstance(training, Sequences)
    seen = b"".join(bytes(a.astype(np.uint8)) for a in training.arrays)
    segments, _ = perplexity.get_documents(None, tokenizer, 4096, 16)
    assert len(segments) == 16
    assert not any(name.startswith("cp") for name in segments)          # tables of code pages
    assert not any(bytes(s.astype(np.uint8))[1000:1500] in seen for s in segments.values())


def test_position_p_has_p_tokens_of_context(checkpoints):
    """Against the logits of the whole model on each prefix by itself."""
    model, _, _ = load_checkpoint(checkpoints["multiscreen"])
    x = draw_tokens(21, seed=1, n=257)
    found = perplexity.nats(model, x.numpy().astype(np.uint16))
    for p in (1, 2, 20):
        with torch.no_grad():
            nats = -model(x[None, :p])[0, -1].log_softmax(-1)[x[p]].item()
        assert found[p - 1] == pytest.approx(nats, abs=1e-5)


def document(name, nats, **values):
    """A row of perplexity.tsv."""
    row = dict.fromkeys(perplexity.KEYS, "") | {
        "model": "multiscreen", "parameters": "4626", "seed": "0", "seq_len": "16", "step": "9",
        "data": "books", "window": "0.3", "length": "32", "document": name, "nats": nats,
        "hash": f"{values.get('seed', '0')}-1"}
    return row | values


def test_means_over_documents_then_over_seeds():
    """Only the documents that all seeds have: a and b. Seeds at 2 and 4 nats."""
    rows = [document("a", "1"), document("b", "3"), document("c", "9"),
            document("a", "5", seed="1"), document("b", "3", seed="1"),
            document("a", "7", swe="yes")]
    found = curves.get_curves(rows)
    assert [*found.values()] == [{"0": [2.0], "1": [4.0]}, {"0": [7.0]}]
    (mean, std), = curves.summarize(next(iter(found.values())))
    assert mean == pytest.approx((math.e**2 + math.e**4) / 2)
    assert std == pytest.approx((math.e**4 - math.e**2) / math.sqrt(2))


def test_perplexity_has_a_row_for_each_document_and_setting_and_makes_none_twice(
        call, checkpoints, tmp_path, monkeypatch, capsys):
    (tmp_path / "text").write_text("screening is enough " * 4)
    (tmp_path / "more").write_text("screening is enough, " * 4)
    path = checkpoints["multiscreen:rope"]
    flags = ["--ckpt", path, "--length", 40, "--rope-scale", 1, 4, "--swe", "--device", "cpu",
             "--data", tmp_path / "text"]
    call(perplexity, *flags)
    call(perplexity, *flags, tmp_path / "more")
    rows = read_table(path.with_name("perplexity.tsv"))
    assert len(rows) == 4 + 8                          # --data is a column
    assert [(row["swe"], row["factor"]) for row in rows[:4]] == [
        ("", "1"), ("", "4"), ("yes", "1"), ("yes", "4")]
    assert len({row["nats"] for row in rows[:4]}) == 4
    assert len(rows[0]["nats"].split()) == 2           # positions 32 and 40

    monkeypatch.setattr(perplexity, "nats", None)
    capsys.readouterr()
    call(perplexity, *flags, tmp_path / "more")
    assert len(read_table(path.with_name("perplexity.tsv"))) == 12
    shown = cells_of(capsys)[-4:]
    assert [line[1] for line in shown] == ["RoPE ×1", "RoPE ×4", "SWE RoPE ×1", "SWE RoPE ×4"]
    nats = [float(row["nats"].split()[0]) for row in rows[4:6]]
    assert float(shown[0][3]) == pytest.approx(math.exp(sum(nats) / 2), rel=5e-3)


@pytest.mark.parametrize("name, flag, message", [
    ("multiscreen", "--rope-scale 2", "RoPE"), ("transformer:2,2,8", "--swe", "--swe"),
    ("multiscreen", "--length 80", "no document")])
def test_perplexity_refuses_what_a_model_or_a_text_does_not_have(call, checkpoints, tmp_path,
                                                                 name, flag, message):
    (tmp_path / "text").write_text("screening is enough " * 4)
    with pytest.raises(UsageError, match=message):
        call(perplexity, "--ckpt", checkpoints[name], "--data", tmp_path / "text", "--length", 40,
             "--device", "cpu", *flag.split())
    assert not checkpoints[name].with_name("perplexity.tsv").exists()


@needs_matplotlib
def test_a_figure_of_perplexity_has_a_curve_for_each_model_and_setting(call, tmp_path, capsys):
    nats = "1 2"
    rows = [document("a", nats, length="40"), document("a", "2 4", length="40", seed="1"),
            document("a", nats, length="40", swe="yes"),
            document("a", nats, length="40", model="transformer:2,2,8", parameters="9999",
                     factor="4", hash="x-2")]
    write_rows(tmp_path / "t.tsv", rows)
    call(long_context, tmp_path / "t.tsv", "--out", tmp_path / "figure/f.png")
    assert cells_of(capsys)[1:5] == [
        ["model", "curve", "seeds", "32", "40"],
        ["Multiscreen, 4.6K", "as trained", "2", "5.05 ± 3.3", "31 ± 33"],
        ["Multiscreen, 4.6K", "SWE", "1", "2.72", "7.39"],
        ["Transformer, 10K", "RoPE ×4", "1", "2.72", "7.39"]]
    assert (tmp_path / "figure/f.png").exists()
    assert read_table(tmp_path / "figure/f.tsv") == read_table(tmp_path / "t.tsv")


# --------------------------------------------------------------------------------- retrieval

@pytest.mark.parametrize("depth, before", [(0.0, 0), (0.3, 3), (0.5, 5), (1.0, 10)])
def test_passkey_prompts_have_the_key_at_the_depth(depth, before):
    frame = len(passkey.TASK + passkey.NEEDLE.format(50_000) + passkey.QUESTION)
    n_tokens = frame + 10 * len(passkey.FILLER) + 50
    prompts, answers = passkey.passkey_prompts(n_tokens, depth, len, 5)
    assert len(set(answers)) == 5
    for prompt, answer in zip(prompts, answers):
        key = answer.removeprefix(" ")
        assert 1 <= int(key) <= 50_000
        head, tail = prompt.split(passkey.NEEDLE.format(key))
        assert head == passkey.TASK + passkey.FILLER * before
        assert tail == passkey.FILLER * (10 - before) + passkey.QUESTION
    with pytest.raises(UsageError):
        passkey.passkey_prompts(frame, depth, len, 1)


def test_the_passkey_prompt_is_as_published():
    frame = len(passkey.TASK + passkey.NEEDLE.format(50_000) + passkey.QUESTION)
    found = passkey.passkey_prompts(frame + 2 * len(passkey.FILLER), 0.5, len, 1)
    filler = ("The grass is green. The sky is blue. The sun is yellow. Here we go. There and back "
              "again. ")
    assert found == ([
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize "
        "them. I will quiz you about the important information there.\n" + filler +
        "\nThe pass key is 3432. Remember it. 3432 is the pass key.\n" + filler +
        "\nWhat is the pass key? The pass key is"], [" 3432"])


@needs_matplotlib
def test_passkeys_are_measured_and_their_table_drawn(call, checkpoints, capsys):
    path = checkpoints["multiscreen"]
    call(passkey, "--ckpt", path, "--lengths", 420, "--depths", 0, 1, "--trials", 2, "--device",
         "cpu")
    assert [row["accuracy"] for row in read_table(path.with_name("passkey.tsv"))] == ["0", "0"]
    capsys.readouterr()
    call(retrieval, path.with_name("passkey.tsv"))
    row = capsys.readouterr().out.splitlines()[3].split()
    assert row == ["Multiscreen", "420", "26.25", "1", "2", "0.0%", "-", "0.0%"]
    assert path.with_name("passkey.png").exists()
    assert not path.with_name("passkey_by_length.png").exists()


def cell(accuracy="1", **values):
    """A row of abcdigits.tsv."""
    row = dict.fromkeys((*RUN, "digits", *CELL), "") | {
        "model": "multiscreen", "parameters": "4626", "seed": "0", "seq_len": "16", "step": "9",
        "digits": "2", "length": "16", "depth": "0.1", "trials": "4", "accuracy": accuracy,
        "hash": f"{values.get('seed', '0')}-{values.get('model', '')}"}
    return row | values


@needs_matplotlib
def test_retrieval_by_length_of_two_seeds_in_two_tables(call, tmp_path, capsys):
    for seed, accuracy in (("0", "0.75"), ("1", "0.25")):
        values = {"seed": seed, "swe": "yes"}
        write_rows(tmp_path / f"{seed}.tsv", [
            cell(**values), cell("0.25", length="32", **values),
            cell(accuracy, length="32", depth="0.5", **values)])
    call(retrieval, tmp_path / "0.tsv", tmp_path / "1.tsv", "--out", tmp_path / "f.png")
    assert cells_of(capsys)[2:4] == [
        ["Multiscreen + SWE", "16", "1", "2", "4", "100.0%", "0.0%", "100.0%"],
        ["Multiscreen + SWE", "32", "2", "2", "4", "37.5%", "17.7%", "25.0%"]]
    assert (tmp_path / "f_by_length.png").exists()
    assert len(read_table(tmp_path / "f.tsv")) == 6

    # Nothing that was drawn before is lost.
    with pytest.raises(UsageError, match="3 rows that are not drawn"):
        call(retrieval, tmp_path / "0.tsv", "--out", tmp_path / "f.png")


def panels_of(call, tmp_path, monkeypatch, rows):
    """The panels of a figure as (row, title, number of cells)."""
    found = []
    monkeypatch.setattr(retrieval, "draw_panels", lambda plt, panels, *rest: found.extend(panels))
    write_rows(tmp_path / "t.tsv", rows)
    call(retrieval, tmp_path / "t.tsv")
    return [(retrieval.ROWS[panel.row], panel.title, len(panel.cells)) for panel in found]


@needs_matplotlib
def test_panels_are_in_the_papers_order(call, tmp_path, monkeypatch):
    """Rows of models, columns by size; an ablation stands beside the original, at its lengths."""
    large = {"parameters": "900000"}
    rows = [cell(**large), cell(), cell(swe="yes"), cell(model="transformer:2,2,8"),
            cell(length="32")]
    assert panels_of(call, tmp_path, monkeypatch, rows) == [
        ("Transformer", "4.6K", 1), ("Multiscreen", "4.6K", 2), ("Multiscreen", "0.9M", 1),
        ("Multiscreen + SWE", "4.6K", 1)]
    (tmp_path / "t_by_length.png").unlink()
    rows = [cell(model="multiscreen:no-gate"), cell(), cell(length="32"), cell(swe="yes"),
            cell(model="multiscreen:rope"), cell(model="transformer:2,2,8"),
            cell(step="8", hash="1-")]
    assert panels_of(call, tmp_path, monkeypatch, rows) == [
        ("Multiscreen", "Original", 1), ("Multiscreen", "MiPE → RoPE", 1),
        ("Multiscreen", "w/o Gate", 1), ("Multiscreen + SWE", "Original", 1)]
    assert not (tmp_path / "t_by_length.png").exists()


@needs_matplotlib
def test_what_differs_is_said(call, tmp_path, monkeypatch):
    rows = [cell(), cell(step="10", hash="1-"), cell(digits="6")]
    assert panels_of(call, tmp_path, monkeypatch, rows) == [
        ("Multiscreen", "4.6K, 2 digits, step 9", 1), ("Multiscreen", "4.6K, 2 digits, step 10", 1),
        ("Multiscreen", "4.6K, 6 digits, step 9", 1)]
    assert retrieval.count_seeds({1: retrieval_cell(1), 2: retrieval_cell(3)}) == "1 to 3 seeds"


def retrieval_cell(seeds):
    shares = {str(n): 1.0 for n in range(seeds)}
    return Cell(shares, dict.fromkeys(shares, 4))


def test_the_rows_of_a_figure_are_of_one_measurement(call, tmp_path):
    write_rows(tmp_path / "t.tsv", [{"a": "1", "b": "2"}])
    with pytest.raises(UsageError, match="does not have the columns"):
        call(retrieval, tmp_path / "t.tsv")
    (tmp_path / "t.tsv").write_text("")
    with pytest.raises(UsageError, match="has no rows"):
        call(retrieval, tmp_path / "t.tsv")


# -------------------------------------------------------------- windows, relevance maps, samples

def test_summary_of_windows():
    w, r = np.array([2.0, 300.0, np.inf]), np.array([0.5, 1.0, 0.25])
    row = windows.summary("1", w, r, 256.0, 300)
    assert row == ["1", 3, 2.0, 300.0, INF, 0.25, 0.5, 1.0, 2, 1]


@pytest.mark.parametrize("name, r", [("multiscreen", 0.5), ("multiscreen:fixed-r", 1.0)])
def test_windows_of_a_checkpoint(call, checkpoints, name, r):
    """The initial windows are 2, 17 and 257 tokens: exp(s_w) + 1, s_w from 0 to ln 256."""
    call(windows, "--ckpt", checkpoints[name])
    rows = read_table(checkpoints[name].with_name("windows.tsv"))
    assert [row["layer"] for row in rows] == ["1", "2", "all"]
    last = {key: float(value) for key, value in rows[-1].items() if key != "layer"}
    assert last == {"tiles": 6, "w_min": 2, "w_median": 17, "w_max": 257, "r_min": r,
                    "r_median": r, "r_max": r, "w>w_th": 2, "w>T_train": 4}


@pytest.mark.parametrize("script", [windows, relevance_maps, playground])
def test_a_model_without_windows_is_refused(call, checkpoints, script):
    with pytest.raises(UsageError, match="no screening windows"):
        call(script, "--ckpt", checkpoints["transformer:2,2,8"])


def test_live_pairs_are_counted_inside_the_window():
    assert relevance_maps.inside(3, 1.5).tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert relevance_maps.inside(3, 2.0).tolist() == relevance_maps.inside(3, 1.5).tolist()
    assert relevance_maps.inside(4, INF).sum() == 10
    alpha_d = np.array([[1.0, 0, 0], [0, 0.5, 0], [0, 0, 0.1]])
    assert relevance_maps.alive(alpha_d, 1.5) == pytest.approx(3 / 5)
    assert relevance_maps.alive(alpha_d, INF) == pytest.approx(3 / 6)


def test_relevance_maps_count_what_train_logs(call, checkpoints):
    """`alive` over all tiles, weighted by the pairs in their windows, is train.py's number."""
    path, text = checkpoints["multiscreen"], "screening is enough" * 9
    call(relevance_maps, "--ckpt", path, "--text", text, "--tokens", 20, "--device", "cpu")
    rows = read_table(path.with_name("relevance_maps.tsv"))
    assert [row["layer"] + row["tile"] for row in rows] == ["11", "12", "13", "21", "22", "23"]
    assert [row["w"] for row in rows] == ["2", "17", "257"] * 2
    assert {row["r"] for row in rows} == {"0.5"}
    pairs = {"2": 20 + 19, "17": sum(range(4, 21)), "257": 210}
    alive = sum(float(row["alive"]) * pairs[row["w"]] for row in rows)
    model, tokenizer, _ = load_checkpoint(path)
    tokens = torch.tensor([tokenizer.encode_ordinary(text)[:20]])
    share = alive / (2 * sum(pairs.values()))
    assert share == pytest.approx(train.alive_fraction(model, tokens), rel=1e-3)


@pytest.mark.parametrize("tokens, pieces", [
    ([0x61, 0xC3, 0xA9, 0x62], ["a", "", "é", "b", ""]), ([0xE2, 0x82], ["", "", "\ufffd"]),
    ([0x61, 256, 0x62], ["a", ""])])
def test_what_is_no_character_yet_is_held_back(tokens, pieces):
    assert list(sample.decode_stream(tokens, get_tokenizer("bytes"))) == pieces


@pytest.mark.parametrize("name", ["multiscreen", "transformer:2,2,8"])
def test_a_sample_is_what_the_model_generates(name, checkpoints, call, capsys):
    flags = ["--ckpt", checkpoints[name], "--device", "cpu", "--tokens", 8]
    call(sample, *flags, "--prompt", "screen", "--temperature", 0)
    model, _, _ = load_checkpoint(checkpoints[name])
    greedy = model.generate(torch.tensor([list(b"screen")]), 8)[0].tolist()
    shown, note = capsys.readouterr()
    assert shown == "screen" + bytes(t for t in greedy if t < 256).decode(errors="replace")
    assert "8 tokens" in note
    texts = []
    for seed in (3, 3, 4):
        call(sample, *flags, "--seed", seed)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


# --------------------------------------------------------------------------------- latency

def test_trained_like_windows_have_the_stated_shares_and_ranges():
    w = support.timing.trained_like(1000)
    shares = [((a <= w) & (w <= b)).sum() for a, b in ((2, 128), (256, 4096), (4096, 65536))]
    assert shares == [700, 250, 50]
    near = w[w <= 128]
    assert abs((near < 16).float().mean() - 0.5) < 0.06        # 16 is the geometric middle
    assert 0 < (w[:100] > 4096).sum() < 20                     # shuffled over the layers
    assert (support.timing.trained_like(9) > 4096).sum() == 1


def test_settings_change_only_the_windows_they_should():
    model = Multiscreen(Config(psi=6, vocab_size=11))

    def widths():
        return torch.cat([window(tile.s_w.detach()) for tile in model.layers])

    before = widths()
    latency.apply_setting(model, "initial", 4096)
    assert torch.equal(widths(), before)
    latency.apply_setting(model, "trained-like + SWE", 4096)  # after a stop it comes first
    latency.apply_setting(model, "trained-like", 4096)
    likely = widths()
    torch.testing.assert_close(likely, support.timing.trained_like(36), rtol=1e-5, atol=0)
    latency.apply_setting(model, "trained-like + SWE", 4096)
    far = likely > 4096
    assert far.sum() == 2
    assert torch.equal(widths(), torch.where(far, INF, likely))


def test_latency_has_a_row_for_each_cell_and_none_without_a_backend(call, tmp_path, monkeypatch):
    monkeypatch.setitem(latency.BACKENDS, "flash", SDPBackend.CUDNN_ATTENTION)     # no CPU has it
    flags = ["--psi", 2, 3, "--transformer", "1,2,8", "--lengths", 64, 32, "--repeats", 2,
             "--device", "cpu", "--out", tmp_path]
    call(latency, *flags)
    made = read_table(tmp_path / "latency.tsv")
    settings = ["initial", "trained-like", "trained-like + SWE"]
    cells = [("2832", "math", T) for T in ("32", "64")]
    cells += [("4626", s, "64") for s in settings]
    cells += [("20486", s, T) for s in settings for T in ("32", "64")]
    assert [(row["parameters"], row["setting"], row["length"]) for row in made] == cells
    assert all(float(row["ms"]) > 0 for row in made)

    # What could not run is tried again, nothing else.
    tried = []

    def time_nothing(model, setting, *rest):
        tried.append(setting)
        return None, "no"

    monkeypatch.setattr(latency, "time_passes", time_nothing)
    call(latency, *flags)
    assert tried == ["flash", "flash"]
    assert read_table(tmp_path / "latency.tsv") == made


def test_latency_of_a_checkpoint_is_a_table_beside_it(call, checkpoints, monkeypatch):
    path = checkpoints["multiscreen"]
    monkeypatch.setattr(latency, "time_passes", lambda *inputs: (2.0, None))
    call(latency, "--ckpt", path, "--transformer", "1,2,8", "--lengths", 32, "--device", "cpu")
    rows = read_table(path.with_name("latency.tsv"))
    assert [(row["model"], row["setting"], row["ms"]) for row in rows] == [
        ("transformer:1,2,8", "flash", "2"), ("transformer:1,2,8", "math", "2"),
        ("multiscreen", "trained", "2"), ("multiscreen", "trained + SWE", "2")]
    assert rows[2]["seq_len"] == "16"


def timed(model, parameters, setting, length, ms, machine="CPU"):
    """A row of latency.tsv."""
    row = dict.fromkeys(latency.KEYS, "") | {"repeats": "3", "machine": machine}
    return row | {"model": model, "parameters": parameters, "setting": setting, "length": length,
                  "ms": ms, "hash": "1"}


@needs_matplotlib
def test_a_time_is_compared_with_the_fastest_of_the_transformer_beside_it(call, tmp_path, capsys):
    """By size: 9 beside 10, and 90 has none. What another machine took is left out."""
    write_rows(tmp_path / "t.tsv", [
        timed("transformer:a", "10", "flash", "64", "9", "GPU"),
        timed("transformer:a", "10", "flash", "32", "4"),
        timed("transformer:a", "10", "flash", "64", "400"),
        timed("transformer:a", "10", "math", "64", "100"),
        timed("multiscreen", "90", "initial", "64", "7"),
        timed("multiscreen", "9", "initial", "64", "50")])
    call(latency_curves, tmp_path / "t.tsv")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[3:] for line in lines[3:8]] == [
        ["32", "4", "-"], ["64", "400", "-"], ["64", "100", "-"], ["64", "7", "-"],
        ["64", "50", "2"]]
    assert (tmp_path / "t.png").stat().st_size > 10_000

"""Tests of the commands that measure a checkpoint and draw tables."""
import math

import numpy as np
import pytest
import torch

import multiscreen
import train
from lab import passkey, perplexity, retrieval, sample, tiles
from lab.common import pyplot, write_rows
from support.cli import UsageError
from support.data import Sequences, get_data, get_tokenizer
from support.maps import alive_pairs
from support.run import load_checkpoint
from tests.helpers import (
    INF,
    arrays_of,
    cells_of,
    draw_tokens,
    fit,
    needs_matplotlib,
    read_table,
)


@pytest.mark.parametrize("script, flags, message", [
    (tiles, ["--text", ""], "not be empty"), (sample, ["--temperature", "1e-9"], "--temperature"),
    (retrieval, ["nowhere.tsv"], "measure a model first"),
    (perplexity, ["a.tsv", "--out", "b.tsv"], "name a .png file"),
    (perplexity, ["a.tsv", "--ckpt", "mine.pt"], "--ckpt is for measuring")])
def test_a_mistake_is_told_in_one_line_before_any_work(call, script, flags, message):
    with pytest.raises(UsageError, match=message) as e:
        call(script, *flags)
    assert "\n" not in str(e.value)


# ----------------------------------------------------------------------- long-context perplexity

def test_positions_and_their_windows():
    assert perplexity.positions(100) == [32, 45, 64, 91, 100]
    assert perplexity.positions(3) == [3]
    means = perplexity.window_means(np.arange(1.0, 101), 100, 0.1)     # position p has value p
    assert means[0] == np.mean(range(29, 36))
    assert means[-2:] == [np.mean(range(82, 101)), np.mean(range(90, 101))]
    assert perplexity.window_means(np.arange(1.0, 101), 100, 2)[0] == np.mean(range(1, 97))


def test_the_middle_of_each_document_that_is_long_enough(tmp_path, capsys):
    for name, n in (("a", 5), ("b", 8), ("c", 9), ("d", 20)):
        (tmp_path / name).write_text(name * n)
    (tmp_path / "e").write_text("0123456789")
    (tmp_path / "f.png").write_bytes(b"\x89PNG" * 5)
    tokenizer, files = get_tokenizer("bytes"), perplexity.documents_in([tmp_path])
    segments = perplexity.get_segments(files, tokenizer, 8, 5)
    assert [name.split()[0] for name in segments] == ["c", "d", "e"]
    assert [tokenizer.decode(s.tolist()) for s in segments.values()] == [
        "c" * 9, "d" * 9, "012345678"]
    assert len(perplexity.get_segments(files, tokenizer, 8, 1)) == 1
    with pytest.raises(UsageError, match="longer than 20 tokens, the longest has 20"):
        perplexity.get_segments(files, tokenizer, 20, 5)
    assert f"skipped {tmp_path / 'f.png'}: not UTF-8\n" in capsys.readouterr().out


def test_default_documents_are_held_out_from_training():
    tokenizer = get_tokenizer("bytes")
    training, _ = get_data(train.get_parser().parse_args([]), tokenizer)
    assert isinstance(training, Sequences)
    seen = b"".join(bytes(a.astype(np.uint8)) for a in arrays_of(training))
    segments = perplexity.get_segments(perplexity.documents_in(None), tokenizer, 4096, 16)
    assert len(segments) == 16
    assert not any(name.startswith("cp") for name in segments)          # tables of code pages
    assert not any(bytes(s.astype(np.uint8))[1000:1500] in seen for s in segments.values())


def test_position_p_has_p_tokens_of_context(checkpoints):
    """Compared with the model's logits on each prefix alone."""
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
    """The seeds share documents a and b, where their means are 2 and 4 nats; c does not count."""
    rows = [document("a", "1"), document("b", "3"), document("c", "9"),
            document("a", "5", seed="1"), document("b", "3", seed="1"),
            document("a", "7", swe="yes")]
    plain, expanded = perplexity.get_curves(rows)
    assert (plain.setting, plain.n_seeds, plain.n_documents) == ("", 2, 2)
    assert plain.mean == pytest.approx([(math.e**2 + math.e**4) / 2])
    assert plain.std == pytest.approx([(math.e**4 - math.e**2) / math.sqrt(2)])
    assert (expanded.setting, expanded.n_documents) == (" + SWE", 1)
    assert expanded.mean == pytest.approx([math.e**7])


def test_seeds_without_a_document_in_common_have_no_curve_and_a_line_says_so(capsys):
    assert perplexity.get_curves([document("a", "1"), document("b", "1", seed="1")]) == []
    assert capsys.readouterr().err == "Multiscreen: no curve, since its seeds share no document\n"


def test_a_text_is_the_same_at_another_path():
    rows = [document("a.txt 1", "1", data="/x/a.txt"),
            document("b.txt 1", "3", seed="1", data="/y/b.txt")]
    curve, = perplexity.get_curves(rows)
    assert (curve.setting, curve.n_seeds, curve.n_documents) == ("", 2, 1)
    other = document("a.txt 2", "3", data="/z/a.txt")
    assert [curve.setting for curve in perplexity.get_curves([*rows, other])] == [
        ", data /x/a.txt", ", data /z/a.txt"]


def test_perplexity_has_a_row_for_each_document_and_setting_and_makes_none_twice(
        call, checkpoints, tmp_path, monkeypatch, capsys):
    (tmp_path / "text").write_text("screening is enough " * 4)
    (tmp_path / "more").write_text("screening is enough, " * 4)
    path = checkpoints["multiscreen:rope"]
    flags = ["--ckpt", path, "--length", 40, "--rope-scale", 1, 4, "--swe", "--device", "cpu",
             "--data", "text"]
    call(perplexity, *flags)
    call(perplexity, *flags, "more")
    rows = read_table(path.with_name("perplexity.tsv"))
    assert [row["data"] for row in rows] == ["text"] * 4 + ["text more"] * 8
    assert [(row["swe"], row["factor"]) for row in rows[:4]] == [
        ("", "1"), ("", "4"), ("yes", "1"), ("yes", "4")]
    assert len({row["nats"] for row in rows[:4]}) == 4
    assert len(rows[0]["nats"].split()) == 2           # positions 32 and 40

    monkeypatch.setattr(perplexity, "nats", None)
    capsys.readouterr()
    call(perplexity, *flags, "more", "--out", "figure/f.png")
    assert len(read_table(path.with_name("perplexity.tsv"))) == 12
    assert len(read_table(tmp_path / "figure/f.tsv")) == 8
    shown = [line for line in cells_of(capsys) if line[0].startswith("MiPE → RoPE")]
    assert [line[0].removeprefix("MiPE → RoPE") for line in shown] == [
        ", RoPE ×1", ", RoPE ×4", " + SWE, RoPE ×1", " + SWE, RoPE ×4"]
    nats = [float(row["nats"].split()[0]) for row in rows[4:6]]
    assert float(shown[0][3]) == pytest.approx(math.exp(sum(nats) / 2), rel=5e-3)


@pytest.mark.parametrize("name, flag, message", [
    ("multiscreen", "--rope-scale 2", "RoPE"), ("transformer:2,2,8", "--swe", "no screening")])
def test_perplexity_refuses_what_a_model_does_not_have(call, checkpoints, name, flag, message):
    with pytest.raises(UsageError, match=message):
        call(perplexity, "--ckpt", checkpoints[name], "--device", "cpu", *flag.split())
    assert not checkpoints[name].with_name("perplexity.tsv").exists()


@needs_matplotlib
def test_a_table_of_perplexity_is_printed_and_each_model_has_a_panel_with_the_first_curve(
        call, tmp_path, capsys, monkeypatch):
    rows = [document("a", "1 2", length="40"), document("a", "2 4", length="40", seed="1"),
            document("a", "1 2", length="40", swe="yes"),
            document("a", "1 2", length="40", model="transformer:2,2,8", parameters="9999",
                     factor="4", hash="x-2")]
    write_rows(tmp_path / "t.tsv", rows)
    figures = []
    monkeypatch.setattr(perplexity, "save_figure", lambda fig, path: figures.append(fig))
    monkeypatch.setattr(perplexity, "load_for_evaluation", None)       # drawing needs no model
    call(perplexity, "t.tsv", "mine=t.tsv", "--out", "figure/f.png")
    assert cells_of(capsys)[1:5] == [
        ["model", "seeds", "documents", "32", "40"],
        ["Multiscreen, 4.6K", "2", "1", "5.05 ± 3.3", "31 ± 33"],
        ["Multiscreen, 4.6K + SWE", "1", "1", "2.72", "7.39"],
        ["Transformer, 10K, RoPE ×4", "1", "1", "2.72", "7.39"]]
    assert read_table(tmp_path / "figure/f.tsv")[:4] == read_table(tmp_path / "t.tsv")
    legend, = figures[0].legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "Multiscreen, 4.6K, 2 seeds", "SWE, 1 seed", "training length, 16 tokens",
        "RoPE ×4, 1 seed", "as trained, 2 seeds"]
    titles = {ax.get_title(): len(ax.lines) - 1 for ax in figures[0].axes}
    assert titles == {"Multiscreen, 4.6K": 2, "Transformer, 10K": 2, "mine, 4.6K": 3,
                      "mine, 10K": 2, "": -1}


# -------------------------------------------------------------- windows, relevance maps, samples

def test_a_layer_is_summarized():
    shown = [tiles.Tile(1, 1, 2.0, 0.5, 0.0), tiles.Tile(1, 2, 300.0, 1.0, 0.5),
             tiles.Tile(1, 3, INF, 0.25, 1.0)]
    assert tiles.summary(1, shown, 256.0, 300) == [
        1, 3, 2.0, 300.0, INF, 0.25, 0.5, 1.0, 2, 1, 0.5, 1]


@needs_matplotlib
def test_an_infinite_window_is_drawn_at_the_edge():
    shown = [tiles.Tile(1, 1, 2.0, 0.5, 0.0), tiles.Tile(2, 1, INF, 0.25, 1.0)]
    _, _, ax, *_ = tiles.draw_windows(pyplot(), shown, 16.0, 100).axes
    assert ax.collections[0].get_offsets().tolist() == [[2, 0.5], [ax.get_xlim()[1], 0.25]]


@pytest.mark.parametrize("script, flags", [
    (tiles, ["--text", "screening"]), (perplexity, ["--length", 40, "--documents", 1]),
    (passkey, ["--lengths", 420, "--trials", 1, "--depths", 0.5])])
def test_a_table_can_be_named_and_nothing_is_written_beside_the_checkpoint(
        call, checkpoints, monkeypatch, tmp_path, script, flags):
    monkeypatch.setattr(script, "pyplot", lambda: None, raising=False)
    path = checkpoints["multiscreen"]
    call(script, "--ckpt", path, "--device", "cpu", *flags, "--table", "mine/t.tsv")
    assert len(read_table(tmp_path / "mine/t.tsv")) > 0
    assert [*path.parent.iterdir()] == [path]


def test_tiles_of_screening_in_a_transformer_have_their_own_windows(call, monkeypatch, tmp_path):
    monkeypatch.setattr(tiles, "pyplot", lambda: None)
    fit(tmp_path / "a", "--model", "transformer:1,2,8:screening", "--steps", "2")
    call(tiles, "--ckpt", "a/ckpt.pt", "--text", "screening", "--device", "cpu")
    model, _, _ = load_checkpoint(tmp_path / "a/ckpt.pt")
    w = [float(row["w"]) for row in read_table(tmp_path / "a/tiles.tsv")]
    assert w == pytest.approx(model.layers[0].window().tolist(), rel=1e-4)


@pytest.mark.parametrize("script, flags, what", [
    (tiles, ["--text", "screening"], "relevances"), (perplexity, ["--length", 40], "losses")])
def test_numbers_that_are_not_finite_are_refused(call, checkpoints, monkeypatch, script, flags,
                                                 what):
    monkeypatch.setattr(tiles, "pyplot", lambda: None)
    monkeypatch.setattr(multiscreen, "trim", lambda s, r: s * math.nan)
    with pytest.raises(FloatingPointError, match=f"{what} are not finite"):
        call(script, "--ckpt", checkpoints["multiscreen"], "--device", "cpu", *flags)


def test_relevance_maps_count_what_train_logs(call, checkpoints, monkeypatch):
    """The mean of `alive`, weighted by the pairs in each window, is train.py's number.

    Initial windows are 2, 17 and 257 tokens: exp(s_w) + 1, with s_w from 0 to ln 256.
    """
    monkeypatch.setattr(tiles, "pyplot", lambda: None)
    path, text = checkpoints["multiscreen"], "screening is enough!"
    call(tiles, "--ckpt", path, "--text", text, "--device", "cpu")
    rows = read_table(path.with_name("tiles.tsv"))
    assert [row["layer"] + row["tile"] for row in rows] == ["11", "12", "13", "21", "22", "23"]
    assert [row["w"] for row in rows] == ["2", "17", "257"] * 2
    assert {row["r"] for row in rows} == {"0.5"}       # initial values
    pairs = {"2": 20 + 19, "17": sum(range(4, 21)), "257": 210}
    alive = sum(float(row["alive"]) * pairs[row["w"]] for row in rows)
    model, tokenizer, _ = load_checkpoint(path)
    tokens = torch.tensor([tokenizer.encode_ordinary(text)])
    share = alive / (2 * sum(pairs.values()))
    assert share == pytest.approx(alive_pairs(model, tokens)["alive"], rel=1e-3)


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
    assert shown == "screen" + bytes(t for t in greedy if t < 256).decode(errors="replace") + "\n"
    assert "8 tokens" in note
    texts = []
    for seed in (3, 3, 4):
        call(sample, *flags, "--seed", seed)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]

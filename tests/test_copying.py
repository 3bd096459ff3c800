"""Tests of lab/copying.py: what a repeated string costs, by its distance."""
import math

import numpy as np
import pytest
import torch

from abcdigits import generate_by_token_count
from lab import copying
from lab.common import pyplot, write_rows
from support.cli import UsageError
from support.run import load_checkpoint
from tests.helpers import ROOT, cells_of, draw_tokens, needs_matplotlib, read_table, small

BUNDLED = ROOT / "models" / "retrieval.pt"


def lines_of_abcdigits(n, without):
    """n tokens of lines like B=17 of other letters."""
    text = generate_by_token_count(2 * n, 0.5, len, n_digits=2, n_trials=1)[0]
    lines = [line for line in text.splitlines(keepends=True) if line[0] != without]
    return [*"".join(lines).encode()][:n]


@pytest.mark.parametrize("name", ["bundled", "multiscreen", "transformer:2,2,8"])
def test_ends_cost_what_they_cost_in_a_whole_text(name, checkpoints):
    """Also where a cache has no more room, and drops the keys outside the windows."""
    path = BUNDLED if name == "bundled" else checkpoints[name]
    model, _, _ = load_checkpoint(path)
    start, text, *ends = (draw_tokens(n, seed=n, n=256).tolist() for n in (5, 1100, 24, 25))
    places = [0, 3, 1000, 1012, 1100]
    found = copying.nats_of_ends(model, start, text, places, ends, 4)
    for end, row in zip(ends, found):
        for place, nats in zip(places, row):
            whole = torch.tensor([start + text[:place] + end])
            with torch.no_grad():
                expected = model.loss(whole[:, :-1], whole[:, 1:], "none")[0, 4 - len(end) :]
            assert nats == pytest.approx(expected.mean().item(), abs=1e-4)


def test_a_model_that_copies_and_one_that_does_not():
    """The bundled model knows the number of a letter that it has read, and no other number."""
    model, tokenizer, _ = load_checkpoint(BUNDLED)
    start, right, wrong = map(tokenizer.encode, ("Q=83\n", "Q=83", "Q=47"))
    text, places = lines_of_abcdigits(1000, "Q"), [125, 500, 1000]
    found = copying.nats_of_ends(model, start, text, places, [right, wrong], 2)
    assert (found[0] < 0.5).all() and (found[1] > 2).all()

    untrained = small(0, vocab_size=257)
    found = copying.nats_of_ends(untrained, start, text, places[:2], [right, wrong], 2)
    assert (np.abs(found - math.log(257)) < 1).all()


def test_the_bundled_model_ranks_the_right_number_first():
    model, tokenizer, _ = load_checkpoint(BUNDLED)
    nats = copying.rank_numbers(model, tokenizer, 256, 2, 3)
    assert nats.shape == (3, 2)
    assert (nats[:, 0] < 0.5).all() and (nats[:, 1] > 2).all()


def test_numbers_are_ranked_by_all_of_their_digits(call, checkpoints, monkeypatch, capsys):
    """An end of n digits costs n times its mean. Here the right number costs 5 nats, others 7."""
    def nats_of_ends(model, start, text, places, ends, cue):
        assert len(ends) == 26 and len({*map(tuple, ends)}) == 26
        assert {len(end) for end in ends} == {cue + 2}
        return np.array([[2.5], *[[3.5]] * 25])

    monkeypatch.setattr(copying, "nats_of_ends", nats_of_ends)
    call(copying, "--ckpt", checkpoints["multiscreen"], "--digits", 2, "--strings", 3,
         "--device", "cpu")
    assert ["256", "100%", "5", "7"] in cells_of(capsys)


def test_a_string_is_the_same_in_each_run_and_unlike_the_others():
    strings = [s for n in range(20) for s in copying.random_strings(n)]
    assert strings == [s for n in range(20) for s in copying.random_strings(n)]
    assert len(set(strings)) == 40 and {len(s) for s in strings} == {32}
    assert {c for s in strings for c in s} == {*copying.CHARACTERS}


def test_texts_are_spread_over_all_there_is(tmp_path, checkpoints):
    _, tokenizer, _ = load_checkpoint(checkpoints["multiscreen"])
    (tmp_path / "a.txt").write_text("0123456789")
    (tmp_path / "b.txt").write_text("abcdef")
    texts = copying.get_texts([tmp_path / "a.txt", tmp_path / "b.txt"], tokenizer, 3, 4)
    assert [bytes(text) for text in texts] == [b"0123", b"6789", b"cdef"]
    with pytest.raises(UsageError, match="the text has 10 tokens, fewer than 11: use smaller"):
        copying.get_texts([tmp_path / "a.txt"], tokenizer, 3, 11)


def row(nats, **values):
    """A row of copying.tsv."""
    return dict.fromkeys(copying.KEYS, "") | {
        "model": "multiscreen", "parameters": "4626", "seed": "0", "seq_len": "16", "step": "9",
        "data": "stdlib", "distances": "128 256", "string": "0", "nats": nats, "hash": "1-1"
    } | values


def test_means_over_strings_then_over_seeds():
    """Strings of seed 0 cost 1 and 3 nats at 128, those of seed 1 cost 4 and 6."""
    rows = [row("1 2 5 6"), row("3 4 7 8", string="1")]
    one, = copying.get_curves(rows)
    assert (one.label, one.steps, one.n_seeds, one.T_train) == ("Multiscreen", (9, 9), 1, 16)
    assert one.x == [128, 256]
    assert one.mean.tolist() == [2, 3] and one.other.tolist() == [6, 7]
    assert one.error == pytest.approx([1, 1])                    # sqrt(2) / sqrt(2 strings)

    rows += [row("4 5 6 6", seed="1"), row("6 7 6 6", seed="1", string="1"),
             row("9 9 9 9", swe="yes")]
    two, expanded = copying.get_curves(rows)
    assert two.n_seeds == 2
    assert two.mean.tolist() == [3.5, 4.5] and two.other.tolist() == [6, 6.5]
    assert two.error == pytest.approx([3 / math.sqrt(2)] * 2)    # of the means 2 and 5, 3 and 6
    assert expanded.label == "Multiscreen + SWE"
    assert np.isnan(expanded.error).all()


def test_the_best_rope_scaling_at_each_distance():
    rows = [row("1 8 7 7"), row("2 6 5 5", factor="4"), row("3 5 4 3", factor="ntk4")]
    plain, scaled = copying.get_curves(rows)
    assert plain.label == "Multiscreen"
    assert plain.mean.tolist() == [1, 8]
    assert scaled.label == "Multiscreen + best RoPE scaling"
    assert scaled.mean.tolist() == [2, 5]
    assert scaled.other.tolist() == [5, 3]                       # with the same factors


def test_the_unscaled_model_has_a_curve_and_is_one_of_the_choices():
    """The factor 1 of --rope-scale is the model as trained."""
    plain, scaled = copying.get_curves([row("1 8 7 7", factor="1"), row("2 6 5 5", factor="4")])
    assert (plain.label, scaled.label) == ("Multiscreen", "Multiscreen + best RoPE scaling")
    assert plain.mean.tolist() == [1, 8]
    assert scaled.mean.tolist() == [1, 6]


@needs_matplotlib
def test_a_label_says_which_steps_its_seeds_ended_at(call, tmp_path, monkeypatch):
    """They are not steps of one run, and the figure is one of distance."""
    drawn = []
    monkeypatch.setattr(copying, "save_figure", lambda fig, path: drawn.append(fig))
    write_rows(tmp_path / "a.tsv", [row("1 2 3 4", step="7000")])
    write_rows(tmp_path / "b.tsv", [row("1 2 3 4", step="8000", seed="1")])
    write_rows(tmp_path / "c.tsv", [row("1 2 3 4", step="8000", parameters="61506")])
    call(copying, "a.tsv", "b.tsv")
    call(copying, "a.tsv", "b.tsv", "c.tsv")
    one, two = ([text.get_text() for text in fig.legends[0].get_texts()] for fig in drawn)
    assert one[0] == "Multiscreen, 2 seeds, 7,000 to 8,000 steps"
    assert two[:2] == ["Multiscreen, 4.6K, 2 seeds, 7,000 to 8,000 steps",
                       "Multiscreen, 62K, 1 seed, 8,000 steps"]


@pytest.mark.parametrize("name, values", [("data", ["stdlib", "books"]),
                                          ("distances", ["128 256", "512 1024"])])
def test_tables_of_different_texts_or_distances_are_not_mixed(name, values):
    rows = [row("1 2 3 4", **{name: value}) for value in values]
    with pytest.raises(UsageError, match=f"the tables differ in {name} "):
        copying.get_curves(rows)


@needs_matplotlib
def test_a_checkpoint_is_measured_once_and_drawn(call, checkpoints, tmp_path, capsys):
    (tmp_path / "text").write_text("screening is enough " * 20)
    path = checkpoints["multiscreen"]
    flags = ["--ckpt", path, "--data", "text", "--distances", 300, 40, "--strings", 2, "--swe",
             "--device", "cpu"]
    call(copying, *flags)
    rows = read_table(path.parent / "copying.tsv")
    assert [(r["swe"], r["string"]) for r in rows] == [("", "0"), ("", "1"), ("yes", "0"),
                                                       ("yes", "1")]
    assert {r["distances"] for r in rows} == {"40 300"}
    assert all(len(r["nats"].split()) == 4 for r in rows)
    cells = cells_of(capsys)
    assert ["model", "steps", "seeds", "read before", "40", "300"] in cells
    assert any(line[:4] == ["Multiscreen + SWE", "0", "1", "yes"] for line in cells)
    assert (path.parent / "copying.png").stat().st_size > 10_000

    call(copying, *flags)
    assert "reusing 4 of 4" in capsys.readouterr().err
    assert len(read_table(path.parent / "copying.tsv")) == 4
    with pytest.raises(UsageError, match="at least 2, for the two line ends"):
        call(copying, *flags, "--distances", 1)


@needs_matplotlib
def test_checkpoints_kept_of_one_run_are_drawn_by_step(monkeypatch, tmp_path, capsys):
    drawn = []
    monkeypatch.setattr(copying, "save_figure", lambda fig, path: drawn.append(fig))
    rows = [row("4 5 6 6", step="2000"), row("6 6 6 6", step="1000"), row("3 3 6 6", step="3000")]
    copying.draw_by_step(pyplot(), copying.get_curves(rows), tmp_path / "f.png")
    first, second = drawn[0].axes
    assert first.lines[0].get_xydata().tolist() == [[1000, 6], [2000, 4], [3000, 3]]
    assert second.lines[0].get_xydata().tolist() == [[1000, 6], [2000, 5], [3000, 3]]

"""Tests of the lab: what is measured and reused, when a mean is a mean, what is drawn, repeated."""
import importlib
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import abcdigits
import train
from support.cli import UsageError
from lab import (
    alike,
    bench,
    compare,
    compile_kernel,
    copying,
    curves,
    experiments,
    figures,
    idea,
    mechanisms,
    passkey,
    perplexity,
    plots,
    runner,
    runs,
    sample,
    scaling,
    tiles,
)
from support import data, measure
from support.data import get_tokenizer
from support.measure import Measurement, parser
from support.run import FREE, as_typed, load_checkpoint
from support.tables import RUN, add_row, read_table, write_table
from tests.helpers import ROOT, arrays_of, fit, needs_matplotlib, run, write_run
from tests.inputs import INF, draw_tokens, small

BUNDLED = ROOT / "models/retrieval.pt"
CPU = torch.device("cpu")


# ------------------------------------------------------------------- what all measurements share

def measurement(path, table, *flags):
    """A Measurement of a checkpoint."""
    args = parser("").parse_args(["--ckpt", str(path), "--table", str(table), "--device", "cpu",
                                  *flags])
    return Measurement(args, "numbers")


def fill(run, numbers):
    """Measure each of some numbers in each setting. Returns those that were missing."""
    cells = [setting | {"number": n} for setting in run.settings for n in numbers]
    found = []
    for cell in run.missing(cells):
        run.add(cell, square=cell["number"] ** 2)
        found.append((cell["swe"], cell["factor"], cell["number"]))
    return found


def test_only_rows_that_are_missing_are_measured(checkpoints, tmp_path):
    table = tmp_path / "t.tsv"
    path = checkpoints["multiscreen"]
    assert fill(measurement(path, table), [1, 2]) == [("", "", 1), ("", "", 2)]
    run = measurement(path, table, "--swe")
    assert fill(run, [2, 3]) == [("", "", 3), ("yes", "", 2), ("yes", "", 3)]
    assert [(row["swe"], row["square"]) for row in run.rows()] == [
        ("", "4"), ("", "9"), ("yes", "4"), ("yes", "9")]


def test_a_line_that_a_kill_cut_off_is_no_row_and_costs_no_other(checkpoints, tmp_path):
    table = tmp_path / "t.tsv"
    path = checkpoints["multiscreen"]
    fill(measurement(path, table), [1, 2])
    table.write_text(table.read_text()[:-9])
    run = measurement(path, table)
    assert fill(run, [1, 2]) == [("", "", 2)]
    assert [row["square"] for row in run.rows()] == ["1", "4"]
    assert fill(measurement(path, table), [1, 2]) == []


def test_one_table_appended_to_another_is_one_table(tmp_path):
    for n in "12":
        write_table(tmp_path / f"{n}.tsv", [{"a": n, "b": "3"}])
    (tmp_path / "c.tsv").write_text("".join((tmp_path / f"{n}.tsv").read_text() for n in "12"))
    assert read_table(tmp_path / "c.tsv") == [{"a": "1", "b": "3"}, {"a": "2", "b": "3"}]


def test_a_table_with_other_columns_is_refused_and_stays_as_it_is(checkpoints, tmp_path):
    table = tmp_path / "t.tsv"
    table.write_text("a\tb\n1\t2\n")
    with pytest.raises(UsageError, match="does not have the columns"):
        fill(measurement(checkpoints["multiscreen"], table), [1])
    with pytest.raises(UsageError, match="does not have the columns"):
        add_row(table, {"a": 1, "c": 2})
    assert table.read_text() == "a\tb\n1\t2\n"


def change(path, **changes):
    """Change a checkpoint in place."""
    ckpt = torch.load(path)
    for name, x in changes.items():
        ckpt[name] = x
    torch.save(ckpt, path)


def test_other_weights_another_tokenizer_or_other_products_are_measured_anew(
        checkpoints, tmp_path, monkeypatch):
    table, path = tmp_path / "t.tsv", checkpoints["multiscreen"]
    assert fill(measurement(path, table), [1]) == [("", "", 1)]
    weights = torch.load(path)["weights"]
    change(path, weights=weights | {"W_E": weights["W_E"] + 1})
    assert fill(measurement(path, table), [1]) == [("", "", 1)]
    with monkeypatch.context() as m:
        m.setattr(measure, "products_dtype", lambda device: torch.bfloat16)
        assert fill(measurement(path, table), [1]) == [("", "", 1)]
    monkeypatch.setattr(measure, "load_checkpoint", lambda *inputs: [
        SimpleNamespace(name="other", eot_token=0) if hasattr(x, "encode_ordinary") else x
        for x in load_checkpoint(*inputs)])
    assert fill(measurement(path, table), [1]) == [("", "", 1)]


def test_in_a_notebook_nothing_is_reused(checkpoints, tmp_path, monkeypatch):
    """Functions that it has replaced are in no file."""
    monkeypatch.delattr(sys.modules["__main__"], "__file__")
    for _ in range(2):
        assert fill(measurement(checkpoints["multiscreen"], tmp_path / "t.tsv"), [1])


@pytest.mark.parametrize("at_top", [True, False])
def test_an_edit_in_a_helper_that_your_class_imports_is_measured_anew(
        checkpoints, tmp_path, monkeypatch, at_top):
    """And if you undo it, the rows of before count again, also in figures."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("mine", "its_helper"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / "its_helper.py").write_text("FACTOR = 1.0\n")
    top, inside = "import its_helper\n", ""
    if not at_top:
        top, inside = "", "        import its_helper\n"
    (tmp_path / "mine.py").write_text(
        f"{top}from multiscreen import GatedScreeningTiles\n\n\n"
        "class Tiles(GatedScreeningTiles):\n"
        f"    def bound(self, h):\n{inside}        return its_helper.FACTOR * h\n")
    importlib.invalidate_caches()
    path, table = checkpoints["multiscreen"], tmp_path / "t.tsv"
    change(path, model="multiscreen:mine.Tiles")
    assert fill(measurement(path, table), [1]) == [("", "", 1)]
    (tmp_path / "its_helper.py").write_text("FACTOR = 2.0\n")
    assert fill(measurement(path, table), [1]) == [("", "", 1)]
    edited = read_table(table)[-1]["hash"]
    (tmp_path / "its_helper.py").write_text("FACTOR = 1.0\n")
    assert fill(measurement(path, table), [1]) == []
    assert [row["hash"] == edited for row in read_table(table)] == [True, False]
    for name in ("mine", "its_helper"):
        del sys.modules[name]


def test_a_setting_changes_windows_and_positions(checkpoints, tmp_path):
    run = measurement(checkpoints["multiscreen:rope"], tmp_path / "t.tsv", "--swe", "--rope-scale",
                      "1", "ntk4")
    seen = []
    for cell in run.missing([setting | {"n": 0} for setting in run.settings]):
        layer = run.model.layers[0]
        seen.append((layer.rope_scale, layer.window().max().item() == INF))
        run.add(cell, value=0)
    assert seen == [((1, 1), False), ((1, 4), False), ((1, 1), True), ((1, 4), True)]


@pytest.mark.parametrize("name, flag, message", [
    ("multiscreen", "--rope-scale 2", "RoPE"),
    ("multiscreen:rope", "--rope-scale x", "a number above 0"),
    ("transformer:2,2,8", "--swe", "no windows")])
def test_a_setting_that_a_model_does_not_have_is_refused(checkpoints, tmp_path, name, flag,
                                                         message):
    with pytest.raises(UsageError, match=message):
        measurement(checkpoints[name], tmp_path / "t.tsv", *flag.split())


def test_the_table_is_beside_the_checkpoint_and_that_of_a_bundled_model_is_in_out():
    assert str(measure.table_of("a/ckpt.pt", "copying")) == "a/copying.tsv"
    assert str(measure.table_of("a/m.pt", "copying")) == "a/m_copying.tsv"
    assert str(measure.table_of(BUNDLED, "copying")) == "out/retrieval_copying.tsv"


# -------------------------------------------------------------------- a number belongs to its text

@pytest.fixture
def texts(tmp_path):
    """A folder with a text."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("the first text, " * 60)
    return tmp_path / "texts"


@pytest.mark.parametrize("script, flags", [
    (perplexity, ["--length", 40]), (copying, ["--strings", 1, "--distances", 40])])
def test_rows_are_not_reused_after_the_text_was_replaced(call, checkpoints, texts, tmp_path,
                                                         script, flags):
    flags = ["--ckpt", checkpoints["multiscreen"], "--device", "cpu", "--data", texts, *flags,
             "--table", "t.tsv"]
    call(script, *flags)
    call(script, *flags)
    assert len(read_table(tmp_path / "t.tsv")) == 1
    (texts / "a.txt").write_text("another of this length" * 60)
    call(script, *flags)
    one, two = read_table(tmp_path / "t.tsv")
    assert one["nats"] != two["nats"] and one["hash"] == two["hash"]


def test_rows_of_another_number_of_strings_are_not_reused(call, checkpoints, texts, tmp_path):
    """The texts of the strings are spread evenly, so string 1 of 2 and of 3 have others."""
    flags = ["--ckpt", checkpoints["multiscreen"], "--device", "cpu", "--data", texts,
             "--distances", 40, "--table", "t.tsv"]
    (texts / "a.txt").write_text("".join(chr(97 + n % 23) for n in range(2000)))
    call(copying, *flags, "--strings", 2)
    call(copying, *flags, "--strings", 3)
    strings = [row["string"] for row in read_table(tmp_path / "t.tsv")]
    assert [string.split()[0] for string in strings] == ["0", "1", "1", "2"]


def test_a_token_file_has_a_document_for_each_end_of_text(tmp_path):
    np.array([1, 2, 256, 3, 256, 256, 4, 5], "<u2").tofile(tmp_path / "b.bin")
    found = perplexity.documents_of([tmp_path], get_tokenizer("bytes"))
    assert [(name, x.tolist()) for name, x in found] == [
        ("b.bin", [1, 2]), ("b.bin", [3]), ("b.bin", [4, 5])]
    (_, tokens), = perplexity.documents_of([tmp_path], get_tokenizer("257"))
    assert len(tokens) == 8                            # a vocabulary of your own has no such token


def run_on(*names, val=None, tokenizer="bytes"):
    """(what choose_text knows of a run on such a text, its validation data)"""
    args = SimpleNamespace(data=[str(name) for name in names], val=val, seq_len=8)
    tokenizer = get_tokenizer(tokenizer)
    training, held_out = data.get_data(args, tokenizer)
    return SimpleNamespace(flags=vars(args), tokenizer=tokenizer,
                           ckpt={"args": vars(args), "corpus": training.corpus}), held_out


@pytest.mark.parametrize("n, val, text, how", [
    (40, None, "held out of books", "every twentieth file"),
    (3, None, "held out of books", "the last twentieth of the tokens, at least one sequence"),
    (3, "val.txt", "held out of books", "1 file, by name"),
    (3, "more.txt", "held out of more.txt", "all of it")])
def test_what_a_run_has_held_out_is_what_is_measured(tmp_path, n, val, text, how):
    books = tmp_path / "books"
    books.mkdir()
    for i in range(n):
        (books / f"{i:02}.txt").write_text(chr(65 + i) * 50)
    flag = None
    if val:
        (books / val).write_text("z" * 50)
    if val == "more.txt":
        flag = [str(books / val)]
    run, held_out = run_on(books, val=flag)
    documents, *words = perplexity.choose_text(run, None, lambda documents: True)
    assert words == [text, how]
    found = [tokens.tolist() for _, tokens in documents]
    expected = [t for tokens in arrays_of(held_out) for t in tokens.tolist() if t != 256]
    assert sum(found, []) == expected and all(found)


@pytest.mark.parametrize("kind, reason", [
    ("gone", "books does not exist: name the text where it is now"),
    ("edited", "has another hash than the text that the run has read"),
    ("short", "what the run has held out is too short"), ("task", "was trained on passkey"),
    ("unnamed", "the checkpoint names no text")])
def test_where_a_run_has_no_text_the_standard_librarys_is_measured_and_named(
        tmp_path, monkeypatch, kind, reason):
    books = tmp_path / "books"
    books.mkdir()
    (books / "a.txt").write_text("a text " * 99)
    run, _ = run_on(books)
    if kind == "gone":
        books.rename(tmp_path / "elsewhere")
    if kind == "edited":
        (books / "a.txt").write_text("another" * 99)
    if kind in ("task", "unnamed"):
        run.flags["data"] = ["passkey"] if kind == "task" else []
    paths = [tmp_path / f"{n:02}.py" for n in range(20)]
    for path in paths:
        path.write_text(path.name)
    monkeypatch.setattr(data, "standard_library", lambda: paths)
    documents, name, more = perplexity.choose_text(run, None, lambda documents: kind != "short")
    assert [name for name, _ in documents] == ["19.py"]
    assert name == "stdlib" and more.endswith(reason)
    _, name, more = perplexity.choose_text(run, [str(paths[0])], lambda documents: True)
    assert (name, more) == (str(paths[0]), "")


def test_perplexity_holds_out_what_train_py_holds_out_even_if_a_file_cannot_be_read(
        tmp_path, monkeypatch):
    paths = [tmp_path / f"{n:02}.py" for n in range(60)]
    for n, path in enumerate(paths):
        path.write_text(f"file {n:02}")
    paths[7].write_bytes(b"\xff\xfe\xff")
    monkeypatch.setattr(data, "standard_library", lambda: paths)
    tokenizer = get_tokenizer("bytes")
    args = SimpleNamespace(data=["stdlib"], val=None, seq_len=7)
    _, held_out = data.get_data(args, tokenizer)
    said = "".join(tokenizer.decode(held_out[n].tolist()) for n in range(len(held_out)))
    documents = perplexity.documents_of(None, tokenizer)
    found = [tokenizer.decode(x.tolist()) for _, x in documents]
    assert found == re.findall(r"file \d\d", said) == ["file 20", "file 40"]


# ------------------------------------------------------------------------- perplexity by position

def test_positions_are_powers_of_the_root_of_2_and_their_windows_are_cut_at_the_ends():
    assert perplexity.positions(100) == [32, 45, 64, 91, 100]
    means = perplexity.window_means(np.arange(1.0, 101), 0.1)      # position p has value p
    assert means[0] == np.mean(range(29, 36))
    assert means[-2:] == [np.mean(range(82, 101)), np.mean(range(90, 101))]


def test_the_middle_of_each_document_that_is_long_enough_is_measured(tmp_path):
    for name, n in (("a", 8), ("b", 9), ("c", 20)):
        (tmp_path / name).write_text(name * n)
    (tmp_path / "d").write_text("0123456789")
    (tmp_path / "e.png").write_bytes(b"\x89PNG" * 5)
    tokenizer = get_tokenizer("bytes")
    documents = perplexity.documents_of([tmp_path], tokenizer)
    found = perplexity.middles(documents, 8, 5)
    assert [tokenizer.decode(x.tolist()) for x in found.values()] == ["b" * 9, "c" * 9, "012345678"]
    with pytest.raises(UsageError, match="longer than 20 tokens, the longest has 20"):
        perplexity.middles(documents, 20, 5)


def test_the_token_at_position_p_is_predicted_from_the_p_before_it(checkpoints):
    model, _, _ = load_checkpoint(checkpoints["multiscreen"])
    x = draw_tokens(21, seed=1, n=257)
    found = perplexity.nats(model, x.numpy().astype(np.uint16))
    for p in (1, 2, 20):
        with torch.no_grad():
            expected = -model(x[None, :p])[0, -1].log_softmax(-1)[x[p]].item()
        assert found[p - 1] == pytest.approx(expected, abs=1e-5)


# ---------------------------------------------------------------------------- copying by distance

@pytest.mark.parametrize("name", ["bundled", "multiscreen", "transformer:2,2,8"])
def test_an_end_costs_what_it_costs_in_a_whole_text(name, checkpoints):
    """Also after a long text, where a cache forgets the keys outside the windows."""
    model, tokenizer, _ = load_checkpoint(BUNDLED if name == "bundled" else checkpoints[name])
    text = draw_tokens(1200, n=256).tolist()
    start, ends = [*b"a" * 20, 10], [[10, *b"a" * 20], [10, *b"b" * 20], [10, *b"c" * 9]]
    places = [38, 1148]
    found = copying.costs_of_ends(model, start, text, places, ends, 5)
    for end, costs in zip(ends, found):
        for place, x in zip(places, costs):
            whole = torch.tensor([start + text[:place] + end])
            with torch.no_grad():
                expected = model.loss(whole[:, :-1], whole[:, 1:], "none")[0, 5 - len(end) :]
            assert x == pytest.approx(expected.numpy(), abs=1e-4)


def test_the_ends_are_controls_of_each_other_and_the_same_each_time():
    for n in range(30):
        assert copying.ends_of(n) == copying.ends_of(n)
        same, another, reordered, near_miss = copying.ends_of(n).values()
        assert [same, another] == copying.random_strings(n)
        assert not set(zip(range(4), same)) >= set(zip(range(4), another))
        assert reordered[:4] == near_miss[:4] == same[:4]
        assert sorted(reordered) == sorted(same) and reordered != same
        assert [a != b for a, b in zip(same, near_miss)] == [n >= 4 and n % 4 == 3
                                                             for n in range(32)]
    assert len({copying.random_strings(n)[m] for n in range(30) for m in (0, 1)}) == 60


def test_of_a_near_miss_the_characters_that_were_not_changed_count():
    costs = torch.zeros(28)
    costs[3::4] = 4.0
    assert copying.means_of([[costs]] * 4, copying.ends_of(0)) == [1, 1, 1, 0]


def test_one_of_several_candidates_is_asked_for_and_others_are_wrong_answers():
    places = set()
    for n in range(30):
        strings, others = copying.candidates_of(n, 8)
        asked = copying.random_strings(n)[0]
        assert all(other[4] != asked[4] for other in copying.candidates_of(n, 32)[1])
        places.add(strings.index(asked))
        assert sorted([*others, asked]) == sorted(strings) and len(strings) == 8
        assert asked[copying.CUE] not in [other[copying.CUE] for other in others]
    assert len(places) > 5
    assert copying.candidates_of(3, 1) == ([copying.random_strings(3)[0]], [])
    dearer, too = torch.tensor([2.0, 1.0, 0, 0, 9]), torch.tensor([1.0, 5.1, 0, 0, 0])
    asked_for = [torch.tensor([1.0, 5.0, 0, 0, 0])] * 2
    assert copying.shares_beaten(asked_for, [[dearer, dearer], [too, dearer]]) == [0.5, 0]


def test_a_string_is_copied_only_where_a_character_is_a_token(call, checkpoints, monkeypatch):
    monkeypatch.setattr(measure, "load_checkpoint", lambda *inputs: [
        SimpleNamespace(name="gpt2", eot_token=0) if hasattr(x, "encode_ordinary") else x
        for x in load_checkpoint(*inputs)])
    with pytest.raises(UsageError, match="was trained with --tokenizer gpt2"):
        call(copying, "--ckpt", checkpoints["multiscreen"], "--device", "cpu")


def test_text_before_the_string_is_what_comes_before_it(tmp_path):
    (tmp_path / "a.txt").write_text("".join(chr(33 + n) for n in range(90)))
    tokenizer = get_tokenizer("bytes")
    plain = copying.get_texts([tmp_path], tokenizer, 2, 30)
    for without, text in zip(plain, copying.get_texts([tmp_path], tokenizer, 2, 30, before=5)):
        assert text[5:] == without
        assert (text[4] + 1 - 33) % 90 == text[5] - 33


def test_a_bundled_model_finds_a_string_only_if_it_has_read_it(call, tmp_path, capsys):
    call(copying, "--ckpt", ROOT / "models/text.pt", "--strings", 1, "--distances", 128, 1024,
         "--swe", "--candidates", 2, "--device", "cpu", "--table", "t.tsv")
    _, row = read_table(tmp_path / "t.tsv")
    nats = np.array(row["nats"].split(), float).reshape(4, 2)
    assert (nats[0] < 3).all() and (nats[1:] > nats[0] + 2).all()
    assert row["right"] == row["beaten"] == "1 1"
    assert "guessing: 4.13" in capsys.readouterr().out


# --------------------------------------------------------------------------- abcdigits and passkey

def test_the_bundled_model_finds_needles_and_each_cell_is_a_row(call, tmp_path, capsys):
    flags = ["--ckpt", BUNDLED, "--lengths", 256, "--depths", 0.1, 0.9, "--trials", 2,
             "--device", "cpu", "--table", "t.tsv"]
    call(abcdigits, *flags)
    call(abcdigits, *flags, "--swe")
    rows = read_table(tmp_path / "t.tsv")
    assert [(row["swe"], row["depth"], row["accuracy"]) for row in rows] == [
        ("", "0.1", "1"), ("", "0.9", "1"), ("yes", "0.1", "1"), ("yes", "0.9", "1")]
    assert capsys.readouterr().out.count("100.0%") == 9            # with the means


def test_a_passkey_prompt_has_its_key_at_the_depth_that_was_asked():
    prompts, answers = passkey.passkey_prompts(get_tokenizer("bytes"), 1000, 0.5, 2)
    for prompt, answer in zip(prompts, answers):
        assert len(prompt) <= 1000
        assert 0.3 < prompt.index(f"The pass key is{answer}.") / len(prompt) < 0.7


# ------------------------------------------------------------------------ when a mean is a mean

def log_of(loss):
    """Rows of a log that ends at this validation loss."""
    steps = [{"step": n, "loss": 2.0, "grad_norm": 1.0, "tokens_per_s": 9.0} for n in range(1, 30)]
    return [*steps, {"step": 10, "val_loss": 3.0}, {"step": 20, "val_loss": loss}]


def test_a_change_is_a_mean_over_the_seeds_that_both_groups_have(call, tmp_path, capsys):
    for seed, (a, b) in enumerate([(1.0, 0.75), (2.0, 1.25)]):
        write_run(tmp_path / f"a-{seed}", log_of(a), seed=seed)
        write_run(tmp_path / f"b-{seed}", log_of(b), seed=seed, lr=0.5)
    write_run(tmp_path / "b-7", log_of(9.0), seed=7, lr=0.5)
    call(compare, "a-*", "mine=b-*", "--table", "t.tsv")
    out = capsys.readouterr().out
    row = next(re.split(" {2,}", line.strip()) for line in out.splitlines() if "mine  " in line)
    assert row[:3] == ["mine", "3 (0 1 7)", "0"]
    assert row[6:10] == ["2 (0 1)", "-0.5", "0.35355", "3.1766"]   # of -0.25 and -0.75; t is 12.706
    assert "lr 0.0625 | 0.5" in out
    call(compare, "t.tsv")                             # its rows are runs, too
    assert capsys.readouterr().out.splitlines()[2:5] == out.splitlines()[2:5]


@pytest.mark.parametrize("changes, verdict", [
    ((-0.3, -0.2, -0.25), "the loss is lower than that of a: -0.2500, 95 % interval -0.3742 to "
                          "-0.1258"),
    ((0.3, 0.2, 0.25), "the loss is higher than that of a: +0.2500, 95 % interval +0.1258 to "
                       "+0.3742"),
    ((-0.3, -0.2, 0.25), "no difference from a is shown: -0.0833")])
def test_the_verdict_on_a_change_is_that_of_its_interval(call, tmp_path, capsys, changes, verdict):
    for seed, change in enumerate(changes):
        write_run(tmp_path / f"a-{seed}", log_of(1.0 + seed), seed=seed)
        write_run(tmp_path / f"b-{seed}", log_of(1.0 + seed + change), seed=seed)
    call(compare, "a-*", "b-*")
    assert f"\nb: {verdict}" in capsys.readouterr().out


@pytest.mark.parametrize("different", [{"seq_len": 32}, {"tokenizer": "gpt2"}, {"lr": 0.5},
                                       {"corpus": "other"}])
def test_runs_that_differ_in_more_than_the_seed_have_no_mean(tmp_path, different):
    write_run(tmp_path / "a-0", log_of(1.0), seed=0)
    write_run(tmp_path / "a-1", log_of(2.0), seed=1, **different)
    with pytest.raises(UsageError, match=f"differ in {[*different][0]}"):
        alike.group_runs(runs.read_runs([f"mine={tmp_path}/a-*"]))


def test_a_run_that_diverged_has_no_loss_and_an_edit_is_shown(call, tmp_path, capsys):
    for name, text in (("a-0", "x = 1\n"), ("b-0", "x = 2\n")):
        folder = write_run(tmp_path / name, log_of(1.0))
        (folder / "source").mkdir()
        (folder / "source/multiscreen.py").write_text(text)
    (tmp_path / "b-0/diverged.txt").write_text("at step 9")
    call(compare, "a-0", "b-0")
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.strip().startswith("b  "))
    assert row.split()[:6] == ["b", "0", "1", "(0)", "4626", "-"]
    assert "-x = 1" in out and "+x = 2" in out
    write_run(tmp_path / "c-0", log_of(1.0)[:3])       # before its first evaluation
    (tmp_path / "c-0/diverged.txt").write_text("at step 3")
    call(compare, "a-0", "c-0")
    assert capsys.readouterr().out.splitlines()[4].split()[:6] == ["c", "0", "1", "(0)", "4626",
                                                                   "-"]


def test_the_columns_of_runs_of_other_lengths_are_those_of_one_step(call, tmp_path, capsys):
    for name, n in (("a-0", 1), ("b-0", 2)):
        rows = [{"step": 100 * k, "loss": 2.0, "val_loss": 2.0, "alive": k / 10, "w_max": k,
                 "grad_norm": k, "tokens_per_s": k} for k in range(1, n + 1)]
        write_run(tmp_path / name, rows)
    call(compare, "a-0", "b-0", "--table", "both.tsv")
    assert "after 100 steps" in capsys.readouterr().out
    for row in read_table(tmp_path / "both.tsv"):
        assert [float(row[x]) for x in ("alive", "w_max", "grad", "tokens_per_s")] == [0.1, 1, 1, 1]


@pytest.mark.parametrize("losses, spikes", [
    ([4.0], 0), ([4.01], 1), ([-9.0], 0),
    ([9.0, 9.0], 1),                                   # of the ten before the second, one is 9
    ([9.0, *5 * [1.0, 2.0], 4.01], 2)])
def test_a_spike_is_a_loss_five_deviations_above_the_mean_of_the_ten_before(
        tmp_path, losses, spikes):
    """After five times 1 and 2: their mean is 1.5, their deviation 0.5, so the limit is 4."""
    log = [{"step": n + 1, "loss": x} for n, x in enumerate([*5 * [1.0, 2.0], *losses])]
    write_run(tmp_path / "a", [*log, {"step": len(log), "val_loss": 3.0}])
    run, = runs.read_runs([tmp_path / "a"])
    assert run.facts_at(math.inf)["spikes"] == spikes


def test_a_loss_that_rose_in_training_and_validation_counts_as_diverged(tmp_path):
    for name, training, val in (("rose", 2.0, 4.0), ("overfits", -1.0, 4.0), ("fell", 2.0, 2.0)):
        log = [{"step": n, "loss": 2 + training * n / 30} for n in range(1, 31)]
        write_run(tmp_path / name, [*log, {"step": 3, "val_loss": 3.0},
                                    {"step": 30, "val_loss": val}])
    logged = runs.read_runs([tmp_path / name for name in ("rose", "overfits", "fell")])
    assert [run.diverged for run in logged] == [True, False, False]
    assert math.isnan(logged[0].loss(30)) and logged[1].loss(30) == 4.0


def test_a_rate_counts_for_scaling_only_with_all_its_seeds(tmp_path):
    for seed in (0, 1, 2):
        write_run(tmp_path / f"good-{seed}", log_of(1.5), seed=seed, lr=0.1)
        write_run(tmp_path / f"bad-{seed}", log_of(1.0), seed=seed, lr=0.2)
    write_run(tmp_path / "one-0", log_of(0.5), seed=0, lr=0.3)
    for seed in (1, 2):
        (tmp_path / f"bad-{seed}/diverged.txt").write_text("at step 9")
    models = scaling.get_models(runs.read_runs([f"{tmp_path}/*-*"]))["multiscreen"]
    assert [(model.lr, model.loss) for model in models] == [("0.1", 1.5)]


@needs_matplotlib
def test_losses_are_those_of_the_last_step_that_all_runs_have(tmp_path):
    """A run that is not finished does not stand beside others at their end."""
    write_run(tmp_path / "a", log_of(1.0), seed=0)
    write_run(tmp_path / "b", log_of(1.0)[:-1], seed=1)
    logged = runs.read_runs([f"m={tmp_path}/?"])
    model, = scaling.get_models(logged)["multiscreen"]
    assert model.losses == {"0": 3.0, "1": 3.0}
    fig = figures.losses([f"m={tmp_path}/?"])
    assert fig.axes[0].lines[0].get_ydata().tolist() == [3.0]


@pytest.mark.parametrize("learned, owes", [(False, False), (True, False), (True, True)])
def test_a_run_on_abcdigits_counts_among_mechanisms_only_if_it_has_ended(tmp_path, monkeypatch,
                                                                         learned, owes):
    ckpt = {"learned": learned, "owes_evaluation": owes}
    monkeypatch.setattr(mechanisms, "read_checkpoint", lambda path: ckpt)
    log = [*log_of(1.0)[:-1], {"step": 10, "needle": 0.9}]
    folder = write_run(tmp_path / "a", log, data="abcdigits")
    row = row_of(step="10", length="256", depth="0", accuracy="1")
    write_table(folder / "abcdigits.tsv", [row])
    if learned and not owes:
        assert mechanisms.rows_of([f"m={tmp_path}/a"])[0]["value"] == 0.9
        write_table(folder / "abcdigits.tsv", [row | {"step": "5"}])
        with pytest.raises(UsageError, match="abcdigits.tsv of m, seed 0, is of step 5"):
            mechanisms.rows_of([f"m={tmp_path}/a"])
    else:
        with pytest.raises(UsageError, match="a has not ended"):
            mechanisms.rows_of([f"m={tmp_path}/a"])


@pytest.mark.parametrize("steps, log, step, message", [
    (20, log_of(1.0), "20", None), (20, log_of(1.0)[:-1], "10", "m, seed 0, is of step 20"),
    (20, log_of(1.0), "10", "m, seed 1, is of step 10"),
    (10, log_of(1.0)[:-1], "10", "m, seed 0, is of step 20")])
def test_all_numbers_of_mechanisms_on_text_are_of_one_step(tmp_path, steps, log, step, message):
    row = row_of(data="d", positions="32 45 64 91", document="a", nats="1 2 3 4")
    write_run(tmp_path / "a", log_of(1.0))
    write_run(tmp_path / "b", log, seed=1, steps=steps)
    write_table(tmp_path / "a/perplexity.tsv", [row])
    write_table(tmp_path / "b/perplexity.tsv", [row | {"seed": "1", "step": step}])
    words = [f"m={tmp_path}/a", f"{'k' if steps == 10 else 'm'}={tmp_path}/b"]
    if message:
        with pytest.raises(UsageError, match=message):
            mechanisms.rows_of(words)
    else:
        losses = [row["value"] for row in mechanisms.rows_of(words) if row["what"] == "loss"]
        assert losses == [1.0, 1.0]


def test_a_difference_of_mechanisms_names_the_seeds_that_are_in_it(capsys):
    lines = {("a", ""): {("needles", 256): {"0": 10.0, "1": 20.0, "2": 90.0}},
             ("b", ""): {("needles", 256): {"0": 9.0, "1": 18.0, "3": 1.0}}}
    mechanisms.print_differences(lines, ("needles", 256))
    *_, b = capsys.readouterr().out.splitlines()
    assert re.split(" {2,}", b.strip())[:4] == ["b", "-1.5", "0.20483", "2 (0 1)"]


def test_sizes_at_an_equal_loss_are_interpolated_and_never_extrapolated():
    models = [scaling.Model("m", "1", n, n, {"0": loss}) for n, loss in ((100, 3.0), (400, 1.0))]
    assert scaling.size_at(2.0, models, "parameters") == pytest.approx(200)
    assert math.isnan(scaling.size_at(0.9, models, "parameters"))
    models[0].losses["1"] = 3.0
    rows = scaling.get_rows({"multiscreen": models, "transformer": []})
    assert [(row["seeds"], row["± of"]) for row in rows] == [("2 (0 1)", "1 (0)"),
                                                             ("1 (0)", "1 (0)")]


def row_of(**cells):
    """A row of a measurement."""
    row = dict.fromkeys(RUN, "") | {"model": "m", "parameters": "10", "seed": "0", "seq_len": "16",
                                    "step": "20", "swe": "", "factor": ""}
    return row | cells | {"hash": "w-c"}


def seconds(rows, key, x="4"):
    """The rows, with another value in a column of every second one."""
    return [row | {key: x} if n % 2 else row for n, row in enumerate(rows)]


def test_the_best_factor_of_a_cell_is_one_that_all_seeds_have():
    rows = [row_of(length="256", depth="0.5", factor=factor, accuracy=x, seed=seed)
            for seed, cells in {"0": {"": "0.2", "4": "0.3", "8": "1"},
                                "1": {"": "0.2", "4": "0.5"}, "2": {"": "0.4", "4": "0.4"}}.items()
            for factor, x in cells.items()]
    (best,), _ = curves.retrieval_curves(rows, plain=False)
    assert best.name == "m + best RoPE scaling"
    assert best.points == {(256, "0.5"): {"0": 0.3, "1": 0.5, "2": 0.4}}


def test_of_equal_factors_the_first_is_the_best_whatever_rounding_says():
    """0.1 + 0.2 + 0.3 is not 0.3 + 0.2 + 0.1 in floating point."""
    rows = [row_of(length="256", depth="0.5", factor=factor, accuracy=x, seed=seed)
            for factor, shares in (("", ("0.3", "0.2", "0.1")), ("4", ("0.1", "0.2", "0.3")))
            for seed, x in enumerate(shares)]
    assert 0.1 + 0.2 + 0.3 > 0.3 + 0.2 + 0.1
    (best,), _ = curves.retrieval_curves(rows, plain=False)
    assert best.points == {(256, "0.5"): {0: 0.3, 1: 0.2, 2: 0.1}}


def test_factors_are_compared_on_the_strings_and_documents_that_all_of_them_have():
    """Factor 4 was measured on the cheap text alone, where it is no better than the others."""
    measured = [("", "a", 1.0), ("", "b", 3.0), ("4", "a", 1.5)]
    strings = [row_of(seed=seed, factor=factor, string=text, distances="128",
                      nats=f"{nats} {nats}") for seed in "01" for factor, text, nats in measured]
    documents = [row | {"document": row["string"], "positions": "32 45 64 91",
                        "nats": f"{row['nats']} 9 9"}
                 for row in strings]
    plain, best = curves.copying_curves(strings)
    assert (plain.name, best.name) == ("m", "m + best RoPE scaling")
    assert plain.points["same", 128] == best.points["same", 128] == {"0": 1.0, "1": 1.0}
    _, best = curves.with_best_scaling(curves.perplexity_curves(documents),
                                       lambda points, place: sum(points[place].values()))
    assert best.points[32] == pytest.approx({"0": math.e, "1": math.e})

    one_seed_each = [row for row in strings if (row["factor"] == "4") == (row["seed"] == "1")]
    with pytest.raises(UsageError, match="measured with all seeds"):
        curves.copying_curves(one_seed_each)


def test_a_perplexity_is_of_the_position_that_its_row_names(tmp_path):
    row = row_of(data="d", window="0.3", document="a", nats="1 2")
    curve, = curves.perplexity_curves([row | {"positions": "20 91"}])
    assert curve.points == {20: {"0": math.e}, 91: {"0": math.exp(2)}}
    write_table(tmp_path / "t.tsv", [row])             # a table from before
    with pytest.raises(UsageError, match="of an older lab.perplexity, without the column pos"):
        alike.read_measurements([tmp_path / "t.tsv"], alike.PERPLEXITY)


def test_mechanisms_that_were_measured_with_scaled_positions_alone_are_refused():
    rows = [{"model": "m", "seed": "0", "what": "perplexity", "length": length, "setting": "RoPE",
             "value": "3"} for length in ("64", "2048")]
    with pytest.raises(UsageError, match="m, seed 0, was not measured as trained"):
        mechanisms.get_lines(rows)


def copied(path, *rows):
    """A table of lab.copying. rows: what is special in each, dicts."""
    usual = {"string": "0", "distances": "128", "nats": "1 2", "right": "", "beaten": ""}
    write_table(path, [row_of(**usual | row) for row in rows])
    return path


def read_copied(*words, kind=alike.COPYING):
    return alike.read_measurements(words, kind)


def test_two_runs_of_one_model_and_seed_are_not_drawn_as_one(tmp_path):
    for name in "ab":
        copied(tmp_path / f"{name}.tsv", {"step": "5" if name == "a" else "6"})
    with pytest.raises(UsageError, match="both have m, seed 0: label one"):
        read_copied(f"{tmp_path}/?.tsv")
    rows = read_copied(f"mine={tmp_path}/a.tsv", f"{tmp_path}/b.tsv")
    assert [row["model"] for row in rows] == ["mine", "m"]
    assert len(read_copied(f"{tmp_path}/?.tsv", kind=alike.COPYING_STEPS)) == 2


def test_a_table_has_one_run_of_a_model_and_a_seed(tmp_path):
    """Rows of another code or another step are of a run that was edited or trained further."""
    row = row_of(string="0", distances="128", nats="1 2", right="", beaten="")
    for changes in ({"hash": "v-d"}, {"hash": "v-c", "step": "30"}, {"hash": "v-c"}):
        write_table(tmp_path / "t.tsv", [row, row | {"nats": "3 4"} | changes])
        if changes != {"hash": "v-c"}:
            assert [row["nats"] for row in read_copied(tmp_path / "t.tsv")] == ["3 4"]
    with pytest.raises(UsageError, match="two runs of m, seed 0, step 20: move it away"):
        read_copied(tmp_path / "t.tsv")


def test_of_a_run_that_was_trained_further_the_last_rows_count(tmp_path):
    table = copied(tmp_path / "t.tsv", *({"nats": nats, "step": step} for nats, step in (
        ("1 1", "5"), ("2 2", "5"), ("3 3", "9"))))
    assert [row["nats"] for row in read_copied(table)] == ["3 3"]
    rows = read_copied(table, kind=alike.COPYING_STEPS)
    assert [row["nats"] for row in rows] == ["1 1", "2 2", "3 3"]


# ------------------------------------------------------------------------------------- figures

@needs_matplotlib
def test_a_curve_is_a_mean_over_seeds_and_guessing_is_drawn_only_where_it_is_known():
    ax = plots.pyplot().subplots()[1]
    curve = curves.Curve("x", {1: {"0": 1, "1": 3}, 2: {"0": 5}})
    plots.draw_curves(ax, [curve], plots.looks([curve]))
    assert ax.lines[0].get_ydata().tolist() == [2, 5]
    assert ax.lines[0].get_label() == "x, 1 to 2 seeds"
    for tokenizer, expected in (("bytes", True), ("gpt2", False)):
        fig = figures.copying([row_of(tokenizer=tokenizer, distances="128 256", string="0",
                                      nats="1 2 3 4", right="", beaten="")])
        labels = fig.axes[0].get_legend_handles_labels()[1]
        assert ("guessing a letter or digit" in labels) == expected


@needs_matplotlib
def test_a_figure_has_no_mean_of_runs_that_differ_in_more_than_the_seed(call, tmp_path, capsys):
    for seed, rate in enumerate((0.1, 0.1, 0.2)):
        folder = write_run(tmp_path / f"m-{seed}", log_of(1.0), seed=seed, lr=rate)
        write_table(folder / "copying.tsv", [row_of(
            nats="1 2", string="0", distances="128", seed=str(seed), step=str(1000 + seed),
            right="", beaten="")])
    call(figures, "copying", "mine=m-[01]/copying.tsv")
    assert "mine: its runs were measured after 1,000 to 1,001 steps" in capsys.readouterr().out
    for word in ("mine=m-*/copying.tsv", "m-*/copying.tsv"):
        with pytest.raises(UsageError, match="differ in lr"):
            call(figures, "copying", word)


@needs_matplotlib
def test_a_figure_does_not_overwrite_other_rows(call, tmp_path):
    copied(tmp_path / "copying.tsv", {})
    copied(tmp_path / "b.tsv", {"seed": "1"})
    before = (tmp_path / "copying.tsv").read_text()
    with pytest.raises(UsageError, match="already holds 1 other rows"):
        call(figures, "copying", "b.tsv", "--out", "copying.png")
    call(figures, "copying", "copying.tsv", "b.tsv")   # to out/
    assert (tmp_path / "copying.tsv").read_text() == before
    call(figures, "copying", "copying.tsv", "b.tsv", "--out", "copying.png")
    assert len(read_table(tmp_path / "copying.tsv")) == 2


@needs_matplotlib
@pytest.mark.parametrize("figure, table", [
    ("perplexity", "long_context_ablations"), ("copying", "copying_scaled"), ("gain", "copying"),
    ("candidates", "controls_candidates"), ("copying_steps", "copying_steps_others"),
    ("retrieval", "abcdigits"), ("losses", "lr_sweep"), ("changes", "ablations"),
    ("latency", "latency_gpu"), ("latency", "latency")])
def test_the_reports_tables_can_be_drawn(call, tmp_path, figure, table):
    call(figures, figure, ROOT / f"lab/report/{table}.tsv", "--out", "f.png")
    assert (tmp_path / "f.png").stat().st_size > 10_000


@needs_matplotlib
def test_what_was_timed_again_counts_once(call, tmp_path, capsys):
    row = {"model": "m", "parameters": "9", "what": "forward", "setting": "flash", "length": "64",
           "machine": "here", "ms": "1 2", "parts_ms": ""}
    write_table(tmp_path / "times.tsv", [row, row | {"ms": "6"}, row | {"length": "128"}])
    call(figures, "latency", "times.tsv")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[-2:] for line in lines if line[:1] == ["M,"]] == [["64", "6"], ["128", "1.5"]]


@needs_matplotlib
def test_mechanisms_are_read_from_runs_and_from_the_table_of_a_figure(call, tmp_path, capsys):
    for seed in (0, 1):
        folder = write_run(tmp_path / f"text_mine-{seed}", log_of(1.0 + seed), seed=seed)
        for swe, nats in (("", "1 2 3 4"), ("yes", "1 2 3 3")):
            add_row(folder / "perplexity.tsv", row_of(
                seed=str(seed), swe=swe, data="d", positions="32 45 64 91", document="a",
                nats=nats))
    call(mechanisms, f"mine={tmp_path}/*_mine-*")
    first = capsys.readouterr().out
    assert [line.split()[:2] for line in first.splitlines()[5:7]] == [["mine", "1.500"],
                                                                      ["mine", "SWE"]]
    assert f"{math.e:.2f} ± 0.00" in first             # exp(4) over exp(3)
    call(mechanisms, "out/mechanisms.tsv", "--out", "out/again.png")
    assert capsys.readouterr().out.splitlines()[:5] == first.splitlines()[2:7]


def test_what_a_string_gains_is_a_column_of_mechanisms_for_each_distance(tmp_path):
    folder = write_run(tmp_path / "mine-0", log_of(1.0))
    add_row(folder / "perplexity.tsv", row_of(data="d", positions="32 45 64 91", document="a",
                                              nats="1 2 3 4"))
    for swe, nats in (("", "1 2 5 7"), ("yes", "1 1 5 8")):
        add_row(folder / "copying.tsv", row_of(
            swe=swe, data="d", before="0", candidates="1", ends="same another",
            distances="64 128", string="0", nats=nats, first_right="", four_right=""))
    rows = [row | {"length": str(row["length"])} for row in mechanisms.rows_of([f"m={folder}"])]
    lines = mechanisms.get_lines(rows)
    assert mechanisms.columns_of(lines) == [("loss", 0), ("perplexity", 91), ("gain", 64),
                                            ("gain", 128)]
    gains = {setting: [values["gain", distance]["0"] for distance in (64, 128)]
             for (_, setting), values in lines.items()}
    assert gains == {"": [4.0, 5.0], "SWE": [4.0, 7.0]}


@needs_matplotlib
def test_tiles_are_a_row_each_and_a_sample_is_text(call, checkpoints, capsys):
    path = checkpoints["multiscreen"]
    call(tiles, "--ckpt", path, "--text", "screening is enough", "--device", "cpu")
    rows = read_table(path.with_name("tiles.tsv"))
    assert [float(row["w"]) for row in rows] == pytest.approx([2, 17, 257] * 2, rel=1e-5)
    assert all(0 <= float(row["alive"]) <= 1 for row in rows)
    summary = capsys.readouterr().out.splitlines()[1:6]
    call(tiles, path.with_name("tiles.tsv"))
    assert capsys.readouterr().out.splitlines()[2:6] == summary[1:]
    call(sample, "--ckpt", path, "--prompt", "screen", "--tokens", 4, "--device", "cpu")
    assert capsys.readouterr().out.startswith("screen")


@needs_matplotlib
def test_weights_of_a_training_loop_of_your_own_are_measured_like_any_other(call, tmp_path, capsys):
    """With your own class, on the text that you have held out."""
    (tmp_path / "own_tiles.py").write_text(
        "from multiscreen import GatedScreeningTiles\n\n\nclass Tiles(GatedScreeningTiles):\n"
        "    pass\n")
    (tmp_path / "held out.txt").write_text("one two three four " * 30)
    sys.path.append(str(tmp_path))
    from own_tiles import Tiles

    model, path = small(1, psi=2, vocab_size=257, tiles=Tiles), tmp_path / "runs/mine.pt"
    train.save_checkpoint(path, model, seq_len=32, step=7, val=["held out.txt"])
    again, tokenizer, ckpt = train.load_checkpoint(path)
    tokens = draw_tokens(2, 20)
    assert torch.equal(again(tokens), model(tokens)) and type(again.layers[0]) is Tiles
    assert (ckpt["model"], ckpt["step"], tokenizer.name) == ("multiscreen:own_tiles.Tiles", 7,
                                                             "bytes")
    flags = ["--ckpt", path, "--device", "cpu"]
    call(perplexity, *flags, "--length", 64)
    call(copying, *flags, "--distances", 64, "--strings", 1)
    assert capsys.readouterr().out.count("text: held out of held out.txt (all of it)") == 2
    call(abcdigits, *flags, "--lengths", 260, "--trials", 1, "--depths", 0.5)
    call(passkey, *flags, "--lengths", 400, "--trials", 1, "--depths", 0.5)
    call(tiles, *flags)
    call(sample, *flags, "--tokens", 2)
    found = {path.name for path in (tmp_path / "runs").iterdir()}
    assert found >= {"mine_perplexity.tsv", "mine_copying.tsv", "mine_abcdigits.tsv",
                     "mine_passkey.tsv", "mine_tiles.tsv"}
    tuned = fit(tmp_path / "tuned", "--init", str(path), "--steps", "1")
    assert tuned["model"] == "multiscreen:own_tiles.Tiles"
    sys.path.remove(str(tmp_path))
    del sys.modules["own_tiles"]


def test_a_checkpoint_of_your_own_loop_is_refused_where_nobody_could_read_it(tmp_path):
    model = small(vocab_size=65)
    with pytest.raises(UsageError, match="bytes has 257 tokens, and the model's vocabulary 65"):
        train.save_checkpoint(tmp_path / "a.pt", model)
    with torch.no_grad():
        model.W_E[0] = math.nan
    with pytest.raises(UsageError, match="a.pt was not written: W_E is not finite"):
        train.save_checkpoint(tmp_path / "a.pt", model, tokenizer=65)
    with pytest.raises(UsageError, match="missing does not exist"):
        train.save_checkpoint(tmp_path / "a.pt", small(vocab_size=257), val=["missing/"])
    assert not [*tmp_path.iterdir()]


@needs_matplotlib
def test_a_vocabulary_of_your_own_is_measured_where_no_question_is_in_words(call, tmp_path, capsys):
    """On the token files that the run has held out."""
    for name, n in (("train.bin", 900), ("val.bin", 300)):
        (np.arange(n) % 65).astype("<u2").tofile(tmp_path / name)
    fit(tmp_path / "run", "--tokenizer", "65", "--steps", "1", data=tmp_path)
    flags = ["--ckpt", tmp_path / "run/ckpt.pt", "--device", "cpu"]
    call(perplexity, *flags, "--length", 200)
    assert f"text: held out of {tmp_path.name} (1 file, by name)" in capsys.readouterr().out
    train.save_checkpoint(tmp_path / "mine.pt", small(vocab_size=65), tokenizer=65)
    for path, length, reason in ((tmp_path / "run/ckpt.pt", 400, "held out is too short"),
                                 (tmp_path / "mine.pt", 200, "checkpoint names no text")):
        with pytest.raises(UsageError, match=f"{reason}: name token files with --data, longer"):
            call(perplexity, "--ckpt", path, "--device", "cpu", "--length", length)
    call(tiles, *flags)
    assert all(float(row["alive"]) > 0 for row in read_table(tmp_path / "run/tiles.tsv"))
    for script in (copying, passkey, abcdigits):
        with pytest.raises(UsageError, match="needs a tokenizer of text, bytes or gpt2"):
            call(script, *flags)


# ------------------------------------------------------------------------------------ benchmarks

def test_the_benchmark_times_each_model_in_each_setting(call, tmp_path):
    call(bench, "--models", "multiscreen", "transformer:1,2,8", "--psi", 2, "--lengths", 40,
         "--train-length", 16, "--repeats", 2, "--device", "cpu", "--table", "t.tsv")
    rows = read_table(tmp_path / "t.tsv")
    assert [row["what"] for row in rows] == ["train"] * 4 + ["decode"] * 4 + ["forward"] * 4
    assert {row["setting"] for row in rows} == {"initial", "trained-like", "trained-like + SWE",
                                                "flash"}
    assert all(len(row["ms"].split()) == 2 for row in rows)


# ----------------------------------------------------------------------------------- experiments

@pytest.mark.parametrize("name", experiments.EXPERIMENTS)
def test_each_training_of_an_experiment_has_flags_that_train_takes_and_its_own_folder(name):
    folders = {}
    for jobs in experiments.EXPERIMENTS[name]("out", [0, 1]):
        for job in jobs:
            for command in job:
                words = shlex.split(command)
                if words[1] == "train.py":
                    args = train.get_args(words[2:])
                    del args.steps
                    assert folders.setdefault(args.out, vars(args)) == vars(args)
                    folders[args.out] = vars(args)


def test_mechanisms_are_tuned_at_the_rates_that_the_protocol_names():
    found = {"text": set(), "task": set()}
    trainings, _ = experiments.tune_mechanisms("out", [20])
    for command, in trainings:
        args = train.get_args(shlex.split(command)[2:])
        found["task" if args.data == ["abcdigits"] else "text"].add(math.log2(args.lr))
    assert found == {"text": {-10, -8, -6}, "task": {-10, -8}}


def test_the_next_stage_trains_at_the_rate_that_won_and_did_not_diverge(tmp_path):
    stages = experiments.copying_mechanisms(str(tmp_path), [32])
    next(stages)
    for lr, loss in zip((2**-8, 2**-9, 2**-10), (1.0, 3.0, 2.0)):
        for name in ("entmax", "local-entmax"):
            folder = tmp_path / f"copying_mechanisms/tuning/{name}_lr{lr}-20"
            write_run(folder, log_of(loss), lr=lr)
            (folder / "ckpt.pt").touch()
    (tmp_path / f"copying_mechanisms/tuning/entmax_lr{2**-8}-20/diverged.txt").write_text("nan")
    tuning, main = next(stages), next(stages)
    assert len(tuning) == 3 * len(main)
    found = {}
    for training, *measuring in main:
        args = train.get_args(shlex.split(training)[2:])
        found[args.model.removeprefix("transformer:6,4,112")] = args.lr
        assert all(f"--ckpt {args.out}/ckpt.pt" in command for command in measuring)
    assert found[":lab.baselines.local.Entmax"] == 2**-8
    assert found[":entmax"] == 2**-10
    assert (found[":nope"], found["multiscreen"]) == (2**-9, 2**-7)            # nothing was tried


def test_a_stage_is_made_when_the_one_before_has_run(tmp_path, monkeypatch, call):
    def stages(out, seeds):
        yield [[f"python -c pass {out}"]]
        yield [[f"python {tmp_path / 'write.py'} {(tmp_path / 'a').exists()}"]]

    def run_job(job, failed):
        ran.extend(job)
        (tmp_path / "a").touch()

    ran = []
    monkeypatch.setitem(experiments.EXPERIMENTS, "two", stages)
    monkeypatch.setattr(runner, "run_job", run_job)
    call(experiments, "two")
    assert ran[1].endswith("True")


def test_a_seed_that_no_run_takes_is_not_printed_either(call, capsys):
    with pytest.raises(UsageError, match="--seeds: '-1'"):
        call(experiments, "text", "--print", "--seeds", -1)
    assert capsys.readouterr().out == ""


def test_a_job_ends_at_a_failure_others_go_on_and_a_diverged_run_is_none(tmp_path):
    script = tmp_path / "end.py"
    script.write_text("import sys\nopen(sys.argv[2], 'w')\nsys.exit(int(sys.argv[1]))\n")

    def command(code, name):
        return f"python {script} {code} {tmp_path / name}"

    stages = [[[command(1, "a"), command(0, "b")], [command(0, "c")],
               [command(3, "d"), command(0, "not measured")]], [[command(0, "e")]]]
    with pytest.raises(UsageError, match="failed") as e:
        runner.run_all(stages, 2)
    assert str(e.value).count("end.py 1") == 1 and "end.py 3" not in str(e.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c", "d", "e", "end.py"]


def test_an_idea_has_a_name_of_its_own_and_is_other_than_the_original(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("", "a/b", "--resume"):
        with pytest.raises(UsageError, match="one word"):
            idea.one_word(name)
    now = (ROOT / "multiscreen.py").read_text()
    code = {"multiscreen.py": now, "support/cli.py": "not in these runs"}
    usual, low = (train.get_args(words) for words in ([], ["--lr", "0.01", "--seed", "7"]))
    with pytest.raises(UsageError, match="lab.idea original -- --psi 4$"):
        idea.require_idea("mine", usual, code, ["--", "--psi", "4"])

    def trained(name, text, args):
        folder = tmp_path / f"out/idea/{name}-0"
        (folder / "source").mkdir(parents=True, exist_ok=True)
        (folder / "source/multiscreen.py").write_text(text)
        args = vars(args) | {"dtype": "float32"}       # what `auto` has become
        (folder / "flags.txt").write_text("".join(f"{flag}\t{as_typed(x)}\n" for flag, x in
                                                  args.items() if flag not in FREE))

    for text in (now, now + "# an edit"):
        for args in (usual, low):
            trained("original", text, args)
            if (text, args) == (now, low):             # an edit that was not saved
                with pytest.raises(UsageError, match="mine has the code and the flags of original"):
                    idea.require_idea("mine", low, code)
            else:
                idea.require_idea("mine", low, code)
    with pytest.raises(UsageError, match="another multiscreen.py: move out/idea away"):
        idea.require_idea("original", low, code)
    trained("original", now, low)
    again = train.get_args(["--lr", "0.01", "--out", "o", "--resume"])
    idea.require_idea("original", again, code)
    with pytest.raises(UsageError, match="with --lr 0.01 and not 0.0625: move out/idea away"):
        idea.require_idea("original", usual, code)
    trained("mine", now + "# an edit", low)
    with pytest.raises(UsageError, match="mine was trained with another multiscreen.py: choose"):
        idea.require_idea("mine", low, code)
    trained("mine", now, low)
    with pytest.raises(UsageError, match="mine was trained with --lr 0.01 and not 0.0625: choose"):
        idea.require_idea("mine", usual, code)


def test_what_an_idea_does_is_possible_before_it_trains_and_adds_no_texts(call, tmp_path, capsys,
                                                                          monkeypatch):
    write_run(tmp_path / "out/idea/original-0", log_of(1.0))
    model = ["--", "--model", "transformer:2,2,16"]
    call(idea, "mine", "--print", *model)
    printed = capsys.readouterr().out
    assert "--out out/idea/mine-2" in printed and "--psi 6" not in printed
    with pytest.raises(UsageError, match="--w-th is for Multiscreen"):
        call(idea, "mine", "--needles", *model)        # it would train for minutes first
    with pytest.raises(UsageError, match="^--psi 4: flags of train.py come behind --"):
        call(idea, "mine", "--psi", "4")
    monkeypatch.setattr(idea, "run_or_print", lambda *inputs: None)
    monkeypatch.setattr(idea.check.check, "faults", lambda *_, **__: {"causal": "it sees later"})
    with pytest.raises(UsageError, match="would be trained in vain"):
        call(idea, "mine", *model)
    monkeypatch.setattr(idea.check.check, "faults", lambda *_, **__: {"trained": "W is unused"})
    call(idea, "mine", *model, "--data", ".")          # a note beside the runs would be a text
    assert [path.name for path in (tmp_path / "out/idea").iterdir()] == ["original-0"]
    assert "idea/mine.png" not in printed              # beside which there is mine.tsv


# ------------------------------------------------------------------ what the compiler makes of it

@pytest.mark.parametrize("flags, message", [
    ("--blocks 128,60,4,3", "--blocks: BI and BJ in 128,60,4,3 must be among"),
    ("--blocks 64,64,4", "'64,64,4' is not BI,BJ,WARPS,STAGES"),
    ("--blocks 64,64,4,x", "'64,64,4,x' is not BI,BJ,WARPS,STAGES"),
    ("--blocks 64,64,3,3", "the warps in 64,64,3,3 must be among"),
    ("--blocks 64,64,4,0", "the stages in 64,64,4,0 must be 1 to 8"),
    ("--kernel qd", "--kernel: invalid choice: 'qd'"),
    ("--target 91", "--target: invalid choice: 91"),
    # The compiler itself.
    ("--kernel dq --target 90 --blocks 64,64,32,3",
     "dq with blocks 64,64,32,3 does not compile for sm_90: ptxas fatal   : too few registers")])
def test_a_bad_configuration_of_the_kernel_is_one_line(monkeypatch, capsys, flags, message):
    triton = pytest.importorskip("triton")

    def fail(*inputs, **options):
        print("all of the PTX")
        raise RuntimeError("PTXAS error\nptxas fatal   : too few registers\nRepro command: ..")

    monkeypatch.setattr(triton, "compile", fail)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", "")         # restored afterwards
    with pytest.raises(UsageError) as e:
        compile_kernel.main(flags.split())
    assert message in str(e.value)
    assert "PTX" not in capsys.readouterr().out


@pytest.mark.slow
def test_one_configuration_of_the_kernel_is_compiled():
    pytest.importorskip("triton")
    done = run("-m", "lab.compile_kernel", "--kernel", "decode", "--target", "80", "--blocks",
               "16,32,1,4", env=os.environ | {"TRITON_INTERPRET": "0"})
    versions, header, row = done.stdout.splitlines()
    assert done.returncode == 0 and header.split("\t") == [*compile_kernel.COLUMNS]
    assert row.split("\t")[:7] == ["decode", "fp32", "bf16", "sm_80", "16x32", "1", "4"]


@pytest.mark.slow
def test_an_idea_runs_from_any_folder_and_waits_at_ctrl_c_until_its_runs_are_saved(tmp_path):
    (tmp_path / "out/idea/original-0").mkdir(parents=True)
    (tmp_path / "out/idea/original-0/flags.txt").write_text("")
    (tmp_path / "own.txt").write_text("some text of my own, " * 200)
    (tmp_path / "own.py").write_text("from multiscreen import GatedScreeningTiles as Tiles\n")
    flags = ("--psi 2 --seq-len 32 --steps 100000 --data own.txt --model multiscreen:own.Tiles "
             "--eval-every 100000 --log-every 1 --kernel definition --device cpu")
    command = [sys.executable, "-m", "lab.idea", "mine", "--seeds", "0", "1", "--lanes", "1", "--",
               *flags.split()]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True,
                               stderr=subprocess.STDOUT, start_new_session=True,
                               env=os.environ | {"PYTHONPATH": str(ROOT)})
    log, until = tmp_path / "out/idea/mine-0/log.tsv", time.time() + 200
    while time.time() < until and not (log.exists() and log.read_text().count("\n") > 3):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)              # what a terminal does
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 130, said
    assert said.endswith("stopped: repeat the command to go on\n")
    assert 0 < torch.load(log.with_name("ckpt.pt"))["step"] < 100_000
    assert sorted(path.name for path in (tmp_path / "out/idea").iterdir()) == [
        "mine-0", "original-0"]

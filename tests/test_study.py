"""Tests of study/: statistics by hand, pages against rows, what is measured, the table of runs."""
import math
import os
import random
import re
import subprocess
import sys
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from multiscreen import Config, Multiscreen
from study import copying, curriculum, figures, headline, runs, tables
from study.passkey import FILLER, NEEDLE, QUESTION, TASK, passkey_prompts
from tests.helpers import ROOT, read_table
from train import get_args, get_tokenizer, named

PAGES = [ROOT / "study" / name for name in ("README.md", "report.md", "copying.md")]


def rows(**columns):
    """A table for tables.py, with the columns that each has."""
    table = pd.DataFrame(columns)
    return table.assign(setting="")


# ------------------------------------------------------------------------------- statistics

def test_a_family_of_differences_by_hand():
    """The first: differences 1, 2, 3; mean 2, deviation 1, t = 2 sqrt(3), t_2(0.975) = 4.303.

    Pairs are of one seed, Holm's p counts both tests, and one seed alone is no test.
    """
    zero = pd.Series([0.0, 0, 0])
    table = tables.tests({
        "a": (pd.Series([11, 22, 33]), pd.Series([30, 20, 10, 7], [2, 1, 0, 9])),
        "b": (pd.Series([1.0, 1.1, 1.2]), zero), "c": (pd.Series([5.0]), zero)}, 2)
    assert table.values.tolist() == [
        ["a", 3, "2.00 ± 1.00", "-0.48 to 4.48", "0.074", "0.074"],
        ["b", 3, "1.10 ± 0.10", "0.85 to 1.35", "0.003", "0.005"]]
    assert list(tables.holm([0.01, 0.04, 0.03, math.nan])) == pytest.approx(
        [0.03, 0.06, 0.06, math.nan], nan_ok=True)


@pytest.mark.parametrize("column", ["lr", "step", "data", "code", "commit", "parameters", "w_th"])
def test_runs_that_are_not_alike_have_no_mean(column):
    table = rows(model=["a", "a", "b"], seed=[0, 1, 0], value=[1.0, 2.0, 3.0])
    assert len(tables.by_seed(table.assign(**{column: [1, 1, 2]}))) == 3
    for other in (2, None):
        with pytest.raises(ValueError, match=f"differ in {column}"):
            tables.by_seed(table.assign(**{column: [1, other, 2]}))


def test_seeds_with_unequal_numbers_of_strings_have_no_mean():
    table = rows(model=["a"] * 3, seed=[0, 0, 1], distance=[8] * 3, value=[1.0, 3.0, 5.0])
    assert list(tables.by_seed(table[1:], "distance").value) == [3, 5]
    with pytest.raises(ValueError, match="same number of rows"):
        tables.by_seed(table, "distance")


def test_the_chosen_scaling_is_the_best_at_each_place_of_those_that_all_seeds_have(
        tmp_path, monkeypatch):
    """At 1 the scaling by 4 is best, as one seed alone has that by 8; at 2 none is best."""
    pd.DataFrame({"commit": "c", "model": "a", "seed": [0, 0, 0, 1, 1, 0, 0], "depth": 0.5,
                  "setting": ["as trained", "RoPE x 4", "RoPE x 8", "as trained", "RoPE x 4",
                              "as trained", "RoPE x 4"],
                  "length": [1] * 5 + [2] * 2, "accuracy": [0.3, 0.4, 0.9, 0.3, 0.4, 0.5, 0.1]}
                 ).to_csv(tmp_path / "mine.tsv", sep="\t", index=False)
    monkeypatch.setattr(tables, "ROWS", tmp_path)
    best = tables.found_rows("mine")
    assert list(zip(best.length, best.value)) == [(1, 40), (1, 40), (2, 50)]
    assert set(best.setting) == {"chosen RoPE scaling"}


def test_of_each_size_the_rate_with_the_lowest_mean_is_chosen(tmp_path, monkeypatch):
    """At a rate of 2 the mean is 3, though one seed has 1; at a rate of 1 it is 2."""
    pd.DataFrame({"run": list("aabbc"), "parameters": [10] * 4 + [20], "lr": [1, 1, 2, 2, 2],
                  "seed": [0, 1, 0, 1, 0], "val_loss": [2.0, 2, 1, 5, 4]}
                 ).to_csv(tmp_path / "mine.tsv", sep="\t", index=False)
    monkeypatch.setattr(tables, "ROWS", tmp_path)
    assert list(tables.chosen_rates("mine").model) == ["a", "a", "c"]


def test_a_saving_is_read_off_between_two_measured_sizes():
    """At a loss of 2 a Multiscreen of 10 and a Transformer of sqrt(10 * 1000) = 100 are equal."""
    models = pd.DataFrame({"family": ["m", "m", "t", "t"], "parameters": [10, 20, 10, 1000],
                           "value": [2.0, 1.0, 3.0, 1.0]})
    assert tables.saving(models, 2.0, "parameters") == pytest.approx(90)
    assert math.isnan(tables.saving(models, 5.0, "parameters"))


# ------------------------------------------------------------------------------------- pages

@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_tables_of_a_page_are_those_of_the_rows(path):
    page = path.read_text()
    assert tables.written(page) == page


def test_the_numbers_of_the_pages_are_those_of_the_rows():
    """Each phrase is on study/README.md or copying.md; each "(n = .." of a page is a phrase."""
    phrases = headline.all_phrases()
    pages = {path: " ".join(path.read_text().split()) for path in [*PAGES, ROOT / "README.md"]}
    for path, page in pages.items():
        for found in re.findall(r"[-\d.]+ \w+ \(n = [^)]*\)", page):
            assert found in phrases.values(), f"{path}: {found}"
        assert page.count("(n = ") == len(re.findall(r"[-\d.]+ \w+ \(n = [^)]*\)", page))
    for name in ("claims", "cheaper than guessing", "SWE is better than local: gain",
                 "SWE is better than local: cost", "Multiscreen as trained, less local",
                 "Original less Softmax", "Original less Fixed r = 1"):
        assert phrases[name] in pages[PAGES[0]], name
    assert phrases["claims"] in pages[PAGES[1]]
    assert phrases["standard errors"] in pages[PAGES[2]]
    for path in (PAGES[1], ROOT / "README.md"):
        assert phrases["fixed curriculum"] in pages[path]


def test_a_line_of_a_figure_is_drawn_from_left_to_right():
    numbers = rows(model=["m"] * 3, seed=[0] * 3, length=[512, 256, 1024], value=[2.0, 1.0, 3.0])
    _, ax = figures.plt.subplots()
    figures.lines(ax, numbers, "length")
    assert ax.lines[0].get_xydata().tolist() == [[256, 1], [512, 2], [1024, 3]]


def test_a_seed_that_finds_exactly_95_percent_counts(monkeypatch):
    numbers = rows(model=["m"] * 2, seed=[0, 1], length=[256] * 2, value=[95.0, 94.9])
    monkeypatch.setattr(tables, "found_rows", lambda name: numbers)
    found = dict(tables.retrieval(""))["seeds that find 95 % or more"]
    assert found[256].tolist() == ["1"]
    assert tables.mean_sd(1)(pd.Series([98.0, 98.5])) == "98.3 ± 0.4"      # a tie, 98.25


@pytest.mark.slow
def test_every_figure_can_be_drawn(tmp_path):
    """In a process of its own, as the fixtures hide matplotlib."""
    code = ("import pathlib, study.figures as f; "
            f"f.PICTURES = pathlib.Path({str(tmp_path)!r}); "
            "[draw(name) for name, draw in f.FIGURES.items()]")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    assert {path.stem for path in tmp_path.glob("*.png")} >= {*figures.FIGURES} - {"tiles"}


# ----------------------------------------------------------------------------------- copying

ENCODE = get_tokenizer("bytes").encode_ordinary
TEXT = ENCODE("the quick brown fox jumps over the lazy dog. " * 20)


def model_of(seed=0):
    torch.manual_seed(seed)
    return Multiscreen(Config(psi=2, vocab_size=257)).eval()


def test_a_model_without_memory_gains_exactly_nothing():
    """Windows of one token: what was read is forgotten, so the swapped readings cancel."""
    model = model_of().double()
    with torch.no_grad():
        for layer in model.layers:
            layer.s_w.fill_(-math.inf)
    rows = copying.measure(model, ENCODE, TEXT, copying.pair_of(0), [64, 128])
    for row in rows:
        assert row["gain"] == pytest.approx(0, abs=1e-9)
        assert row["cost"] > 4


def test_costs_are_those_of_one_pass_over_the_whole_text():
    model, (same, another) = model_of().double(), copying.pair_of(3)
    ends = [ENCODE("\n" + same), ENCODE("\n" + another)]
    text = ENCODE(same + "\n") + TEXT
    for place, found in zip((40, 90), copying.read(model, text, [40, 90], ends)):
        for end, (nats, hits) in zip(ends, found):
            tokens = torch.tensor([text[:place] + end])
            exact = model.loss(tokens[:, :-1], tokens[:, 1:], "none")[0, -28:]
            torch.testing.assert_close(nats, exact.detach().double(), rtol=1e-6, atol=1e-6)
            z = model(tokens[:, :-1])[0, -28:]
            assert torch.equal(hits, z.argmax(-1) == tokens[0, -28:])


def test_a_model_that_copies_is_right_and_gains(monkeypatch):
    """Ends are cheap if they are what was read: the numbers tell the string from all others."""
    def read(model, text, places, ends):
        cheap = ENCODE("\n" + asked[0])
        asked.reverse()
        start = 10 + 4 * 33                            # --before 9, a newline, and four strings
        assert text[:9] + text[start:] == TEXT
        assert places == [start + 62]                  # and two newlines
        return [[(torch.full((28,), 0.5 if end == cheap else 6.0),
                  torch.full((28,), end == cheap)) for end in ends]]

    asked = copying.pair_of(5)
    monkeypatch.setattr(copying, "read", read)
    row, = copying.measure(None, ENCODE, TEXT, copying.pair_of(5), [64], 9, candidates=4)
    assert row == {"distance": 64, "cost": 0.5, "gain": 5.5, "right": 1, "reordered": 5.5,
                   "near_miss": 5.5, "likeliest": 1}


def test_ends_and_candidates_are_what_the_docstring_says():
    same, _, reordered, near_miss = copying.ends_of(*copying.pair_of(7))
    assert sorted(reordered) == sorted(same)
    assert reordered[:4] == same[:4]
    assert reordered != same
    changed = [place for place in range(32) if near_miss[place] != same[place]]
    assert changed == [7, 11, 15, 19, 23, 27, 31]
    strings, others = copying.candidates_of(same, 5)
    assert sorted(strings) == sorted([same, *others])
    assert all(other[4] != same[4] for other in others)
    places = [copying.candidates_of(same, 5)[0].index(same)
              for same, _ in map(copying.pair_of, range(50))]
    assert set(places) == set(range(5))
    nats = [(torch.full((28,), x), torch.ones(28)) for x in (0.5, 6.0, 6.0, 6.0, 6.0, 0.4)]
    nats[3][0][[place - 4 for place in changed]] = 99                   # in vain: they do not count
    row = copying.numbers(nats)
    assert (row["near_miss"], row["likeliest"]) == (5.5, 0)
    assert f"guessing a letter or digit costs {headline.GUESS:.2f}" in copying.__doc__


def test_the_log_scale_sharpens_only_queries_that_see_more_than_256_keys():
    model = named("study.local.Softmax")(Config(N_L=2, N_H=2, d_E=16, vocab_size=257))
    odd, even = model.layers
    q, i = torch.ones(1, 2, 3, 8), torch.tensor([9, 255, 1023])
    before = odd.encode(q, q, i)[0]
    copying.scale_queries(model, 0.5)
    assert torch.equal(odd.encode(q, q, i)[0], before)
    scaled, keys = even.encode(q, q, i)
    torch.testing.assert_close(scaled[0, 0, :, 0],
                               torch.tensor([1, 1, 1 + 0.5 * math.log(4)]))
    assert torch.equal(keys, q)


# --------------------------------------------------------------------------------- the tasks

def passkey(part, T=512):
    args = SimpleNamespace(seq_len=T, seed=5, batch_tokens=4 * T)
    return curriculum.Passkey(args, get_tokenizer("bytes"), part)


def test_documents_of_abcdigits_help_until_the_loss_has_shown_lookup():
    args = SimpleNamespace(seq_len=256, seed=5, batch_tokens=8 * 256)
    data = curriculum.ABCDigits(args, get_tokenizer("bytes"), "train")
    for _ in range(100):
        data.observe(0.72)
    assert data.help_at(99_999) == (0.5, 2)
    for _ in range(220):
        data.observe(0.58)
    share, base = data.help_at(0)
    assert share == 0
    assert 1.1 < base < 2


def test_passkey_documents_are_prompts_with_answers_and_validation_keys_are_apart():
    for part, held_out in (("train", False), ("val", True)):
        data = passkey(part)
        for n in range(60):
            text = data.tokenizer.decode(data[n].tolist())
            assert len(data[n]) == 513
            if TASK in text:
                key = re.search(re.escape(QUESTION) + r" (\d+)<", text)[1]
                assert NEEDLE.format(key) in text
            for key in re.findall(r" is (\d+)[.<]", text):
                assert (int(key) % 7 == 0) == held_out


def test_the_text_between_helped_questions_grows_with_the_steps():
    data, longest = passkey("train"), []
    for data.state in ((0, 1.0), (4000, 0.0)):
        texts = [data.tokenizer.decode(data[n].tolist()) for n in range(40)]
        longest.append(max(len(line) for text in texts if TASK not in text
                           for line in text.split("\n")))
    assert longest[0] < 80 < 200 < longest[1]


def test_the_help_ends_once_the_loss_has_shown_lookup():
    data = passkey("train")
    for _ in range(100):
        assert not data.observe(0.42)
    assert data.state[0] == 0
    for _ in range(200):
        data.observe(0.15)
    counted = data.state[0]
    assert 700 < counted < 800                         # about 20 losses decide
    for _ in range(100):
        data.observe(0.42)                             # documents are harder without help
    assert data.state[0] == counted + 400
    data.state = 16_000, 0.0
    assert data.observe(0.15)
    assert all(TASK in data.tokenizer.decode(data[n].tolist()) for n in range(20))


def test_passkey_prompts_hide_the_number_at_the_depth():
    prompts, answers = passkey_prompts(get_tokenizer("bytes"), 1024, 0.7, 3)
    rng = random.Random(123)
    for prompt, answer in zip(prompts, answers):
        assert answer == f" {rng.randint(1, 50_000)}"
        before, after = prompt.split(NEEDLE.format(answer.strip()))
        assert before.count(FILLER) == (before + after).count(FILLER) * 7 // 10
        assert prompt.endswith(QUESTION)


# ----------------------------------------------------------------------------- the table of runs

def test_every_training_of_the_table_has_flags_of_train_py():
    seen = set()
    for experiment, seeds in runs.SEEDS.items():
        for run in experiment():
            flags = run.flags.replace("--lr RATE", "--lr 1").split()
            args = get_args([*flags, "--seed", str([*seeds][0]), "--out", "nowhere"])
            seen |= {name for name in (args.model, *args.data) if "." in name and "/" not in name}
    assert "study.local.Screening" in seen
    assert all(named(name) for name in seen)


def test_what_is_finished_is_skipped_and_what_diverged_is_left(tmp_path, monkeypatch):
    def left(steps):
        run = runs.Run("a", f"--psi 2 --steps {steps}", {f"b{steps}": "-m tool"})
        return [command.split()[1] for command in runs.commands(tmp_path, run, 0)]

    ckpt = {"finished": True, "args": {"steps": 2}}
    monkeypatch.setattr(runs, "read_checkpoint", lambda path: ckpt)
    assert left(2) == ["train", "tool"]
    (tmp_path / "ckpt.pt").touch()
    assert left(2) == ["tool"]
    (tmp_path / "b2.tsv").touch()
    assert left(2) == []
    assert left(4) == ["train", "tool"]                # the checkpoint is at step 2
    ckpt["args"]["steps"] = 4
    assert left(2) == []
    ckpt["finished"] = False
    assert left(2) == ["train"]
    (tmp_path / "log.tsv").write_text("step\tloss\tgrad_norm\n1\t5.5\tinf\n")
    assert left(2) == []


def test_a_run_ends_with_the_first_command_that_fails(monkeypatch):
    ran, codes = [], {"train": 0, "tool": 1, "other": 0}

    def run(words, env):
        ran.append(words[2])
        return SimpleNamespace(returncode=codes[words[2]])

    monkeypatch.setattr(runs, "subprocess", SimpleNamespace(run=run))
    assert runs.do(["-m train --psi 2", "-m tool", "-m other"]) == "-m tool"
    assert ran == ["train", "tool"]
    assert runs.do(["-m train", "-m other"]) is None


def test_each_model_whose_rate_is_tuned_for_copying_is_trained():
    tuned = {run.name.rpartition("_lr")[0] for run in runs.tune_copying()}
    assert tuned == {run.name for run in runs.copying_mechanisms()}


def test_a_run_has_its_own_seeds_the_tuned_rate_and_its_name_in_the_tables(
        tmp_path, monkeypatch, capsys):
    """The rate with the lowest loss of those that did not diverge; RATE before any has run."""
    tuned = {}
    for lr, loss, diverged in ((0.5, 2, False), (0.25, 1, False), (0.125, 0, True)):
        folder = tmp_path / f"tune_reason/softmax_lr{lr}-20"
        folder.mkdir(parents=True)
        (folder / "ckpt.pt").touch()
        (folder / "table.tsv").write_text(f"lr\n{lr}\n")
        tuned[folder] = {"flags": {"lr": lr}, "loss": loss, "diverged": diverged}
    monkeypatch.setattr(runs, "OUT", tmp_path)
    monkeypatch.setattr(runs, "read_run", tuned.get)
    monkeypatch.setattr(sys, "argv", ["runs", "reason", "passkey", "rates", "--print"])
    runs.main()
    trained = [line for line in capsys.readouterr().out.splitlines() if "-m train" in line]
    for words, n in (("local.Softmax --layers 6 --tiles 4 --d-E 112 --lr 0.25 ", 4),
                     ("--lr RATE", 4), ("--w-th 8192", 5), ("--layers 16 ", 2 + 2),
                     ("attention.Softmax --layers 4 ", 3)):
        assert sum(words in line for line in trained) == n, words

    runs.join_tables(tmp_path, {folder: "softmax"})
    assert (tmp_path / "table.tsv").read_text() == "lr\trun\n0.125\tsoftmax\n"


@pytest.mark.slow
def test_every_tool_runs_once(tmp_path):
    """`python -m study.runs tiny` from an empty folder."""
    done = subprocess.run([sys.executable, "-m", "study.runs", "tiny"], cwd=tmp_path, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    tables_of = {path.stem: path for path in tmp_path.rglob("*.tsv")}
    assert {*tables_of} >= {"perplexity", "passkey", "abcdigits", "copying2", "copying4", "latency"}
    assert all(len(row["ms"].split()) == 2 for row in read_table(tables_of["latency"]))


def test_text_before_a_string_wraps_around():
    text, = copying.spread_texts(range(100), 1, 50, before=10)
    assert list(text) == [*range(90, 100), *range(50)]

"""Tests of abcdigits.py: the author's prompts, exact match, the table."""
import hashlib
import os
import re
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import abcdigits
import multiscreen as ms
from support.cli import UsageError
from support.data import get_tokenizer
from support.run import load_checkpoint
from tests.helpers import fit, read_table
from tests.inputs import INF

# Is GPT-2's BPE installed?
no_gpt2 = pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="no GPT-2 BPE")


# ---------------------------------------------------------------------------------- prompts

@pytest.mark.parametrize("prompts, digest", [
    (abcdigits.generate_by_line_count(64, 0.1, n_trials=3),
     "b72dc88ab383d80a12db83b320d3f424a41b566a7bf60186f32af024b74be7b5"),
    (abcdigits.generate_by_token_count(1000, 0.7, len, n_trials=3),
     "55820dafe0de27bd685acf9b9ed6e84db9eae403996d06884486b66eed1d2f66")])
def test_prompts_are_the_authors_bit_for_bit(prompts, digest):
    assert hashlib.sha256("\0".join(prompts).encode()).hexdigest() == digest


@given(lines=st.integers(27, 300), depth=st.floats(0, 1), digits=st.integers(2, 8))
def test_prompts_are_what_the_paper_says(lines, depth, digits):
    for prompt in abcdigits.generate_by_line_count(lines, depth, digits, 2):
        rows = prompt.split("\n")
        assert len(rows) == lines
        assert all(re.fullmatch(rf"[A-Z]=[1-9]\d{{{digits - 1}}}", row) for row in rows)
        assert len(set(rows)) == 26
        assert len({row[0] for row in rows}) == 26             # one number per letter
        assert len({row[2:] for row in rows}) == 26
        found = [n for n, row in enumerate(rows) if row == rows[-1]]
        assert found == [int((lines - 2) * depth), lines - 1]


@given(tokens=st.integers(300, 2000), depth=st.floats(0, 1))
def test_prompts_by_token_count_are_as_long_as_asked(tokens, depth):
    for prompt in abcdigits.generate_by_token_count(tokens, depth, len, n_trials=2):
        assert tokens <= len(prompt) + 1 < tokens + len("A=123456\n")


def test_27_lines_are_the_fewest():
    with pytest.raises(UsageError, match="26 is too short: the shortest prompt has 27"):
        abcdigits.generate_by_line_count(26, 0.5)


# ------------------------------------------------------------------------------- evaluation

class Parrot(torch.nn.Module):
    """Looks up the number of the last letter, and adds a digit for the letters in `wrong`."""

    def __init__(self, tokenizer, wrong=""):
        super().__init__()
        self.p = torch.nn.Parameter(torch.zeros(()))
        self.tokenizer, self.wrong, self.batches = tokenizer, wrong, []

    def generate(self, tokens, n):
        self.batches.append(tokens.shape)
        out = []
        for row in tokens.tolist():
            text = self.tokenizer.decode(row)
            answer = re.search(text[-2:] + r"(\d+)", text).group(1)
            answer += "7" if text[-2] in self.wrong else ""
            new = self.tokenizer.encode_ordinary(answer + "\nX=123456789")
            out.append((new + [10] * n)[:n])
        return torch.tensor(out)


@pytest.mark.parametrize("name", ["bytes", pytest.param("gpt2", marks=no_gpt2)])
def test_evaluate_counts_the_exact_integer_only(name):
    tokenizer = get_tokenizer(name)
    texts = [text for n in (40, 41) for text in abcdigits.generate_by_line_count(n, 0.3, 4, 16)]
    prompts, answers = [t[:-4] for t in texts], [t[-4:] for t in texts]
    asked = [p[-2] for p in prompts]
    model = Parrot(tokenizer, wrong="".join(sorted(set(asked))[:2]))
    right = abcdigits.exact_matches(model, tokenizer, prompts, answers, tokens_at_once=1000)
    assert right == [letter not in model.wrong for letter in asked]
    assert set(right) == {True, False}
    assert sum(B for B, _ in model.batches) == 32
    assert all(B * T <= 1000 for B, T in model.batches)
    assert name == "gpt2" or len(model.batches) <= 12          # equal lengths share a batch


@pytest.fixture
def measure(tmp_path, monkeypatch):
    """measure(*flags) runs abcdigits.py on a model trained for one step; returns its table.

    right(model, prompts), a list of booleans, replaces the model's answers.
    """
    def command(*flags, right=lambda model, prompts: [True] * len(prompts), model="multiscreen"):
        out = tmp_path / model.replace(":", "_")
        if not out.exists():
            fit(out, "--steps", "1", "--model", model)

        def exact_matches(model, tokenizer, prompts, answers):
            assert all(prompt.endswith("=") for prompt in prompts)
            assert all(re.fullmatch(r"\d{6}", answer) for answer in answers)
            return right(model, prompts)

        monkeypatch.setattr(abcdigits, "exact_matches", exact_matches)
        monkeypatch.setattr(sys, "argv", ["abcdigits.py", "--ckpt", str(out / "ckpt.pt"),
                                          "--device", "cpu", "--trials", "2", *flags])
        abcdigits.main()
        return read_table(out / "abcdigits.tsv")

    return command


def test_the_table_has_the_lengths_that_are_possible(measure, capsys):
    rows = measure("--depths", "0.1", "0.5")
    assert [(row["length"], row["depth"]) for row in rows] == [
        (length, depth) for length in ("256", "512", "1024") for depth in ("0.1", "0.5")]
    assert {row["accuracy"] for row in rows} == {"1"}
    assert capsys.readouterr().out.count("100.0%") == 9
    assert {name: rows[0][name] for name in ("model", "seed", "seq_len", "step", "digits", "length",
                                             "depth", "factor", "swe", "trials")} == {
        "model": "multiscreen", "seed": "0", "seq_len": "32", "step": "1", "digits": "6",
        "length": "256", "depth": "0.1", "factor": "", "swe": "", "trials": "2"}


@pytest.mark.parametrize("flags", [
    ["--lengths", "260", "10"], ["--lengths", "260", "--rope-scale", "0"], ["--depths", "2"],
    ["--trials", "0"], ["--digits", "1"]])
def test_what_cannot_be_measured_is_refused_before_a_table_is_begun(measure, tmp_path, flags):
    with pytest.raises(UsageError):
        measure(*flags)
    assert not list(tmp_path.glob("*/abcdigits.tsv"))


def test_a_trained_model_is_measured_as_it_is_and_with_expanded_windows(measure, tmp_path):
    windows = []

    def right(model, prompts):
        windows.append(ms.window(model.layers[0].s_w).tolist())
        return [True, False]

    for more in ([], ["--swe"]):
        rows = measure("--lengths", "260", "--depths", "0.5", *more, right=right)
    model, _, _ = load_checkpoint(tmp_path / "multiscreen/ckpt.pt")
    assert windows[0] == ms.window(model.layers[0].s_w).tolist()
    assert windows[1] == [INF if w > 32 else w for w in windows[0]]
    assert INF in windows[1]
    assert [(row["swe"], row["accuracy"]) for row in rows] == [("", "0.5"), ("yes", "0.5")]


def test_the_last_line_is_the_mean_over_the_depths(measure, capsys):
    found = [[True, True], [False, True]]
    measure("--lengths", "260", "--depths", "0.1", "0.5", right=lambda *_: found.pop(0))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[-2:] for line in lines[-3:]] == [["0.1", "100.0%"], ["0.5", "50.0%"],
                                                  ["mean", "75.0%"]]


@pytest.mark.parametrize("data", ["abcdigits", None])
def test_a_run_is_asked_for_numbers_as_long_as_those_it_learned(
        tmp_path, monkeypatch, capsys, data):
    """A line says so if it was trained on something else."""
    def exact_matches(model, tokenizer, prompts, answers):
        assert {len(answer) for answer in answers} == {2}
        return [True] * len(prompts)

    fit(tmp_path / "out", "--steps", "1", "--digits", "2", data=data)
    monkeypatch.setattr(abcdigits, "exact_matches", exact_matches)
    monkeypatch.setattr(sys, "argv", ["abcdigits.py", "--ckpt", str(tmp_path / "out/ckpt.pt"),
                                      "--device", "cpu", "--lengths", "160", "--depths", "0.5"])
    capsys.readouterr()
    abcdigits.main()
    assert ("not on abcdigits: expect 0 %" in capsys.readouterr().out) == (data is None)

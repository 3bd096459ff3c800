"""Tests of abcdigits.py: the prompts, the documents that teach them, exact match, the table."""
import hashlib
import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import abcdigits
from tests.helpers import fit
from train import get_data, get_tokenizer

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


# -------------------------------------------------------------------------------- documents

def documents(T=400, seed=5, part="train", data=("abcdigits",)):
    args = SimpleNamespace(data=[*data], seq_len=T, seed=seed)
    return get_data(args, get_tokenizer("bytes"))[0 if part == "train" else 1]


def text_of(docs, n):
    return docs.tokenizer.decode(docs[n].tolist())


def test_documents_are_those_that_the_committed_runs_read():
    docs = documents(T=256, seed=24)
    digest = hashlib.sha256()
    for n in (0, 1, 9_999, 10_000, 12_345, 20_000):
        digest.update(docs.draw(n).astype("<i8").tobytes())
    assert digest.hexdigest() == (
        "b83807b7d3ca3699af9caf106023dab9f112c7fe02e104a13a1b7293fccba86a")


def test_a_document_has_the_lines_of_the_task_and_depends_on_its_number_and_the_seed():
    docs = documents()
    texts = [text_of(docs, n) for n in range(50)]
    assert all(len(text) == 401 for text in texts)
    assert all(re.fullmatch(r"[A-Z]=[1-9]\d", row)
               for text in texts for row in text.split("\n")[:-1])
    assert len(set(texts)) == 50
    assert [text_of(documents(), n) for n in range(49, -1, -1)] == texts[::-1]
    assert text_of(documents(seed=6), 0) != texts[0]
    assert text_of(documents(part="val"), 0) != texts[0]


def test_half_of_the_documents_help_until_the_model_has_learned_lookup():
    """In a quarter whole numbers are the letter's own, in another one digits; later none is."""
    def own(docs, n):
        """The share of a document's letters that have their own numbers, and of their digits."""
        rows = {row[0]: row[2:] for row in text_of(docs, n).split("\n")[:-1]}
        pairs = [("".join(docs.own[ord(letter) - 65]), x) for letter, x in rows.items()]
        digits = [a == b for mine, x in pairs for a, b in zip(mine, x)]
        return np.mean([mine == x for mine, x in pairs]), np.mean(digits)

    docs = documents()
    early, late = ([own(docs, n) for n in range(first, first + 200)] for first in (0, 12_000))
    assert sum(digits > 0.6 for _, digits in early) == pytest.approx(100, abs=20)
    assert max(numbers for numbers, _ in late) < 0.3
    val = documents(part="val")
    assert max(own(val, n)[0] for n in range(200)) < 0.3


def test_letters_are_drawn_more_evenly_later():
    def most_frequent(docs, first):
        shares = []
        for n in range(first, first + 50):
            letters = [row[0] for row in text_of(docs, n).split("\n")[:-1]]
            shares.append(max(map(letters.count, letters)) / len(letters))
        return np.mean(shares)

    docs = documents()
    assert 0.4 < most_frequent(docs, 9_900) < 0.6      # weights 2^i: half of the lines
    assert most_frequent(docs, 18_000) < 0.2


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
def test_only_the_exact_number_counts(name):
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
def measured(tmp_path, monkeypatch, call):
    """measured(*flags) runs abcdigits.py on a model of one step; returns the windows it had."""
    fit(tmp_path / "out", "--steps", "1")
    windows = []

    def exact_matches(model, tokenizer, prompts, answers):
        assert all(prompt.endswith("=") for prompt in prompts)
        assert {len(answer) for answer in answers} == {2}
        windows.append(model.layers[0].w.tolist())
        return [True] + [len(windows) > 1] * (len(prompts) - 1)

    def command(*flags):
        monkeypatch.setattr(abcdigits, "exact_matches", exact_matches)
        call(abcdigits, "--device", "cpu", "--trials", "2", *flags)
        return windows

    return command


def test_the_table_says_how_many_prompts_a_cell_has_and_what_they_took(measured, capsys):
    capsys.readouterr()
    measured("--lengths", "256", "512", "--depths", "0.1", "0.5")
    first, head, *rows, last = capsys.readouterr().out.splitlines()
    assert "2 prompts in each cell" in first
    assert head.split() == ["0.1", "0.5", "mean", "seconds"]
    assert [row.split()[:4] for row in rows] == [["256", "50.0%", "100.0%", "75.0%"],
                                                 ["512", "100.0%", "100.0%", "100.0%"]]
    assert re.fullmatch(r"8 prompts took \d+ seconds", last)


def test_swe_makes_windows_beyond_the_training_length_infinite(measured):
    before, after = [*measured("--lengths", "256", "--depths", "0.5"),
                     *measured("--lengths", "256", "--depths", "0.5", "--swe")[1:]]
    assert after == [float("inf") if w > 32 else w for w in before]
    assert float("inf") in after


@pytest.mark.parametrize("flags", [["--lengths", "10"], ["--depths", "2"], ["--trials", "0"],
                                   ["--digits", "1"]])
def test_what_cannot_be_measured_is_one_line(measured, flags):
    with pytest.raises(SystemExit, match="error: .*(too short|expected)"):
        measured(*flags)

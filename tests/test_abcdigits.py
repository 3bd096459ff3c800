"""Tests of abcdigits.py: the prompts, the documents that teach them, exact match, the table."""
import hashlib
import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch

import abcdigits
from tests.helpers import args_of
from train import get_data, get_tokenizer, make_model, save_checkpoint

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


@pytest.mark.parametrize("depth, before", [(0, 0), (0.7, 17), (1, 25)])
def test_the_shortest_prompt_has_a_line_for_each_letter_and_the_needles_again(depth, before):
    prompt, = abcdigits.generate_by_line_count(27, depth, n_trials=1)
    lines = prompt.splitlines()
    assert len(lines) == 27 and lines.index(lines[-1]) == before


def test_a_prompt_is_as_long_in_tokens_as_it_was_asked_for():
    """By a tokenizer whose tokens have two characters."""
    pairs = SimpleNamespace(encode_ordinary=lambda text: re.findall("..?", text, re.S))
    (prompt,), (answer,) = abcdigits.prompts_of(pairs, 600, 0.5, 1, 2)
    lines = (prompt + answer + "\n").splitlines(keepends=True)
    assert 600 <= sum(len(pairs.encode_ordinary(line)) for line in lines) <= 603


# -------------------------------------------------------------------------------- documents

@pytest.mark.parametrize("part, digest", [
    ("train", "b83807b7d3ca3699af9caf106023dab9f112c7fe02e104a13a1b7293fccba86a"),
    ("val", "571d83ad2a874313e98b4d8d92a17e8726e64a430a141b8da34f2fa42b2db61d")])
def test_documents_are_those_that_the_committed_runs_read(part, digest):
    """In any order: document n depends on n and the seed alone."""
    args, sha = SimpleNamespace(data=["abcdigits"], seq_len=256, seed=24), hashlib.sha256()
    docs = get_data(args, get_tokenizer("bytes"))[part == "val"]
    documents = {n: docs.draw(n) for n in (20_000, 12_345, 10_000, 9_999, 1, 0)}
    for n in sorted(documents):
        sha.update(documents[n].astype("<i8").tobytes())
    assert sha.hexdigest() == digest
    assert not docs.observe(torch.zeros(()))           # training ends with --steps


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
    short, long = (abcdigits.generate_by_line_count(n, 0.3, 4, 16) for n in (40, 41))
    texts = [text for pair in zip(short, long) for text in pair]
    prompts, answers = [t[:-4] for t in texts], [t[-4:] for t in texts]
    asked = [p[-2] for p in prompts]
    model = Parrot(tokenizer, wrong="".join(sorted(set(asked))[:2]))
    right = abcdigits.exact_matches(model, tokenizer, prompts, answers, tokens_at_once=1000)
    assert right == [letter not in model.wrong for letter in asked]
    assert set(right) == {True, False}
    assert sum(B for B, _ in model.batches) == 32
    assert all(B * T <= 1000 for B, T in model.batches)
    assert name == "gpt2" or len(model.batches) <= 12          # equal lengths share a batch
    # A prompt may be longer than what goes through at once.
    assert abcdigits.exact_matches(model, tokenizer, prompts, answers, tokens_at_once=9) == right


def save(path, *flags, s_F=0.0):
    args = args_of(["--psi", "2", "--seq-len", "32", *flags])
    model = make_model(args, get_tokenizer("bytes"))
    if s_F:
        model.s_F.data.fill_(s_F)
    save_checkpoint(path, model, args)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """measured(*flags) runs abcdigits.py on a new model; returns the windows it had."""
    windows = []
    save(tmp_path / "ckpt.pt")

    def exact_matches(model, tokenizer, prompts, answers):
        assert all(prompt.endswith("=") for prompt in prompts)
        assert {len(answer) for answer in answers} == {2}
        windows.append(model.layers[0].w.tolist())
        return [True] + [len(windows) > 1] * (len(prompts) - 1)

    def command(*flags):
        argv = ["--ckpt", f"{tmp_path}/ckpt.pt", "--device", "cpu", "--trials", "2", *flags]
        monkeypatch.setattr(sys, "argv", ["abcdigits.py", *argv])
        abcdigits.main()
        return windows

    monkeypatch.setattr(abcdigits, "exact_matches", exact_matches)
    return command


def test_the_table_says_how_many_prompts_a_cell_has_and_what_they_took(measured, capsys):
    measured("--lengths", "256", "512", "--depths", "0.1", "0.5")
    first, head, *rows, last = capsys.readouterr().out.splitlines()
    assert "2 prompts in each cell" in first
    assert head.split() == ["0.1", "0.5", "mean", "seconds"]
    assert [row.split()[:4] for row in rows] == [["256", "50.0%", "100.0%", "75.0%"],
                                                 ["512", "100.0%", "100.0%", "100.0%"]]
    assert re.fullmatch(r"8 prompts took \d+ seconds", last)


def test_swe_makes_windows_beyond_the_training_length_infinite(measured):
    measured("--lengths", "256", "--depths", "0.5")
    before, after = measured("--lengths", "256", "--depths", "0.5", "--swe")
    assert after == [float("inf") if w > 32 else w for w in before]
    assert float("inf") in after


@pytest.mark.parametrize("flags", [["--lengths", "10"], ["--depths", "2"], ["--trials", "0"],
                                   ["--digits", "1"]])
def test_what_cannot_be_measured_is_one_line(measured, flags):
    with pytest.raises(SystemExit, match="error: .*(too short|expected)"):
        measured(*flags)


@pytest.mark.parametrize("flags, s_F, more, says", [
    (["--model", "lab.transformer.Transformer"], 0.0, ["--swe"], "no windows"),
    ([], float("inf"), [], "not finite")])
def test_a_model_that_cannot_be_measured_is_one_line(tmp_path, monkeypatch, flags, s_F, more, says):
    save(tmp_path / "ckpt.pt", *flags, s_F=s_F)
    monkeypatch.setattr(sys, "argv", ["abcdigits.py", "--ckpt", f"{tmp_path}/ckpt.pt", "--lengths",
                                      "256", "--device", "cpu", *more])
    with pytest.raises(SystemExit, match=says):
        abcdigits.main()

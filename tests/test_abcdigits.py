"""Tests of abcdigits.py: the author's prompts, exact match, the table."""
import hashlib
import os
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import abcdigits
import multiscreen as ms
from support import retrieval
from support.checkpoint import load_checkpoint
from support.cli import UsageError
from support.data import get_tokenizer
from support.results import Results
from tests.helpers import INF, fit, read_table

# Whether GPT-2's BPE is here.
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
        assert len({row[0] for row in rows}) == 26             # one number a letter
        assert len({row[2:] for row in rows}) == 26
        found = [n for n, row in enumerate(rows) if row == rows[-1]]
        assert found == [int((lines - 2) * depth), lines - 1]


@given(tokens=st.integers(300, 2000), depth=st.floats(0, 1))
def test_prompts_by_token_count_are_as_long_as_asked(tokens, depth):
    for prompt in abcdigits.generate_by_token_count(tokens, depth, len, n_trials=2):
        assert tokens <= len(prompt) + 1 < tokens + len("A=123456\n")


@pytest.mark.parametrize("generate", [
    lambda: abcdigits.generate_by_line_count(26, 0.5),
    lambda: abcdigits.generate_by_line_count(64, 1.5),
    lambda: abcdigits.generate_by_line_count(64, 0.5, n_digits=1),
    lambda: abcdigits.generate_by_line_count(64, 0.5, n_trials=0),
    lambda: abcdigits.generate_by_token_count(200, 0.5, len)])
def test_impossible_prompts_are_refused(generate):
    with pytest.raises(UsageError):
        generate()


# ------------------------------------------------------------------------------- evaluation

class Parrot(torch.nn.Module):
    """Completes the last letter by looking it up; for the letters in `wrong` adds a digit."""

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
    texts = abcdigits.generate_by_line_count(40, 0.3, 4, 30)
    prompts, answers = [t[:-4] for t in texts], [t[-4:] for t in texts]
    asked = [p[-2] for p in prompts]
    model = Parrot(tokenizer, wrong="".join(sorted(set(asked))[:2]))
    right = abcdigits.exact_matches(model, tokenizer, prompts, answers, tokens_at_once=1000)
    assert right == [letter not in model.wrong for letter in asked]
    assert set(right) == {True, False}
    assert sum(B for B, _ in model.batches) == 30
    assert all(B * T <= 1000 for B, T in model.batches)
    assert name == "gpt2" or len(model.batches) <= 10          # prompts of equal length, together


def grid(tmp_path, monkeypatch, *flags, right=lambda model: True, seed=0):
    """The values of results.tsv after `measure`, of a model that answers alike, by right(model)."""
    def evaluate(model, tokenizer, prompts, answers):
        return [right(model)] * len(prompts)

    monkeypatch.setattr(abcdigits, "exact_matches", evaluate)
    flags = ["--trials", "2", "--device", "cpu", *flags]
    args = abcdigits.get_parser("").parse_args(flags)
    model = SimpleNamespace(layers=[SimpleNamespace(rope_scale=1.0)])
    ckpt = {"args": {"seed": seed, "seq_len": 32}, "step": 7, "weights": {"W": torch.ones(1)}}

    def get_prompts(length, depth, trials):
        if length < 64:
            raise UsageError("too short")
        return ["A="] * trials, ["1"] * trials

    results = Results(tmp_path / "results.tsv")
    keys = abcdigits.measure(args, results, model, None, ckpt, "passkey", get_prompts)
    return {key: results.values[key] for key in keys}


def test_the_table_has_the_lengths_that_are_possible(tmp_path, monkeypatch):
    values = grid(tmp_path, monkeypatch, "--depths", "0.1", "0.5")
    cells = retrieval.get_cells(values)
    lengths = [64, 128, 256, 512, 1024]
    assert list(cells) == [(n, depth) for n in lengths for depth in (0.1, 0.5)]
    assert set(map(str, values.values())) == {"[1.0]"}
    out = retrieval.table(cells, 128).splitlines()
    assert out[0].split() == ["depth", "64", "[128]", "256", "512", "1024"]
    assert out[1].split() == ["0.1", *["100.0%"] * 5]
    assert out[-1] == "[128] is the training length, in tokens"
    row = read_table(tmp_path / "results.tsv")[0]
    assert (row["task"], row["step"], row["length"], row["depth"], row["trials"]) == (
        "passkey", "7", "64", "0.1", "2")


def test_what_was_measured_is_not_measured_again_but_for_other_weights(tmp_path, monkeypatch):
    flags = ["--lengths", "64", "--depths", "0.5"]
    grid(tmp_path, monkeypatch, *flags)
    asked = []
    more = grid(tmp_path, monkeypatch, *flags, "0.9", right=lambda model: bool(asked.append(1)))
    assert sorted(more.values()) == [[0.0], [1.0]]
    assert len(asked) == 1
    monkeypatch.setattr(abcdigits, "weights_hash", lambda ckpt: "others")
    assert list(grid(tmp_path, monkeypatch, *flags, right=lambda model: False).values()) == [[0.0]]


def test_the_rope_scale_is_chosen_on_the_mean_over_the_seeds(tmp_path, monkeypatch):
    """Seed 0 is right with 2 and 4, seed 1 with 4 only: 4 counts, for both."""
    flags = ["--lengths", "64", "--depths", "0.5", "--rope-scale", "1", "2", "4"]
    values = {}
    for seed, least in ((0, 2), (1, 4)):
        values |= grid(tmp_path, monkeypatch, *flags, seed=seed,
                       right=lambda model, least=least: model.layers[0].rope_scale >= least)
    one_seed = {key: x for key, x in values.items() if key.seed == "0"}
    assert retrieval.get_cells(one_seed) == {        # the first of them
        (64, 0.5): ({"0": 1.0}, {"0": 2}, 2.0)}
    cells = retrieval.get_cells(values)
    assert cells == {(64, 0.5): ({"0": 1.0, "1": 1.0}, {"0": 2, "1": 2}, 4.0)}
    assert "100.0% x4" in retrieval.table(cells, 64)
    assert retrieval.by_model(values, "passkey") == [values]


def test_the_mean_over_the_depths_is_of_the_seeds_that_have_all_of_them(tmp_path, monkeypatch):
    values = grid(tmp_path, monkeypatch, "--lengths", "64", "--depths", "0.1", "0.5")
    values |= grid(tmp_path, monkeypatch, "--lengths", "64", "128", "--depths", "0.5", seed=1,
                   right=lambda model: False)
    means = retrieval.mean_by_length(retrieval.get_cells(values))
    assert means == {64: {"0": 1.0}, 128: {"1": 0.0}}


def test_what_cannot_be_measured_is_refused_before_a_table_is_begun(tmp_path, monkeypatch):
    for flags in (["--lengths", "10"], ["--lengths", "64", "--rope-scale", "0"]):
        with pytest.raises(UsageError):
            grid(tmp_path, monkeypatch, *flags)
        assert not list(tmp_path.iterdir())


def test_a_trained_model_is_measured_as_it_is_and_with_expanded_windows(tmp_path, monkeypatch,
                                                                        capsys):
    fit(tmp_path / "out", "--steps", "1", "--psi", "3")
    path, windows = tmp_path / "out/ckpt.pt", []

    def evaluate(model, tokenizer, prompts, answers):
        assert all(prompt.endswith("=") for prompt in prompts)
        assert all(re.fullmatch(r"\d{6}", answer) for answer in answers)
        windows.append(ms.window(model.layers[0].s_w).tolist())
        return [True, False]

    monkeypatch.setattr(abcdigits, "exact_matches", evaluate)
    flags = ["--ckpt", str(path), "--lengths", "260", "--trials", "2", "--depths", "0.5",
             "--device", "cpu"]
    for more in ([], ["--swe"]):
        monkeypatch.setattr(sys, "argv", ["abcdigits.py", *flags, *more])
        abcdigits.main()
    assert capsys.readouterr().out.count(" 50.0%") == 4
    model, _, _ = load_checkpoint(path)
    assert windows[0] == ms.window(model.layers[0].s_w).tolist()
    assert windows[1] == [INF if w > 32 else w for w in windows[0]]
    assert INF in windows[1]
    rows = read_table(path.with_name("results.tsv"))
    assert [(row["swe"], row["value"]) for row in rows] == [("", "0.5"), ("yes", "0.5")]
    assert "--seq-len 32 " in rows[0]["run"]

    # The table alone is shown without the checkpoint.
    path.unlink()
    monkeypatch.setattr(sys, "argv", ["abcdigits.py", "--results",
                                      str(path.with_name("results.tsv"))])
    abcdigits.main()
    assert capsys.readouterr().out.count(" 50.0%") == 4

"""Tests of experiments.mechanisms and experiments.weights."""
import math

import pytest
import torch

import abcdigits
from baselines import BLOCKS
from baselines.attention import Scored
from experiments import mechanisms, perplexity, weights
from experiments.weights import CONFIG, MATCH, N_KEYS, TITLES, draw_tokens, get_weights, is_zero
from multiscreen import softmask
from support.cli import UsageError
from support.table import write_rows
from tests.helpers import cells_of, fit, needs_matplotlib, read_table, write_run

# ------------------------------------------------------------------------------- weights


def scores(n):
    """The scores of the last head, the nearest key first."""
    query, x = (y.double().unflatten(-1, (CONFIG.N_H, -1))[0, :, -1] for y in draw_tokens(n))
    return (x @ query[0] / math.sqrt(CONFIG.d_K)).flip(0)


def test_the_scores_are_those_that_the_figure_says():
    """One match, the same for both lengths; all others are random, of deviation 1.5."""
    few, many = map(scores, N_KEYS)
    torch.testing.assert_close(few, many[: len(few)])
    assert many[MATCH].item() == pytest.approx(6)
    others = torch.cat((many[:MATCH], many[MATCH + 1 :]))
    assert others.max() < 5.5
    assert others.std().item() == pytest.approx(1.5, abs=0.1)
    assert abs(others.mean()) < 0.1


@pytest.mark.parametrize("n", N_KEYS)
def test_weights_are_those_of_the_formulas(n):
    s, d = scores(n), torch.arange(n)
    slope, head = 2**-8, CONFIG.N_H - 1
    expected = {
        "softmax": s.softmax(0),
        "nope": s.softmax(0),
        "local": s.masked_fill(d >= 64, -math.inf).softmax(0),
        "alibi": (s - slope * d).softmax(0),
        "ssmax-rope": (s * math.log(n) / math.log(256)).softmax(0),
        "off-by-one": s.exp() / (1 + s.exp().sum()),
        "sigmoid": (s - slope * d - math.log(n)).sigmoid(),
        "forgetting": (s + d * math.log(0.5)).softmax(0),
    }
    for name, p in expected.items():
        torch.testing.assert_close(get_weights(name, n), p, rtol=1e-5, atol=1e-12, msg=name)
    r, w = (getattr(BLOCKS["screening"](CONFIG), f)()[head].item() for f in ("acceptance", "reach"))
    alpha = (1 - (1 - s / 6) / r).relu().square() * softmask(-d, torch.tensor(w))
    p = get_weights("screening", n)
    torch.testing.assert_close(p, alpha, rtol=1e-4, atol=1e-9)
    assert torch.equal(p == 0, (s / 6 <= 1 - r) | (d >= w))


def test_what_the_figure_shows_of_each_mechanism():
    """(match of 64, of 1,024), zeros of 1,024, totals without a match."""
    seen = {name: weights.summarize(name) for name in TITLES}
    kept = {name for name, (match, _, _) in seen.items() if match[1] > 0.9 * match[0] > 0.1}
    assert kept == {"local", "entmax", "selective", "screening"}
    assert {name for name, (match, _, _) in seen.items() if match[1] < 1e-3} == {
        "stick-breaking", "forgetting"}
    assert {name for name, (_, zeros, _) in seen.items() if zeros > 1} == {
        "local", "entmax", "screening"}
    assert seen["stick-breaking"][1] == 1              # the query's own key, never an underflow
    free = {name for name, (_, _, totals) in seen.items() if abs(totals[0] - 1) > 1e-4}
    assert free == {"off-by-one", "sigmoid", "screening"}
    assert max(seen["off-by-one"][2]) < 1


def test_a_product_that_underflows_is_no_zero():
    p = torch.tensor([0.0, 1e-3, 0.0, 1e-250, 0.0], dtype=torch.float64)
    assert is_zero(p).tolist() == [True, False, True, False, False]


class Softpick(Scored):
    """A reader's thirteenth: weights that may all be 0, and a matrix of its own."""

    def __init__(self, config, dtype=None, number=1):
        super().__init__(config, dtype, number)
        self.W_new = torch.nn.Parameter(torch.full((2, 2), math.nan))

    def weights(self, s, d):
        e = s.exp() - 1
        return e.relu() / (e.abs().sum(-1, keepdim=True) + self.W_new.sum())


@needs_matplotlib
def test_a_thirteenth_is_drawn_when_it_is_named(call, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(BLOCKS, "softpick", Softpick)
    call(mechanisms, "--names", "softpick", "screening", "--out", "a/weights.png")
    names = [cells[0] for cells in cells_of(capsys)]
    assert names[-3:-1] == ["softpick", "screening"]
    assert (tmp_path / "a/weights.png").exists()
    with pytest.raises(UsageError, match="softpic: use softmax, or one of qknorm, nope"):
        call(mechanisms, "--names", "softpic")


@needs_matplotlib
def test_without_names_the_twelve_are_drawn(call, tmp_path, capsys):
    call(mechanisms)
    assert [cells[0] for cells in cells_of(capsys)][2:-1] == [*TITLES]
    assert (tmp_path / "out/mechanism_weights.png").exists()


# ------------------------------------------------------------------------------------ results

def write_measured(folder, model="transformer:4,4,72", data="stdlib", seed=32,
                   log=((9, 2.5, ""),), tables=None):
    """A run with three steps and then log: (step, val_loss, needle), and its tables."""
    rows = [{"step": step, "ms": ms} for step, ms in ((1, 900), (2, 40), (3, 50))]
    rows += [dict(zip(("step", "val_loss", "needle"), row)) for row in log]
    write_run(folder, rows, model=model, data=data, seed=seed, lr=0.25, parameters=1000, steps=9)
    for name, found in (tables or {}).items():
        write_rows(folder / name, found)
    return folder


def needle_row(length, depth, accuracy, factor="", swe="", trials=10, hash="new"):
    return {"seed": "32", "length": str(length), "depth": str(depth), "factor": factor, "swe": swe,
            "trials": str(trials), "accuracy": str(accuracy), "hash": hash}


def perplexity_row(document, *nats, factor="", swe="", length=128, hash="new"):
    """nats at 32, 45, 64, 91 and 128 tokens."""
    return {"length": str(length), "swe": swe, "factor": factor, "document": document,
            "nats": " ".join(map(str, nats)), "hash": hash}


def values_of(folder, label=""):
    return {row["what"]: float(row["value"]) for row in mechanisms.rows_of(folder, label)}


def test_a_run_is_its_last_loss_and_its_median_step(tmp_path):
    run = write_measured(tmp_path / "a", log=((5, 3.0, 0.1), (9, 2.5, 0.75)), data="abcdigits")
    assert values_of(run) == {"loss": 2.5, "needle digits": 0.75, "ms": 50, "parameters": 1000}
    row = mechanisms.rows_of(run)[0]
    assert row | {"what": "", "value": ""} == {
        "model": "transformer:4,4,72", "task": "abcdigits", "seed": "32", "lr": "0.25",
        "step": "9", "what": "", "value": ""}
    assert mechanisms.rows_of(run, "mine")[0]["model"] == "transformer=mine"
    (run / "diverged.txt").touch()
    assert math.isnan(values_of(run)["loss"])
    (run / "log.tsv").unlink()
    with pytest.raises(UsageError, match="holds no run"):
        mechanisms.rows_of(run)


def test_answers_are_means_over_depths_of_the_best_in_each_cell(tmp_path):
    rows = [needle_row(256, 0.5, 1.0, hash="old"), needle_row(256, 0.1, 1.0, trials=2),
            needle_row(256, 0.1, 0.5), needle_row(256, 0.9, 0.1),
            needle_row(256, 0.1, 0.2, factor="2"), needle_row(256, 0.9, 0.4, factor="2"),
            needle_row(256, 0.1, 0.7, swe="yes"), needle_row(256, 0.9, 0.9, swe="yes")]
    found = values_of(write_measured(tmp_path / "a", tables={"abcdigits.tsv": rows}))
    assert {what: x for what, x in found.items() if "needles" in what} == {
        "needles 256": 0.3, "needles 256 RoPE": 0.45, "needles 256 SWE": 0.8}


def test_perplexities_are_of_the_longest_texts_and_the_factor_best_at_their_end(tmp_path):
    rows = [perplexity_row("a", 9, 9, 9, length=64), perplexity_row("a", 0, 0, 1, 0, 4),
            perplexity_row("b", 0, 0, 3, 0, 6), perplexity_row("a", 0, 0, 9, 0, 3, factor="4"),
            perplexity_row("a", 0, 0, 9, 0, 8, factor="8")]
    found = values_of(write_measured(tmp_path / "a", tables={"perplexity.tsv": rows}))
    for what, nats in {"64": 2, "128": 5, "64 RoPE": 9, "128 RoPE": 3}.items():
        assert found[f"perplexity {what}"] == pytest.approx(math.exp(nats), rel=1e-5)


def table_of(capsys):
    """The printed rows of results, {(model, setting): {column: text}}."""
    lines = cells_of(capsys)
    start = next(n for n, line in enumerate(lines) if line[:2] == ["model", "seeds"])
    head = ["model", "setting", *lines[start][1:]]
    rows = [dict(zip(head, line)) for line in lines[start + 1 :] if len(line) == len(head)]
    return {(row["model"], row["setting"]): row for row in rows}


def make_runs(folder):
    """Two seeds of softmax on text, t1, and on the task, t2; one of screening on the task."""
    for seed, loss, needle in ((32, 1.5, 0.9), (33, 2.5, 0.2)):
        texts = [perplexity_row("a", 0, 0, 1, 0, seed - 31, swe="")]
        write_measured(folder / f"t1-{seed}", seed=seed, log=((9, loss, ""),),
                  tables={"perplexity.tsv": texts})
        write_measured(folder / f"t2-{seed}", data="abcdigits", seed=seed, log=((9, 9.0, needle),),
                  tables={"abcdigits.tsv": [needle_row(256, 0.5, needle / 2)]})
    tables = {"abcdigits.tsv": [needle_row(256, 0.5, 0.5), needle_row(256, 0.5, 1, swe="yes")]}
    write_measured(folder / "other", "transformer:4,4,72:screening", "abcdigits", tables=tables,
              log=((9, 9.0, 0.9),))


def test_the_table_has_means_over_the_seeds(call, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(mechanisms, "pyplot", lambda: None)
    make_runs(tmp_path / "runs")
    call(mechanisms, tmp_path / "runs/*", "--out", "a/m.png")
    table = table_of(capsys)
    softmax = table["softmax", "as trained"]
    assert softmax == {
        "model": "softmax", "setting": "as trained", "seeds": "2", "loss": "2.0000",
        "perplexity 128": f"{(1 + math.e) / 2:.2f}", "needles 256": "27.5", "learned": "1 of 2",
        "parameters": "1000", "ms": "50"}
    assert table["screening", "as trained"]["needles 256"] == "50.0"
    assert table["screening", "with SWE"]["needles 256"] == "100.0"
    assert [*table] == [("softmax", "as trained"), ("screening", "as trained"),
                        ("screening", "with SWE")]


def test_the_tsv_stands_for_the_runs_and_loses_none(call, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(mechanisms, "pyplot", lambda: None)
    make_runs(tmp_path / "runs")
    call(mechanisms, "runs/t*", "--out", "m.png")
    with open("runs/t1-32/log.tsv", "a") as log:       # it went on
        log.write("12\t\t1.25\t\n")
    call(mechanisms, "runs/t*", "--out", "m.png")
    with pytest.raises(UsageError, match="already holds .* other rows: add this table"):
        call(mechanisms, "runs/other", "--out", "m.png")
    call(mechanisms, "m.tsv", "runs/other", "--out", "m.png")
    both = table_of(capsys), read_table(tmp_path / "m.tsv")
    assert {row["model"] for row in both[1]} == {"transformer:4,4,72",
                                                 "transformer:4,4,72:screening"}
    call(mechanisms, "m.tsv")
    assert (table_of(capsys), read_table(tmp_path / "m.tsv")) == both
    with pytest.raises(UsageError, match="m.tsv and runs/other are both .*screening"):
        call(mechanisms, "m.tsv", "runs/other")
    with pytest.raises(UsageError, match="runs/other/log.tsv is not a table of this command"):
        call(mechanisms, "runs/other/log.tsv")


def test_two_runs_of_one_seed_need_labels(call, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(mechanisms, "pyplot", lambda: None)
    a, b = (write_measured(tmp_path / name, "multiscreen") for name in "ab")
    with pytest.raises(UsageError, match="label one"):
        call(mechanisms, a, b)
    call(mechanisms, a, f"w_th 16={b}")
    assert [name for name, _ in table_of(capsys)] == ["Multiscreen", "w_th 16"]


def test_tries_that_won_on_other_tasks_are_one_row(call, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(mechanisms, "pyplot", lambda: None)
    alibi, steep = "transformer:4,4,72:alibi", "transformer:4,4,72:alibi-steep"
    write_measured(tmp_path / "text", steep)
    write_measured(tmp_path / "task", alibi, "abcdigits", log=((9, 9.0, 0.9),))
    call(mechanisms, "text", "task", "--out", "m.png")
    printed = capsys.readouterr().out
    assert "Transformer, alibi: alibi on abcdigits, alibi-steep on text" in printed
    assert printed.splitlines()[-1].split()[0] == "alibi"
    assert {row["model"] for row in read_table(tmp_path / "m.tsv")} == {alibi, steep}
    write_measured(tmp_path / "other", alibi)               # both on text: one row each
    call(mechanisms, "other", "m.tsv", "--out", "m.png")
    assert [name for name, _ in table_of(capsys)] == ["alibi", "alibi-steep"]


@needs_matplotlib
def test_trained_and_measured_runs_are_compared(call, tmp_path, capsys):
    for name in ("local", "screening"):
        model = ("--model", f"transformer:1,2,8:{name}", "--steps", "2")
        fit(tmp_path / f"{name}-text", *model)
        fit(tmp_path / f"{name}-task", *model, "--digits", "2", data="abcdigits")
        swe = ["--swe"] if name == "screening" else []
        call(perplexity, "--ckpt", f"{name}-text/ckpt.pt", "--length", 128, "--documents", 1, *swe)
        call(abcdigits, "--ckpt", f"{name}-task/ckpt.pt", "--lengths", 160, "--depths", 0.5,
             "--trials", 1, *swe)
    capsys.readouterr()
    call(mechanisms, "local-*", "screening-*", "--out", "m.png")
    table = table_of(capsys)
    assert [*table] == [("local", "as trained"), ("screening", "as trained"),
                        ("screening", "with SWE")]
    assert table["local", "as trained"]["learned"] == "0 of 1"
    assert float(table["screening", "with SWE"]["perplexity 128"]) > 0
    assert (tmp_path / "m.png").exists()

"""Tests of lab.mechanisms and lab.weights."""
import math

import pytest
import torch

import abcdigits
from lab import mechanisms, perplexity, weights
from lab.baselines.attention import VARIANTS, Scored
from lab.weights import CONFIG, MATCH, N_KEYS, TITLES, draw_tokens, get_weights
from multiscreen import softmask
from support.cli import UsageError
from support.table import RUN, write_rows
from tests.helpers import cells_of, fit, needs_matplotlib, write_run

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
    layer = VARIANTS["screening"](CONFIG)
    r, w = layer.acceptance()[head].item(), layer.reach()[head].item()
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


class Softpick(Scored):
    """A reader's thirteenth: weights that may all be 0, and a matrix of its own."""

    def __init__(self, config, dtype=None, number=1):
        super().__init__(config, dtype, number)
        self.W_new = torch.nn.Parameter(torch.full((2, 2), math.nan))

    def weights(self, s, d):
        e = s.exp() - 1
        return e.relu() / (e.abs().sum(-1, keepdim=True) + self.W_new.sum())


@needs_matplotlib
def test_the_twelve_are_drawn_or_those_that_are_named(call, tmp_path, capsys):
    mine = f"{__name__}.Softpick"
    call(mechanisms, "--names", mine, "screening", "--out", "a/weights.png")
    names = [cells[0] for cells in cells_of(capsys)]
    assert names[-3:-1] == [mine, "screening"]
    assert (tmp_path / "a/weights.png").exists()
    call(mechanisms)
    assert [cells[0] for cells in cells_of(capsys)][2:-1] == [*TITLES]
    with pytest.raises(UsageError, match="softpic is unknown: lab/baselines/.* has qknorm, nope"):
        call(mechanisms, "--names", "softpic")


# ------------------------------------------------------------------------------------ results

@pytest.fixture
def no_figure(monkeypatch):
    monkeypatch.setattr(mechanisms, "pyplot", lambda: None)


def write_measured(folder, last, rows=(), **flags):
    """A run whose first steps took 900, 40 and 50 ms. last: of its log; rows: of a table."""
    log = [{"step": step, "ms": ms} for step, ms in ((1, 900), (2, 40), (3, 50))]
    log += [{"step": 5, "val_loss": 3.0, "needle": 0.1}, {"step": 9} | last]
    flags = {"model": "transformer:4,4,72", "seed": 32, "lr": 0.25, "parameters": 1000,
             "steps": 9} | flags
    write_run(folder, log, **flags)
    if rows:
        name = "perplexity" if "nats" in rows[0] else "abcdigits"
        run = {"model": flags["model"], "parameters": "1000", "seed": str(flags["seed"]),
               "seq_len": "64", "step": "9"}
        rows = [row | {x: row[x] or value for x, value in run.items()} for row in rows]
        write_rows(folder / f"{name}.tsv", rows)
    return folder


def needle_row(length, depth, accuracy, **values):
    row = dict.fromkeys((*RUN, "digits", *abcdigits.CELL), "") | {
        "length": str(length), "depth": str(depth), "trials": "10", "accuracy": str(accuracy),
        "hash": "new"}
    return row | values


def perplexity_row(document, *nats, **values):
    """nats at 32, 45, 64, 91 and 128 tokens."""
    row = dict.fromkeys(perplexity.KEYS, "") | {
        "length": "128", "document": document, "nats": " ".join(map(str, nats)), "hash": "new"}
    return row | values


def values_of(folder, *only):
    """{(what, length, setting): value}"""
    rows, _ = mechanisms.gather([str(folder)], only)
    return {(row["what"], row["length"], row["setting"]): float(row["value"]) for row in rows}


def test_a_run_is_its_last_loss_and_its_median_step(tmp_path):
    run = write_measured(tmp_path / "a", {"val_loss": 2.5})
    assert values_of(run) == {("loss", "", ""): 2.5, ("ms", "", ""): 50}
    assert mechanisms.gather([f"mine={run}"])[0][0] == dict(zip(mechanisms.COLUMNS, (
        "transformer=mine", "1000", "32", "text", "0.25", "9", "loss", "", "", "2.5")))
    (run / "diverged.txt").touch()
    assert math.isnan(values_of(run)["loss", "", ""])
    run = write_measured(tmp_path / "b", {"val_loss": 9, "needle": 0.75}, data="abcdigits")
    assert values_of(run) == {("needle digits", "", ""): 0.75}


def test_answers_are_means_over_depths_of_the_best_in_each_cell(tmp_path):
    rows = [needle_row(256, 0.5, 1.0, hash="old"), needle_row(256, 0.5, 1.0, step="4"),
            needle_row(256, 0.1, 0.5), needle_row(256, 0.9, 0.1, factor="1"),
            needle_row(256, 0.1, 0.2, factor="2"), needle_row(256, 0.9, 0.4, factor="2"),
            needle_row(256, 0.1, 0.7, swe="yes"), needle_row(256, 0.9, 0.9, swe="yes")]
    found = values_of(write_measured(tmp_path / "a", {"needle": 0.9}, rows, data="abcdigits"))
    assert {setting: x for (what, _, setting), x in found.items() if what == "needles"} == {
        "": 0.3, "RoPE": 0.45, "SWE": 0.8}


def test_perplexities_are_of_the_longest_texts_and_the_factor_best_at_their_end(tmp_path):
    rows = [perplexity_row("a", 0, 0, 0, length="64"), perplexity_row("a", 0, 0, 1, 0, 4),
            perplexity_row("b", 0, 0, 3, 0, 6),
            *(perplexity_row(name, 0, 0, 9, 0, x, factor=factor)
              for name in "ab" for factor, x in (("4", 3), ("8", 8)))]
    found = values_of(write_measured(tmp_path / "a", {"val_loss": 2.5}, rows))
    nats = {(length, setting): math.log(x) for (what, length, setting), x in found.items()
            if what == "perplexity"}
    assert nats == pytest.approx({("64", ""): 2, ("128", ""): 5, ("64", "RoPE"): 9,
                                  ("128", "RoPE"): 3}, abs=1e-4)


def perplexity_of(found):
    return {place: x for (what, *place), x in found.items() if what == "perplexity"
            for place in [tuple(place)]}


def test_a_number_is_of_the_weights_that_a_run_has_now(call, monkeypatch, tmp_path, capsys):
    """Trained further, and trained anew with another rate to the same step."""
    def measure():
        call(perplexity, "--ckpt", "a/ckpt.pt", "--data", "text.txt", "--length", 128, "--device",
             "cpu")
        return printed()

    def printed():
        return next(line[-2:] for line in cells_of(capsys) if line[0] == "Multiscreen")

    monkeypatch.setattr(perplexity, "pyplot", lambda: None)
    fit(tmp_path / "a", "--steps", "2")
    before = measure()
    for more in (["--steps", "9", "--resume"], ["--steps", "9", "--lr", "0.5", "--force"]):
        fit(tmp_path / "a", *more)
        capsys.readouterr()
        assert perplexity_of(values_of(tmp_path / "a")) == {}
        assert "left out, measured with other weights than" in capsys.readouterr().err
        with pytest.raises(UsageError, match="has no row of a/ckpt.pt as it is now: measure"):
            call(perplexity, "a/perplexity.tsv")
        now = measure()
        assert now != before
        call(perplexity, "a/perplexity.tsv")
        assert printed() == now
        assert f"{perplexity_of(values_of(tmp_path / 'a'))['128', '']:.3g}" == now[-1]
        before = now


def test_without_its_checkpoint_a_run_has_the_rows_of_its_last_step(tmp_path):
    rows = [perplexity_row("a", 0, 0, 1, 0, 2, step="5", hash="x-1"),
            perplexity_row("a", 0, 0, 1, 0, 3, hash="y-1"),
            perplexity_row("a", 0, 0, 1, 0, 4, seed="33", hash="z-1")]
    found = values_of(write_measured(tmp_path / "a", {"val_loss": 2.5}, rows))
    assert found["perplexity", "128", ""] == pytest.approx(math.exp(3), rel=1e-4)


def test_of_two_texts_or_numbers_of_digits_one_asks_which(tmp_path):
    rows = [perplexity_row("a 1", 0, 0, 1, 0, 2, data="x"),
            perplexity_row("b 2", 0, 0, 1, 0, 3, data="y"),
            perplexity_row("c 1", 0, 0, 1, 0, 2, data="z")]            # x, moved and renamed
    run = write_measured(tmp_path / "a", {"val_loss": 2.5}, rows)
    with pytest.raises(UsageError, match=r"with data x \| y: choose, as in --only 'data=y'"):
        values_of(run)
    for name, nats in (("x", 2), ("y", 3), ("z", 2)):
        assert values_of(run, f"data={name}")["perplexity", "128", ""] == pytest.approx(
            math.exp(nats), rel=1e-4)
    assert perplexity_of(values_of(run, "data=x", "data=z"))["128", ""] == pytest.approx(
        math.exp(2), rel=1e-4)
    rows = [needle_row(256, 0.5, 0.9, digits="2"), needle_row(256, 0.5, 0.1, digits="6")]
    run = write_measured(tmp_path / "b", {"needle": 0.9}, rows, data="abcdigits")
    with pytest.raises(UsageError, match=r"digits 2 \| 6: choose, as in --only 'digits=6'"):
        values_of(run)
    assert values_of(run, "digits=2")["needles", "256", ""] == 0.9
    for word in ("digit=2", "digits"):
        with pytest.raises(UsageError, match="--only digit.*: expected a column"):
            values_of(run, word)


def test_runs_that_were_measured_on_other_things_share_no_column(tmp_path):
    def runs(name, what, *rows):
        return [f"{n}={write_measured(tmp_path / f'{name}-{n}', {'val_loss': 2}, some, data=what)}"
                for n, some in enumerate(rows)]

    a, b = runs("d", "abcdigits", [needle_row(256, d, 1) for d in (0.1, 0.5)],
                [needle_row(256, 0.5, 0)])
    with pytest.raises(UsageError, match="needles 256 is of .*depths 0.1 0.5 in .* depths 0.5 in"):
        mechanisms.gather([a, b])
    rows, _ = mechanisms.gather([a, b], ["depth=0.5"])
    assert [row["value"] for row in rows if row["what"] == "needles"] == ["1", "0"]
    a, b, c = runs("t", "books", *([perplexity_row(f"{name} {x}", 0, 0, 1, 0, 2, data=name)]
                                   for name, x in (("x", 1), ("moved", 1), ("y", 2))))
    mechanisms.gather([a, b])
    with pytest.raises(UsageError, match="perplexity .* is of data x, .* of data y, .*documents y"):
        mechanisms.gather([a, b, c])
    d, = runs("f", "books", [perplexity_row(name, 0, 0, 1, 0, 2, factor=factor)
                             for name, factor in (("a", "1"), ("b", "1"), ("a", "4"))])
    with pytest.raises(UsageError, match="perplexity .*documents a .*measure both alike"):
        mechanisms.gather([d])


def test_what_the_means_hide_stands_below_the_table(call, no_figure, tmp_path, capsys):
    rows = [perplexity_row("a", 0, 0, 1, 0, 2, step="5")]
    write_measured(tmp_path / "a-32", {"val_loss": 2.5})
    write_measured(tmp_path / "a-33", {"val_loss": 2.0}, seed=33, corpus="c2")
    write_measured(tmp_path / "a-34", {"val_loss": 2.5}, rows, seed=34, steps=100)
    with open("a-33/log.tsv", "a") as log:
        log.write("12\t\t1.25\t\n")
    with pytest.raises(UsageError, match=r"a-33 would share a row .* \(other texts\): label it"):
        call(mechanisms, "a-32", "a-33", "a-34")
    call(mechanisms, "a-32", "mine=a-33", "a-34")
    lines = capsys.readouterr().out.splitlines()
    for said in ("mine, seed 33: its loss is that after 12 steps",
                 "mine does not compare with the first row: other texts",
                 "Transformer, seed 34: at step 9 of at most 100",
                 "Transformer, text: seed 32 | seed 34", "  steps 9 | 100"):
        assert said in lines, said
    assert not any("seed 32:" in line for line in lines)
    call(mechanisms, "out/mechanisms.tsv", "--out", "again.png")
    lines = capsys.readouterr().out.splitlines()
    assert "mine, seed 33: its loss is that after 12 steps" in lines


def test_a_mean_over_fewer_seeds_and_one_of_another_step_are_told():
    cells = (("0", "9", "loss", ""), ("1", "9", "loss", ""), ("0", "7", "perplexity", "128"))
    rows = [dict(zip(mechanisms.COLUMNS, ("multiscreen", "9", seed, "text", "1", *cell, "", "1")))
            for seed, *cell in cells]
    assert [*mechanisms.notes_on(rows, {})] == [
        "Multiscreen, seed 0: its perplexity was measured after 7 steps",
        "Multiscreen: perplexity 128 is of 1 of its 2 seeds"]


def table_of(capsys):
    """The printed rows of results, {(model, setting): {column: text}}."""
    lines = cells_of(capsys)
    start = next(n for n, line in enumerate(lines) if line[:2] == ["model", "seeds"])
    head = ["model", "setting", *lines[start][1:]]
    rows = [dict(zip(head, line)) for line in lines[start + 1 :] if len(line) == len(head)]
    return {(row["model"], row["setting"]): row for row in rows}


def make_runs(folder):
    """Two seeds of softmax on text, t1, and on the task, t2; screening on the task."""
    for seed, loss, digits in ((32, 1.5, 0.9), (33, 2.5, 0.2)):
        write_measured(folder / f"t1-{seed}", {"val_loss": loss},
                       [perplexity_row("a", 0, 0, 1, 0, seed - 31)], seed=seed)
        write_measured(folder / f"t2-{seed}", {"needle": digits},
                       [needle_row(256, 0.5, digits / 2)], seed=seed, data="abcdigits")
    rows = [needle_row(256, 0.5, 0.5), needle_row(256, 0.5, 1, swe="yes")]
    write_measured(folder / "other", {"needle": 0.9}, rows, data="abcdigits",
                   model="transformer:4,4,72:screening")


def test_the_table_has_means_over_the_seeds(call, no_figure, tmp_path, capsys):
    make_runs(tmp_path / "runs")
    call(mechanisms, "runs/*")
    table = table_of(capsys)
    assert table["Transformer", "as trained"] == {
        "model": "Transformer", "setting": "as trained", "seeds": "2", "loss": "2.0000",
        "perplexity 128": f"{(1 + math.e) / 2:.2f}", "needles 256": "27.5", "learned": "1 of 2",
        "parameters": "1000", "ms": "50"}
    of_screening = {setting: row["needles 256"] for (name, setting), row in table.items()
                    if name == "Transformer, screening"}
    assert of_screening == {"as trained": "50.0", "with SWE": "100.0"}


def test_the_tsv_stands_for_the_runs_and_loses_none(call, no_figure, tmp_path, capsys):
    make_runs(tmp_path / "runs")
    call(mechanisms, "runs/t*", "--out", "m.png")
    with open("runs/t1-32/log.tsv", "a") as log:       # it went on
        log.write("12\t\t1.25\t\n")
    measured = tmp_path / "runs/t1-32/perplexity.tsv"  # and was measured again
    measured.write_text(measured.read_text().replace("\t9\t", "\t12\t"))
    call(mechanisms, "runs/t*", "--out", "m.png")
    with pytest.raises(UsageError, match="already holds .* other rows: add this table"):
        call(mechanisms, "runs/other", "--out", "m.png")
    call(mechanisms, "m.tsv", "runs/other", "--out", "m.png")
    both = table_of(capsys)
    assert both["Transformer", "as trained"]["loss"] == "1.8750"
    call(mechanisms, "m.tsv", "--out", "again.png")
    assert table_of(capsys) == both
    with pytest.raises(UsageError, match="m.tsv and runs/other are both .*screening"):
        call(mechanisms, "m.tsv", "runs/other")
    with pytest.raises(UsageError, match="runs/other/log.tsv is not a table of this command"):
        call(mechanisms, "runs/other/log.tsv")


def test_a_label_parts_runs_of_one_model_and_joins_those_of_two(call, no_figure, tmp_path, capsys):
    a, b = (write_measured(tmp_path / name, {"val_loss": 2.5}) for name in "ab")
    write_measured(tmp_path / "c", {"needle": 0.9}, data="abcdigits",
                   model="transformer:4,4,72:local")
    with pytest.raises(UsageError, match="label one"):
        call(mechanisms, a, b)
    call(mechanisms, a, a, f"mine={b}", "mine=c")
    found = {name: (row["seeds"], row["learned"]) for (name, _), row in table_of(capsys).items()}
    assert found == {"Transformer": ("1", "-"), "mine": ("1", "1 of 1")}


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
    call(mechanisms, "local=local-*", "screening-*", "--out", "m.png")
    table = table_of(capsys)
    assert [*table] == [("local", "as trained"), ("Transformer, screening", "as trained"),
                        ("Transformer, screening", "with SWE")]
    assert table["local", "as trained"]["learned"] == "0 of 1"
    assert float(table["Transformer, screening", "with SWE"]["perplexity 128"]) > 0
    assert (tmp_path / "m.png").exists()

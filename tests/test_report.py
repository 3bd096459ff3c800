"""Tests of what README and the report say: the numbers of README's tables are those of the TSVs."""
import re
import statistics
from importlib.util import find_spec

import pytest

import train
from lab import mechanisms, perplexity, retrieval, scaling
from lab.common import percent
from lab.logs import read_runs
from support.measure import read_rows, read_tables
from tests.helpers import ROOT

FOLDER = ROOT / "lab/report"
README = (ROOT / "README.md").read_text()
REPORT = (FOLDER / "report.md").read_text()


def rows_of(text, title):
    """The rows of the Markdown table with that title in its head, each a list of cells."""
    table = text[text.index(f"| {title} |"):].partition("\n\n")[0]
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def shares(name):
    """{model: {length: its share of answers, a mean over the seeds}} of a table"""
    rows = read_tables([FOLDER / f"{name}.tsv"], "accuracy")
    found = {}
    for panel in retrieval.get_panels(rows):
        means = retrieval.mean_by_length(panel.cells).items()
        found[panel.name] = {length: shares.values() for length, shares in means}
    return found


def test_the_mechanisms():
    """Means over the seeds of report/mechanisms.tsv, and those with SWE."""
    lines = mechanisms.get_lines(read_rows(FOLDER / "mechanisms.tsv"))
    means = {(line.name, line.setting): {column: statistics.mean(values)
                                         for column, values in line.values.items()}
             for line in lines}
    names = [*dict.fromkeys(line.name for line in lines)]
    rows = rows_of(README, "mechanism")
    assert len(rows) == len(names)
    for row, name in zip(rows, names):
        mean = means[name, ""]
        assert row[2] == f"{mean['loss', '']:.3f}"
        assert float(row[3]) == pytest.approx(mean["perplexity", 2048], rel=0.02)
        needles = [f"{mean['needles', n]:.0f}" for n in (256, 1024, 4096)]
        if (name, "SWE") in means:
            needles[2] += f", with SWE {means[name, 'SWE']['needles', 4096]:.0f}"
        assert row[4:] == needles


def test_the_numbers_of_the_claims():
    """Of both families, in the order of their columns."""
    said = {int(row[0]): " ".join(row[2:4]) for row in rows_of(README, "#")}
    numbers = {n: re.findall(r"\d[\d.,]*", text) for n, text in said.items()}
    numbers = {n: [x.rstrip(",") for x in found] for n, found in numbers.items()}
    found = shares("abcdigits")
    assert [float(x) for x in numbers[16]] == [
        float(percent(statistics.mean(found[name][n]))[:-1])
        for name in ("Multiscreen + SWE", "Multiscreen") for n in (8192, 32768)]

    rows = read_tables([FOLDER / "long_context.tsv"], "nats")
    curves = {curve.label + curve.setting: curve.mean
              for curve in perplexity.get_curves(rows)}
    at = [perplexity.positions(8192).index(n) for n in (256, 8192)]
    assert numbers[11] == [f"{curves[name][n]:.3g}" for name in
                           ("Multiscreen, 0.93M", "Transformer, 1.2M, RoPE ×1") for n in at]

    losses = {}
    for row in read_rows(FOLDER / "lr_sweep.tsv"):
        if not row["end"]:
            losses.setdefault((row["run"], float(row["lr"])), []).append(float(row["val_loss"]))
    means = {key: statistics.mean(x) for key, x in losses.items()}
    assert numbers[5] == [f"{x:.2f}" for name in ("Multiscreen", "Transformer") for x in
                          (min(means[key] for key in means if key[0] == name), means[name, 1.0])]

    rows = scaling.equal_losses(scaling.get_models(read_runs([str(FOLDER / "scaling.tsv")])))
    assert numbers[1] == [f"{rows[n][i] / 1000:.0f}" for i in (3, 4) for n in (2, 5)]


def test_the_reports_claims_about_retrieval_have_the_means_of_its_tables():
    def percents(n):
        said, = (row[3] for row in rows_of(REPORT, "#") if row[0] == str(n))
        return [float(x) for x in re.findall(r"([\d.]+)(?: ± [\d.]+)? %", said)]

    def means(found, names, lengths):
        return [float(percent(statistics.mean(found[name][n]))[:-1])
                for n in lengths for name in names]

    models, keys, ablations = map(shares, ("abcdigits", "passkey", "abcdigits_ablations"))
    ours, expanded = "Multiscreen", "Multiscreen + SWE"
    assert percents(14)[:3] == means(models, [ours], (2048, 8192, 32768))
    assert percents(16)[:6] == means(models, [expanded, ours], (8192, 16384, 32768))
    assert percents(17) == [*means(keys, [expanded], [8192]),
                            *means(keys, [ours], (512, 1024, 2048, 4096, 8192)),
                            *means(keys, ["Transformer"], (512, 1024))]
    names = ("Multiscreen", "MiPE → NoPE", "w/o Gate", "w/o TanhNorm", "Fixed r = 1", "MiPE → RoPE")
    assert percents(22) == [*means(ablations, names, [8192]),
                            *means(ablations, [f"{name} + SWE" for name in names], [8192])]


def test_the_verdicts_and_their_tallies():
    said = {row[0]: row[-1] for row in rows_of(REPORT, "#")}
    assert len(said) == 22
    for row in rows_of(README, "#"):
        assert said[row[0]].startswith(row[-1])
    for word in ("shown", "partly", "contradicted", "not testable here", "a GPU's claim"):
        count = sum(verdict.startswith(word) for verdict in said.values())
        tally = rf"\b{count} (are |is ){word}"
        for text in (REPORT, README) if word in ("shown", "partly") else (REPORT,):
            assert not count or re.search(tally, text.replace("\n", " ")), (word, count)


def test_every_figure_that_the_report_shows_exists():
    shown = re.findall(r"\]\(([\w/-]+\.png)\)", REPORT)
    assert shown
    assert [name for name in shown if not (FOLDER / name).exists()] == []


def test_the_commands_name_modules_that_are_there():
    """Of a program that is gone a page says `git show COMMIT:path`, not how it was called."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("models/*.md"),
             *ROOT.glob("lab/*.md"), FOLDER / "report.md"]
    for page in pages:
        text = page.read_text()
        written = {path.replace("/", ".") for path in re.findall(r"to `([\w/]+)\.py`", text)}
        named = re.findall(r"python3? -m\s+([\w.]+\w)|\bfrom ([\w.]+) import", text)
        modules = {command or module for command, module in named} - written
        assert [name for name in modules if not find_spec(name)] == [], page


def test_the_table_of_memory_adds_up():
    text = (ROOT / "docs/scale.md").read_text()
    lines = re.findall(r"^\| `(--(?:psi|model) .+)` \| (.+) \|$", text, re.M)
    assert len(lines) == 9
    for words, cells in lines:
        args = train.get_parser().parse_args(words.split())
        gpus, P, passes, *sizes = (float(x.replace(",", "")) for x in cells.split(" | "))
        weights, gradients, moments, _, _, whole, checkpoint = sizes
        state = 4 * P / 2**30
        known = [state / args.shard, state / (args.shard if passes == 1 else 1),
                 2 * state / args.shard]
        assert passes == 2**22 / 2**12 / (args.batch_size * gpus)
        assert [weights, gradients, moments] == pytest.approx(known, abs=0.006)
        assert whole == pytest.approx(sum(sizes[:5]), abs=0.03)
        assert checkpoint == pytest.approx(3 * state, abs=0.006)

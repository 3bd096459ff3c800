"""The numbers that README, docs and the report take from committed rows are those of the rows."""
import math
import re
import statistics
from importlib.util import find_spec

import numpy as np
import pytest
import torch

import train
from lab import alike, figures, mechanisms, scaling
from lab.alike import mean_and_std, mean_in_words, read_measurements
from lab.compare import compare
from lab.curves import copying_curves, curves_by_string, perplexity_curves, retrieval_curves
from lab.paired import difference, holm, share_among, standard_errors
from lab.runs import read_runs
from support.check import inside
from support.tables import read_table
from tests.helpers import ROOT, needs_matplotlib

FOLDER = ROOT / "lab/report"
README = (ROOT / "README.md").read_text()
REPORT = (FOLDER / "report.md").read_text()
COPYING = (ROOT / "docs/copying.md").read_text()


def rows_of(text, title):
    """The rows of the Markdown table with that title in its head, each a list of cells."""
    table = text[text.index(f"| {title} |") :].partition("\n\n")[0]
    return [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]


def found_in(text, pattern):
    """The numbers that a pattern finds once in a text whose lines may be broken anywhere."""
    match, = re.findall(pattern, " ".join(text.split()))
    return [float(x) for x in ([match] if isinstance(match, str) else match)]


def shares(name):
    """{model: {length: its mean share of answers in percent, as one prints it}}"""
    rows = read_measurements([FOLDER / f"{name}.tsv"], alike.RETRIEVAL)
    _, curves = retrieval_curves(rows, plain=False)
    return {curve.name.removesuffix(" + best RoPE scaling"):
            {length: float(f"{100 * statistics.fmean(of_seed.values()) + 1e-9:.1f}")
             for length, of_seed in curve.points.items()} for curve in curves}


def copying_of(rows, *step):
    """{curve: {end: costs (seeds, distances)}}, after a step if it is given."""
    return {curve.name: {end: np.array([[*of_seed.values()] for of_seed
                                        in curve.part(end, *step, ...).points.values()]).T
                         for end in ("same", "another")}
            for curve in copying_curves(rows, *["step" for _ in step])}


def read_copying(name, kind=alike.COPYING):
    return read_measurements([FOLDER / f"{name}.tsv"], kind)


def changes(name, digits, by=None):
    """{group: (change, deviation), rounded}"""
    rows, _, _ = compare(read_runs([FOLDER / f"{name}.tsv"]), by)
    return {row["run"]: (round(row["change"], digits), round(row["± std"], digits)) for row in rows
            if row["pairs"]}


def losses_by_rate():
    """{(label, rate): the losses of lr_sweep.tsv that did not diverge}"""
    found = {}
    for run in read_runs([FOLDER / "lr_sweep.tsv"]):
        if not run.diverged:
            found.setdefault((run.label, float(run.flags["lr"])), []).append(run.loss(1000))
    return found


def printed(call, capsys, script, *words):
    """The lines that a command prints, each a list of its columns."""
    call(script, *words)
    return [re.split(r"\s{2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]


def p_of(t, pairs):
    """The two-sided p of Student's t of three or five pairs, in its closed form."""
    angle = math.atan(abs(t) / math.sqrt(pairs - 1))
    factors = {3: 1, 5: 1 + math.cos(angle) ** 2 / 2}
    return 1 - math.sin(angle) * factors[pairs]


# --------------------------------------------------------------------------------- the front page

def test_readmes_sentence_about_retrieval():
    """ABCDigits at 8,192 bytes over eight seeds, and the list at 4,096 of the mechanisms."""
    rows = read_measurements([FOLDER / "abcdigits.tsv"], alike.RETRIEVAL)
    _, curves = retrieval_curves(rows, plain=False)
    found = {curve.name: [100 * x for x in curve.points[8192].values()]
             for curve in curves if curve.name in ("Multiscreen + SWE", "Transformer, local")}
    assert {len(x) for x in found.values()} == {8}
    assert set(found["Multiscreen + SWE"]) == {100}
    lines = mechanisms.get_lines(read_table(FOLDER / "mechanisms.tsv"))
    in_lists = (lines[key]["needles", 4096].values() for key in (("Multiscreen", "SWE"),
                                                                 ("local", "")))
    said = [f"{mean:.0f} ± {std:.0f}" for mean, std in map(mean_and_std, (
        found["Transformer, local"], *in_lists))]
    assert ("100 and {} % at 8,192 bytes (eight seeds), and {} and {} % at 4,096".format(*said)
            in " ".join(README.split()))


def losses_by_seed(name, label):
    """{seed: the loss at the end} of that label's runs."""
    return {run.seed: run.loss(int(run.flags["steps"]))
            for run in read_runs([FOLDER / f"{name}.tsv"]) if run.label == label}


def test_the_ps_of_losses_and_of_windows():
    """Two-sided, of differences that are paired by seed."""
    def p(name, ours, theirs):
        return difference(losses_by_seed(name, ours), losses_by_seed(name, theirs)).p

    at_620 = p("text_losses", "Multiscreen", "Transformer")
    softmax, r_is_1, rope = (p("ablations", label, "Original")
                             for label in ("Softmax", "Fixed r = 1", "MiPE → RoPE"))
    said = [*found_in(README, r"1\.2M; p = ([.\d]+)\)"),
            *found_in(README, r"0.011 \(p = ([.\d]+)\)"),
            *found_in(README, r"r = 1 raises the loss \(p = ([.\d]+)\)")]
    assert said == [round(at_620, 2), round(softmax, 2), round(r_is_1, 2)]
    assert found_in(REPORT, r"1\.421 \(p = ([.\d]+), 3 seeds\)") == [round(at_620, 2)]
    assert found_in(claim("21b"), r"p = ([.\d]+)\) and .* \(p = ([.\d]+)\)") == [
        round(rope, 3), round(r_is_1, 3)]

    rows = read_measurements([FOLDER / "abcdigits.tsv"], alike.RETRIEVAL)
    _, curves = retrieval_curves(rows, plain=False)
    points = {curve.name: curve.points for curve in curves}
    found = [difference(points["Multiscreen + SWE"][n], points["Multiscreen"][n]).p
             for n in (8192, 16384, 32768)]
    assert found_in(claim(16), r"p = ([.\d]+), ([.\d]+) and ([.\d]+)\]") == [
        round(found[0], 2), round(found[1], 2), round(found[2], 3)]

    rows = read_measurements([FOLDER / "abcdigits_ablations.tsv"], alike.RETRIEVAL)
    _, curves = retrieval_curves(rows, plain=False)
    at_32 = {curve.name: curve.points.get(8192) for curve in curves}
    found = [difference(at_32[name + swe], at_32["Multiscreen" + swe]).p
             for name in ("w/o TanhNorm", "r fixed to 1") for swe in ("", " + SWE")]
    verdict, = (row[-1] for row in rows_of(REPORT, "#") if row[0] == "22")
    assert found_in(verdict, r"p = ([.\d]+) to ([.\d]+)\)") == [
        round(min(found), 2), round(max(found), 2)]


def test_the_speeds_on_a_gpu():
    """The range over four sizes of Transformer over Multiscreen, at 131,072 tokens."""
    ms = {(row["model"].partition(":")[0], row["setting"], int(row["parameters"])):
          statistics.fmean(map(float, row["ms"].split()))
          for row in read_table(FOLDER / "latency_gpu.tsv")}
    theirs = [x for (_, setting, _), x in sorted(ms.items(), key=lambda item: item[0][2])
              if setting == "cudnn"]
    found = {}
    for wanted in ("initial", "trained-like", "trained-like + SWE"):
        ours = [x for (_, setting, _), x in sorted(ms.items(), key=lambda item: item[0][2])
                if setting == wanted]
        speeds = [b / a for a, b in zip(ours, theirs)]
        found[wanted] = [float(f"{x:.1f}") for x in (min(speeds), max(speeds))]
    assert found["initial"] == found_in(
        REPORT, r"It is ([\d.]+) to ([\d.]+) times as fast with initial windows")
    assert found["trained-like"] == found_in(
        REPORT, r"([\d.]+) to ([\d.]+) times with windows guessed")
    assert found["trained-like + SWE"] == found_in(
        REPORT, r"trained ones, and ([\d.]+) to ([\d.]+) times with SWE")

    # README has the same as ratios of times, and the largest pair in a table.
    times = [f"{statistics.fmean(x):,.0f} ms" for x in (
        [ms["multiscreen", "initial", 1304884226]], [ms["transformer", "cudnn", 1310935040]],
        [ms["multiscreen", "trained-like + SWE", 1304884226]])]
    assert f"| {times[0]} | {times[1]} | 0.21 |" in README
    assert f"| {times[2]} | {times[1]} | 0.37 |" in README
    low, high = found_in(README, r"first row's ratio is ([\d.]+) to ([\d.]+), the")
    assert [1 / high, 1 / low] == pytest.approx(found["initial"], rel=0.03)
    low, high = found_in(README, r"the second's ([\d.]+) to ([\d.]+)\.")
    assert [1 / high, 1 / low] == pytest.approx(found["trained-like + SWE"], rel=0.03)


# -------------------------------------------------------------------------------------- the report

def claim(n):
    """The fourth cell of a claim's row in the report."""
    text, = (row[3] for row in rows_of(REPORT, "#") if row[0] == str(n))
    return text


def percents(n):
    return [float(x) for x in re.findall(r"([\d.]+)(?: ± [\d.]+)? %", claim(n))]


def test_the_reports_claims_about_retrieval():
    def means(found, names, lengths):
        return [found[name][n] for n in lengths for name in names]

    models, keys, ablations = map(shares, ("abcdigits", "passkey", "abcdigits_ablations"))
    ours, expanded = "Multiscreen", "Multiscreen + SWE"
    assert percents(14)[:3] == means(models, [ours], (2048, 8192, 32768))
    assert percents(15) == [*means(models, ["Transformer, RoPE"], (512, 2048, 8192)),
                            *means(models, ["Transformer, local"], (2048, 8192))]
    assert percents(16)[:6] == means(models, [expanded, ours], (8192, 16384, 32768))
    assert percents(17) == [*means(keys, [expanded], [8192]),
                            *means(keys, [ours], (512, 1024, 2048, 4096, 8192)),
                            *means(keys, ["Transformer, RoPE"], (512, 1024))]
    names = ("Multiscreen", "MiPE → NoPE", "w/o gate", "w/o TanhNorm", "r fixed to 1",
             "MiPE → RoPE")
    assert percents(22) == [*means(ablations, names, [8192]),
                            *means(ablations, [f"{name} + SWE" for name in names], [8192])]


def test_the_reports_claim_about_perplexity():
    """A mean over documents is one of nats, before the exponential."""
    rows = read_measurements([FOLDER / "long_context.tsv"], alike.PERPLEXITY)
    found = {curve.name: [f"{statistics.fmean(curve.points[n].values()):.3g}" for n in (256, 8192)]
             for curve in perplexity_curves(rows)}
    assert found_in(claim(11), r"is ([\d.]+) at 256 bytes and ([\d.]+) at 8,192, the Transformer's "
                               r"([\d.]+) and ([\d.]+) \[3\]") == [
        float(x) for x in (*found["Multiscreen, 0.93M"], *found["Transformer, 1.2M"])]


def test_the_reports_claims_about_losses():
    rows = scaling.get_rows(scaling.get_models(read_runs([FOLDER / "scaling.tsv"])))
    savings = [round(row["saving"]) for row in rows if row["saving"] == row["saving"]]
    assert savings == [-7, *found_in(claim(1), r"saves (\d+) ± 7 % against .* 68 thousand, "
                                     r"(\d+) ± 7 % against 86, (\d+) ± 5 % against 164, "
                                     r"(\d+) ± 3 % against 257 and (\d+) % against 328")]
    others = [round(row["non_emb"]) for row in rows if row["non_emb"] == row["non_emb"]]
    assert others == [-33, 9, 20, 35, 41, 29]
    assert "33 % more" in claim(2) and "9 ± 8, 20 ± 8, 35 ± 6, 41 ± 3 and 29 %" in claim(2)

    means = {key: f"{statistics.fmean(x):.2f}" for key, x in losses_by_rate().items()}
    qknorm = [means["Transformer + QKNorm", lr] for lr in (2**-4, 2**-2, 1.0)]
    assert f"ends at {qknorm[0]}, {qknorm[1]} and {qknorm[2]}" in claim(6)
    ours = [means["Multiscreen", lr] for lr in (2**-4, 2**-2, 1.0)]
    assert f"Multiscreen at {ours[0]}, {ours[1]} and {ours[2]}" in claim(6)
    by_rate = changes("lr_sweep", 3, "lr")
    for exponent in (-8, -6, -4):
        change, std = by_rate[f"Transformer + QKNorm, lr {2.0**exponent}"]
        assert f"{change:.3f} ± {std:.3f} at 2^{exponent}" in claim(6)

    found = changes("sanity", 4)
    assert "{:.4f} ± {:.4f}".format(*map(abs, found["Transformer, no weight decay"])) in claim(9)
    found = changes("ablations", 3)
    for row, name, words in (
            ("21a", "w/o Gate", "without the gate"), ("21a", "w/o TanhNorm", "without TanhNorm"),
            ("21a", "MiPE → NoPE", "with NoPE"), ("21b", "MiPE → RoPE", "with RoPE"),
            ("21b", "Fixed r = 1", "with r = 1")):
        assert "{:+.3f} ± {:.3f} ".format(*found[name]) + words in claim(row)
    text = " ".join(REPORT.split())
    change, std = found["Softmax"]
    assert f"{-change:.3f} ± {std:.3f} lower for softmax" in text
    found = changes("copying_losses", 3)
    assert "by {:.3f} ± {:.3f}, that of the local one by {:.3f} ± {:.3f}".format(
        *found["softmax"], *found["local"]) in text


def test_the_reports_tiles():
    rows = read_table(FOLDER / "text_multiscreen-0/tiles.tsv")
    w, r, alive = (np.array([float(row[name]) for row in rows]) for name in ("w", "r", "alive"))
    pairs = inside(203, torch.tensor(w)).sum((1, 2)).numpy()
    text = " ".join(REPORT.split())
    assert f"rejects {1 - alive.mean():.0%} of".replace("%", " %") in text
    zero = 1 - (pairs * alive).sum() / pairs.sum()
    assert f"of all tiles together, {zero:.0%}".replace("%", " %") in text
    assert f"median window is {np.median(w):.1f} tokens, and {(w > 256).sum()} of the 64" in text
    assert f"median r is {np.median(r):.2f}, and {(r > 0.9).sum()} of the 64" in text
    assert (alive == 0).sum() == 16 and "Sixteen tiles accept nothing" in text


def test_the_verdicts_and_their_tallies():
    said = {row[0]: row[-1] for row in rows_of(REPORT, "#")}
    assert len({name.rstrip("ab") for name in said}) == 22
    counts = {word: sum(verdict.startswith(word) for verdict in said.values())
              for word in ("shown", "partly", "contradicted", "not testable")}
    assert sum(counts.values()) == len(said)
    for word, count in counts.items():
        for text in (REPORT, README):
            assert re.search(rf"\b{count} (are |is ){word}", " ".join(text.split())), (word, count)


def test_how_far_a_repeated_run_moves():
    """The runs of curves.tsv are those of lr_sweep.tsv with seed 0, trained again."""
    first = {(run.label, run.flags["lr"]): run.loss(1000)
             for run in read_runs([FOLDER / "lr_sweep.tsv"]) if run.seed == "0"}
    again = {(run.label.partition(",")[0], run.flags["lr"]): run.loss(1000)
             for run in read_runs([FOLDER / "curves.tsv"])}
    log = (ROOT / "lab/LOG.md").read_text()
    cells = {row[0]: row[2:] for row in rows_of(log, "run | seed")}
    rates = ("0.00390625", "0.0625", "1.0")
    before, after = ([f"{runs['Transformer', lr]:.3f}" for lr in rates] for runs in (first, again))
    assert cells["Transformer, 2^-8, 2^-4, 1 (lr_sweep, curves)"] == [
        ", ".join(before), ", ".join(after)]
    for rate, words in (("0.0625", "the same, 2^-4 (earlier, lr_sweep, curves)"),
                        ("1.0", "the same, 1 (earlier, lr_sweep, curves)")):
        both = first["Multiscreen", rate], again["Multiscreen", rate]
        assert cells[words][1] == "{:.3f}, {:.3f}".format(*both)

    def moved(words):
        numbers = [float(x) for cell in cells[words] for x in cell.split(", ")]
        return max(numbers) - min(numbers)

    best, at_1 = (moved(f"the same, {rate} (earlier, lr_sweep, curves)") for rate in ("2^-4", "1"))
    theirs = [abs(again["Transformer", lr] - first["Transformer", lr]) for lr in rates]
    said = found_in(REPORT, r"moved by up to ([\d.]+) and a Transformer by ([\d.]+), at 2\^-4 a "
                            r"Transformer moved by ([\d.]+), and at a rate of 1 they moved by up "
                            r"to ([\d.]+) and ([\d.]+)")
    assert said == [round(best, 3), *(round(x, 3) for x in theirs[:2]), round(at_1, 2),
                    round(theirs[2], 2)]


def test_retrieval_with_scaled_rope_is_told_by_seed():
    """One fact in the report, in LOG.md and in a lecture: two seeds of three, and the third."""
    rows = read_measurements([FOLDER / "abcdigits_ablations.tsv"], alike.RETRIEVAL)
    _, curves = retrieval_curves(rows, plain=False)
    curve, = (curve for curve in curves if curve.name == "MiPE → RoPE + best RoPE scaling")
    at_16, at_32 = (sorted((round(100 * x) for x in curve.points[n].values()), reverse=True)
                    for n in (4096, 8192))
    assert at_16[0] == at_16[1]
    said = [at_16[0], *sorted(at_32[:2]), at_16[2], at_32[2]]
    lecture = (ROOT / "course/exercises/teach/lecture4.md").read_text()
    for text in (REPORT, lecture):
        assert said == found_in(text, r"find (\d+) % at 16 times [^.]*? (\d+) and (\d+) % at 32 "
                                      r"times, and the third finds (\d+) and (\d+) %")
    log = (ROOT / "lab/LOG.md").read_text()
    assert found_in(log, r"find (\d+), \d+ and (\d+) % at 16 times [^.]*? (\d+), (\d+) and (\d+) % "
                         r"at 32") == [said[0], said[3], *said[1:3], said[4]]


def test_the_latencies_compare_models_of_these_sizes():
    sizes = {}
    for row in read_table(FOLDER / "latency_gpu.tsv"):
        sizes.setdefault(row["model"].partition(":")[0], set()).add(int(row["parameters"]))
    ours, theirs = sorted(sizes["multiscreen"]), sorted(sizes["transformer"])
    assert found_in(REPORT, r"which have ([\d.]+), ([\d.]+), ([\d.]+) and ([\d.]+) times its "
                            "parameters") == [round(b / a, 2) for a, b in zip(ours, theirs)]


# ------------------------------------------------------------------------------------- mechanisms

def test_the_table_of_mechanisms():
    lines = mechanisms.get_lines(read_table(FOLDER / "mechanisms.tsv"))
    digits = {("loss", 0): 3, ("perplexity", 2048): 2, ("needles", 256): 0, ("needles", 1024): 0,
              ("needles", 4096): 0}
    rows = rows_of((ROOT / "docs/mechanisms.md").read_text(), "mechanism")
    for row, values in zip(rows, lines.values(), strict=True):
        cells = [mean_in_words(values[name].values(), n) if name in values else ""
                 for name, n in digits.items()]
        learned = ""
        if ("needle digits", 0) in values:
            learned = f"{sum(x > 0.5 for x in values['needle digits', 0].values())} of 3"
        assert [cell.strip() for cell in row[2:]] == [*cells[:2], learned, *cells[2:]]


@needs_matplotlib
def test_the_differences_of_mechanisms_are_paired_by_seed(call, capsys):
    """Those of the needles at the longest length, less the best's and less the same as trained."""
    lines = mechanisms.get_lines(read_table(FOLDER / "mechanisms.tsv"))
    found = {key: np.array(list(values["needles", 4096].values())) for key, values in lines.items()}
    table = printed(call, capsys, mechanisms, FOLDER / "mechanisms.tsv", "--out", "m.png")
    for model in ("screening", "Multiscreen"):
        said = []
        for other in (("local", ""), (model, "")):
            mean, std = mean_and_std(found[model, "SWE"] - found[other])
            said += [mean, p_of(mean / (std / 3**0.5), 3)]
        line, = (line for line in table if line[:2] == [model, "SWE"]
                 and line[4] == line[-1] == "3 (32-34)")
        assert [float(line[n]) for n in (2, 3, 5, 6)] == pytest.approx(said, rel=1e-3)


def test_what_three_seeds_of_mechanisms_can_tell():
    """Student's t with two degrees of freedom: p = 1 - t / sqrt(2 + t^2), of two sides."""
    lines = mechanisms.get_lines(read_table(FOLDER / "mechanisms.tsv"))

    def p(one, other):
        a, b = (lines[key]["needles", 4096] for key in (one, other))
        mean, std = mean_and_std(a[seed] - b[seed] for seed in a)
        t = abs(mean) / (std / 3**0.5)
        return round(1 - t / (2 + t**2) ** 0.5, 2)

    found = [p(("local", ""), ("Multiscreen", "SWE")), p(("local", ""), ("screening", "SWE")),
             p(("Multiscreen", "SWE"), ("Multiscreen", "")),
             p(("screening", "SWE"), ("screening", ""))]
    text = (ROOT / "docs/mechanisms.md").read_text()
    assert found == found_in(
        text, r"\(p = ([.\d]+) and ([.\d]+), paired by seed\), nor show that SWE helps "
              r"Multiscreen \(p = ([.\d]+)\), although it helps screening \(p = ([.\d]+)\)")


def test_the_runs_of_sigmoid_that_ended_too_early():
    rows = [row for row in read_table(FOLDER / "mechanisms.tsv") if row["model"] == "sigmoid"]
    steps = [int(row["step"]) for row in rows if row["what"] == "needle digits"
             and float(row["value"]) < 0.5]
    shares = [100 * float(row["value"]) for row in rows if (row["what"], row["length"]) == (
        "needles", "256") and float(row["value"]) < 0.5]
    text = (ROOT / "docs/mechanisms.md").read_text().replace(",", "")
    assert [*steps, *shares] == pytest.approx(found_in(
        text, r"ended at steps (\d+) and (\d+) although they find only (\d+) and (\d+) %"))


# ----------------------------------------------------------------------------------------- copying

NAMES = {"Multiscreen": "Multiscreen", "Multiscreen with SWE": "Multiscreen + SWE",
         "Multiscreen as trained": "Multiscreen", "softmax, RoPE": "Transformer, RoPE",
         "local": "Transformer, local"}


@pytest.mark.parametrize("name, title, curves", [("controls", "distance in bytes", 6),
                                                 ("copying", "gain of seeds 32 to 34", 4)])
def test_the_tables_of_copying(name, title, curves):
    found = copying_of(read_copying(name))
    said = rows_of(COPYING, title)
    assert len(said) == curves
    for title, *cells in said:
        what, _, model = title.rpartition(": ")
        same, another = (found[NAMES[model]][end] for end in ("same", "another"))
        if what == "cost":
            assert cells == [f"{x:.2f}" for x in same.mean(axis=0)]
        else:
            assert cells == [f"{mean:.2f} ± {std:.2f}"
                             for mean, std in map(mean_and_std, (another - same).T)]


def statistics_of(ours, theirs):
    """(mean, deviation, t, p) of the gain over 128 to 8,192 bytes, and of the cost."""
    found = []
    for a, b in ((ours["another"] - ours["same"], theirs["another"] - theirs["same"]),
                 (ours["same"], theirs["same"])):
        mean, std = mean_and_std((a - b)[:, :7].mean(axis=1))
        t = mean / (std / len(a) ** 0.5)
        found.append((mean, std, t, p_of(t, len(a))))
    return found


@needs_matplotlib
def test_the_statistics_of_copying(call, capsys):
    """They are computed here from the rows, and are those that lab.figures prints."""
    lines = printed(call, capsys, figures, "gain", FOLDER / "controls.tsv", "--out", "g.png")
    found = copying_of(read_copying("controls"))
    ours = found["Multiscreen + SWE"]
    assert ours["same"].shape == (5, 9)
    for title, *cells in rows_of(COPYING, "Multiscreen with SWE, less"):
        name, said = NAMES[title], []
        for what, (mean, std, t, p) in zip(("gain", "same"), statistics_of(ours, found[name])):
            pair = {"Multiscreen + SWE", name}
            line, = (line for line in lines if line[2:3] == [what] and set(line[:2]) == pair)
            sign = 1 if line[0] == "Multiscreen + SWE" else -1
            shown = [float(line[n]) for n in (4, 5, 6, 7)]
            assert [sign * shown[0], shown[1], sign * shown[2]] == pytest.approx([mean, std, t],
                                                                                 rel=1e-3)
            assert shown[3] == pytest.approx(p, rel=1e-3, abs=1e-9)
            said += [f"{mean:.2f} ± {std:.2f}", f"{t:.1f}", p_in_words(p)]
        assert cells == said

    line, = (line for line in lines if len(line) == 11 and "(" in line[2]
             and {*line[:2]} == {"Multiscreen + SWE", "Transformer, local"})
    by_distance = [re.fullmatch(r"(\S+) \((\S+)\)", cell).groups() for cell in line[2:]]
    assert len(by_distance) == 9
    gains = [of["another"] - of["same"] for of in (ours, found["Transformer, local"])]
    known = [mean_and_std(x) for x in (gains[0] - gains[1]).T]
    assert [abs(float(mean)) for mean, _ in by_distance] == pytest.approx(
        [abs(mean) for mean, _ in known], abs=0.0051)
    corrected = holm([p_of(mean / (std / 5**0.5), 5) for mean, std in known])
    assert [float(p) for _, p in by_distance] == pytest.approx(corrected, abs=0.0006)
    assert found_in(COPYING, r"correction p is ([.\d]+) to ([.\d]+)\.") == [
        round(min(corrected), 3), round(max(corrected), 3)]
    means = [round(mean, 2) for mean, _ in known]
    assert [means[0], means[6]] == [min(means), max(means)]
    assert found_in(COPYING, r"at 128 bytes, ([.\d]+) nats, and largest at 8,192, ([.\d]+)\.") == [
        means[0], means[6]]

    errors = standard_errors(mean_gains_by_string("Multiscreen + SWE")
                             - mean_gains_by_string("Transformer, local"))
    assert found_in(COPYING, r"in gain is ([\d.]+) over the seeds, ([\d.]+) over the ten strings, "
                             r"and ([\d.]+) over both") == [round(x, 2) for x in errors]
    line, = (line for line in lines if line[2:3] == ["gain"]
             and {*line[:2]} == {"Multiscreen + SWE", "Transformer, local"})
    assert [float(x) for x in line[8:]] == pytest.approx(errors, rel=1e-3)
    said = re.findall(r"less than guessing up to ([\d,]+) bytes", " ".join(COPYING.split()))
    for name, last in zip(("Multiscreen + SWE", "Transformer, local"), said, strict=True):
        cheaper = found[name]["same"].mean(axis=0) < math.log(62)
        assert cheaper.tolist() == [128 * 2**n <= int(last.replace(",", "")) for n in range(9)]


def test_what_pages_say_of_the_statistic():
    """That of the five new seeds, and that of the three before them."""
    new, old = (copying_of(read_copying(name)) for name in ("controls", "copying"))
    gain, cost = statistics_of(new["Multiscreen + SWE"], new["Transformer, local"])
    before, cost_before = statistics_of(old["Multiscreen + SWE"], old["Transformer, local"])
    softmax, cost_softmax = statistics_of(old["Multiscreen + SWE"], old["Transformer, RoPE"])

    def numbers(statistic, digits=3):
        mean, std, _, p = statistic
        return [round(abs(mean), 2), round(std, 2), round(p, digits)]

    number = r"(\d*\.\d+)"
    both = rf"{number} ± {number} nats"
    assert found_in(COPYING, rf"gains {both} more than the local Transformer \(p = {number}\), and "
                             rf"the string costs it {both} less \(p = {number}\)") == [
        *numbers(gain), *numbers(cost)]
    assert found_in(COPYING, rf"gains {number} nats per character less \(p = {number}\)") == [
        numbers(gain)[0], numbers(gain)[2]]
    assert found_in(COPYING, rf"gains {both} more than the local Transformer \(p = {number}; by "
                             rf"cost {number}\), and {number} ± {number} more than softmax "
                             rf"\(p = {number}; by cost {number}\)") == [
        *numbers(before), numbers(cost_before)[2], *numbers(softmax), numbers(cost_softmax)[2]]

    assert found_in(REPORT, rf"gains {both} more per character \(p = {number}, .*?; by cost p = "
                            rf"{number}\)") == [*numbers(gain), numbers(cost)[2]]
    assert found_in(REPORT, rf"the difference is {both} \(p = {number}, three seeds; by cost p = "
                            rf"{number}\)") == [*numbers(before), numbers(cost_before)[2]]
    rope = old["Transformer, RoPE"]
    gains = (rope["another"] - rope["same"]).mean(axis=0)[2:]
    assert found_in(REPORT, rf"gains at most {number} nats from 512 bytes on") == [
        round(gains.max(), 2)]

    assert found_in(README, rf"gains {number} nats less over 128 to 8,192 bytes \(.*?: p = "
                            rf"{number}; by cost {number}\)") == [
        numbers(gain)[0], numbers(gain)[2], numbers(cost)[2]]


def mean_gains_by_string(name):
    """Of controls.tsv, over 128 to 8,192 bytes: an array (seeds, strings)."""
    curve, = (curve for curve in curves_by_string(read_copying("controls")) if curve.name == name)
    strings = sorted({place[-1] for place in curve.points})
    gains = [[[*curve.points["gain", distance, string].values()] for string in strings]
             for distance in (128, 256, 512, 1024, 2048, 4096, 8192)]
    return np.mean(gains, axis=0).T


def test_the_losses_of_the_new_seeds():
    runs = read_runs([FOLDER / "controls_losses.tsv"])
    by_label = {label: [run for run in runs if run.label == label]
                for label in ("Multiscreen", "Transformer, local")}
    said = [f"{mean:.3f} ± {std:.3f}" for mean, std in (
        mean_and_std(run.loss(8000) for run in of_label) for of_label in by_label.values())]
    assert "{} for Multiscreen and {} for the local Transformer.".format(*said) in (
        " ".join(COPYING.split()))
    speeds = {label: 0.0 for label in by_label}
    for row in read_table(FOLDER / "controls_losses.tsv"):
        speeds[row["run"]] += float(row["tokens_per_s"])
    assert found_in(COPYING, r"Multiscreen made ([.\d]+) times as many of them a second") == [
        round(speeds["Multiscreen"] / speeds["Transformer, local"], 2)]


def p_in_words(p):
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def means_by_seed(table, column, model, **wanted):
    """The means over the strings: an array (seeds, numbers of the column)."""
    wanted |= {"model": model, "swe": "yes" if model == "Multiscreen" else ""}
    found = {}
    for row in read_table(FOLDER / f"{table}.tsv"):
        if wanted.items() <= row.items():
            found.setdefault(row["seed"], []).append([float(x) for x in row[column].split()])
    assert sorted(found) == ["40", "41", "42", "43", "44"]
    return np.mean([found[seed] for seed in sorted(found)], axis=1)


@needs_matplotlib
def test_the_controls_of_copying(call, capsys):
    """The table of the page is computed here from the rows, and lab.figures prints its numbers."""
    known, exact, orders, lost, falls, dearer = {}, [], [], [], [], []
    for model in ("Multiscreen", "Transformer, local"):
        # Arrays (seeds, ends, distances): of nine distances, the three that the controls have.
        ends = means_by_seed("controls", "nats", model).reshape(5, 4, 9)[:, :, [0, 3, 5]]
        after = means_by_seed("controls_before", "nats", model).reshape(5, 4, 3)
        rows = {"another string": (ends[:, 1] - ends[:, 0], 2),
                "another order": (ends[:, 2] - ends[:, 0], 2),
                "a near miss": (ends[:, 3] - ends[:, 0], 2),
                "another string, 4,096 bytes before": (after[:, 1] - after[:, 0], 2)}
        same, another, reordered, near_miss = ends.mean(axis=0)
        orders += [*abs(another - reordered)]
        lost += [*(100 * (near_miss - same) / (another - same))]
        dearer.append((after[:, 0] - ends[:, 0]).mean(axis=0))
        falls.append(100 * (1 - (after[:, 1] - after[:, 0]).mean(axis=0) / (another - same)))
        of_k = {k: {column: means_by_seed("controls_candidates", column, model, candidates=k)[:, :3]
                    for column in ("nats", "right", "beaten")} for k in ("2", "32")}
        for k in of_k:
            rows[f"cost among {k}"] = of_k[k]["nats"], 2
        for k in of_k:
            rows[f"right among {k} (%)"] = 100 * of_k[k]["right"], 0
        expected = [100 * share_among(32, share) for share in of_k["2"]["right"].mean(axis=0)]
        rows["expected among 32 (%)"] = np.array(expected), 0
        rows["beaten among 31 (%)"] = 100 * of_k["32"]["beaten"], 0
        for name, (x, digits) in rows.items():
            if name.startswith("expected"):
                x = x[None]                            # one number, not one for each seed
            known.setdefault(name, []).extend(mean_in_words(of_seeds, digits) for of_seeds in x.T)
            exact += [mean_in_words(of_seeds, 2) for of_seeds in x.T]
    assert {row[0]: row[1:] for row in rows_of(COPYING, "at a distance of")} == known

    assert found_in(COPYING, r"another string by at most ([.\d]+) nats") == [round(max(orders), 2)]
    assert found_in(COPYING, r"more by (\d+) to (\d+) % of the gain") == [round(min(lost)),
                                                                     round(max(lost))]
    numbers = r"by (\d+), (\d+) and (\d+) %"
    assert found_in(COPYING, rf"falls {numbers} at .*? SWE {numbers}") == [
        round(x) for x in (*falls[1], *falls[0])]
    numbers = r"([.\d]+), ([.\d]+) and ([.\d]+)"
    assert found_in(COPYING, rf"itself costs them {numbers}, and {numbers} nats more") == [
        round(x, 2) for x in (*dearer[1], *dearer[0])]

    lines = []
    for figure, table in (("gain", "controls"), ("gain", "controls_before"),
                          ("candidates", "controls_candidates")):
        lines += printed(call, capsys, figures, figure, FOLDER / f"{table}.tsv", "--out",
                         f"{table}.png")
    assert set(exact) <= {cell for line in lines for cell in line}


def test_how_much_the_cost_of_copying_still_moves():
    steps_of, moves = {}, {}
    for curve in copying_curves(read_copying("copying_steps", alike.COPYING_STEPS), "step"):
        for distance in (128, 1024):
            points = curve.part("same", ..., distance).points
            for seed in curve.seeds():
                steps = [step for step in points if seed in points[step]][-9:]     # the last 8,000
                steps_of[curve.name, seed] = steps
                family = curve.model.partition(",")[0]
                last = [points[step][seed] for step in steps]
                moves[family] = max(moves.get(family, 0), np.abs(np.diff(last)).max())
    assert all(x[-1] - x[0] == 8000 for x in steps_of.values())
    assert found_in(COPYING, r"up to ([\d.]+) nats for Multiscreen and ([\d.]+) for the Trans") == [
        float(f"{moves[name]:.2f}") for name in ("Multiscreen", "Transformer")]


def test_copying_at_equal_steps():
    rows, gains = read_copying("copying_steps", alike.COPYING_STEPS), {}
    for step in range(13000, 17001, 1000):
        for name, ends in copying_of(rows, step).items():
            gains.setdefault(name, []).append(ends["another"] - ends["same"])
    text = " ".join(COPYING.split())
    for name in ("Multiscreen + SWE", "Transformer, local", "Transformer, RoPE"):
        mean, std = mean_and_std(np.mean(gains[name], axis=0)[:, 1])       # at 1,024 bytes
        assert f"{mean:.2f} ± {std:.2f}" in text


def test_the_best_scaling_of_copying():
    found = copying_of(read_copying("copying_scaled"))
    best = found["Transformer, RoPE + best RoPE scaling"]["same"].T[1:5]
    means = [f"{mean:.1f} ± {std:.1f}" for mean, std in map(mean_and_std, best)]
    said = re.findall(r"([\d.]+ ± [\d.]+) (?:nats )?at (?:256 bytes|512|1,024|2,048)",
                      " ".join(COPYING.split()))
    assert said == means

    means = {curve.factor: {distance: statistics.fmean(
        x for (end, there, _), of_seed in curve.points.items() for x in of_seed.values()
        if (end, there) == ("same", distance)) for distance in (512, 1024, 2048)}
        for curve in curves_by_string(read_copying("copying_scaled"))}
    cheapest = [min(means, key=lambda factor: means[factor][n]) for n in (512, 1024, 2048)]
    assert cheapest == ["ntk16", "ntk64", "ntk64"]     # from 1,024 bytes on
    assert "From 1,024 bytes on the best one is NTK-aware scaling by 64" in (
        " ".join(COPYING.split()))


# ------------------------------------------------------------------------------------- the commands

def test_every_figure_that_a_page_shows_exists():
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("models/*.md"),
             *ROOT.glob("lab/*.md"), FOLDER / "report.md"]
    shown = [(page, name) for page in pages
             for name in re.findall(r"!\[.*?\]\(([\w/.-]+\.(?:png|svg))\)", page.read_text())]
    assert len(shown) > 15
    assert [name for page, name in shown if not (page.parent / name).exists()] == []


def test_the_commands_name_modules_and_tables_that_are_there():
    """Of a program that is gone a page says `git show COMMIT:path`, not how it was called."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("models/*.md"),
             *ROOT.glob("lab/*.md"), FOLDER / "report.md"]
    for page in pages:
        text = page.read_text()
        written = {path.replace("/", ".") for path in re.findall(r"to `([\w/]+)\.py`", text)}
        named = re.findall(r"python3? -m\s+([\w.]+\w)|\bfrom ([\w.]+) import", text)
        modules = {command or module for command, module in named} - written
        assert [name for name in modules if not find_spec(name)] == [], page
        tables = re.findall(r"lab/report/[\w./-]+\.tsv", text)
        assert [name for name in tables if not (ROOT / name).exists()] == [], page


def test_the_table_of_memory_adds_up():
    text = (ROOT / "docs/scale.md").read_text()
    lines = re.findall(r"^\| `(--(?:psi|model) .+)` \| (.+) \|$", text, re.M)
    assert len(lines) == 9
    for words, cells in lines:
        args = train.get_parser().parse_args(words.split())
        gpus, P, passes, state, total, checkpoint = (
            float(x.replace(",", "")) for x in cells.split(" | "))
        weights = 4 * P / 2**30
        gradients = weights / gpus if passes == 1 else weights
        assert passes == 2**22 / 2**12 / (args.batch_size * gpus)
        assert state == pytest.approx(3 * weights / gpus + gradients, abs=0.006)
        assert state < total < 80
        assert checkpoint == pytest.approx(3 * weights, abs=0.006)

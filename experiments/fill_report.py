"""Fill in the tables of report/report.md and of README.md.

    python -m experiments.fill_report

A code block of the report is what the command above it prints.

A comment above each block holds its command, `<!-- python -m experiments... -->`, or the path of a
table that is shown as it is. The commands run in a copy of the report's tables, so the figures and
tables of the report stay as they are. SHA256SUMS gets a line for each table: `sha256sum -c` reads
it. README's two tables are filled from the report's tables; its verdicts are the report's, up to a
colon.
"""
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from experiments.common import mean_and_std, percent
from experiments.latency import is_transformer, latency_rows
from experiments.perplexity import get_curves, positions, setting_of, summarize
from experiments.retrieval import at_least_95, get_cells, mean_by_length
from experiments.runs import read_table
from experiments.scaling import at_best_rates, between_rows, model_rows
from support.cli import Parser, UsageError, cli, replacing
from support.table import as_columns, read_rows

ROOT = Path(__file__).parent.parent
REPORT = ROOT / "experiments/report/report.md"
README = ROOT / "README.md"
BLOCK = re.compile(r"<!-- (.+) -->\n```\n(?:(?!```).*\n)*```\n")


def run(command, folder):
    """What a command prints in a folder."""
    done = subprocess.run([sys.executable, *command.split()[1:]], cwd=folder, capture_output=True,
                          text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    if done.returncode:
        raise UsageError(f"{command}: {done.stderr.strip()}")
    return done.stdout


def filled(text, run):
    """The text of a report with its tables. run(command, folder): what the command prints."""
    def fill(block):
        source = block[1]
        if source.startswith("python "):
            lines = run(source, folder).splitlines()
            kept = [line for line in lines if not line.startswith(("wrote ", "no figure"))]
            table = "\n".join(kept).strip("\n")
        else:
            rows = read_rows(ROOT / source)
            table = as_columns(rows[0], [row.values() for row in rows])
        return f"<!-- {source} -->\n```\n{table}\n```\n"

    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(REPORT.parent, Path(folder) / "experiments/report",
                        ignore=shutil.ignore_patterns("*.png", "*.md"))
        return BLOCK.sub(fill, text)


# ------------------------------------------------------------------------------------ README

FILLED = re.compile(r"<!-- filled in by python -m experiments\.fill_report: (\w+) -->\n(?:\|.*\n)*")
# The rows of README's first table: name, table of the report, model, whether windows are expanded.
FOUND = [("Multiscreen", "abcdigits", "multiscreen", False),
         ("Multiscreen + SWE", "abcdigits", "multiscreen", True),
         ("Multiscreen, no positions", "abcdigits_ablations", "multiscreen:nope", False),
         ("Softmax", "competition", "multiscreen:softmax", False),
         ("Softmax + SWE", "competition", "multiscreen:softmax", True),
         ("Transformer, local", "abcdigits", "transformer:4,4,96:local", False),
         ("Transformer, RoPE", "abcdigits", "transformer:4,4,96", False)]


def markdown(*lines):
    """A table, its second line the alignment."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def found(table, model, swe=False):
    """{length: {seed: share of the answers found}} of a model in a table of the report."""
    rows = read_rows(REPORT.with_name(f"{table}.tsv"))
    return mean_by_length(get_cells([row for row in rows if row["model"] == model
                                     and bool(row["swe"]) == swe]))


def shares(by_length, *lengths):
    """The mean over the seeds at each length, and "-" where there is none."""
    means = [percent(mean_and_std(by_length[n].values())[0]) if n in by_length else "-"
             for n in lengths]
    return [mean.replace(".0%", "%").replace("%", " %") for mean in means]


def answers():
    """README's first table: the answers found by each kind of model."""
    rows = []
    for name, table, model, swe in FOUND:
        by_length = found(table, model, swe)
        rows.append([name, *shares(by_length, 256, 2048, 8192, 32768),
                     at_least_95(by_length[8192])])
    columns = ["answers found, by bytes of context", "256", "2,048", "8,192", "32,768",
               "seeds with 95 % or more at 8,192"]
    return markdown(columns, ["---", *["--:"] * 5], *rows)


def claims():
    """README's second table: a claim, a number or two of each family, the report's verdict."""
    ours, expanded = (found("abcdigits", "multiscreen", swe) for swe in (False, True))
    local, rope = (found("abcdigits", f"transformer:4,4,96{kind}") for kind in (":local", ""))
    keys = found("passkey", "multiscreen", True), found("passkey", "transformer:4,4,96")
    flat, rising = (perplexities(name, how) for name, how in
                    (("multiscreen", "as trained"), ("transformer", "RoPE ×1")))
    rate_m, rate_t = (losses_by_rate(name) for name in ("Multiscreen", "Transformer"))
    saved = [row for row in between_rows(at_best_rates(model_rows(read_table(
        REPORT.with_name("scaling.tsv"))))) if row[0] == "total"]
    time_m, time_t = milliseconds()
    rows = [
        ["15", "beyond the training length a Transformer degrades: at 32 times",
         " ".join(shares(ours, 8192)),
         f"RoPE {shares(rope, 8192)[0]}, local {shares(local, 8192)[0]}"],
        ["16", "expanded windows (`--swe`) help small models: at 32 and 128 times",
         ", ".join(shares(expanded, 8192, 32768)), "has no windows"],
        ["17", "passkey, a number in English text, with `--swe`: at 16 times",
         *(shares(by_length, 8192)[0] for by_length in keys)],
        ["11", "stable perplexity far beyond the training length: at 256 and 8,192 bytes",
         f"{flat[256]:.3g}, {flat[8192]:.3g}", f"{rising[256]:.3g}, {rising[8192]:.3g}"],
        ["5", "trains at large rates: loss at the best rate and at 1",
         *(f"{min(rates.values()):.2f}, {rates[1]:.2f}" for rates in (rate_m, rate_t))],
        ["1", "needs about 30 % fewer parameters at equal loss: two pairs, in thousands",
         *(f"{saved[1][n] / 1000:.0f}, {saved[4][n] / 1000:.0f}" for n in (2, 3))],
        ["18", "lower latency: ms at 1,024 and 16,384 tokens on a CPU",
         *(f"{ms[1024]:.0f}, {ms[16384]:,.0f}" for ms in (time_m, time_t))],
    ]
    said = verdicts()
    return markdown(["#", "claim of the paper", "Multiscreen", "Transformer", "verdict"],
                    ["--:", *["---"] * 4],
                    *([*row, re.match("[^:;]*", said[row[0]])[0]] for row in rows))


def verdicts():
    """{number of a claim: the report's verdict}"""
    rows = re.findall(r"^\| (\d+) \|.*\| (.*?) \|$", REPORT.read_text(encoding="utf-8"), re.M)
    return dict(rows)


def perplexities(model, how):
    """{tokens of context: perplexity} of the report's long texts."""
    curves = get_curves(read_rows(REPORT.with_name("long_context.tsv")))
    for curve, seeds in curves.items():
        if curve.model.startswith(model) and setting_of(curve._asdict()) == how:
            return dict(zip(positions(int(curve.length)), (x for x, _ in summarize(seeds))))


def losses_by_rate(name):
    """{learning rate: mean loss of the runs that did not diverge}"""
    rates = {}
    for run in read_table(REPORT.with_name("lr_sweep.tsv")):
        if run.label == name:
            rates.setdefault(float(run.flags["lr"]), []).append(run.loss_at())
    return {rate: mean_and_std(losses)[0] for rate, losses in rates.items()}


def milliseconds():
    """{tokens: ms} of Multiscreen with initial windows, and of the Transformer's faster setting."""
    ours, theirs = {}, {}
    for row in latency_rows(read_rows(REPORT.with_name("latency.tsv"))):
        if is_transformer(row):
            theirs[row["length"]] = min(row["ms"], theirs.get(row["length"], row["ms"]))
        elif row["setting"] == "initial":
            ours[row["length"]] = row["ms"]
    return ours, theirs


def filled_readme(text):
    """README with its two tables."""
    tables = {"answers": answers, "claims": claims}
    return FILLED.sub(lambda table: table[0].partition("\n")[0] + "\n" + tables[table[1]](), text)


def sums():
    """The text of SHA256SUMS."""
    tables = {path.relative_to(REPORT.parent): path for path in REPORT.parent.rglob("*.tsv")}
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n"
                   for name, path in sorted(tables.items()))


def main():
    Parser(__doc__).parse_args()
    text = filled(REPORT.read_text(encoding="utf-8"), run)
    files = {REPORT: text, REPORT.with_name("SHA256SUMS"): sums()}
    files[README] = filled_readme(README.read_text(encoding="utf-8"))
    for path, content in files.items():
        with replacing(path) as file:
            file.write(content.encode())
        print(f"wrote {path}")


if __name__ == "__main__":
    cli(main)

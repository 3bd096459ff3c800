"""Fill in the tables of report/report.md and of README.md.

    python -m experiments.fill_report

A code block of the report is what the command above it prints. A comment above each block holds
its command, `<!-- python -m experiments... -->`, or the path of a table to show as it is. The
commands run in a copy of the report's tables, so the figures and tables of the report stay as they
are. SHA256SUMS gets a line for each table: `sha256sum -c` reads it. README's two tables are filled
from what the report then prints; its verdicts are the report's, up to a colon.
"""
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from support.cli import Parser, UsageError, cli, replacing
from support.source import ROOT
from support.table import as_columns, read_rows

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
# The rows of README's first table: their name, a table of the report, the name there.
FOUND = [("Multiscreen", "abcdigits", "Multiscreen"),
         ("Multiscreen + SWE", "abcdigits", "Multiscreen + SWE"),
         ("Multiscreen, no MiPE", "abcdigits_ablations", "MiPE → NoPE"),
         ("Softmax", "competition", "Softmax"),
         ("Softmax + SWE", "competition", "Softmax + SWE"),
         ("Transformer, local", "abcdigits", "Transformer, local"),
         ("Transformer", "abcdigits", "Transformer")]


def tables_of(report):
    """{name of a table of the report: its lines, each a list of cells}"""
    found = {}
    for block in BLOCK.finditer(report):
        name = re.search(r"([^/]+)\.tsv", block[1])[1]
        found[name] = [re.split(" {2,}", line.strip()) for line in block[0].splitlines()]
    return found


def rows_of(lines, *first):
    """The rows whose first cells are these, each as {column: cell}."""
    rows, columns = [], []
    for cells in lines:
        if cells[0] in ("model", "run", "size", "rates"):
            columns = cells
        elif tuple(cells[: len(first)]) == first:
            rows.append(dict(zip(columns, cells)))
    return rows


def shares(lines, name, *lengths):
    """The share of the answers that a model finds at each length, a mean over its seeds."""
    means = {row["length"]: row["mean"] for row in rows_of(lines, name) if "mean" in row}
    return [means.get(length, "-").replace(".0%", "%").replace("%", " %") for length in lengths]


def answers(report):
    """README's first table: the answers found by each kind of model."""
    tables, rows = tables_of(report), []
    for name, table, label in FOUND:
        lines = tables[table]
        enough = rows_of(lines, label, "95 %")[0]["8192"]
        rows.append([name, *shares(lines, label, "256", "2048", "8192", "32768"), enough])
    columns = ["answers found, by bytes of context", "256", "2,048", "8,192", "32,768",
               "seeds with 95 % or more at 8,192"]
    return markdown(columns, ["---", *["--:"] * 5], *rows)


def claims(report):
    """README's second table: a claim, a number or two of each family, the report's verdict."""
    tables = tables_of(report)
    found, keys = tables["abcdigits"], tables["passkey"]
    flat, rising = (rows_of(tables["long_context"], *words)[0] for words in
                    (("Multiscreen, 0.93M",), ("Transformer, 1.2M", "RoPE ×1")))
    latency = [{row["length"]: float(row["ms"]) for row in rows_of(tables["latency"], *words)}
               for words in (("multiscreen", "934146", "initial"),
                             ("transformer:8M", "1213312", "flash"))]
    # Two pairs of sizes of the table without a line, at the best rates, which comes first.
    equal = [row for row in rows_of(tables["scaling"], "total") if "at_loss" in row]
    saved = equal[1], equal[4]
    rows = [
        ["15", "beyond the training length a Transformer degrades: at 32 times",
         *shares(found, "Multiscreen", "8192"),
         f"RoPE {shares(found, 'Transformer', '8192')[0]}, "
         f"local {shares(found, 'Transformer, local', '8192')[0]}"],
        ["16", "expanded windows (`--swe`) help small models: at 32 and 128 times",
         ", ".join(shares(found, "Multiscreen + SWE", "8192", "32768")), "-"],
        ["17", "passkey, a number in English text, with `--swe`: at 16 times",
         *shares(keys, "Multiscreen + SWE", "8192"), *shares(keys, "Transformer", "8192")],
        ["11", "stable perplexity far beyond the training length: at 256 and 8,192 bytes",
         *(f"{row['256'].split()[0]}, {row['8192'].split()[0]}" for row in (flat, rising))],
        ["5", "trains at large rates: loss at the best rate and at 1",
         *(losses(tables["lr_sweep"], name) for name in ("Multiscreen", "Transformer"))],
        ["1", "needs about 30 % fewer parameters at equal loss: two pairs, in thousands",
         *(", ".join(f"{float(row[column]) / 1000:.0f}" for row in saved)
           for column in ("N_multiscreen", "N_transformer"))],
        ["18", "lower latency: an untrained model's ms at 1,024 and 16,384 tokens on a CPU",
         *(f"{ms['1024']:.0f}, {ms['16384']:,.0f}" for ms in latency)],
    ]
    said = verdicts(report)
    return markdown(["#", "claim of the paper", "Multiscreen", "Transformer", "verdict"],
                    ["--:", *["---"] * 4],
                    *([*row, re.match("[^:;]*", said[row[0]])[0]] for row in rows))


def losses(lines, name):
    """The least loss over the learning rates, and that at 1."""
    found = {row["run"].partition(", lr ")[2]: float(row["val_loss"])
             for row in rows_of(lines) if row.get("val_loss") and row["run"].startswith(f"{name},")}
    return f"{min(found.values()):.2f}, {found['1.0']:.2f}"


def verdicts(report):
    """{number of a claim: the report's verdict}"""
    return dict(re.findall(r"^\| (\d+) \|.*\| (.*?) \|$", report, re.M))


def markdown(*lines):
    """A table, its second line the alignment."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def filled_readme(text, report):
    """README with its two tables. report: the text of the report, with its tables."""
    def fill(table):
        comment = table[0].splitlines(keepends=True)[0]
        return comment + {"answers": answers, "claims": claims}[table[1]](report)

    return FILLED.sub(fill, text)


def sums():
    """The text of SHA256SUMS."""
    tables = {path.relative_to(REPORT.parent): path for path in REPORT.parent.rglob("*.tsv")}
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n"
                   for name, path in sorted(tables.items()))


def main():
    Parser(__doc__).parse_args()
    text = filled(REPORT.read_text(encoding="utf-8"), run)
    files = {REPORT: text, REPORT.with_name("SHA256SUMS"): sums()}
    files[README] = filled_readme(README.read_text(encoding="utf-8"), text)
    for path, content in files.items():
        with replacing(path) as file:
            file.write(content.encode())
        print(f"wrote {path}")


if __name__ == "__main__":
    cli(main)

"""Fill in the tables of report/report.md: a code block is what the command above it prints.

    python -m experiments.fill_report

A comment above each block holds its command, `<!-- python -m experiments... -->`, or the path of a
table that is shown as it is. The commands run in a copy of the report's tables, so the figures and
tables of the report stay as they are. SHA256SUMS gets a line for each table: `sha256sum -c` reads
it.
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
from support.table import as_columns, read_rows

ROOT = Path(__file__).parent.parent
REPORT = ROOT / "experiments/report/report.md"
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


def sums():
    """The text of SHA256SUMS."""
    tables = {path.relative_to(REPORT.parent): path for path in REPORT.parent.rglob("*.tsv")}
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n"
                   for name, path in sorted(tables.items()))


def main():
    Parser(__doc__).parse_args()
    text = filled(REPORT.read_text(encoding="utf-8"), run)
    for path, content in {REPORT: text, REPORT.with_name("SHA256SUMS"): sums()}.items():
        with replacing(path) as file:
            file.write(content.encode())
        print(f"wrote {path}")


if __name__ == "__main__":
    cli(main)

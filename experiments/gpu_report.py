"""A report that grows while it is measured, and the steps that fill it until the time is over."""
import math
import time
import traceback

from support.cli import UsageError, replacing


class Report:
    """A Markdown file, rewritten whenever something is added: it is whole whenever you look.

    What is in the file already stays. A table's rows may come in any order (`key` sorts them).
    """

    def __init__(self, path, seconds=math.inf):
        self.path, self.deadline = path, time.monotonic() + seconds
        self.before = path.read_text() if path.exists() else ""
        self.blocks, self.notes = [], []

    def left(self):
        """The seconds that are left."""
        return self.deadline - time.monotonic()

    def section(self, title, text=""):
        self.close()
        self.blocks.append(f"## {title}\n\n{text}".rstrip())
        self.write()

    def table(self, title, columns, key=None):
        """A table without rows yet. add(row) adds one."""
        table = Table(self, title, columns, key)
        self.blocks.append(table)
        return table

    def note(self, text):
        """A line below the tables of this section."""
        print(text, flush=True)
        self.notes.append(text)
        self.write()

    def close(self):
        """What comes next stands below the notes."""
        self.blocks.extend(f"* {text}" for text in self.notes)
        self.notes = []

    def write(self):
        shown = [str(block) for block in self.blocks] + [f"* {text}" for text in self.notes]
        with replacing(self.path) as file:
            file.write((self.before + "".join(f"{text}\n\n" for text in shown if text)).encode())


class Table:
    """Rows of a report. One without rows is not shown."""

    def __init__(self, report, title, columns, key):
        self.report, self.title, self.columns, self.key = report, title, columns, key
        self.rows = []

    def add(self, *row):
        if len(row) != len(self.columns):
            raise ValueError(f"{len(row)} cells in a table of {len(self.columns)} columns")
        self.rows.append(row)
        print("  ".join(cell(x) for x in row), flush=True)
        self.report.write()

    def __str__(self):
        if not self.rows:
            return ""
        rows = sorted(self.rows, key=self.key) if self.key else self.rows
        lines = [self.columns, ["---"] * len(self.columns), *rows]
        lines = ["| " + " | ".join(cell(x) for x in row) + " |" for row in lines]
        return "\n".join([f"{self.title}:\n", *lines])


def cell(x):
    """A cell: four digits of a number, - for what was not measured."""
    if x is None or isinstance(x, float) and math.isnan(x):
        return "-"
    return f"{x:.4g}" if isinstance(x, float) else str(x).replace("|", "/")


def first_line(e):
    """An exception in one line. A compiler's says at the top only that it comes from there."""
    lines = [line.strip() for line in str(e).splitlines() if line.strip()] or ["no message"]
    return f"{type(e).__name__}: {' / '.join(lines[:3])[:300]}"


def run_steps(steps, report, tell=lambda missing: None):
    """Run steps (name, seconds that must be left, function of the report) in their order.

    A step that fails is a note, and the next one is run. What did not fit is listed. `tell` is
    given the names of what is not done yet, before each step, in case that the process is killed.
    """
    missing = [name for name, _, _ in steps]
    for name, need, run in steps:
        tell(missing)
        if report.left() < need:
            continue
        try:
            run(report)
        except UsageError:
            raise
        except Exception as e:
            traceback.print_exc()
            report.note(f"{name} failed ({first_line(e)})")
        missing.remove(name)
    tell(missing)
    if missing:
        report.note(did_not_fit(missing))


def did_not_fit(names):
    return f"Did not fit into the time: {'; '.join(names)}."

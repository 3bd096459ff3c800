"""`pytest course/exercises`: short failures, points at the end, --hidden and --grades."""
import re
from pathlib import Path

import pytest

import multiscreen
from course.exercises import checks
from course.exercises.checks import Wrong

# As they were before any file of yours was imported.
ORIGINAL = {module: dict(vars(module)) for module in (checks, multiscreen)}


def pytest_addoption(parser):
    group = parser.getgroup("exercises")
    group.addoption("--hidden", metavar="FILE", help="a file of extra tests, with its own points")
    group.addoption("--grades", action="store_true", help="print the points as TSV")


def pytest_configure(config):
    if config.getoption("--hidden"):
        config.args.append(config.getoption("--hidden"))
    if config.option.tbstyle == "auto":
        config.option.tbstyle = "short"
    config.option.reportchars = "N"                    # print each message once
    config.pluginmanager.register(Points(config), "points")


class Points:
    """Collects the outcome of each test. Registered for all folders, so hidden tests count too."""

    def __init__(self, config):
        self.grades = config.getoption("--grades")
        self.rows = {}                                 # test -> (part, exercise, passed)
        self.unreadable = set()                        # messages of syntax errors

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        outcome = yield
        report = outcome.get_result()
        for error in causes(call.excinfo and call.excinfo.value):
            if isinstance(error, Wrong):
                report.longrepr = str(error)
            elif isinstance(error, NotImplementedError):
                report.longrepr = f"still to do: {error}"
            elif "modified by an inplace operation" in str(error):
                report.longrepr = ("a tensor was changed in place, and its gradient needs the old "
                                   "values: write x = x + 1, not x += 1 or x.add_(1)")
            elif isinstance(error, SyntaxError):
                where = f"{Path(error.filename or '').name}, line {error.lineno}"
                message = f"{where}: {error.msg}: {(error.text or '').strip()}"
                report.longrepr = message
                if message in self.unreadable:         # each test meets it: print it once
                    report.outcome, report.longrepr = "skipped", (str(item.path), 0, message)
                self.unreadable.add(message)

    def pytest_runtest_logreport(self, report):
        """With `pytest -n 2` the tests run in other processes: only their reports come here."""
        if report.when == "call" or report.failed:
            name = report.nodeid.rpartition("::")[2].removeprefix("test_")
            self.rows[report.nodeid] = part_of(report.location[0]), name, report.passed

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_call(self, item):
        for module, before in ORIGINAL.items():
            changed = [name for name, x in before.items() if vars(module).get(name) is not x]
            vars(module).update(before)
            if changed:
                raise Wrong(f"{module.__name__}.{changed[0]} was replaced: the tests need the "
                            "original")

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter):
        terminalreporter.ensure_newline()
        rows = sorted(self.rows.values(), key=lambda row: row[0])
        if self.grades:
            terminalreporter.write_line("part\texercise\tpoints\tof")
            for part, exercise, passed in rows:
                terminalreporter.write_line(f"{part}\t{exercise}\t{int(passed)}\t1")
        parts = [part for part, _, _ in rows]
        for part in dict.fromkeys(parts):
            points = sum(passed for p, _, passed in rows if p == part)
            terminalreporter.write_line(f"{part}: {points} of {parts.count(part)}")


def causes(error):
    """An error and its causes: Triton's interpreter wraps a kernel's exceptions."""
    while error:
        yield error
        error = error.__cause__


def part_of(file):
    """`part 1` for test_part1*.py, the name of the file for others."""
    name = Path(file).stem
    match = re.match(r"test_part(\d+)", name)
    return f"part {match[1]}" if match else name

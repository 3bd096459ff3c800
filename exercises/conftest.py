"""`pytest exercises`: short failures, points at the end, --hidden and --grades."""
import re
from pathlib import Path

import pytest

import multiscreen
from exercises import checks
from exercises.checks import Wrong

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
            elif isinstance(error, SyntaxError):
                where = f"{Path(error.filename or '').name}, line {error.lineno}"
                message = f"{where}: {error.msg}: {(error.text or '').strip()}"
                report.longrepr = message
                if message in self.unreadable:         # each test meets it: print it once
                    report.outcome, report.longrepr = "skipped", (str(item.path), 0, message)
                self.unreadable.add(message)
        if report.when == "call" or report.failed:
            self.rows[item.nodeid] = part_of(item), item.name.removeprefix("test_"), report.passed

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
        if self.grades:
            terminalreporter.write_line("part\texercise\tpoints\tof")
            for part, exercise, passed in self.rows.values():
                terminalreporter.write_line(f"{part}\t{exercise}\t{int(passed)}\t1")
        parts = [part for part, _, _ in self.rows.values()]
        for part in dict.fromkeys(parts):
            points = sum(passed for p, _, passed in self.rows.values() if p == part)
            terminalreporter.write_line(f"{part}: {points} of {parts.count(part)}")


def causes(error):
    """An error and its causes: Triton's interpreter wraps a kernel's exceptions."""
    while error:
        yield error
        error = error.__cause__


def part_of(item):
    """`part 1` for test_part1*.py, the name of the file for others."""
    match = re.match(r"test_part(\d+)", item.path.stem)
    return f"part {match[1]}" if match else item.path.stem

"""Grade one submission. Gradescope runs this command for you.

    python -m course.exercises.teach.autograder --root /autograder

The folder has the layout that Gradescope documents: source/ is this repository, submission/ has the
student's files, and the grades are written to results/results.json. Only the four files from
part1_screening.py to part4_kernel.py are taken from the submission, so that a student's file can
never replace a test. They are copied into a copy of the repository that has no solutions, no known
mistakes and no teach/.

A test that passes earns as many points as minutes.tsv gives it minutes. All tests of a part run in
one process. If that process ends early or takes too long, each of these tests is run again in a
process of its own, so that a single bad function does not cost the points of the others.
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

from support.cli import Parser, UsageError, cli

PARTS = ["part1_screening.py", "part2_model.py", "part3_derivative.py", "part4_kernel.py"]
LEFT_OUT = shutil.ignore_patterns(".git", "__pycache__", "out*", "solutions", "teach", "tests")
MINUTES = Path(__file__).with_name("minutes.tsv")
LONGEST = {"part": 100, "test": 55}                    # seconds; 39 minutes if all hang


def read_minutes():
    """The table minutes.tsv, as {test: (exercise, minutes)}."""
    rows = (line.split("\t") for line in MINUTES.read_text().splitlines()[1:])
    return {test: (exercise, int(minutes)) for exercise, test, minutes, _ in rows}


def lay_out(source, submission, folder):
    """Copy the repository and the student's parts to a folder. Return the missing parts' names."""
    shutil.copytree(source, folder, ignore=LEFT_OUT)
    missing = []
    for name in PARTS:
        found = sorted(submission.rglob(name), key=lambda path: len(path.parts))
        if found:
            shutil.copyfile(found[0], folder / "course/exercises" / name)
        else:
            missing.append(name)
    return missing


def run_tests(folder, part, seconds, test=""):
    """Run the tests of a part, or one of them, in a process of their own.

    Returns {test: None if it passed, otherwise its message}, or {} if the process did not finish.
    """
    files = sorted(map(str, (folder / "course/exercises").glob(f"test_part{part}*.py")))
    with tempfile.TemporaryDirectory() as results:
        report = Path(results) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files,
                   f"-ktest_{test}", f"--junitxml={report}"]
        env = {name: value for name, value in os.environ.items() if name != "EXERCISES"}
        env |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        try:
            subprocess.run(command, cwd=folder, env=env, timeout=seconds, capture_output=True)
        except subprocess.TimeoutExpired:
            return {}
        return read_report(report) if report.exists() else {}


def read_report(path):
    """Read a report in JUnit's format, as {test: None if it passed, otherwise its message}."""
    found = {}
    for case in ET.parse(path).iter("testcase"):
        wrong = [x for x in case if x.tag in ("failure", "error", "skipped")]
        name = case.get("name").removeprefix("test_")
        found[name] = (wrong[0].text or wrong[0].get("message")) if wrong else None
    return found


def grade(folder, minutes):
    """Run every test of the table. Returns {test: None if it passed, otherwise its message}."""
    found = {}
    for part in range(1, len(PARTS) + 1):
        tests = [test for test, (exercise, _) in minutes.items() if exercise[0] == str(part)]
        results = run_tests(folder, part, LONGEST["part"]) if tests else {}
        for test in tests:
            if test not in results:
                results |= run_tests(folder, part, LONGEST["test"], test)
        found |= {test: results.get(test, "this test did not finish: it took more than "
                            f"{LONGEST['test']} seconds, or your code exited the program")
                  for test in tests}
    return found


def as_results(found, minutes, missing, seconds):
    """The content of results.json."""
    tests = []
    for test, (exercise, points) in minutes.items():
        message = found[test]
        tests.append({"name": f"{exercise} {test}", "score": 0 if message else points,
                      "max_score": points, "status": "failed" if message else "passed",
                      "output": message or "right", "visibility": "visible"})
    output = f"missing, so the stubs were graded instead: {', '.join(missing)}" if missing else ""
    return {"tests": tests, "output": output, "execution_time": round(seconds),
            "stdout_visibility": "hidden"}


def main(argv=None):
    p = Parser(__doc__)
    p.add_argument("--root", type=Path, default=Path("/autograder"),
                   help="the folder with source/ and submission/ [/autograder]")
    root = p.parse_args(argv).root
    for name in ("source", "submission"):
        if not (root / name).is_dir():
            raise UsageError(f"{root / name} is missing: --root must have source/ and submission/")
    start, minutes = time.monotonic(), read_minutes()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder) / "course"
        missing = lay_out(root / "source", root / "submission", folder)
        found = grade(folder, minutes)
    results = as_results(found, minutes, missing, time.monotonic() - start)
    (root / "results").mkdir(exist_ok=True)
    (root / "results/results.json").write_text(json.dumps(results, indent=1))
    score, full = (sum(test[key] for test in results["tests"]) for key in ("score", "max_score"))
    print(f"{score} of {full} points, in {results['execution_time']} s")


if __name__ == "__main__":
    cli(main)

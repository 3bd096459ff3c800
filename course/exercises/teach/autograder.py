"""Grade a folder of submissions, or the one that Gradescope runs this command for.

    python -m course.exercises.teach.autograder submissions > grades.tsv
    python -m course.exercises.teach.autograder --root /autograder

In `submissions` each folder and each zip file is the submission of a student. The table that is
printed has a row for each of them, with the points of each part, their total, and remarks: what
hangs or ends the program, and why a part has no points, if all its tests say the same. Its file may
be missing, import a solution, or have nothing but stubs.

The other folder has the layout that Gradescope documents: source/ is this repository, submission/
has the student's files, and the grades are written to results/results.json. Only the four files
from part1_screening.py to part4_kernel.py are taken from a submission, from whichever folder in it.

A test that passes earns as many points as minutes.tsv gives it minutes. All tests of a part run in
one process. If that process ends early or takes too long, each of these tests is run again in a
process of its own, so that a single bad function does not cost the points of the others. Each
process gets a fresh copy of the files that it needs, because a submission may delete its own. There
is no solution in that copy except multiscreen.py, and the tests refuse a file that imports it.

Before anything of the student runs, results.json says that the student has 0 points. If grading
ends in the middle, this is what remains, and not the results of somebody else.
"""
if not __package__:
    raise SystemExit("error: run python -m course.exercises.teach.autograder in the repository's "
                     "folder")

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from pathlib import Path

from course.exercises.grade import TO_DO, missing

PARTS = ["part1_screening.py", "part2_model.py", "part3_derivative.py", "part4_kernel.py"]
NEEDED = ["multiscreen.py", "pyproject.toml", "models/retrieval.pt", "course/__init__.py",
          "course/exercises/*.py"]
ROOT = Path(__file__).parents[3]
MINUTES = Path(__file__).with_name("minutes.tsv")
HUNG, ENDED = "this did not finish", "your code ended the program"
LONGEST = {"part": 100, "test": 54}                    # seconds; 39 minutes if all hang


def read_minutes():
    """The table minutes.tsv, as {test: (exercise, minutes)}."""
    rows = (line.split("\t") for line in MINUTES.read_text().splitlines()[1:])
    return {test: (exercise, int(minutes)) for exercise, test, minutes, _ in rows}


def read_files(source, submission):
    """The files to grade, {path: content}, and {a part's number: why it has no points}."""
    files = {}
    for pattern in NEEDED:
        for path in source.glob(pattern):
            files[path.relative_to(source)] = path.read_bytes()
    refused = {}
    for number, name in enumerate(PARTS, 1):
        found = sorted(path for path in submission.rglob(name) if path.is_file())
        if len(found) == 1:
            files[Path("course/exercises") / name] = found[0].read_bytes()
        elif found:
            places = ", ".join(str(path.relative_to(submission)) for path in found)
            refused[number] = f"there are {len(found)} files {name}: {places}. Hand in one of them"
        else:
            refused[number] = missing(name, submission.rglob("*"))
    return files, refused


def run_tests(files, part, seconds, test=""):
    """Run the tests of a part, or one of them, in a process of their own.

    Returns {test: (whether it passed, its message)}, and what to say of a test that is not in it.
    """
    where = f"course/exercises/test_part{part}.py"
    if test:
        where += f"::test_{test}"
    with (tempfile.TemporaryDirectory() as reports,
          tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder):
        for path, content in files.items():
            (Path(folder) / path).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder) / path).write_bytes(content)
        report = Path(reports) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", where,
                   f"--junitxml={report}"]
        env = {name: value for name, value in os.environ.items() if name != "EXERCISES"}
        env |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1",
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        process = subprocess.Popen(command, cwd=folder, env=env, start_new_session=True,
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return {}, f"{HUNG} in {seconds} seconds"
        finally:
            end(process)
        if report.exists():
            return read_report(report), "this test has no result: did your code end pytest?"
    return {}, f"{ENDED}, with exit code {code}"


def end(process):
    """Kill a process and all that it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def read_report(path):
    """Read a report in JUnit's format, as {test: (whether it passed, its message)}."""
    found = {}
    for case in ET.parse(path).iter("testcase"):
        wrong = [x for x in case if x.tag in ("failure", "error", "skipped")]
        message = "right"
        if wrong:
            message = wrong[0].text or wrong[0].get("message")
        found[case.get("name").removeprefix("test_")] = (not wrong, message)
    return found


def grade(files, refused, minutes):
    """Run every test of the table. Returns {test: (whether it passed, its message)}."""
    found = {}
    for part in range(1, len(PARTS) + 1):
        tests = [test for test, (exercise, _) in minutes.items() if exercise[0] == str(part)]
        if part in refused:
            found |= {test: (False, refused[part]) for test in tests}
            continue
        results, _ = run_tests(files, part, LONGEST["part"]) if tests else ({}, "")
        for test in tests:
            if test not in results:
                again, reason = run_tests(files, part, LONGEST["test"], test)
                results[test] = again.get(test, (False, reason))
        found |= {test: results[test] for test in tests}
    return found


def as_results(found, minutes, output, seconds):
    """The content of results.json."""
    tests = []
    for test, (exercise, points) in minutes.items():
        passed, message = found[test]
        tests.append({"name": f"{exercise} {test}", "score": points if passed else 0,
                      "max_score": points, "status": "passed" if passed else "failed",
                      "output": message, "visibility": "visible"})
    return {"tests": tests, "output": output, "execution_time": round(seconds),
            "stdout_visibility": "hidden"}


def write(root, results):
    """Write results.json, in place of what is there."""
    (root / "results").mkdir(parents=True, exist_ok=True)
    (root / "results/results.json").write_text(json.dumps(results, indent=1))


def remarks_on(found, minutes):
    """What a teacher should know: what hangs or ends the program, and why a part has no points."""
    lines = []
    for part in range(1, len(PARTS) + 1):
        results = {test: found[test] for test, (exercise, _) in minutes.items()
                   if exercise[0] == str(part)}
        # Each stub names its exercise.
        said = {TO_DO if message.startswith(TO_DO) else message for _, message in results.values()}
        if len(said) == 1 and len(results) > 1 and said != {"right"}:
            lines.append(f"part {part}: {said.pop()}")
            continue
        for test, (_, message) in results.items():
            if message.startswith((HUNG, ENDED)):
                lines.append(f"{test}: {message}")
    return "; ".join(" ".join(line.split()) for line in lines)


def grade_one(path, minutes):
    """The row of a submission, a folder or a zip file: the points of each part, and remarks."""
    with tempfile.TemporaryDirectory() as folder:
        if path.is_file():
            shutil.unpack_archive(path, folder, "zip")
            path = Path(folder)
        found = grade(*read_files(ROOT, path), minutes)
    points = [0] * len(PARTS)
    for test, (exercise, worth) in minutes.items():
        if found[test][0]:
            points[int(exercise[0]) - 1] += worth
    return points, remarks_on(found, minutes)


def grade_all(folder, minutes):
    """Print a row for each submission in a folder, whatever happens in it."""
    print("submission", *PARTS, "total", "remarks", sep="\t", flush=True)
    for path in sorted(folder.iterdir()):
        try:
            points, remarks = grade_one(path, minutes)
        except Exception as e:                         # such as a file that is no zip file
            points, remarks = [0] * len(PARTS), f"not graded: {e}"
        print(path.name, *points, sum(points), remarks, sep="\t", flush=True)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("submissions", type=Path, nargs="?",
                   help="a folder of submissions, of which a table is printed")
    p.add_argument("--root", type=Path, default=Path("/autograder"),
                   help="the folder with source/ and submission/ [/autograder]")
    args = p.parse_args(argv)
    start, minutes, root = time.monotonic(), read_minutes(), args.root
    if args.submissions:
        if any((args.submissions / name).exists() for name in PARTS):
            sys.exit(f"error: {args.submissions} is one submission: name the folder that it is in")
        grade_all(args.submissions, minutes)
        return
    write(root, {"score": 0, "output": "Grading did not finish. If this remains, your code has "
                                       "probably ended the grader: ask your teacher."})
    for name in ("source", "submission"):
        if not (root / name).is_dir():
            sys.exit(f"error: {root / name} is missing: --root must have source/ and submission/")

    files, refused = read_files(root / "source", root / "submission")
    found = grade(files, refused, minutes)
    results = as_results(found, minutes, "\n".join(refused.values()), time.monotonic() - start)
    write(root, results)
    score, full = (sum(test[key] for test in results["tests"]) for key in ("score", "max_score"))
    print(f"{score} of {full} points, in {results['execution_time']} s")


if __name__ == "__main__":
    main()

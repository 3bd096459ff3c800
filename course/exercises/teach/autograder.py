"""Grade a folder of submissions, or the one that Gradescope runs this command for.

    python -m course.exercises.teach.autograder submissions > grades.tsv
    python -m course.exercises.teach.autograder --root /autograder

In `submissions` each folder and each zip file is the submission of a student. The table that is
printed has a row for each of them, with the points of each part, their total, and remarks: what
hangs or ends the program, and why a part has no points, if all its tests say the same. Its file may
be missing, or have nothing but stubs.

The other folder has the layout that Gradescope documents: source/ is this repository, submission/
has the student's files, and the grades are written to results/results.json. Only the four files
from part1_screening.py to part4_kernel.py are taken from a submission, from whichever folder in it.

A test that passes earns as many points as minutes.tsv gives it minutes. The student's code runs in
processes of its own, one for each exercise: see course/exercises/grade.py. Before any of it runs,
results.json says that the student has 0 points. If grading ends in the middle, this is what
remains, and not the results of somebody else.
"""
if not __package__:
    raise SystemExit("error: run python -m course.exercises.teach.autograder in the repository's "
                     "folder")

import argparse
import contextlib
import importlib
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest

from course.exercises import grade

PARTS = ["part1_screening.py", "part2_model.py", "part3_derivative.py", "part4_kernel.py"]
MINUTES = Path(__file__).with_name("minutes.tsv")


def read_minutes():
    """The table minutes.tsv, as {test: (exercise, minutes)}."""
    rows = (line.split("\t") for line in MINUTES.read_text().splitlines()[1:])
    return {test: (exercise, int(minutes)) for exercise, test, minutes, _ in rows}


def grade_files(submission, minutes):
    """Run every test of the table on a submission: {test: (whether it passed, its message)}."""
    with tempfile.TemporaryDirectory() as folder:
        refused = take_files(submission, Path(folder))
        grade.FOLDER = Path(folder)
        return {test: (False, refused[exercise[0]]) if exercise[0] in refused else
                run_test(exercise[0], test) for test, (exercise, _) in minutes.items()}


def take_files(submission, folder):
    """Copy the files to grade into a folder. Returns {a part's number: why it has no points}."""
    refused = {}
    for number, name in zip("1234", PARTS):
        found = sorted(path for path in submission.rglob(name) if path.is_file())
        if len(found) == 1:
            shutil.copy(found[0], folder)
        elif found:
            places = ", ".join(str(path.relative_to(submission)) for path in found)
            refused[number] = f"there are {len(found)} files {name}: {places}. Hand in one of them"
        else:
            refused[number] = grade.missing(name, submission)
    return refused


def run_test(part, test):
    """Whether a test passes, and its message. What the student's code prints is not shown."""
    try:
        with contextlib.redirect_stdout(None):
            getattr(importlib.import_module(f"course.exercises.test_part{part}"), f"test_{test}")()
    except (pytest.fail.Exception, pytest.skip.Exception) as e:
        return False, str(e)
    except Exception as e:                             # such as results that are damaged
        return False, f"your results could not be read: {type(e).__name__}: {e}"
    return True, "right"


def as_results(found, minutes, seconds):
    """The content of results.json."""
    tests = []
    for test, (exercise, points) in minutes.items():
        passed, message = found[test]
        tests.append({"name": f"{exercise} {test}", "score": points if passed else 0,
                      "max_score": points, "status": "passed" if passed else "failed",
                      "output": message, "visibility": "visible"})
    return {"tests": tests, "execution_time": round(seconds), "stdout_visibility": "hidden"}


def write(root, results):
    """Write results.json, in place of what is there."""
    (root / "results").mkdir(parents=True, exist_ok=True)
    (root / "results/results.json").write_text(json.dumps(results, indent=1))


def remarks_on(found, minutes):
    """What a teacher should know: what hangs or ends the program, and why a part has no points."""
    lines = []
    for part in "1234":
        results = {test: found[test] for test, (exercise, _) in minutes.items()
                   if exercise[0] == part}
        # Each stub names its exercise.
        said = {grade.TO_DO if message.startswith(grade.TO_DO) else message
                for _, message in results.values()}
        if len(said) == 1 and len(results) > 1 and said != {"right"}:
            lines.append(f"part {part}: {said.pop()}")
            continue
        for test, (_, message) in results.items():
            if message.startswith((grade.HUNG, grade.ENDED)):
                lines.append(f"{test}: {message}")
    return "; ".join(" ".join(line.split()) for line in lines)


def grade_one(path, minutes):
    """The row of a submission, a folder or a zip file: the points of each part, and remarks."""
    with tempfile.TemporaryDirectory() as folder:
        if path.is_file():
            shutil.unpack_archive(path, folder, "zip")
            path = Path(folder)
        found = grade_files(path, minutes)
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
    write(root, {"score": 0, "output": "Grading did not finish. If this stays, ask your teacher."})
    if not (root / "submission").is_dir():
        sys.exit(f"error: {root / 'submission'} is missing: --root must have submission/")
    results = as_results(grade_files(root / "submission", minutes), minutes,
                         time.monotonic() - start)
    write(root, results)
    score, full = (sum(test[key] for test in results["tests"]) for key in ("score", "max_score"))
    print(f"{score} of {full} points, in {results['execution_time']} s")


if __name__ == "__main__":
    main()

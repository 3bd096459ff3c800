"""Grade a folder of submissions, or the one that Gradescope runs this command for.

    python -m course.exercises.teach.autograder submissions > grades.tsv
    python -m course.exercises.teach.autograder --root /autograder

In `submissions` each folder and each zip file is the submission of a student. The table that is
printed has a row for each of them, with the points of each part, their total, and remarks: which
exercises hang or end the program, and what the first test of a part without points says.

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
import csv
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
    """The rows of minutes.tsv, as dicts."""
    with open(MINUTES) as file:
        return list(csv.DictReader(file, delimiter="\t"))


def grade_files(submission):
    """Run every test of minutes.tsv on a submission. Returns what Gradescope wants of each."""
    tests = []
    with tempfile.TemporaryDirectory() as folder:
        refused = take_files(submission, Path(folder))
        grade.FOLDER = Path(folder)
        for row in read_minutes():
            part, points = row["exercise"][0], int(row["minutes"])
            passed, output = False, refused.get(part)
            if part not in refused:
                passed, output = run_test(part, row["test"])
            tests.append({"name": f"{row['exercise']} {row['test']}", "max_score": points,
                          "score": points if passed else 0, "output": output})
    return tests


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


def write(root, results):
    """Write results.json, in place of what is there."""
    (root / "results").mkdir(parents=True, exist_ok=True)
    (root / "results/results.json").write_text(json.dumps(results, indent=1))


def row_of(tests):
    """The points of each part, their total, and remarks."""
    points, remarks = [], []
    for part in "1234":
        of_part = [test for test in tests if test["name"].startswith(part)]
        points.append(sum(test["score"] for test in of_part))
        if points[-1] == 0 and of_part:
            remarks.append(f"part {part}: {of_part[0]['output']}")
    for test in tests:
        if test["output"].startswith((grade.HUNG, grade.ENDED)):
            remarks.append(f"{test['name']}: {test['output']}")
    return *points, sum(points), " ".join("; ".join(remarks).split())


def grade_all(folder):
    """Print a row for each submission in a folder, whatever happens in it."""
    print("submission", *PARTS, "total", "remarks", sep="\t", flush=True)
    for path in sorted(folder.iterdir()):
        try:
            with tempfile.TemporaryDirectory() as unpacked:
                if path.is_file():
                    shutil.unpack_archive(path, unpacked, "zip")
                row = row_of(grade_files(Path(unpacked) if path.is_file() else path))
        except Exception as e:                         # such as a file that is no zip file
            row = 0, 0, 0, 0, 0, f"not graded: {e}"
        print(path.name, *row, sep="\t", flush=True)


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("submissions", type=Path, nargs="?",
                   help="a folder of submissions, of which a table is printed")
    p.add_argument("--root", type=Path, default=Path("/autograder"),
                   help="the folder with source/ and submission/ [/autograder]")
    args = p.parse_args(argv)
    root, start = args.root, time.monotonic()
    if args.submissions:
        if any((args.submissions / name).exists() for name in PARTS):
            sys.exit(f"error: {args.submissions} is one submission: name the folder that it is in")
        grade_all(args.submissions)
        return
    write(root, {"score": 0, "output": "Grading did not finish. If this stays, ask your teacher."})
    if not (root / "submission").is_dir():
        sys.exit(f"error: {root / 'submission'} is missing: --root must have submission/")
    tests = grade_files(root / "submission")
    seconds = round(time.monotonic() - start)
    write(root, {"tests": tests, "execution_time": seconds, "stdout_visibility": "hidden"})
    score, full = (sum(test[key] for test in tests) for key in ("score", "max_score"))
    print(f"{score} of {full} points, in {seconds} s")


if __name__ == "__main__":
    main()

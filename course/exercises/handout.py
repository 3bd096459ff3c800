"""Make the hand-out, a zip file with the course for your students, or Gradescope's autograder.

    python -m course.exercises.handout                    writes course.zip, with a folder course/
    python -m course.exercises.handout --out week1.zip
    python -m course.exercises.handout --autograder       writes autograder.zip, for Gradescope

The hand-out has the files of the last commit, except those that are for teachers: the solutions of
parts 3 and 4, the tests of the course itself, course/exercises/teach/ and course/README.md.
multiscreen.py is included although it solves parts 1 and 2, because it is the subject of the
course. The autograder has the same files and what grades them, and so no solutions of parts 3 and 4
that a submission could read.
"""
if not __package__:
    raise SystemExit("error: run python -m course.exercises.handout in the repository's folder")

import argparse
import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TEACH = "course/exercises/teach"
LEFT_OUT = ("course/README.md", TEACH, "course/exercises/solutions", "course/exercises/handout.py",
            "tests/test_course.py", "tests/test_teach.py", "tests/test_notebook.py", ".ci")
GRADER = {f"{TEACH}/__init__.py": f"{TEACH}/__init__.py",
          f"{TEACH}/autograder.py": f"{TEACH}/autograder.py",
          f"{TEACH}/minutes.tsv": f"{TEACH}/minutes.tsv",
          f"{TEACH}/run_autograder": "run_autograder", f"{TEACH}/setup.sh": "setup.sh"}


def is_for_teachers(name):
    """Whether LEFT_OUT names this file or a folder that it is in."""
    return any(name == other or name.startswith(f"{other}/") for other in LEFT_OUT)


def committed_files():
    """Yield the name, content and mode of each file of the last commit."""
    done = subprocess.run(["git", "archive", "--format=tar", "HEAD"], cwd=ROOT,
                          capture_output=True)
    if done.returncode:
        sys.exit("error: the hand-out is made from the last commit, so run this in a clone: "
                 f"git says {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in archive:
            if member.isfile():
                yield member.name, archive.extractfile(member).read(), member.mode


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path,
                   help="the zip file to write [course.zip, or autograder.zip]")
    p.add_argument("--autograder", action="store_true", help="make the autograder for Gradescope")
    args = p.parse_args(argv)
    out = args.out or Path("autograder.zip" if args.autograder else "course.zip")

    files = []
    for name, content, mode in committed_files():
        if not args.autograder and not is_for_teachers(name):
            files.append((f"course/{name}", content, mode))
        elif args.autograder and (name in GRADER or not is_for_teachers(name)):
            files.append((GRADER.get(name, name), content, mode))

    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content, mode in files:
            entry = zipfile.ZipInfo(name)
            entry.external_attr = mode << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    print(f"{out}: {len(files)} files of the last commit")


if __name__ == "__main__":
    main()

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
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TEACH = "course/exercises/teach"
FOR_TEACHERS = ["course/README.md", "course/exercises/solutions", "course/exercises/handout.py",
                "tests/test_course.py", "tests/test_teach.py", "tests/test_notebook.py", ".ci",
                f"{TEACH}/*.md", f"{TEACH}/setup.sh", f"{TEACH}/run_autograder"]
GRADER = [f"{TEACH}/*.py", f"{TEACH}/*.tsv"]


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path,
                   help="the zip file to write [course.zip, or autograder.zip]")
    p.add_argument("--autograder", action="store_true", help="make the autograder for Gradescope")
    args = p.parse_args(argv)
    if args.autograder:
        out, left_out = args.out or Path("autograder.zip"), FOR_TEACHERS
        # Gradescope wants these two at the top.
        options = [f"--add-file={TEACH}/run_autograder", f"--add-file={TEACH}/setup.sh"]
    else:
        out, left_out = args.out or Path("course.zip"), FOR_TEACHERS + GRADER
        options = ["--prefix=course/"]
    done = subprocess.run(
        ["git", "archive", "--format=zip", f"--output={out.resolve()}", *options, "HEAD", ".",
         *[f":(exclude){pattern}" for pattern in left_out]], cwd=ROOT, capture_output=True)
    if done.returncode:
        sys.exit("error: the hand-out is made from the last commit, so run this in a clone: "
                 f"git says {done.stderr.decode().strip()}")
    print(f"{out}: the last commit's files")


if __name__ == "__main__":
    main()

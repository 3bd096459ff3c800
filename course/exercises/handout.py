"""Make the hand-out, a zip file with the course as your students get it.

    python -m course.exercises.handout                    writes course.zip, with a folder course/
    python -m course.exercises.handout --out week1.zip

The hand-out has the files of the last commit, except those that are for teachers: the solutions of
parts 3 and 4, the list of known mistakes and the tests that use it, course/exercises/teach/ and
course/README.md. multiscreen.py is included although it solves parts 1 and 2, because it is the
subject of the course.
"""
import io
import subprocess
import tarfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

from support.cli import Parser, UsageError, cli

ROOT = Path(__file__).parent.parent.parent
LEFT_OUT = ("course/README.md", "course/exercises/teach", "course/exercises/solutions",
            "course/exercises/handout.py", "tests/mutants.py", "tests/test_exercises.py",
            "tests/test_teach.py", "tests/test_notebook.py", ".ci")


def is_for_teachers(name):
    """Whether LEFT_OUT names this file or a folder that it is in."""
    return any(fnmatch(name, pattern) or fnmatch(name, f"{pattern}/*") for pattern in LEFT_OUT)


def committed_files():
    """Yield the name, content and mode of each file of the last commit."""
    done = subprocess.run(["git", "archive", "--format=tar", "HEAD"], cwd=ROOT,
                          capture_output=True)
    if done.returncode:
        raise UsageError("the hand-out is made from the last commit, so run this in a clone: "
                         f"git says {done.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in archive:
            if member.isfile():
                yield member.name, archive.extractfile(member).read(), member.mode


def main(argv=None):
    p = Parser(__doc__)
    p.add_argument("--out", type=Path, default=Path("course.zip"),
                   help="the zip file to write [course.zip]")
    out = p.parse_args(argv).out
    files = [x for x in committed_files() if not is_for_teachers(x[0])]
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content, mode in files:
            entry = zipfile.ZipInfo(f"course/{name}")
            entry.external_attr = mode << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    print(f"{out}: {len(files)} files of the last commit")


if __name__ == "__main__":
    cli(main)

"""Collect the text of the experiment `copying`: the sources of Python and of all packages here.

    python -m lab.collect out/lab/copying/text

Every twentieth file goes to val/, the others to train/.
"""
import hashlib
import os
import shutil
import sysconfig
from pathlib import Path

from support.cli import Parser, cli
from support.data import every_twentieth, standard_library


def main():
    p = Parser(__doc__)
    p.add_argument("folder", type=Path, help="the folder to write, if there is none yet")
    folder = p.parse_args().folder
    files = [*standard_library(), *sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py"))]
    held_out = set(every_twentieth(files))
    if not folder.exists():
        part = folder.with_name(folder.name + ".part")
        shutil.rmtree(part, ignore_errors=True)        # of a command that was stopped
        for n, path in enumerate(files):
            to = part / ("val" if path in held_out else "train")
            to.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, to / f"{n:05}.py")
        os.replace(part, folder)

    # The text is whatever this environment holds, so say which one it is.
    collected = sorted(folder.rglob("*.py"))
    text = hashlib.sha256()
    for path in collected:
        text.update(path.read_bytes())
    print(f"{folder}: {len(collected):,} files, hash {text.hexdigest()[:12]}. The report's runs "
          "read those of Python 3.12.3 and of another machine's packages: do not compare losses "
          "with theirs", flush=True)


if __name__ == "__main__":
    cli(main)

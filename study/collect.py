"""Collect the text that models learned copying from: the sources of Python and its packages here.

    python -m study.collect out/text

Every twentieth file goes to val/, the others to train/. The text is whatever this environment
holds, so the number of files and a hash of them are printed: study/LOG.md has those of our runs,
and losses on another text do not compare with theirs.
"""
import argparse
import hashlib
import shutil
import sysconfig
from pathlib import Path

from train import files_of


def main():
    p = argparse.ArgumentParser(description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder", type=Path, help="the folder to write, if there is none yet")
    folder = p.parse_args().folder
    if not folder.exists():
        packages = Path(sysconfig.get_paths()["purelib"])
        for part in ("train", "val"):
            (folder / part).mkdir(parents=True)
        for n, path in enumerate([*files_of(["stdlib"]), *sorted(packages.rglob("*.py"))]):
            shutil.copyfile(path, folder / ("val" if n % 20 == 19 else "train") / f"{n:05}.py")
    collected = sorted(folder.rglob("*.py"))
    text = hashlib.sha256()
    for path in collected:
        text.update(path.read_bytes())
    print(f"{folder}: {len(collected):,} files, hash {text.hexdigest()[:12]}")


if __name__ == "__main__":
    main()

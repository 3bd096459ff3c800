"""runs/*.sh: what they print is what train.py and the scripts take; a failure stops no other."""
import fnmatch
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

import train
from support import distributed
from support.run import get_args
from tests.helpers import ROOT

SCRIPTS = ("tiny", "small", "controls", "paper")
PYTHON = """#!/bin/sh
echo "$*" >>"$CALLS"
case "$*" in
    *slow*)
        trap 'sleep 1; echo saved >>"$CALLS"; exit 130' INT
        echo >"$CALLS.begun"
        for n in $(seq 600); do sleep 0.1; done ;;
    *wrong*) exit 1 ;;
    *diverges*) mkdir -p o/diverges; touch o/diverges/diverged.txt; exit 3 ;;
esac
"""
FIGURES = """
OUT=o
FIGURES="first second"
. "$(dirname "$0")/lib.sh"
first() {
    each "a wrong b" train --seed @ --out $OUT/@
    train --out $OUT/diverges
    run python -m experiments.wrong
    run $E.draw --out $REPORT
}
second() { each "c slow d" run $E.measure --ckpt @; }
main "$@"
"""


def bash(path, *words, **options):
    return subprocess.run(["bash", str(path), *words], capture_output=True, text=True, **options)


def lines_of(name):
    found = bash(ROOT / f"runs/{name}.sh", "--print")
    assert (found.returncode, found.stderr) == (0, "")
    return found.stdout.splitlines()


@pytest.fixture
def house(tmp_path):
    """(a script of two figures, an environment) in which `python` only notes what it was given."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/lib.sh").write_text((ROOT / "runs/lib.sh").read_text())
    script = tmp_path / "runs/mine.sh"
    script.write_text(FIGURES)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text(PYTHON)
    (tmp_path / "bin/python").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    return script, os.environ | {"PATH": path, "CALLS": str(tmp_path / "calls")}


@pytest.mark.parametrize("name", [*SCRIPTS, "lib"])
def test_bash_can_read_a_script(name):
    assert bash("-n", ROOT / f"runs/{name}.sh").stderr == ""


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_training_has_a_folder_of_its_own_and_flags_that_train_takes(name, monkeypatch):
    folders = {}
    for line in set(lines_of(name)):
        launch, found, flags = line.partition(" train.py ")
        if not found:
            continue
        nodes = re.search("--nnodes ([0-9]+)", launch)
        gpus = 8 * int(nodes[1]) if nodes else 1
        monkeypatch.setattr(distributed, "world", lambda gpus=gpus: gpus)
        args = train.get_parser().parse_args(flags.split())
        assert flags.split()[-1] == args.out
        assert len(set(flags.split()[::2])) == len(flags.split()[::2])
        get_args(train.get_parser(), flags.split())
        folders.setdefault(args.out, set()).add(line)
    assert folders
    assert {out: lines for out, lines in folders.items() if len(lines) > 1} == {}


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_measured_and_drawn_was_made_before(name):
    """A checkpoint by a training, a table by a measurement, in the lines above."""
    made = set()
    for line in lines_of(name):
        words = line.split()
        if " train.py " in line:
            made.add(words[-1])
            continue
        paths = [word.rpartition("=")[2] for word in words]
        inputs = [path for path in paths if path.startswith(f"out/{name}/")
                  and not path.startswith(f"out/{name}/report")]
        for path in inputs:
            assert fnmatch.filter(made, path.removesuffix("/ckpt.pt")), line
            if path.endswith("/ckpt.pt"):
                task = re.search(r"(\w+)(\.py)? ", line.partition("python ")[2])[1]
                task = re.search(r"experiments\.(\w+)", line)[1] if task == "m" else task
                made.add(path.replace("ckpt.pt", f"{task}.tsv"))


def test_tiny_covers_every_script():
    text = "\n".join(lines_of("tiny"))
    for path in (ROOT / "experiments").glob("*.py"):
        # The report's tables are filled in by tests/test_report.py.
        if "cli(main)" in path.read_text() and path.stem != "fill_report":
            assert re.search(rf"python -m experiments\.{path.stem}\b", text), path.name
    assert "python train.py" in text
    assert "python abcdigits.py" in text


def test_paper_has_the_papers_runs():
    runs = [line for line in lines_of("paper") if " train.py " in line]
    assert sum("--psi 64 " in line for line in runs) == 1
    assert sum("--psi 8 " in line for line in runs) == 3
    assert sum(":qknorm " in line for line in runs) == 15
    assert sum("--steps 16384 " in line for line in runs) == 18
    largest, = (line for line in runs if "--psi 64 " in line)
    assert "--nnodes 8" in largest
    assert "--shard 8" in largest
    for line in runs:
        args = train.get_parser().parse_args(line.partition(" train.py ")[2].split())
        assert (args.batch_tokens, args.warmup, args.seq_len) == (2**22, 4096, 4096)


@pytest.mark.parametrize("lanes", ["1", "3"])
def test_a_failure_stops_nothing_and_is_told_at_the_end(house, lanes):
    script, environment = house
    found = bash(script, "first", env=environment | {"LANES": lanes})
    assert found.returncode == 1
    assert found.stdout.endswith("failed:\ntrain.py --seed wrong --out o/wrong\n"
                                 "python -m experiments.wrong\n")
    calls = (script.parent.parent / "calls").read_text().splitlines()
    assert sorted(calls) == sorted([
        "train.py --seed a --out o/a", "train.py --seed wrong --out o/wrong",
        "train.py --seed b --out o/b", "train.py --out o/diverges", "-m experiments.wrong",
        "-m experiments.draw --out o/report"])


def test_nothing_failed(house):
    script, environment = house
    script.write_text(FIGURES.replace("wrong", "right"))
    assert bash(script, "first", env=environment).returncode == 0


def test_print_runs_nothing_and_a_wrong_figure_is_told(house):
    script, environment = house
    found = bash(script, "--print", "second", env=environment)
    assert found.stdout.splitlines() == [
        f"python -m experiments.measure --ckpt {word}" for word in ("c", "slow", "d")]
    assert not (script.parent.parent / "calls").exists()
    found = bash(script, "third", env=environment)
    assert found.returncode == 1
    assert found.stderr == "error: third is not a figure of runs/mine.sh: take first second\n"


def test_after_ctrl_c_nothing_more_starts_and_what_runs_is_waited_for(house):
    script, environment = house
    process = subprocess.Popen(["bash", str(script), "second"], env=environment,
                               start_new_session=True, stdout=subprocess.DEVNULL)
    calls = script.parent.parent / "calls"
    for _ in range(100):
        if calls.with_name("calls.begun").exists():
            break
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=30) == 130
    assert calls.read_text().splitlines() == [
        "-m experiments.measure --ckpt c", "-m experiments.measure --ckpt slow", "saved"]


def test_a_script_that_cannot_note_failures_fails(house):
    script, env = house
    done = bash(script, env=env | {"TMPDIR": "/nonexistent"})
    assert done.returncode == 1
    assert not Path(env["CALLS"]).exists()

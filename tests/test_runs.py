"""Tests of lab/runs/*.sh: train.py and the tools take their commands; a failure stops no other."""
import fnmatch
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from support import distributed
from tests.helpers import ROOT, args_of

SCRIPTS = ("tiny", "small", "tune_transformers", "mechanisms", "copying")
# Stands in for `python`: it notes its words and leaves a run's or a table's files.
NOTE = """#!/bin/bash
last="${*: -1}"
line=$(printf '%q ' python "$@")
echo "$line" >>"$CALLS"                # in one piece, since lanes write at once
case "$*" in
    *slow*)
        trap 'sleep 1; echo saved >>"$CALLS"; exit 130' INT
        touch "$CALLS.begun"
        for n in $(seq 600); do sleep 0.1; done ;;
    *wrong*) exit 1 ;;
    *diverges*) exit 3 ;;
    *train.py*)
        mkdir -p "$last"
        touch "$last/ckpt.pt"
        [[ $* =~ "--steps "([0-9]+) ]] && echo "${BASH_REMATCH[1]}" >"$last/log.tsv" ;;
    *--ckpt*)
        [ "$1" = -m ] && shift
        name=${1#lab.}
        table=${last%.pt}_${name%.py}.tsv
        touch "${table/ckpt_/}" ;;
esac
true
"""
FIRST = """
. "$(dirname "$0")/lib.sh"
for seed in a wrong b; do
    echo python train.py --seed $seed --out o/$seed
done | lanes
run python train.py --out o/diverges
run python -m lab.wrong "two words"
run python -m lab.draw --out o/report
"""
SECOND = """
. "$(dirname "$0")/lib.sh"
for name in c slow d; do echo python measure.py $name; done | lanes
run python draw.py
"""


def environment(folder, python=NOTE):
    """An environment with a stand-in for `python`, which may note its words in folder/calls."""
    (folder / "bin").mkdir()
    (folder / "bin/python").write_text(python)
    (folder / "bin/python").chmod(0o755)
    return os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "OUT": f"{folder}/out",
                         "CALLS": f"{folder}/calls"}


def copy_script(name, folder):
    """Copy a script of lab/runs to where it runs in a folder without the rest of the repository."""
    (folder / "lab/runs").mkdir(parents=True)
    (folder / "lab/runs" / name).write_text((ROOT / "lab/runs" / name).read_text())


def wait_for(path):
    for _ in range(100):
        if path.exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"{path} has not come")


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    """{script: its commands, each a list of words}"""
    found = {}
    for name in SCRIPTS:
        folder = tmp_path_factory.mktemp(name)
        env = environment(folder) | ({"SEEDS": "32"} if name in ("mechanisms", "copying") else {})
        done = subprocess.run(["bash", f"lab/runs/{name}.sh"], cwd=ROOT, env=env,
                              capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), name
        found[name] = [shlex.split(line) for line in (folder / "calls").read_text().splitlines()]
    return found


@pytest.fixture
def house(tmp_path):
    """(a folder for scripts beside lab/runs/lib.sh, an environment, a reader of the calls)"""
    copy_script("lib.sh", tmp_path)
    (tmp_path / "lab/runs/first.sh").write_text(FIRST)
    (tmp_path / "lab/runs/second.sh").write_text(SECOND)
    calls = tmp_path / "calls"
    return (tmp_path / "lab/runs", environment(tmp_path),
            lambda: [line.strip() for line in calls.read_text().splitlines()])


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_training_has_a_folder_of_its_own_and_flags_that_train_takes(name, commands):
    folders = {}
    for words in commands[name]:
        if "train.py" not in words:
            continue
        flags = words[words.index("train.py") + 1:]
        args = args_of(flags)
        assert flags[-1] == args.out and "--resume" in flags
        given = [flag for flag in flags if flag.startswith("--")]
        assert name == "tiny" or len(set(given)) == len(given), flags
        if name == "copying":                          # trains in pieces
            at = flags.index("--steps")
            del flags[at : at + 2]
        folders.setdefault(args.out, set()).add(tuple(flags))
    assert folders
    assert {out: lines for out, lines in folders.items() if len(lines) > 1} == {}


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_measured_and_drawn_was_made_before(name, commands):
    """Earlier lines train each checkpoint, and measure each table."""
    made = set()
    for words in commands[name]:
        if "train.py" in words:
            made.add(words[-1])
            continue
        if words[1] == "-":                            # makes a text, renamed when it is complete
            made |= {text := words[-1].removesuffix(".tmp"), f"{text}/val"}
            continue
        tool = words[2] if words[1] == "-m" else words[1]
        tool = tool.removeprefix("lab.").removesuffix(".py")
        for word in words:
            path = word.rpartition("=")[2]
            if "/out/" not in path or "/out/report" in path:
                continue
            assert fnmatch.filter(made, re.sub(r"/(ckpt|at_\d+)\.pt$", "", path)), words
            if path.endswith(".pt"):
                made.add(path.replace(".pt", f"_{tool}.tsv").replace("ckpt_", ""))


def test_train_takes_each_of_the_papers_runs_on_its_gpus(monkeypatch):
    text = (ROOT / "docs/scale.md").read_text().partition("## The paper's runs")[2]
    command, = re.findall(r" train\.py (.+?)```", text.replace("\\\n", ""), re.S)
    rows = [[cell.strip("` ") for cell in line.split("|")[1:-1]]
            for line in re.findall(r"^\|.+`--.+\|$", text, re.M)]
    first = rows[0][1]
    assert f" {first} --steps 65536 --seed 0 " in command
    for figure, flags, gpus, steps, seeds, out in rows:
        monkeypatch.setattr(distributed, "world", lambda gpus=gpus: int(gpus))
        flags = flags.replace("RATE", "0.5").replace("NAME", "rope")
        args = args_of(command.replace(first, flags).split())
        assert (args.batch_tokens, args.warmup, args.seq_len) == (2**22, 4096, 4096)
        assert steps == ("16,384" if figure == "ablations" else "65,536")
        assert out.endswith("-SEED" if "," in seeds else "-0")
    # The commands that draw name the folders.
    drawn = text.rpartition("```sh")[2]
    names = [re.split("-(?:SEED|0)$|RATE", out)[0] for *_, out in rows]
    assert [name for name in names if name != "NAME" and name not in drawn] == []


# Stands in for `python`: a log whose loss is lowest at 2^-11. `nope` diverges at all rates; `local`
# looks nothing up; `selective` fails while $FAIL is set.
LOGGED = r"""#!/bin/bash
[ "$1" = lab/runs/tune.py ] && exec "$PYTHON" "$@"
echo "$*" >>"$CALLS"
last="${*: -1}"
case "$FAIL$*" in yes*:selective*) exit 1 ;; esac
[[ $* =~ "--lr "([0-9.]+) ]] || exit 0
mkdir -p "$last"
needle=0.5
case "$*" in
    *:nope*) touch "$last/diverged.txt"; exit 3 ;;
    *:local*) needle=0.1 ;;
esac
awk -v lr="${BASH_REMATCH[1]}" -v needle=$needle 'BEGIN { x = log(lr) / log(2) + 11.1
    print "step\tloss\tneedle\tval_loss\n2500\t\t" needle "\t" (x < 0 ? -x : x)
    print "2510\t1\t\t\n4800\t\t" needle "\t" (x < 0 ? -x : x) }' >"$last/log.tsv"
"""


def test_a_mechanism_is_tuned_to_the_best_rate_when_all_its_runs_have_finished(tmp_path):
    env = environment(tmp_path, LOGGED) | {"LANES": "4", "PYTHON": sys.executable}
    words = ["bash", "lab/runs/mechanisms.sh", "tune"]
    done = subprocess.run(words, cwd=ROOT, env=env | {"FAIL": "yes"}, capture_output=True,
                          text=True)
    rows = (tmp_path / "out/tuned.txt").read_text().splitlines()
    assert (done.returncode, len(rows), "selective" in str(rows)) == (1, 2 * 18, False)
    failed = done.stdout.partition("failed:\n")[2].splitlines()
    assert sorted(line.split()[:4] for line in failed) == [
        ["python", "lab/runs/tune.py", task, "selective"] for task in ("task", "text")]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    rows = done.stdout.splitlines()[-2 * 19:]
    assert {"text selective 0.9 -12", "task selective 0.1 -11", "text nope 99 -10"} < {*rows}
    assert not (tmp_path / "out/tune_text/nope-12").exists()

    # Each command is one that train.py takes; only a run that looks something up goes on.
    calls = [line.split()[1:] for line in (tmp_path / "calls").read_text().splitlines()]
    names = {args.out.rpartition("/tune_task/")[2] for args in map(args_of, calls)
             if args.steps == 4800}
    assert "softmax-11" in names
    assert not [name for name in names if name.startswith(("nope", "local"))]


def test_tuning_waits_at_ctrl_c_until_what_trains_has_saved(tmp_path):
    env = environment(tmp_path)
    words = ["lab/runs/tune.py", "text", "any", "2", "-10", "-8", "--", "python", "slow.py"]
    process = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=env, start_new_session=True,
                               stdout=subprocess.DEVNULL)
    wait_for(tmp_path / "calls.begun")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=300) == 130
    calls = (tmp_path / "calls").read_text().splitlines()
    assert (len(calls), calls[-1]) == (2, "saved")


def test_a_checkpoint_is_kept_of_each_piece_that_was_trained_to_its_end(tmp_path):
    env = environment(tmp_path) | {"SEEDS": "32", "STEPS": "2000"}
    stopped = NOTE.replace("    *wrong*)", '    *:local*"--steps 2000"*) exit 130 ;;\n    *wrong*)')
    kept = []
    for python, steps in ((stopped, "2000"), (NOTE, "2000"), (NOTE, "3000")):
        (tmp_path / "bin/python").write_text(python)
        (tmp_path / "calls").unlink(missing_ok=True)
        done = subprocess.run(["bash", "lab/runs/copying.sh"], cwd=ROOT, env=env | {"STEPS": steps},
                              capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        trained = (tmp_path / "calls").read_text().count("train.py")
        kept.append((trained, *(len([*tmp_path.glob(f"out/copying_{name}-32/at_*.pt")])
                                for name in ("multiscreen", "softmax", "local"))))
    assert kept == [(6, 2, 2, 1), (1, 2, 2, 2), (3, 3, 3, 3)]


@pytest.mark.parametrize("lanes", ["1", "3"])
def test_a_failure_stops_nothing_and_is_told_at_the_end(house, lanes):
    folder, env, calls = house
    found = subprocess.run(["bash", folder / "first.sh"], env=env | {"LANES": lanes},
                           capture_output=True, text=True)
    assert found.returncode == 1
    assert found.stdout.endswith("failed:\npython train.py --seed wrong --out o/wrong\n"
                                 "python -m lab.wrong two words\n")
    assert sorted(calls()) == sorted([
        "python train.py --seed a --out o/a", "python train.py --seed wrong --out o/wrong",
        "python train.py --seed b --out o/b", "python train.py --out o/diverges",
        r"python -m lab.wrong two\ words", "python -m lab.draw --out o/report"])


def test_a_script_of_scripts_lists_their_failures_once(house):
    folder, env, _ = house
    (folder / "all.sh").write_text('. "$(dirname "$0")/lib.sh"\nrun bash lab/runs/first.sh\n')
    found = subprocess.run(["bash", folder / "all.sh"], env=env, capture_output=True, text=True)
    assert found.returncode == 1
    assert found.stdout.count("failed:") == 1
    assert found.stdout.endswith("failed:\npython train.py --seed wrong --out o/wrong\n"
                                 "python -m lab.wrong two words\n")


def test_after_ctrl_c_nothing_more_starts_and_what_runs_is_waited_for(house):
    folder, env, calls = house
    (folder / "all.sh").write_text('. "$(dirname "$0")/lib.sh"\nrun bash lab/runs/second.sh\n'
                                   "run bash lab/runs/first.sh\n")
    said = folder.parent.parent / "said"
    # A file: a pipe would be waited for, too.
    process = subprocess.Popen(["bash", folder / "all.sh"], env=env, start_new_session=True,
                               stdout=said.open("w"))
    wait_for(folder.parent.parent / "calls.begun")
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=300) == 130
    assert "failed" not in said.read_text()
    assert calls() == ["python measure.py c", "python measure.py slow", "saved"]


def test_the_script_for_an_idea_gives_flags_that_train_takes(tmp_path):
    copy_script("idea.sh", tmp_path)
    env = environment(tmp_path, '#!/bin/sh\necho "$*" | tee -a "$CALLS"\n')
    calls = tmp_path / "calls"
    words = ["bash", "lab/runs/idea.sh", "mine", "--lr", "0.5"]
    short = subprocess.run(words, cwd=tmp_path, env=env | {"SEEDS": "3 4"}, capture_output=True,
                           text=True)
    assert short.returncode == 0 and "--resume" not in short.stdout
    said = [line for line in short.stdout.splitlines() if " train.py " in line]
    assert sorted(line[:8] for line in said) == ["seed 3: ", "seed 4: "]
    assert all(f"--seed {line[5]} --out out/idea/mine-{line[5]}" in line for line in said)
    calls.unlink()
    out = subprocess.run(words, cwd=tmp_path, env=env | {"NEEDLES": "1"}, capture_output=True,
                         text=True)
    assert out.returncode == 0, out.stderr
    command = "python -m lab.compare out/idea/original-* out/idea/mine-*"
    assert f"To compare them: {command}\n" in out.stdout
    assert "First train the code without your edit" in out.stdout
    assert "No learning rate was tuned for mine" in out.stdout
    lines = calls.read_text().splitlines()
    trained = [line.split() for line in lines if line.startswith("train.py")]
    assert {(line[-3], line[-1]) for line in trained} == {
        (str(n), f"out/{folder}/mine-{n}") for n in range(3) for folder in ("idea", "needles")}
    for line in trained:
        assert args_of(line[1:]).lr == 0.5
    assert len(lines) == 3 * 5
    assert subprocess.run(words[:2], cwd=tmp_path, env=env, capture_output=True).returncode

    # Nothing is trained under a name of which one seed is there already.
    (tmp_path / "out/idea/mine-2/source").mkdir(parents=True)
    (tmp_path / "out/idea/mine-2/ckpt.pt").touch()
    calls.unlink()
    again = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert again.returncode == 1 and "mine-2 holds a run: add --resume" in again.stderr
    assert not calls.exists()
    assert subprocess.run([*words, "--resume"], cwd=tmp_path, env=env).returncode == 0

    # Nor is a run continued with other code.
    for path, text in (("out/idea/mine-2/source/multiscreen.py", "1"), ("multiscreen.py", "2")):
        (tmp_path / path).write_text(text)
    calls.unlink()
    again = subprocess.run([*words, "--resume"], cwd=tmp_path, env=env, capture_output=True,
                           text=True)
    assert again.returncode == 1 and not calls.exists()
    assert "mine-2 was trained with other code: take multiscreen.py from out/idea/" in again.stderr


def test_the_script_for_an_idea_waits_until_what_ctrl_c_stops_has_saved(tmp_path):
    copy_script("idea.sh", tmp_path)
    env = environment(tmp_path, '#!/bin/bash\ntrap "sleep 1; echo saved; exit 130" INT\n'
                      'echo began\nwhile true; do sleep 0.1; done\n')
    script = subprocess.Popen(
        ["bash", "lab/runs/idea.sh", "mine"], cwd=tmp_path, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    said = [script.stdout.readline() for _ in range(2)]
    os.killpg(script.pid, signal.SIGINT)
    said += script.communicate(timeout=30)[0].splitlines()
    assert sorted(line.strip() for line in said[:4]) == [
        "seed 0: began", "seed 0: saved", "seed 1: began", "seed 1: saved"]
    assert said[4].startswith("not finished: ") and len(said) == 5
    assert script.returncode == 1

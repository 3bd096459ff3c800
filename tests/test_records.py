"""The race: its seeds, its commands, and which runs count."""
import hashlib
import re

import pytest

import train
from experiments import records
from support.checkpoint import equations, model_hash, read_checkpoint, save_checkpoint
from support.cli import UsageError
from support.retrieval import CELL
from support.retrieval import get_parser as get_grid_parser
from support.table import RUN, Table, describe_run, read_rows
from tests.helpers import ROOT

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SEEDS = [3736634260, 3514243492, 833442013, 4290334007]


def test_the_seeds_of_a_commit_are_these_for_ever():
    found = hashlib.sha256(COMMIT.encode()).hexdigest()
    assert records.seeds_of(COMMIT) == [1001 + int(found[n : n + 8], 16) for n in (0, 8, 16, 24)]
    assert records.seeds_of(COMMIT) == SEEDS
    assert records.seeds_of("f" * 40) != SEEDS
    for wrong in ("", COMMIT[:7], COMMIT.upper(), "HEAD"):
        with pytest.raises(UsageError, match="40 digits"):
            records.seeds_of(wrong)


def test_the_printed_commands_make_what_is_checked(call, capsys, monkeypatch):
    call(records, "--commit", COMMIT)
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == f"python -m experiments.records --commit {COMMIT} out/record_0123456/*"
    assert len(lines) == 8
    for seed, training, measuring in zip(SEEDS, lines[::2], lines[1::2]):
        args = train.get_args(training.split()[2:])
        assert args.out == f"out/record_0123456/{seed}"
        assert args.seed == seed
        assert args.batch_tokens == args.seq_len * records.FIXED["documents a step"]
        for name in ("model", "data", "digits", "tokenizer", "seq_len", "init"):
            assert getattr(args, name) == records.FIXED[name], name
        asked = get_grid_parser("").parse_args(measuring.split()[2:])
        assert (asked.lengths, asked.trials) == ([records.LENGTH], records.TRIALS)
        assert (tuple(asked.depths), asked.swe) == (records.DEPTHS, False)
        assert asked.ckpt == f"{args.out}/ckpt.pt"


@pytest.fixture
def entry(tmp_path):
    """entry(n, found, swe, **changes): the folder of the n-th run, a changed copy."""
    def make(n, found=1.0, swe=False, **changes):
        ckpt = read_checkpoint(ROOT / "models/retrieval.pt")
        ckpt |= {"equations": equations("multiscreen")} | changes
        ckpt["args"] |= {"seed": records.seeds_of(COMMIT)[n]} | changes.get("args", {})
        folder = tmp_path / f"run{n}"
        folder.mkdir(exist_ok=True)
        save_checkpoint(folder / "ckpt.pt", ckpt)
        (folder / "abcdigits.tsv").unlink(missing_ok=True)
        table = Table(folder / "abcdigits.tsv", (*RUN, "digits", *CELL), ["accuracy"],
                      model_hash(ckpt))
        for depth in records.DEPTHS:
            cell = describe_run(ckpt) | {"digits": 2, "swe": swe, "trials": 40, "length": 8192,
                                         "depth": depth, "factor": None}
            table.add(cell, accuracy=found if depth == 0.1 else 1.0)
        return folder

    return make


def test_four_runs_of_its_seeds_count_with_the_steps_of_the_slowest(call, entry, capsys):
    # One cell of five with 75 % is 95 % in all.
    folders = [entry(0), entry(1, step=900, drawn=7200), entry(2, 0.75), entry(3)]
    call(records, "--commit", COMMIT, *folders)
    assert capsys.readouterr().out.endswith("it counts: 2,575 steps, the slowest of the four\n")
    with pytest.raises(UsageError, match="it does not count: the seeds are"):
        call(records, "--commit", "f" * 40, *folders)
    with pytest.raises(UsageError, match="it does not count: the seeds are"):
        call(records, "--commit", COMMIT, *folders[:3])


ARGS = read_checkpoint(ROOT / "models/retrieval.pt")["args"]


@pytest.mark.parametrize("changes, words", [
    ({"found": 0.725}, "finds 94.5%, fewer than 95%"),
    ({"swe": True}, "abcdigits.tsv lacks 40 prompts"),
    ({"drawn": 41200}, "documents a step is 16.0, not 8"),
    ({"data_state": (11_999, 2.0)}, "stopped at step 2575: the same command continues it"),
    ({"equations": "00000000"}, "trained with other equations"),
    ({"args": ARGS | {"seq_len": 512}}, "seq_len is 512, not 256"),
    ({"args": ARGS | {"digits": 3}}, "digits is 3, not 2"),
    ({"args": ARGS | {"init": "out/ckpt.pt"}}, "init is out/ckpt.pt, not None"),
    ({"args": ARGS | {"data": ["text"]}, "data_state": ()}, "data is .'text'., not"),
    ({"found": 0.0, "args": ARGS | {"lr": 0.5}}, "finds 80.0%, .*; the runs have different flags"),
])
def test_what_does_not_count_is_told(call, entry, changes, words):
    folders = [entry(n) for n in range(3)] + [entry(3, **changes)]
    with pytest.raises(UsageError, match=f"it does not count: \\S*run3:? {words}") as e:
        call(records, "--commit", COMMIT, *folders)
    assert len(re.findall(r"run\d", str(e.value))) == 1


def test_the_model_of_the_race_is_the_bundled_one():
    ckpt = read_checkpoint(ROOT / "models/retrieval.pt")
    assert describe_run(ckpt)["parameters"] == records.FIXED["parameters"]
    assert f"{records.FIXED['parameters']:,} parameters" in (
        ROOT / "experiments/RECORDS.md").read_text()


def test_the_records_are_what_their_logs_say():
    text = (ROOT / "experiments/RECORDS.md").read_text()
    entries = re.findall(r"^\| ([\d,]+) \|.*`(\w{40})`.*\((record_\w+)/\) \| (.*) % \|$", text,
                         re.MULTILINE)
    assert entries
    for steps, commit, folder, shares in entries:
        ends, found = [], []
        for seed in records.seeds_of(commit):
            run = ROOT / "experiments" / folder / str(seed)
            ends.append(int(read_rows(run / "log.tsv")[-1]["step"]))
            cells = read_rows(run / "abcdigits.tsv")
            assert {float(row["depth"]) for row in cells} == set(records.DEPTHS)
            assert {(row["seed"], row["step"], row["length"], row["trials"], row["swe"])
                    for row in cells} == {(str(seed), str(ends[-1]), "8192", "40", "")}
            found.append(100 * sum(float(row["accuracy"]) for row in cells) / len(cells))
        assert max(ends) == int(steps.replace(",", ""))
        assert [float(x) for x in shares.split(", ")] == pytest.approx(found)
        assert min(found) >= 100 * records.ENOUGH

"""experiments.paper: what is missing is made, once, and what is there is not."""
import shutil
import sys

import pytest

import abcdigits
import train
from experiments import paper, paper_plan, paper_report, paper_steps, perplexity, plan, runs
from support.cli import UsageError
from support.results import Results
from support.run import InUse
from tests.helpers import read_table


@pytest.fixture
def call(monkeypatch, tmp_path):
    """call(*flags) runs experiments.paper at the scale `tiny`, which is one model here."""
    monkeypatch.chdir(tmp_path)
    model = "--psi 1 --data abcdigits --digits 2 --batch-size 1 --device cpu --kernel definition"
    scale = paper_plan.TINY._replace(
        scripts={}, models={"a": model}, seeds=1, steps={"": 1}, shown="a",
        measure={"retrieval": [("abcdigits.py --lengths 256 --depths 0.5 --trials 1 --device cpu",
                                ["a"], None)]})
    monkeypatch.setitem(paper_plan.SCALES, "tiny", scale)

    def run(*flags):
        monkeypatch.setattr(sys, "argv", ["paper", "--scale", "tiny", "--out", "o", *flags])
        paper.main()

    return run


def test_what_is_missing_is_made_and_what_is_there_is_not(call, tmp_path, monkeypatch, capsys):
    call("--only", "retrieval", "--list")
    assert "retrieval: ABCDigits. 0 of 2 rows are there" in capsys.readouterr().out
    assert not (tmp_path / "o").exists()
    call("--only", "retrieval")
    path = tmp_path / "o/results.tsv"
    rows = read_table(path)
    assert [row["task"] for row in rows] == ["validation loss", "abcdigits, 2 digits"]
    report = (tmp_path / "o/report.md").read_text()
    assert "## ABCDigits" in report
    assert "python abcdigits.py --lengths 256" in report
    assert "not finished" not in report
    assert "python -m experiments.relevance_maps --ckpt" in report     # of a figure not asked for

    # A model whose checkpoint is gone is trained again to be measured.
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    (tmp_path / "o/a-0/ckpt.pt").unlink()
    call("--only", "retrieval")
    again = read_table(path)
    assert len(again) == 2
    assert again[-1]["weights"] == rows[-1]["weights"]

    # What the table holds is not made again, where the checkpoints are gone, too.
    shutil.rmtree(tmp_path / "o/a-0")
    monkeypatch.setattr(train, "main", None)
    monkeypatch.setattr(abcdigits, "exact_matches", None)
    capsys.readouterr()
    call("--only", "retrieval", "--list")
    assert "2 of 2 rows are there\n" in capsys.readouterr().out
    call("--only", "retrieval")
    assert read_table(path) == again

    # Nor is a run made of which all is measured, but for its own validation loss.
    head, loss, cell = path.read_text().splitlines(keepends=True)
    assert loss.startswith("validation loss")
    path.write_text(head + cell)
    call("--only", "retrieval")
    assert read_table(path) == again[1:]


def test_a_figure_of_a_killed_process_is_drawn_and_one_that_is_there_is_not(call, tmp_path,
                                                                            monkeypatch):
    (tmp_path / "o/a-0").mkdir(parents=True)
    (tmp_path / "o/a-0/windows.tsv").touch()
    call("--only", "windows")
    assert "the median window of seed 0 is" in (tmp_path / "o/report.md").read_text()
    monkeypatch.setattr(paper, "call", None)
    call("--only", "windows")


def test_steps_that_differ_in_their_seed_are_one_line(tmp_path):
    results = Results(tmp_path / "results.tsv")
    keys = [paper_steps.Key("passkey", "run", str(n), "0") for n in range(3)]
    steps = [paper_steps.Step("train.py --seed $n", [key], None) for key in keys]
    steps += [paper_steps.Step("lr_sweep", [key], None) for key in keys[:2]]
    steps.append(paper_steps.Step("one.py --seed $n", [keys[1]], None))
    results.add(keys[1], [1])
    assert paper_steps.as_lines(steps, results) == [
        ("for n in 0 1 2; do python train.py --seed $n; done", 3, 2),
        ("python lr_sweep", 2, 1), ("python one.py --seed 1", 1, 0)]


def test_what_another_process_does_is_waited_for_and_an_error_costs_one_step(tmp_path, monkeypatch):
    results, order = Results(tmp_path / "results.tsv"), []
    monkeypatch.setattr(runs.time, "sleep", lambda seconds: order.append("sleep"))
    keys = [paper_steps.Key("passkey", "run", str(n), "0") for n in range(3)]

    def busy_twice():
        order.append("busy")
        if order.count("busy") < 3:
            raise InUse("in use")
        results.add(keys[0], [1])

    def wrong():
        raise UsageError("too short")

    def right():
        order.append("right")
        results.add(keys[2], [1])

    steps = [paper_steps.Step(name, [key], do) for name, key, do in
             zip(("a", "b", "c"), keys, (busy_twice, wrong, right))]
    assert paper.work(steps, results) == {"python b": "too short"}
    assert order == ["busy", "right", "busy", "sleep", "busy"]


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_each_measurement_of_a_scale_is_of_a_model_it_trains(name, tmp_path, monkeypatch):
    """And what is measured has the models of the paper's figure: both, or all ablations."""
    monkeypatch.setattr(perplexity, "get_documents", lambda *inputs: ({"a": None}, 0))
    paper_steps.documents.cache_clear()
    scale, results = paper_plan.SCALES[name], Results(tmp_path / "results.tsv")
    found = paper_steps.get_runs(scale, tmp_path)
    for figure in paper_plan.FIGURES:
        steps = paper_steps.get_steps(figure, scale, found, tmp_path, results)
        runs = {key.run for step in steps for key in step.keys}
        families = {run.split()[1].partition(":")[0] for run in runs}
        if figure in ("scaling", "lr_sweep", "sanity", "perplexity", "retrieval"):
            assert families == {"multiscreen", "transformer"}
        if figure == "ablations":
            tasks = {key.task.partition(",")[0] for step in steps for key in step.keys}
            assert tasks == {"validation loss", "perplexity", "abcdigits"}
    paper_steps.documents.cache_clear()


def test_the_papers_runs_are_commands_with_gpus(monkeypatch, capsys):
    monkeypatch.setattr(plan, "fit_paper", lambda like, gpus: (None, (1, 8, False)))
    monkeypatch.setattr(sys, "argv", ["paper", "--scale", "paper", "--list"])
    paper.main()
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    runs = [line for line in lines if line.startswith("torchrun")]
    folders = [line.partition("--out ")[2] for line in runs]
    assert len(set(folders)) == len(runs)
    assert sum("--psi 64 " in line for line in runs) == 1
    assert sum("--psi 8 " in line for line in runs) == 3
    largest, = (line for line in runs if "--psi 64 " in line)
    assert "--nnodes 8 --nproc_per_node 8" in largest
    assert "--batch-size 1 --shard 8" in largest
    for line in runs[::40]:
        words = line.partition("train.py ")[2].split()
        assert len(set(words[::2])) == len(words[::2])         # each flag once
        monkeypatch.setattr(train, "world", lambda line=line: 8 * int(line.split()[2]))
        args, _ = train.get_args(words)
        assert args.batch_tokens == 2**22
        assert args.warmup == 4096
    monkeypatch.setattr(sys, "argv", ["paper", "--scale", "paper"])
    with pytest.raises(UsageError, match="for --list"):
        paper.main()


def test_the_sentences_say_what_the_tables_hold(tmp_path):
    def say(name, table, *rows):
        (tmp_path / table).write_text("".join(row.replace("|", "\t") + "\n" for row in rows))
        return paper_report.SENTENCES[name](tmp_path)

    said = say("lr_sweep", "lr_sweep.tsv", "exponent|rate|multiscreen|multiscreen std|"
               "transformer:2,2,8:qknorm", "-4|0.0625|2.5|0.1|3", "-2|0.25|2.4|0.1|diverged",
               "0|1|2.6 (1 of 3 diverged)|0.1|4")
    assert "Multiscreen is best at 2^-2, at least one seed diverges at 2^0" in said
    assert "Transformer + QKNorm is best at 2^-4, at least one seed diverges at 2^-2 (" in said

    # Gradient norms are compared only where the logs of all runs are there.
    say("sanity", "sanity_curves.tsv", "run|grad_median", "transformer-0|0.4", "multiscreen-0|0.1")
    said = say("sanity", "sanity.tsv", "run|change", "Transformer|0", "w/o clipping|-",
               "Multiscreen|+0.1")
    assert "w/o clipping: diverged, Multiscreen: +0.1. The logs" in said
    said = say("sanity", "sanity.tsv", "run|change", "Transformer|0", "Multiscreen|+0.1")
    assert "gradient norm is 0.25 times" in said

    # Ablations are told with the ablations only, and each curve has its own length.
    head = "task|model|curve|seeds|x_training|perplexity"
    rows = [f"p|{model}|as trained|3|{x}|{x + 3}" for model, x in (
        ("Multiscreen", 0), ("Multiscreen", 1), ("Multiscreen", 32), ("Multiscreen, w/o Gate", 1),
        ("Multiscreen, w/o Gate", 8))]
    said = say("perplexity", "long_context.tsv", head, *rows)
    assert "\n|  | 1 | 32 |\n" in said
    assert said.count("\n| Multiscreen, as trained (3 seeds) | 4 | 35 |\n\n") == 1
    rows = ["abcdigits, 2 digits|Multiscreen|256|3|99%", "passkey|Multiscreen|512|3|1%",
            "abcdigits, 2 digits|Multiscreen, w/o Gate|256|1|98%"]
    said = say("retrieval", "retrieval.tsv", "task|model|length|seeds|mean", *rows)
    assert "found: Multiscreen 99% at 256 and 99% at 256 tokens (seeds: 3 and 3). Bands" in said
    said = say("ablations", "ablations.tsv", "model|change|paper_change", "multiscreen|+0|+0",
               "multiscreen:no-gate|+0.5|+0.06", "multiscreen:rope|-|+0.03")
    assert "(in the paper): w/o Gate +0.5 (+0.06).\n" in said
    assert "\n|  | 256 |\n|---|---|\n| Multiscreen, w/o Gate (1 seed) | 98% |\n" in said
    assert "\n| Multiscreen, w/o Gate, as trained (3 seeds) | 4 | 11 |\n" in said

"""Tests of experiments/: a small run of each script, and the arithmetic behind the tables."""
import math
import os
import shutil
import signal
import sys

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend

import train
from experiments import (
    ablations,
    common,
    curves,
    fits,
    grids,
    latency,
    long_context,
    lr_sweep,
    maps,
    models,
    passkey,
    perplexity,
    relevance_maps,
    retrieval,
    runs,
    sample,
    sanity,
    scaling,
    timing,
    training_curves,
    windows,
)
from multiscreen import Config, Multiscreen, window
from support.checkpoint import FIXED, KEYS, build_model, load_checkpoint, save_checkpoint
from support.cli import UsageError, check_writable
from support.data import Sequences, files_of, get_data, get_tokenizer
from support.results import Key, Results
from support.run import Lock, Log
from tests.helpers import INF, draw_tokens, fit, read_table

NAN = math.nan
TINY = ["--seq-len", 16, "--batch-size", 2, "--device", "cpu", "--kernel", "definition"]


@pytest.fixture
def call(monkeypatch, tmp_path):
    """call(script, *flags) runs its main() in a folder of this test."""
    monkeypatch.chdir(tmp_path)

    def run(script, *flags):
        monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, flags)])
        script.main()

    return run


@pytest.fixture
def data(tmp_path):
    """Flags: some kilobytes to train on, so that no test reads the standard library."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} and {i * i}, " for i in range(600)))
    return ["--data", path]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Paths of checkpoints with random weights, by model, as train.py writes them."""
    folder, paths = tmp_path_factory.mktemp("ckpt"), {}
    for name in ("multiscreen", "multiscreen:rope", "multiscreen:fixed-r", "transformer:2,2,8"):
        torch.manual_seed(0)
        model = build_model(name, {"psi": 3, "N_L": 2, "vocab_size": 257})
        with torch.no_grad():
            for W in model.layers.parameters():        # so that layers and positions matter
                W.mul_(6 if W.ndim > 1 else 1)
        args = dict.fromkeys(FIXED) | {"model": name, "seq_len": 16, "kernel": "definition"}
        paths[name] = folder / name.replace(":", "_") / "ckpt.pt"
        paths[name].parent.mkdir()
        empty = {key: kind() for key, kind in KEYS.items()}
        save_checkpoint(paths[name], empty | {
            "model": name, "config": vars(model.config), "weights": model.state_dict(),
            "tokenizer": "bytes", "args": args})
    return paths


# ----------------------------------------------------------------------------- common runs

def test_a_finished_run_is_read_and_an_interrupted_one_continued(data, tmp_path, monkeypatch):
    run = runs.Run("a", ("--psi", "2", *map(str, TINY), *map(str, data), "--log-every", "1"), 0, 4)
    right = train.main

    def stops_after_2(argv):
        def stop(self, row):
            add(self, row)
            if row["step"] == 2:
                os.kill(os.getpid(), signal.SIGINT)

        add = Log.add
        with monkeypatch.context() as m:
            m.setattr(Log, "add", stop)
            right(argv)

    monkeypatch.setattr(train, "main", stops_after_2)
    with pytest.raises(KeyboardInterrupt, match="the same command continues"):
        run.finish(tmp_path)
    before = runs.read_log(tmp_path / "a-0/log.tsv")
    assert before[-1]["step"] == 2
    assert not runs.is_finished(tmp_path / "a-0", run.key)
    path, half = tmp_path / "a-0/ckpt.pt", (tmp_path / "a-0/ckpt.pt").read_bytes()
    monkeypatch.setattr(train, "main", right)
    assert load_checkpoint(run.checkpoint(tmp_path))[2]["step"] == 4
    path.write_bytes(half)                             # killed between the last row and its save
    assert load_checkpoint(run.checkpoint(tmp_path))[2]["step"] == 4
    rows, diverged = run.finish(tmp_path)
    assert rows[:2] == before                          # their milliseconds too: not run again
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert diverged is None

    # What is finished is not run again, whatever its folder; what was run otherwise is not taken.
    monkeypatch.setattr(train, "main", None)
    assert run.finish(tmp_path) == (rows, None)
    with pytest.raises(UsageError, match="other flags"):
        run._replace(steps=5).finish(tmp_path)
    (tmp_path / "a-0").rename(tmp_path / "mine")
    assert run._replace(name="b").finish(tmp_path) == (rows, None)


def test_a_diverged_run_is_noted_and_not_repeated(data, tmp_path, monkeypatch):
    flags = ["--psi", 2, *TINY, *data, "--lr", 1e18, "--warmup", 0, "--log-every", 1]
    run = runs.Run("b", tuple(map(str, flags)), 0, 3)
    rows, diverged = run.finish(tmp_path)
    assert "diverged" in diverged
    assert rows[-1]["step"] < 3
    monkeypatch.setattr(train, "main", None)
    assert run.finish(tmp_path) == (rows, diverged)
    with pytest.raises(UsageError, match="no model to measure"):
        run.checkpoint(tmp_path)


def test_an_error_is_no_divergence(tmp_path):
    run = runs.Run("c", ("--data", str(tmp_path / "diverged.txt")), 0, 3)
    with pytest.raises(UsageError, match="does not exist"):
        run.finish(tmp_path)
    assert not (tmp_path / "c-0/diverged.txt").exists()


def test_a_run_of_another_process_is_left_to_it_and_what_the_table_holds_is_not_run(
        data, tmp_path, monkeypatch):
    flags = tuple(map(str, ["--psi", 1, *TINY, *data]))
    found = [runs.Run("x", flags, seed, 1) for seed in range(3)]
    lock, order, right = Lock(tmp_path / "x-0", "run.lock"), [], runs.Run.train

    def train_one(self, folder):
        order.append(self.seed)
        if self.seed == 1:
            lock.__exit__()                            # the other process has ended
        right(self, folder)

    monkeypatch.setattr(runs.Run, "train", train_one)
    lock.__enter__()
    losses = runs.train_missing(found, tmp_path)
    assert order == [1, 2, 0]
    assert list(losses) == found
    assert len(set(losses.values())) == 3

    # Without the folders, too.
    for run in found:
        shutil.rmtree(tmp_path / f"x-{run.seed}")
    monkeypatch.setattr(train, "main", None)
    assert runs.train_missing(found, tmp_path) == losses


def test_seeds_for_all_sizes_and_for_one():
    assert runs.parse_seeds(["3", "48:1", "transformer:1.3B:2"]) == {
        "": 3, "48": 1, "transformer:1.3B": 2}
    for wrong in ("0", "48:", "48:0", "many"):
        with pytest.raises(UsageError, match="seeds"):
            runs.parse_seeds([wrong])


def test_what_is_called_diverged():
    """Half a nat above the least mean over an eighth of the rows, here 2.95."""
    log = [{"step": n, "loss": 6.0 - n / 10} for n in range(1, 33)]
    log.append({"step": 33, "val_loss": 3.0})
    assert runs.final_loss(log, None) == 3.0
    assert math.isnan(runs.final_loss(log, "training diverged: at step 21 loss is nan"))
    for last, diverged in ((3.44, False), (3.46, True), (80.0, True), (INF, True), (NAN, True)):
        log[-1]["val_loss"] = last
        assert math.isnan(runs.final_loss(log, None)) == diverged, last
    assert math.isnan(runs.final_loss([], None))


def test_diverged_seeds_are_left_out_of_the_mean_and_counted():
    assert common.mean_and_std([2.0, NAN, 4.0]) == (3.0, math.sqrt(2), 1)
    mean, std, diverged = common.mean_and_std([NAN])
    assert math.isnan(mean)
    assert math.isnan(std)
    assert diverged == 1


@pytest.mark.parametrize("flags, total, rest", [
    (["--psi", 8], 917_698 + 257 * 64, 917_698),
    (["--model", "transformer:8M"], 1_180_416 + 257 * 128, 1_180_416)])
def test_parameters_agree_with_the_papers_tables(flags, total, rest):
    """Of the embedding 257 tokens, bytes, instead of 50,257."""
    assert models.parameters_of(*flags) == (total, rest)


@pytest.mark.parametrize("script, flags, message", [
    (ablations, ["--seed", "1"], "--seed is set"), (ablations, ["--seeds", "0"], "seed"),
    (lr_sweep, ["--models", "transformer:huge"], "unknown"),
    (lr_sweep, ["--exponents", "2000"], "exponents"), (lr_sweep, ["--nonsense", "1"], "nonsense"),
    (lr_sweep, ["--lr=1"], "--lr is set"), (scaling, ["--psi", "0"], "psi = 0"),
    (scaling, ["--transformers", "transformer:1,3,8"], "multiple"),
    (training_curves, [], "lr_sweep"), (training_curves, ["--window", "1"], "window"),
    (latency, ["--lengths", "0"], "at least 1"), (scaling, ["--seeds", "9:2"], "sizes are"),
    (latency, ["--ckpt", "nowhere.pt"], "does not exist"), (sample, ["--tokens", "0"], "--tokens"),
    (long_context, ["--length", "0"], "above 0"), (passkey, [], "train a model first"),
    (windows, ["--ckpt", "nowhere.pt"], "train a model first")])
def test_a_mistake_is_told_in_one_line_before_any_run(call, monkeypatch, script, flags, message):
    monkeypatch.setattr(train, "main", None)
    with pytest.raises(UsageError, match=message) as e:
        call(script, *flags)
    assert "\n" not in str(e.value)


# --------------------------------------------------- scripts that train: ablations, rates, sizes

def test_the_table_of_ablations_is_that_of_their_runs(call, data, tmp_path):
    flags = ["--psi", 2, *TINY, *data, "--steps", 3, "--out", tmp_path / "o"]
    call(ablations, *flags)
    rows = read_table(tmp_path / "o/ablations.tsv")
    names = ["multiscreen", *(f"multiscreen:{name}" for name in
                              ("rope", "nope", "no-tanhnorm", "no-gate", "fixed-r"))]
    assert [row["model"] for row in rows] == names
    losses = []
    for row in rows:
        folder = tmp_path / "o" / (row["model"].replace(":", "_") + "-0")
        model, _, ckpt = load_checkpoint(folder / "ckpt.pt")
        assert ckpt["model"] == row["model"]
        assert int(row["parameters"]) == sum(p.numel() for p in model.parameters())
        losses.append(runs.read_log(folder / "log.tsv")[-1]["val_loss"])
        assert float(row["val_loss"]) == pytest.approx(losses[-1], rel=1e-4)
        assert float(row["change"]) == pytest.approx(losses[-1] - losses[0], abs=6e-5)
    assert len(set(losses)) == 6

    # The paper's table.
    paper = ["3.0966", "3.1232", "3.1109", "3.1094", "3.1555", "3.112"]
    assert [row["paper_28M"] for row in rows] == paper
    changes = ["+0.0000", "+0.0266", "+0.0143", "+0.0128", "+0.0589", "+0.0154"]
    assert [row["paper_change"] for row in rows] == changes

    # It can be made again without the runs.
    before = (tmp_path / "o/ablations.tsv").read_bytes()
    for name in names:
        shutil.rmtree(tmp_path / "o" / (name.replace(":", "_") + "-0"))
    call(ablations, *flags)
    assert (tmp_path / "o/ablations.tsv").read_bytes() == before


def test_a_sweep_of_learning_rates_then_its_curves(call, data, tmp_path, monkeypatch):
    models = ["multiscreen", "transformer:1,1,4:qknorm"]
    sweep = [lr_sweep, "--models", *models, "--exponents", -4, 40, "--seeds", 2, "--steps", 4,
             "--psi", 2, *TINY, *data]
    call(*sweep)
    path = tmp_path / "out/lr_sweep/lr_sweep.tsv"
    rows = read_table(path)
    assert [row["exponent"] for row in rows] == ["-4", "40"]
    assert [float(row["rate"]) for row in rows] == pytest.approx([2**-4, 2**40], rel=1e-4)
    finals = [runs.read_log(tmp_path / f"out/lr_sweep/multiscreen--4-{seed}/log.tsv")[-1]
              for seed in (0, 1)]
    mean = (finals[0]["val_loss"] + finals[1]["val_loss"]) / 2
    assert float(rows[0]["multiscreen"]) == pytest.approx(mean, rel=1e-4)
    assert float(rows[0]["multiscreen std"]) > 0
    assert rows[1]["transformer:1,1,4:qknorm"] == "diverged"

    # Finished runs are not run again.
    before = path.read_bytes()
    monkeypatch.setattr(train, "main", None)
    call(*sweep)
    assert path.read_bytes() == before

    # One row for each run: two seeds, but one with QKNorm.
    call(training_curves, "--window", 2)
    rows = read_table(tmp_path / "out/training_curves/training_curves.tsv")
    assert [row["run"] for row in rows] == [
        "multiscreen--4-0", "multiscreen--4-1", "multiscreen-40-0", "multiscreen-40-1",
        "transformer_1,1,4_qknorm--4-0", "transformer_1,1,4_qknorm-40-0"]
    assert rows[0]["steps"] == "4"
    assert rows[0]["end"] == "-"
    assert rows[-1]["end"] == "diverged"


def test_the_sanity_check_has_four_runs_and_their_curves(call, data, tmp_path):
    call(sanity, "--transformer", "transformer:1,1,4", "--psi", 1, "--steps", 3, "--window", 2,
         *TINY, *data)
    rows = read_table(tmp_path / "out/sanity/sanity.tsv")
    assert [row["run"] for row in rows] == ["Transformer", "Transformer w/o weight decay",
                                            "Transformer w/o clipping", "Multiscreen"]
    folders = ["transformer_1,1,4-0", "transformer_1,1,4_no_decay-0",
               "transformer_1,1,4_no_clipping-0", "multiscreen_psi1-0"]
    found = [training_curves.parse_folder(tmp_path / "out/sanity" / name)[1] for name in folders]
    assert found == ["0.001", "w/o weight decay", "w/o clipping", -4]
    rows = read_table(tmp_path / "out/sanity/sanity_curves.tsv")
    assert [row["run"] for row in rows] == folders


def test_losses_by_size_and_the_lines_through_them(call, data, tmp_path):
    sizes = [257 * E + 4 * E * E + 3 * E * (8 * E // 3) + 2 * E for E in (4, 8)]
    call(scaling, "--psi", 1, 2, "--transformers", "transformer:1,1,4", "transformer:1,1,8",
         "--steps", 3, *TINY, *data)
    rows = read_table(tmp_path / "out/scaling/scaling.tsv")
    assert [row["model"] for row in rows[:2]] == ["multiscreen_psi1", "multiscreen_psi2"]
    assert [int(row["total"]) for row in rows] == [486, 4626, *sizes]
    assert all(3 < float(row["val_loss"]) < 7 for row in rows)
    lines = read_table(tmp_path / "out/scaling/fits.tsv")
    assert [line["size"] for line in lines] == ["total", "non_embedding", "psi"]
    rise = float(rows[1]["val_loss"]) - float(rows[0]["val_loss"])
    slope = rise / math.log2(4626 / 486)               # through two points
    assert float(lines[0]["multiscreen"]) == pytest.approx(slope, abs=2e-3)


def test_a_line_is_least_squares_in_the_logarithm():
    """x = 0, 1, 2: slope -1/2, mean 4 at x = 1."""
    a, b = fits.fit_line([1.0, math.e, math.e**2], [5.0, 3.0, 4.0])
    assert a == pytest.approx(4.5)
    assert b == pytest.approx(-0.5)
    assert fits.size_at(3.0, (5.0, -0.5)) == pytest.approx(math.e**4)
    assert fits.fit_line([7, 7], [1.0, 2.0]) is None


def test_saving_at_equal_loss():
    """In the middle of the losses that both have reached."""
    sizes = [100, 200, 400]
    loss = [6 - math.log(n) for n in sizes]
    at, N_m, N_t, saved, std = fits.saving((sizes, loss), ([n / 0.7 for n in sizes], loss))
    assert at == pytest.approx(6 - math.log(200))
    assert N_m == pytest.approx(200)
    assert N_t == pytest.approx(200 / 0.7)
    assert saved == pytest.approx(0.3)
    assert std == pytest.approx(0, abs=1e-9)
    low = [x - 1 for x in loss]
    at, _, _, saved, _ = fits.saving((sizes, low), (sizes, loss))
    assert at == pytest.approx((11 - math.log(40_000)) / 2)
    assert saved == pytest.approx(1 - 1 / math.e)


def test_the_deviation_of_a_saving_is_that_of_the_fits():
    """To first order, by NumPy's covariance of a line."""
    sizes, losses = [100, 200, 400, 800], [4.0, 3.4, 2.7, 2.2]
    line, covariance = np.polyfit(np.log(sizes), losses, 1, cov=True)
    b, a = line
    slope = np.array([-(3.0 - a) / b**2, -1 / b])      # of ln N = (3 - a)/b by b and a
    expected = slope @ covariance @ slope
    assert fits.variance_at(3.0, sizes, losses) == pytest.approx(expected)
    *_, std = fits.saving((sizes, losses), (sizes, losses))
    at = fits.variance_at(3.1, sizes, losses)
    assert std == pytest.approx(math.sqrt(2 * at))
    *_, std = fits.saving((sizes[:2], losses[:2]), (sizes, losses))
    assert math.isnan(std)


@pytest.mark.parametrize("other", [
    ([100, 200], [9.0, 8.0]), ([100, 200], [1.0, 2.0]), ([100], [1.5]), ([], [])])
def test_no_saving_without_a_common_loss_or_a_line_that_falls(other):
    assert fits.saving(([100, 200], [2.0, 1.0]), other) is None


def test_moving_average():
    x = np.array([1.0, 2.0, 6.0, 4.0])
    assert curves.moving_average(x, 2).tolist() == [1.5, 4.0, 5.0]
    assert curves.moving_average(x, 9).tolist() == [3.25]      # fewer rows than that: all of them
    huge = np.array([1e30, 1.0, 3.0])
    assert curves.moving_average(huge, 2)[-1] == 2.0           # a running sum would have lost it


@pytest.mark.parametrize("values, spikes", [
    ({}, 0), ({12: 6.9}, 0), ({12: 7.1}, 1), ({12: -20.0}, 0), ({8: 100, 16: 100}, 2),
    ({2: 100}, 0)])
def test_spikes_are_measured_against_the_rows_before_them(values, spikes):
    """Any 4 rows have the mean 2 and the deviation 1: the limit is 7. The first 4 have none."""
    x = np.tile([1.0, 3.0], 10)
    for n, value in values.items():
        x[n] = value
    assert curves.count_spikes(x, 4) == spikes


def test_summary_of_a_run():
    step, loss = np.arange(1.0, 11.0), np.arange(10.0, 0.0, -1.0)
    norm = np.array([9.0, 9.0, 9.0, 9.0, 9.0, 5.0, 1.0, 4.0, 2.0, 3.0])
    found = curves.summarize_run(step, loss, norm, 4)
    assert found[:4] == [10, 8.5, 2.5, 0]
    assert found[4:] == pytest.approx([3.0, 4.6, 5.0, 0])      # of 1 2 3 4 5, the second half


# ----------------------------------------------------------------------- long-context perplexity

def test_positions_and_their_windows():
    assert perplexity.positions(100) == [32, 45, 64, 91, 100]
    assert perplexity.positions(3) == [3]
    means = perplexity.window_means(np.arange(1.0, 101), 100, 0.1)     # position p has the value p
    assert means[0] == np.mean(range(29, 36))
    assert means[-2:] == [np.mean(range(82, 101)), np.mean(range(90, 101))]


def test_the_middle_of_each_document_that_is_long_enough(tmp_path):
    for name, n in (("a", 5), ("b", 8), ("c", 9), ("d", 20)):
        (tmp_path / name).write_text(name * n)
    tokenizer = get_tokenizer("bytes")
    segments, short = perplexity.get_documents([tmp_path], tokenizer, 8, 5)
    assert [tokenizer.decode(s.tolist()) for s in segments.values()] == ["c" * 9, "d" * 9]
    assert [name.split()[0] for name in segments] == ["c", "d"]
    assert short == 2
    assert len(perplexity.get_documents([tmp_path], tokenizer, 8, 1)[0]) == 1
    assert perplexity.middle(list(range(10)), 3).tolist() == [3, 4, 5, 6]
    with pytest.raises(UsageError, match="longer than 20 tokens, the longest has 20"):
        perplexity.get_documents([tmp_path], tokenizer, 20, 5)


def test_default_documents_are_held_out_from_training():
    tokenizer = get_tokenizer("bytes")
    training, _ = get_data(train.get_parser().parse_args([]), tokenizer,
                           list(files_of(["stdlib"])))
    assert isinstance(training, Sequences)
    seen = b"".join(bytes(a.astype(np.uint8)) for a in training.arrays)
    segments, _ = perplexity.get_documents(None, tokenizer, 4096, 16)
    assert len(segments) == 16
    assert not any(name.startswith("cp") for name in segments)          # tables of code pages
    assert not any(bytes(s.astype(np.uint8))[1000:1500] in seen for s in segments.values())


def test_position_p_has_p_tokens_of_context(checkpoints):
    """Against the logits of the whole model on each prefix by itself."""
    model, _, _ = load_checkpoint(checkpoints["multiscreen"])
    x = draw_tokens(21, seed=1, n=257)
    found = perplexity.nats(model, x.numpy().astype(np.uint16))
    for p in (1, 2, 20):
        with torch.no_grad():
            nats = -model(x[None, :p])[0, -1].log_softmax(-1)[x[p]].item()
        assert found[p - 1] == pytest.approx(nats, abs=1e-5)


def test_means_over_documents_then_over_seeds():
    """Only the documents that all seeds have: a and b. Seeds at 2 and 4 nats."""
    key = Key("perplexity, books", "", "0", "1", "32")
    values = {key.at(item="a"): [1.0], key.at(item="b"): [3.0], key.at(item="c"): [9.0],
              key.at(item="a", seed="1"): [5.0], key.at(item="b", seed="1"): [3.0],
              key.at(task="passkey"): [0.0]}
    curves = perplexity.get_curves(values)
    assert curves == {key.at(seed=""): {"0": [2.0], "1": [4.0]}}
    (mean, std, nats), = perplexity.summarize(curves[key.at(seed="")])
    assert mean == pytest.approx((math.e**2 + math.e**4) / 2)
    assert std == pytest.approx((math.e**4 - math.e**2) / math.sqrt(2))
    assert nats == 3


def test_long_context_has_a_curve_for_each_model_and_setting(call, checkpoints, tmp_path,
                                                             monkeypatch):
    (tmp_path / "text").write_text("screening is enough " * 4)
    (tmp_path / "more").write_text("screening is enough, " * 4)
    names = ["multiscreen", "multiscreen:rope", "transformer:2,2,8"]
    flags = ["--ckpt", *[checkpoints[name] for name in names], "--length", 40, "--rope-scale", 1, 4,
             "--swe", "--device", "cpu", "--results", tmp_path / "r.tsv", "--data"]
    call(long_context, *flags, tmp_path / "text")
    call(long_context, *flags, tmp_path / "text", tmp_path / "more")
    rows = read_table(tmp_path / "long_context.tsv")
    rows = [row for row in rows if row["position"] == "32"]
    labels = ["Multiscreen, 0.93M", "Multiscreen, MiPE → RoPE", "Transformer, 3.6K"]
    assert [(row["model"], row["curve"]) for row in rows] == [
        (labels[0], "as trained"), (labels[0], "SWE"), (labels[1], "RoPE ×1"),
        (labels[1], "RoPE ×4"), (labels[1], "SWE RoPE ×1"), (labels[1], "SWE RoPE ×4"),
        (labels[2], "RoPE ×1"), (labels[2], "RoPE ×4")]
    assert len({row["perplexity"] for row in rows}) == 8
    for row in rows:
        nats = float(row["nats_per_token"])
        assert float(row["perplexity"]) == pytest.approx(math.exp(nats), rel=1e-3)
    assert len(read_table(tmp_path / "r.tsv")) == 8 + 16       # --data is part of the task

    # Nothing is measured again, and the table alone is enough.
    monkeypatch.setattr(perplexity, "nats", None)
    call(long_context, *flags, tmp_path / "text", tmp_path / "more")
    (tmp_path / "long_context.tsv").unlink()
    call(long_context, "--results", tmp_path / "r.tsv")
    assert len(read_table(tmp_path / "long_context.tsv")) == 2 * 8 * 2


@pytest.mark.parametrize("name, flag, message", [
    ("multiscreen", "--rope-scale 2", "RoPE"), ("transformer:2,2,8", "--swe", "--swe"),
    ("multiscreen", "--length 80", "no document")])
def test_long_context_refuses_what_a_model_or_a_text_does_not_have(call, checkpoints, tmp_path,
                                                                   name, flag, message):
    (tmp_path / "text").write_text("screening is enough " * 4)
    with pytest.raises(UsageError, match=message):
        call(long_context, "--ckpt", checkpoints[name], "--data", tmp_path / "text", "--length",
             40, "--device", "cpu", *flag.split())


# --------------------------------------------------------------------------------- retrieval

@pytest.mark.parametrize("depth, before", [(0.0, 0), (0.3, 3), (0.5, 5), (1.0, 10)])
def test_passkey_prompts_have_the_key_at_the_depth(depth, before):
    frame = len(passkey.TASK + passkey.NEEDLE.format(50_000) + passkey.QUESTION)
    n_tokens = frame + 10 * len(passkey.FILLER) + 50
    prompts, answers = passkey.passkey_prompts(n_tokens, depth, len, 5)
    assert len(set(answers)) == 5
    for prompt, answer in zip(prompts, answers):
        key = answer.removeprefix(" ")
        assert 1 <= int(key) <= 50_000
        head, tail = prompt.split(passkey.NEEDLE.format(key))
        assert head == passkey.TASK + passkey.FILLER * before
        assert tail == passkey.FILLER * (10 - before) + passkey.QUESTION
    with pytest.raises(UsageError):
        passkey.passkey_prompts(frame, depth, len, 1)


def test_the_passkey_prompt_is_as_published():
    frame = len(passkey.TASK + passkey.NEEDLE.format(50_000) + passkey.QUESTION)
    found = passkey.passkey_prompts(frame + 2 * len(passkey.FILLER), 0.5, len, 1)
    filler = ("The grass is green. The sky is blue. The sun is yellow. Here we go. There and back "
              "again. ")
    assert found == ([
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize "
        "them. I will quiz you about the important information there.\n" + filler +
        "\nThe pass key is 3432. Remember it. 3432 is the pass key.\n" + filler +
        "\nWhat is the pass key? The pass key is"], [" 3432"])


def test_passkeys_are_measured_and_their_table_shown(call, checkpoints, tmp_path):
    path = checkpoints["multiscreen"]
    call(passkey, "--ckpt", path, "--lengths", 420, "--depths", 0, 1, "--trials", 2, "--device",
         "cpu", "--results", tmp_path / "r.tsv")
    call(retrieval, tmp_path / "r.tsv", "--out", tmp_path / "r")
    row, = read_table(tmp_path / "r/retrieval.tsv")
    assert (row["task"], row["model"], row["mean"]) == ("passkey", "Multiscreen", "0.0%")
    with pytest.raises(UsageError, match="not a table"):
        call(retrieval, tmp_path / "r/retrieval.tsv")


def test_retrieval_by_length_of_two_seeds_in_two_tables(call, tmp_path):
    run = "--model multiscreen --psi 2 --tokenizer bytes --seq-len 16"
    for seed, accuracy in ((0, 0.75), (1, 0.25)):
        results = Results(tmp_path / f"{seed}.tsv")
        key = Key("abcdigits, 2 digits", run, str(seed), "9", trials="4", swe="yes")
        results.add(key.at(length=16, depth=0.1), [1.0])
        results.add(key.at(length=32, depth=0.1), [0.25])
        results.add(key.at(length=32, depth=0.5), [accuracy])
    call(retrieval, tmp_path / "0.tsv", tmp_path / "1.tsv", "--out", tmp_path)
    rows = read_table(tmp_path / "retrieval.tsv")
    assert {row["model"] for row in rows} == {"Multiscreen + SWE"}
    keys = ("length", "x_training", "seeds", "mean", "std", "worst_depth")
    assert [tuple(row[key] for key in keys) for row in rows] == [
        ("16", "1", "2", "100.0%", "0.0%", "100.0%"), ("32", "2", "2", "37.5%", "17.7%", "25.0%")]


def test_panels_are_in_the_papers_order():
    """Rows of models, columns by size; an ablation stands beside the original of its flags."""
    def model(flags, swe=""):
        return {Key("abcdigits", f"{flags} --tokenizer bytes --lr 1", "0", "9", "16", "0.1",
                    swe=swe, trials="1"): [1.0]}

    found = [model("--model multiscreen --psi 4"), model("--model multiscreen:no-gate --psi 2"),
             model("--model multiscreen --psi 2"), model("--model multiscreen --psi 2", "yes"),
             model("--model multiscreen:rope --psi 2"), model("--model transformer:2,2,8")]
    sizes, ablations = grids.arrange(found)
    assert {row: [values for _, values in panels] for row, panels in sizes.items()} == {
        "Multiscreen": [found[0]], "Transformer": [found[5]]}
    sizes, _ = grids.arrange([found[0], found[2], found[3], found[5]])
    assert {row: [values for _, values in panels] for row, panels in sizes.items()} == {
        "Multiscreen": [found[2], found[0]], "Multiscreen + SWE": [found[3]],
        "Transformer": [found[5]]}
    assert [title for title, _ in ablations["Multiscreen"]] == [
        "Original, 1 seed", "MiPE → RoPE, 1 seed", "w/o Gate, 1 seed"]
    assert [title for title, _ in ablations["Multiscreen + SWE"]] == ["Original, 1 seed"]

    # The original stands there at the lengths of the ablations only.
    longer = found[2] | {key.at(length=32): x for key, x in found[2].items()}
    _, ablations = grids.arrange([longer, found[1]])
    assert [values for _, values in ablations["Multiscreen"]] == [found[2], found[1]]

    # A cell that one of two seeds has.
    more = {key.at(seed="1", **at): x for key, x in found[2].items() for at in ({}, {"depth": 0.5})}
    sizes, _ = grids.arrange([found[2] | more])
    assert [title for title, _ in sizes["Multiscreen"]] == ["4.6K, 1 to 2 seeds"]


# -------------------------------------------------------------- windows, relevance maps, samples

def test_summary_of_windows():
    w, r = np.array([2.0, 300.0, np.inf]), np.array([0.5, 1.0, 0.25])
    row = windows.summary("1", w, r, 256.0, 300)
    assert row == ["1", 3, 2.0, 300.0, INF, 0.25, 0.5, 1.0, 2, 1]


@pytest.mark.parametrize("name, r", [("multiscreen", 0.5), ("multiscreen:fixed-r", 1.0)])
def test_windows_of_a_checkpoint(call, checkpoints, name, r):
    """The initial windows are 2, 17 and 257 tokens: exp(s_w) + 1, s_w from 0 to ln 256."""
    call(windows, "--ckpt", checkpoints[name])
    rows = read_table(checkpoints[name].with_name("windows.tsv"))
    assert [row["layer"] for row in rows] == ["1", "2", "all"]
    last = {key: float(value) for key, value in rows[-1].items() if key != "layer"}
    assert last == {"tiles": 6, "w_min": 2, "w_median": 17, "w_max": 257, "r_min": r,
                    "r_median": r, "r_max": r, "w>w_th": 2, "w>T_train": 4}


@pytest.mark.parametrize("script", [windows, relevance_maps])
def test_a_model_without_windows_is_refused(call, checkpoints, script):
    with pytest.raises(UsageError, match="no screening windows"):
        call(script, "--ckpt", checkpoints["transformer:2,2,8"])


def test_live_pairs_are_counted_inside_the_window():
    assert maps.inside(3, 1.5).tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert maps.inside(3, 2.0).tolist() == maps.inside(3, 1.5).tolist()
    assert maps.inside(4, INF).sum() == 10
    alpha_d = np.array([[1.0, 0, 0], [0, 0.5, 0], [0, 0, 0.1]])
    assert maps.alive(alpha_d, 1.5) == pytest.approx(3 / 5)
    assert maps.alive(alpha_d, INF) == pytest.approx(3 / 6)


def test_a_map_by_distance_is_cropped_to_the_window():
    alpha_d = np.arange(9.0).reshape(3, 3)
    found = maps.by_distance(alpha_d, 1.5)
    np.testing.assert_array_equal(found, [[0, NAN], [4, 3], [8, 7]])
    assert maps.by_distance(alpha_d, 2.0).shape == (3, 2)    # d = 2 is outside, as d >= w
    assert maps.by_distance(alpha_d, INF).shape == (3, 3)
    inside = maps.inside(3, 1.5)
    assert np.isnan(found).sum() == found.size - inside.sum()


def test_relevance_maps_count_what_train_logs(call, checkpoints):
    """`alive` over all tiles, weighted by the pairs in their windows, is train.py's number."""
    path, text = checkpoints["multiscreen"], "screening is enough" * 9
    call(relevance_maps, "--ckpt", path, "--text", text, "--tokens", 20, "--device", "cpu")
    rows = read_table(path.with_name("relevance_maps.tsv"))
    assert [row["layer"] + row["tile"] for row in rows] == ["11", "12", "13", "21", "22", "23"]
    assert [row["w"] for row in rows] == ["2", "17", "257"] * 2
    assert {row["r"] for row in rows} == {"0.5"}
    pairs = {"2": 20 + 19, "17": sum(range(4, 21)), "257": 210}
    alive = sum(float(row["alive"]) * pairs[row["w"]] for row in rows)
    model, tokenizer, _ = load_checkpoint(path)
    tokens = torch.tensor([tokenizer.encode_ordinary(text)[:20]])
    share = alive / (2 * sum(pairs.values()))
    assert share == pytest.approx(train.alive_fraction(model, tokens), rel=1e-3)


@pytest.mark.parametrize("tokens, pieces", [
    ([0x61, 0xC3, 0xA9, 0x62], ["a", "", "é", "b", ""]), ([0xE2, 0x82], ["", "", "\ufffd"]),
    ([0x61, 256, 0x62], ["a", ""])])
def test_what_is_no_character_yet_is_held_back(tokens, pieces):
    assert list(sample.decode_stream(tokens, get_tokenizer("bytes"))) == pieces


@pytest.mark.parametrize("name", ["multiscreen", "transformer:2,2,8"])
def test_a_sample_is_what_the_model_generates(name, checkpoints, call, capsys):
    flags = ["--ckpt", checkpoints[name], "--device", "cpu", "--tokens", 8]
    call(sample, *flags, "--prompt", "screen", "--temperature", 0)
    model, _, _ = load_checkpoint(checkpoints[name])
    greedy = model.generate(torch.tensor([list(b"screen")]), 8)[0].tolist()
    shown, note = capsys.readouterr()
    assert shown == "screen" + bytes(t for t in greedy if t < 256).decode(errors="replace")
    assert "8 tokens" in note
    texts = []
    for seed in (3, 3, 4):
        call(sample, *flags, "--seed", seed)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


# --------------------------------------------------------------------------------- latency

def test_trained_like_windows_have_the_stated_shares_and_ranges():
    w = timing.trained_like(1000)
    shares = [((a <= w) & (w <= b)).sum() for a, b in ((2, 128), (256, 4096), (4096, 65536))]
    assert shares == [700, 250, 50]
    near = w[w <= 128]
    assert abs((near < 16).float().mean() - 0.5) < 0.06        # 16 is the geometric middle
    assert 0 < (w[:100] > 4096).sum() < 20                     # shuffled over the layers
    assert (timing.trained_like(9) > 4096).sum() == 1


def test_settings_change_only_the_windows_they_should():
    model = Multiscreen(Config(psi=6, vocab_size=11))

    def widths():
        return torch.cat([window(tile.s_w.detach()) for tile in model.layers])

    before = widths()
    timing.prepare(model, "initial", 4096)
    assert torch.equal(widths(), before)
    timing.prepare(model, "trained-like + SWE", 4096)  # after a stop it comes first
    timing.prepare(model, "trained-like", 4096)
    likely = widths()
    torch.testing.assert_close(likely, timing.trained_like(36), rtol=1e-5, atol=0)
    timing.prepare(model, "trained-like + SWE", 4096)
    far = likely > 4096
    assert far.sum() == 2
    assert torch.equal(widths(), torch.where(far, INF, likely))


def test_latency_has_a_row_for_each_cell_and_one_without_a_backend(call, tmp_path, monkeypatch):
    monkeypatch.setitem(timing.BACKENDS, "flash", SDPBackend.CUDNN_ATTENTION)      # no CPU has it
    call(latency, "--psi", 2, 3, "--transformer", "1,2,8", "--lengths", 64, 32, "--repeats", 2,
         "--device", "cpu", "--out", tmp_path)
    rows = read_table(tmp_path / "latency.tsv")
    settings = ["initial", "trained-like", "trained-like + SWE"]
    cells = [("transformer:1,2,8", s, T) for s in ("flash", "math") for T in ("32", "64")]
    cells += [("Psi = 2", s, T) for s in settings for T in ("32", "64")]
    cells += [("Psi = 3", s, "64") for s in settings]
    assert [(row["model"], row["setting"], row["length"]) for row in rows] == cells
    assert {row["parameters"] for row in rows[4:10]} == {"4626"}
    assert {row["ms"] for row in rows[:2]} == {"-"}
    assert {row["x_fastest"] for row in rows[10:]} == {"-"}    # it has no Transformer
    for row in rows[4:10]:
        math_ms, = (float(other["ms"]) for other in rows[2:4] if other["length"] == row["length"])
        ratio = math_ms / float(row["ms"])
        assert float(row["x_fastest"]) == pytest.approx(ratio, rel=2e-3)
        assert row["fastest"] == "math"
        assert row["x_flash"] == "-"


def test_latency_of_checkpoints_is_a_mean_over_seeds_and_not_timed_again(
        call, checkpoints, tmp_path, monkeypatch):
    ckpt = torch.load(checkpoints["multiscreen"], weights_only=True)
    save_checkpoint(tmp_path / "seed1.pt", ckpt | {"args": ckpt["args"] | {"seed": 1}})
    times = iter([1.0, 2.0, 8.0] + [3.0] * 3)
    monkeypatch.setattr(latency, "time_cell", lambda *inputs: ([next(times)], None))
    flags = ["--ckpt", checkpoints["multiscreen"], tmp_path / "seed1.pt", "--transformer", "1,2,8",
             "--lengths", 32, "--device", "cpu", "--out", tmp_path]
    for _ in range(2):
        call(latency, *flags)
    rows = read_table(tmp_path / "latency.tsv")
    assert [(row["setting"], row["ms"], row["seeds"]) for row in rows] == [
        ("flash", "1", "1"), ("math", "2", "1"), ("trained", "5.5", "2"),
        ("trained + SWE", "3", "2")]
    assert float(rows[2]["std_ms"]) == pytest.approx(5 / math.sqrt(2), rel=1e-4)

    other = {name: W + 1 for name, W in ckpt["weights"].items()}
    save_checkpoint(tmp_path / "seed1b.pt", ckpt | {"args": ckpt["args"] | {"seed": 1},
                                                    "weights": other})
    with pytest.raises(UsageError, match="the same flags, seed and step"):
        call(latency, *flags[:3], tmp_path / "seed1b.pt", *flags[3:])


def test_ratios():
    found = timing.ratios(50, {"flash": 400, "cudnn": 250, "math": 900})
    assert found == [8, 5, "cudnn"]
    assert timing.ratios(None, {"flash": 1}) == [None, None, None]


def test_parameters_are_counted_beside_a_run_that_is_there(tmp_path, monkeypatch):
    """The quick start's model lies in out/ while the experiments run."""
    fit(tmp_path / "out", "--steps", "1")
    monkeypatch.chdir(tmp_path)
    assert models.parameters_of("--psi", 2)[0] > 0


def test_a_figure_without_a_table_is_deleted_with_force_only(tmp_path):
    figure = tmp_path / "windows.png"
    figure.write_bytes(b"mine")
    check_writable(tmp_path / "windows.tsv")
    assert figure.read_bytes() == b"mine"
    check_writable(tmp_path / "windows.tsv", force=True)
    assert not figure.exists()

"""Tests of experiments/: a small run of each script, and the arithmetic behind the tables."""
import math
import sys

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend

import train
from experiments import (
    grids,
    latency,
    long_context,
    maps,
    passkey,
    perplexity,
    relevance_maps,
    retrieval,
    sample,
    timing,
    windows,
)
from multiscreen import Config, Multiscreen, window
from support.checkpoint import FIXED, KEYS, build_model, load_checkpoint, save_checkpoint
from support.cli import UsageError, check_writable
from support.data import Sequences, files_of, get_data, get_tokenizer
from support.results import Key, Results
from tests.helpers import INF, draw_tokens, read_table

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


@pytest.mark.parametrize("script, flags, message", [
    (latency, ["--lengths", "0"], "at least 1"),
    (latency, ["--ckpt", "nowhere.pt"], "does not exist"), (sample, ["--tokens", "0"], "--tokens"),
    (long_context, ["--length", "0"], "above 0"), (passkey, [], "train a model first"),
    (windows, ["--ckpt", "nowhere.pt"], "train a model first")])
def test_a_mistake_is_told_in_one_line_before_any_run(call, monkeypatch, script, flags, message):
    monkeypatch.setattr(train, "main", None)
    with pytest.raises(UsageError, match=message) as e:
        call(script, *flags)
    assert "\n" not in str(e.value)


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



def test_a_figure_without_a_table_is_deleted_with_force_only(tmp_path):
    figure = tmp_path / "windows.png"
    figure.write_bytes(b"mine")
    check_writable(tmp_path / "windows.tsv")
    assert figure.read_bytes() == b"mine"
    check_writable(tmp_path / "windows.tsv", force=True)
    assert not figure.exists()

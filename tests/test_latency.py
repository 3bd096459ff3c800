"""Tests of experiments.latency: times of a forward pass, and their figure."""
import pytest
import torch
from torch.nn.attention import SDPBackend

import support.timing
from experiments import latency
from multiscreen import Config, Multiscreen, window
from support.table import write_rows
from tests.helpers import INF, needs_matplotlib, read_table

# --------------------------------------------------------------------------------- latency

def test_trained_like_windows_have_the_stated_shares_and_ranges():
    w = support.timing.trained_like(1000)
    shares = [((a <= w) & (w <= b)).sum() for a, b in ((2, 128), (256, 4096), (4096, 65536))]
    assert shares == [700, 250, 50]
    near = w[w <= 128]
    assert abs((near < 16).float().mean() - 0.5) < 0.06        # 16: the geometric mean
    assert 0 < (w[:100] > 4096).sum() < 20                     # shuffled over the layers
    assert (support.timing.trained_like(9) > 4096).sum() == 1


def test_settings_change_only_the_windows_they_should():
    model = Multiscreen(Config(psi=6, vocab_size=11))

    def widths():
        return torch.cat([window(tile.s_w.detach()) for tile in model.layers])

    before = widths()
    latency.apply_setting(model, "initial", 4096)
    assert torch.equal(widths(), before)
    latency.apply_setting(model, "trained-like + SWE", 4096)  # comes first after a stop
    latency.apply_setting(model, "trained-like", 4096)
    likely = widths()
    torch.testing.assert_close(likely, support.timing.trained_like(36), rtol=1e-5, atol=0)
    latency.apply_setting(model, "trained-like + SWE", 4096)
    far = likely > 4096
    assert far.sum() == 2
    assert torch.equal(widths(), torch.where(far, INF, likely))


@pytest.mark.usefixtures("quick_choice")
def test_latency_has_a_row_for_each_cell_and_none_without_a_backend(call, tmp_path, monkeypatch):
    monkeypatch.setitem(latency.BACKENDS, "flash", SDPBackend.CUDNN_ATTENTION)     # no CPU has it
    flags = ["--psi", 2, 3, "--transformer", "1,2,8", "--lengths", 64, 32, "--repeats", 2,
             "--device", "cpu", "--out", tmp_path / "latency.png"]
    call(latency, *flags)
    made = read_table(tmp_path / "latency.tsv")
    settings = ["initial", "trained-like", "trained-like + SWE"]
    cells = [("2832", "math", T) for T in ("32", "64")]
    cells += [("4626", s, "64") for s in settings]
    cells += [("20486", s, T) for s in settings for T in ("32", "64")]
    assert [(row["parameters"], row["setting"], row["length"]) for row in made] == cells
    assert all(float(ms) > 0 for row in made for ms in row["ms"].split())

    # Only what could not run is tried again.
    tried = []

    def time_nothing(model, setting, *rest):
        tried.append(setting)
        return None, "no"

    monkeypatch.setattr(latency, "time_passes", time_nothing)
    call(latency, *flags)
    assert tried == ["flash", "flash"]
    assert read_table(tmp_path / "latency.tsv") == made


def test_latency_of_a_checkpoint_is_a_table_beside_it(call, checkpoints, monkeypatch):
    path = checkpoints["multiscreen"]
    monkeypatch.setattr(latency, "time_passes", lambda *inputs: ([1.0, 3.0], None))
    call(latency, "--ckpt", path, "--transformer", "1,2,8", "--lengths", 32, "--device", "cpu")
    rows = read_table(path.with_name("latency.tsv"))
    assert [(row["model"], row["setting"], row["ms"]) for row in rows] == [
        ("transformer:1,2,8", "flash", "1 3"), ("transformer:1,2,8", "math", "1 3"),
        ("multiscreen", "trained", "1 3"), ("multiscreen", "trained + SWE", "1 3")]
    assert rows[2]["seq_len"] == "16"


def timed(model, parameters, setting, length, ms, machine="CPU"):
    """A row of latency.tsv."""
    row = dict.fromkeys(latency.KEYS, "") | {"repeats": "3", "seed": "0", "machine": machine}
    return row | {"model": model, "parameters": parameters, "setting": setting, "length": length,
                  "ms": ms, "hash": "1"}


@needs_matplotlib
def test_a_time_is_compared_with_the_fastest_of_the_transformer_beside_it(call, tmp_path, capsys):
    """By size: 9 is beside 10, and 90 beside none. Other machines' times do not count."""
    write_rows(tmp_path / "t.tsv", [
        timed("transformer:a", "10", "flash", "64", "9", "GPU"),
        timed("transformer:a", "10", "flash", "32", "4"),
        timed("transformer:a", "10", "flash", "64", "400"),
        timed("transformer:a", "10", "math", "64", "80 120"),
        timed("multiscreen", "90", "initial", "64", "7"),
        timed("multiscreen", "9", "initial", "64", "45 50 55")])
    call(latency, tmp_path / "t.tsv")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[3:] for line in lines[3:8]] == [
        ["32", "4", "-", "-", "-"], ["64", "400", "-", "-", "-"],
        ["64", "100", "28.284", "-", "-"], ["64", "7", "-", "-", "-"],
        ["64", "50", "5", "2", "0.6"]]               # 2 * hypot(0.28284, 0.1)
    assert (tmp_path / "t.png").stat().st_size > 10_000


@needs_matplotlib
def test_each_model_of_a_table_is_a_line_by_length_and_its_sizes_a_line(call, tmp_path,
                                                                        monkeypatch):
    found = []
    monkeypatch.setattr(latency, "save_figure", lambda fig, path: found.append(fig))
    monkeypatch.setattr(latency, "load_for_evaluation", None)          # a drawing needs no model
    write_rows(tmp_path / "t.tsv", [timed("multiscreen", size, "initial", length, "5")
                                    for size in ("20000", "4000") for length in ("64", "32")])
    call(latency, "t.tsv", "mine=t.tsv")
    by_size, by_length = ({line.get_label(): [*line.lines[0].get_xdata()]
                           for line in ax.containers} for ax in found[0].axes)
    assert by_size == {name: [4000, 20000] for name in ("Multiscreen, initial", "mine, initial")}
    assert by_length == {f"{name}, {size}, initial": [32, 64] for name in ("Multiscreen", "mine")
                         for size in ("20K", "4K")}

"""Tests of experiments.retrieval and experiments.passkey."""
import pytest

from abcdigits import CELL
from experiments import passkey, retrieval
from experiments.retrieval import Cell
from support.cli import UsageError
from support.table import RUN, write_rows
from support.tokens import get_tokenizer
from tasks.passkey import FILLER, NEEDLE, QUESTION, TASK
from tests.helpers import cells_of, needs_matplotlib, read_table

BYTES = get_tokenizer("bytes")


@pytest.fixture
def no_figure(monkeypatch):
    monkeypatch.setattr(retrieval, "pyplot", lambda: None)


# --------------------------------------------------------------------------------- retrieval

@pytest.mark.parametrize("depth, before", [(0.0, 0), (0.3, 3), (0.5, 5), (1.0, 10)])
def test_passkey_prompts_have_the_key_at_the_depth(depth, before):
    frame = len(TASK + NEEDLE.format(50_000) + QUESTION)
    n_tokens = frame + 10 * len(FILLER) + 50
    prompts, answers = passkey.passkey_prompts(BYTES, n_tokens, depth, 5)
    assert len(set(answers)) == 5
    for prompt, answer in zip(prompts, answers):
        key = answer.removeprefix(" ")
        assert 1 <= int(key) <= 50_000
        head, tail = prompt.split(NEEDLE.format(key))
        assert head == TASK + FILLER * before
        assert tail == FILLER * (10 - before) + QUESTION
    with pytest.raises(UsageError):
        passkey.passkey_prompts(BYTES, frame, depth, 1)


def test_the_passkey_prompt_is_as_published():
    frame = len(TASK + NEEDLE.format(50_000) + QUESTION)
    found = passkey.passkey_prompts(BYTES, frame + 2 * len(FILLER), 0.5, 1)
    filler = ("The grass is green. The sky is blue. The sun is yellow. Here we go. There and back "
              "again. ")
    assert found == ([
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize "
        "them. I will quiz you about the important information there.\n" + filler +
        "\nThe pass key is 3432. Remember it. 3432 is the pass key.\n" + filler +
        "\nWhat is the pass key? The pass key is"], [" 3432"])


@needs_matplotlib
def test_passkeys_are_measured_and_their_table_drawn(call, checkpoints, capsys):
    path = checkpoints["multiscreen"]
    call(passkey, "--ckpt", path, "--lengths", 420, "--depths", 0, 1, "--trials", 2, "--device",
         "cpu")
    assert [row["accuracy"] for row in read_table(path.with_name("passkey.tsv"))] == ["0", "0"]
    capsys.readouterr()
    call(retrieval, path.with_name("passkey.tsv"))
    row = means(capsys)[0]
    assert row == ["Multiscreen", "420", "26.25", "1", "2", "0.0%", "-", "0.0%"]
    assert path.with_name("passkey.png").exists()
    assert not path.with_name("passkey_by_length.png").exists()


def tables(capsys):
    """The cells of the two printed tables: by seed, and the means."""
    lines = cells_of(capsys)
    titles = [n for n, line in enumerate(lines) if line[0].startswith("Needles found")]
    return lines[titles[0] + 2 : titles[1]], lines[titles[1] + 2 :]


def means(capsys):
    """The rows of the table of means."""
    return tables(capsys)[1]


def cell(accuracy="1", **values):
    """A row of abcdigits.tsv."""
    row = dict.fromkeys((*RUN, "digits", *CELL), "") | {
        "model": "multiscreen", "parameters": "4626", "seed": "0", "seq_len": "16", "step": "9",
        "digits": "2", "length": "16", "depth": "0.1", "trials": "4", "accuracy": accuracy,
        "hash": f"{values.get('seed', '0')}-{values.get('model', '')}"}
    return row | values


@needs_matplotlib
def test_retrieval_by_length_of_two_seeds_in_two_tables(call, tmp_path, capsys):
    for seed, accuracy in (("0", "0.75"), ("1", "0.25")):
        values = {"seed": seed, "swe": "yes"}
        write_rows(tmp_path / f"{seed}.tsv", [
            cell(**values), cell("0.25", length="32", **values),
            cell(accuracy, length="32", depth="0.5", **values)])
    call(retrieval, tmp_path / "0.tsv", tmp_path / "1.tsv", "--out", tmp_path / "f.png")
    by_seed, means = tables(capsys)
    assert by_seed[:3] == [["Multiscreen + SWE", "0", "100.0%", "50.0%"],
                           ["Multiscreen + SWE", "1", "100.0%", "25.0%"],
                           ["Multiscreen + SWE", "95 %", "2 of 2", "0 of 2"]]
    assert means[:2] == [
        ["Multiscreen + SWE", "16", "1", "2", "4", "100.0%", "0.0%", "100.0%"],
        ["Multiscreen + SWE", "32", "2", "2", "4", "37.5%", "17.7%", "25.0%"]]
    assert (tmp_path / "f_by_length.png").exists()
    assert len(read_table(tmp_path / "f.tsv")) == 6

    # No row drawn before is lost.
    with pytest.raises(UsageError, match="already holds 3 other rows:"):
        call(retrieval, tmp_path / "0.tsv", "--out", tmp_path / "f.png")


def test_a_seed_with_fewer_depths_does_not_count(call, no_figure, tmp_path, capsys):
    write_rows(tmp_path / "t.tsv", [cell(), cell(depth="0.5"), cell("0", seed="1")])
    call(retrieval, tmp_path / "t.tsv")
    assert means(capsys)[0] == ["Multiscreen", "16", "1", "1", "4", "100.0%", "-", "100.0%"]


def test_seeds_may_be_measured_at_different_depths(call, no_figure, tmp_path, capsys):
    write_rows(tmp_path / "t.tsv", [cell("0.5"), cell(seed="1", depth="0.5")])
    call(retrieval, tmp_path / "t.tsv")
    assert means(capsys)[0] == ["Multiscreen", "16", "1", "2", "4", "75.0%", "35.4%", "50.0%"]


def panels_of(call, tmp_path, monkeypatch, rows):
    """The panels of a figure as (row, title, number of cells)."""
    found = []
    monkeypatch.setattr(retrieval, "draw_panels", lambda plt, panels, *rest: found.extend(panels))
    write_rows(tmp_path / "t.tsv", rows)
    call(retrieval, tmp_path / "t.tsv")
    return [(retrieval.ROWS[panel.row], panel.title, len(panel.cells)) for panel in found]


@needs_matplotlib
def test_panels_are_in_the_papers_order(call, tmp_path, monkeypatch):
    """A row of panels per model, a column per size; ablations stand beside the original."""
    large = {"parameters": "900000"}
    rows = [cell(**large), cell(), cell(swe="yes"), cell(model="transformer:2,2,8"),
            cell(length="32")]
    assert panels_of(call, tmp_path, monkeypatch, rows) == [
        ("Transformer", "4.6K", 1), ("Multiscreen", "4.6K", 2), ("Multiscreen", "0.9M", 1),
        ("Multiscreen + SWE", "4.6K", 1)]
    (tmp_path / "t_by_length.png").unlink()
    rows = [cell(model="multiscreen:no-gate"), cell(), cell(length="32"), cell(swe="yes"),
            cell(model="multiscreen:rope"), cell(model="transformer:2,2,8"),
            cell(model="multiscreen:yours", length="64")]
    assert panels_of(call, tmp_path, monkeypatch, rows) == [
        ("Transformer", "Transformer", 1), ("Multiscreen", "Original", 1),
        ("Multiscreen", "Multiscreen, yours", 1), ("Multiscreen", "MiPE → RoPE", 1),
        ("Multiscreen", "w/o Gate", 1), ("Multiscreen + SWE", "Original", 1)]
    assert not (tmp_path / "t_by_length.png").exists()


@needs_matplotlib
def test_many_panels_stay_as_wide_as_a_page(call, tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(retrieval, "save_figure", lambda fig, path: found.append(fig))
    names = ("rope", "nope", "no-gate", "fixed-r")
    rows = [cell(), *(cell(model=f"multiscreen:{name}", seed="0") for name in names)]
    write_rows(tmp_path / "t.tsv", rows)
    call(retrieval, tmp_path / "t.tsv")
    titles = [ax.get_title() for ax in found[0].axes if ax.get_images()]
    assert len(titles) == 5 and found[0].get_size_inches()[0] < 10


def test_a_table_can_have_a_label(call, no_figure, tmp_path, capsys):
    """An edited model and the original have the same name but different equations."""
    write_rows(tmp_path / "a.tsv", [cell(hash="1-1")])
    write_rows(tmp_path / "b.tsv", [cell(hash="2-2", accuracy="0.5")])
    call(retrieval, "a.tsv", "mine=b.tsv", "--out", "o/f.png")
    shown = {line[0]: line[5] for line in means(capsys)[:2]}
    assert shown == {"Multiscreen": "100.0%", "mine": "50.0%"}
    call(retrieval, "o/f.tsv", "--out", "o/g.png")
    assert {line[0] for line in means(capsys)[:2]} == {*shown}


@needs_matplotlib
def test_what_differs_is_said(call, tmp_path, monkeypatch):
    rows = [cell(), cell(step="10", hash="1-"), cell(digits="6")]
    assert panels_of(call, tmp_path, monkeypatch, rows) == [
        ("Multiscreen", "4.6K, 2 digits, step 9", 1), ("Multiscreen", "4.6K, 2 digits, step 10", 1),
        ("Multiscreen", "4.6K, 6 digits, step 9", 1)]
    rows = [cell(), cell(seq_len="32", hash="1-")]
    assert panels_of(call, tmp_path, monkeypatch, rows) == [
        ("Multiscreen", "4.6K, trained at 16", 1), ("Multiscreen", "4.6K, trained at 32", 1)]
    rows = [cell(), cell(seed="1", step="10", hash="1-")]       # seeds stop when they have learned
    assert panels_of(call, tmp_path, monkeypatch, rows) == [("Multiscreen", "4.6K", 1)]
    assert retrieval.count_seeds({1: retrieval_cell(1), 2: retrieval_cell(3)}) == "1 to 3 seeds"


def retrieval_cell(seeds):
    shares = {str(n): 1.0 for n in range(seeds)}
    return Cell(shares, dict.fromkeys(shares, 4))


def test_the_rows_of_a_figure_are_of_one_measurement(call, tmp_path):
    write_rows(tmp_path / "t.tsv", [{"a": "1", "b": "2"}])
    for label in ("", "mine="):
        with pytest.raises(UsageError, match="does not have the columns"):
            call(retrieval, f"{label}{tmp_path / 't.tsv'}")
    (tmp_path / "t.tsv").write_text("")
    with pytest.raises(UsageError, match="has no rows"):
        call(retrieval, tmp_path / "t.tsv")

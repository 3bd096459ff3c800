"""Tests of lab.retrieval and lab.passkey."""
import pytest

from lab import passkey, retrieval
from lab.common import write_rows
from lab.passkey import FILLER, NEEDLE, QUESTION, TASK
from lab.retrieval import CELL, get_cells
from support.cli import UsageError
from support.data import get_tokenizer
from support.measure import RUN
from tests.helpers import cells_of, needs_matplotlib, read_table

BYTES = get_tokenizer("bytes")

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
    assert shown(capsys) == [["Multiscreen", "0", "0.0%"]]
    assert path.with_name("passkey.png").exists()
    assert path.with_name("passkey_by_length.png").exists()


def shown(capsys):
    """The rows of the printed table."""
    lines = [line for line in cells_of(capsys) if len(line) > 2]
    return lines[1:]


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
    call(retrieval, "0.tsv", "1.tsv", "--out", "f.png")
    assert shown(capsys) == [["Multiscreen + SWE", "0", "100.0%", "50.0%"],
                             ["Multiscreen + SWE", "1", "100.0%", "25.0%"],
                             ["Multiscreen + SWE", "mean", "100.0%", "37.5%"],
                             ["Multiscreen + SWE", "std", "0.0%", "17.7%"],
                             ["Multiscreen + SWE", "95 %", "2 of 2", "0 of 2"]]
    assert (tmp_path / "f_by_length.png").exists()
    assert len(read_table(tmp_path / "f.tsv")) == 6


def test_a_seed_with_fewer_depths_than_others_does_not_count():
    def means(*rows):
        return retrieval.mean_by_length(get_cells(rows))

    assert means(cell(), cell(depth="0.5"), cell("0", seed="1")) == {16: {"0": 1.0}}
    assert means(cell("0.5"), cell("0.5", seed="1")) == {16: {"0": 0.5, "1": 0.5}}
    # As many depths, but others.
    rows = [cell(), cell(depth="0.5"), cell(seed="1"), cell("0", seed="1", depth="0.9")]
    assert means(*rows) == {16: {}}
    panels = retrieval.get_panels(rows)
    assert [*retrieval.left_out(panels)] == [
        f"Multiscreen, seed {seed}: no mean at 16 tokens, since it lacks depths that other seeds "
        "have" for seed in "01"]
    assert retrieval.table_rows(panels, [16])[:2] == [["Multiscreen", "0", None],
                                                      ["Multiscreen", "1", None]]


def panels_of(rows):
    """The panels of a figure as (name, number of cells)."""
    return [(panel.name, len(panel.cells)) for panel in retrieval.get_panels(rows)]


def test_panels_are_in_the_order_of_the_tables_and_those_with_swe_last():
    rows = [cell(parameters="900000"), cell(swe="yes"), cell(model="transformer:2,2,8"), cell(),
            cell(length="32")]
    assert panels_of(rows) == [("Multiscreen, 0.9M", 1), ("Transformer, 4.6K", 1),
                               ("Multiscreen, 4.6K", 2), ("Multiscreen, 4.6K + SWE", 1)]
    rows = [cell(model="multiscreen:no-gate"), cell(), cell(model="multiscreen:yours")]
    assert panels_of(rows) == [("w/o Gate", 1), ("Multiscreen", 1), ("Multiscreen, yours", 1)]


def test_of_several_rope_factors_and_numbers_of_prompts_the_best_and_the_most_count():
    """Factor 1 lacks a seed. Seed 0 with factor 4 was measured again, with more prompts."""
    rows = [cell("0.5", trials="10", factor="4"), cell("0", factor="4"),
            cell("0.75", factor="4", seed="1"), cell("1", factor="2"),
            cell("0", factor="2", seed="1"), cell("1", factor="1")]
    found = get_cells(rows)[16, 0.1]
    assert (found.factor, found.shares, found.mean) == ("4", {"0": 0.5, "1": 0.75}, 0.625)


@needs_matplotlib
def test_many_panels_stay_as_wide_as_a_page_and_draw_no_curves(call, tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(retrieval, "save_figure", lambda fig, path: found.append(fig))
    write_rows(tmp_path / "t.tsv", [cell(model=f"multiscreen:{name}") for name in "abcdefgh"])
    call(retrieval, tmp_path / "t.tsv")
    figure, = found
    assert len([ax for ax in figure.axes if ax.get_images()]) == 8
    assert figure.get_size_inches()[0] < 10


def test_what_differs_is_said():
    rows = [cell(), cell(step="10", hash="1-"), cell(digits="6")]
    assert panels_of(rows) == [("Multiscreen, 2 digits, step 9", 1),
                               ("Multiscreen, 2 digits, step 10", 1),
                               ("Multiscreen, 6 digits, step 9", 1)]
    assert panels_of([cell(), cell(seq_len="32", hash="1-")]) == [
        ("Multiscreen, trained at 16", 1), ("Multiscreen, trained at 32", 1)]
    rows = [cell(), cell(seed="1", step="10", hash="1-")]       # seeds stop when they have learned
    assert panels_of(rows) == [("Multiscreen", 1)]
    panel, = retrieval.get_panels([*rows, cell(depth="0.5")])
    assert panel.title == "Multiscreen, 1 to 2 seeds"

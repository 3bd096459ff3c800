"""Tests of train.py: what it reads and writes, texts, tokens and checkpoints."""
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train
from abcdigits import exact_matches, prompts_of
from multiscreen import Config, GatedScreeningTiles
from tests.helpers import ROOT, TEXT, args_of, command, fit, write

HERE = __name__                                        # what MODULE.NAME calls this file


# ------------------------------------------------------------------------------------- texts

def arrays_of(*names, val=None):
    """(training arrays, held-out arrays) of --data NAMES --val VAL, as lists of tokens."""
    args = SimpleNamespace(data=[*map(str, names)], val=val, seq_len=4, seed=0)
    data = train.get_data(args, train.get_tokenizer("bytes"))
    return [part.tokens.tolist() for part in data]


def test_a_text_is_read_byte_by_byte_and_ends_with_end_of_text(tmp_path):
    """A byte order mark, with which Windows begins a UTF-8 file, is no part of it."""
    write(tmp_path, {"a.txt": b"\xef\xbb\xbfone\r\ntwo\rthree\n\x00\xc3\xa9", "b.txt": "held out"})
    tokens, val = arrays_of(tmp_path / "a.txt", val=[str(tmp_path / "b.txt")])
    assert tokens == [*b"one\r\ntwo\rthree\n\x00\xc3\xa9", 256]
    assert val == [*b"held out", 256]


def test_a_folder_is_its_texts_and_every_twentieth_of_many_is_held_out(tmp_path):
    files = {f"{n:02}.txt": f"{n:02}" * 4 for n in range(17)}
    write(tmp_path, files | {"deep/a.md": "markdown", "deep/b.py": "python!!", "c.png": b"\xff"})
    tokens, val = arrays_of(tmp_path / "16.txt", tmp_path)
    text = bytes(x for x in tokens if x < 256)
    assert text.startswith(b"1616" * 2 + b"0000" * 2 + b"0101")
    assert text.endswith(b"1616" * 2 + b"markdown")
    assert val == [*b"python!!", 256]


def test_stdlib_is_the_library_without_its_tests_and_what_was_installed():
    names = {part for path in train.files_of(["stdlib"]) for part in path.parts[-5:]}
    assert "argparse.py" in names and not names & {"test", "tests", "site-packages"}


def test_the_library_and_folders_may_be_named_together_but_no_empty_folder(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("a")
    files = train.files_of(["stdlib", str(tmp_path)])
    assert files == [*train.files_of(["stdlib"]), tmp_path / "a.txt"]
    with pytest.raises(SystemExit, match="empty has no files"):
        train.files_of([str(tmp_path), str(tmp_path / "empty")])


@pytest.mark.skipif("TIKTOKEN_CACHE_DIR" not in os.environ, reason="no GPT-2 BPE")
def test_what_looks_like_end_of_text_in_a_text_is_text():
    tokens = train.encode("a<|endoftext|>", train.get_tokenizer("gpt2"))
    assert tokens.tolist().count(50256) == 1


def test_of_few_files_the_last_twentieth_of_each_is_held_out(tmp_path):
    """But at least one sequence, T inputs and their targets; of a shorter file, half."""
    write(tmp_path, {"a.txt": "a" * 999, "b.txt": "b" * 1999, "c.txt": "c" * 59, "d.txt": "d" * 7})
    tokens, val = arrays_of(*(tmp_path / f"{name}.txt" for name in "abcd"))
    assert tokens == [*b"a" * 950, *b"b" * 1900, *b"c" * 55, *b"d" * 4]
    assert val == [*b"a" * 49, 256, *b"b" * 99, 256, *b"c" * 4, 256, *b"d" * 3, 256]


def test_sequences_cover_the_text_without_replacement_in_an_order_of_the_seed():
    def text(seed, n=109):
        return train.Text([np.arange(n)], SimpleNamespace(seq_len=4, seed=seed), 257)

    data = text(0)
    assert len(data) == 27                             # of 27 x 4 + 1 tokens; one less is too few
    assert len(text(0, 108)) == 26
    assert [data[n].tolist() for n in (0, 26)] == [[0, 1, 2, 3, 4], [104, 105, 106, 107, 108]]
    drawn = [[int(data.draw(n)[0]) for n in range(27 * epoch, 27 * epoch + 27)]
             for epoch in (0, 1)]
    assert sorted(drawn[0]) == sorted(drawn[1]) == [*range(0, 108, 4)]
    assert drawn[0] != drawn[1]
    assert int(text(0).draw(30)[0]) == drawn[1][3]     # whatever was drawn before
    assert [int(text(1).draw(n)[0]) for n in range(27)] != drawn[0]


# The largest vocabulary that needs two bytes for a token, and the smallest that needs four.
two = SimpleNamespace(name="bytes", n_vocab=2**16, eot_token=2**16 - 1)
four = SimpleNamespace(name="bytes", n_vocab=2**16 + 1, eot_token=2**16)


@pytest.mark.parametrize("tokenizer, dtype", [(two, "<u2"), (four, "<u4")])
def test_a_bin_file_stays_on_the_disk_and_is_joined_to_texts(tmp_path, tokenizer, dtype):
    write(tmp_path, {"a.bin": np.arange(40, dtype=dtype), "b.txt": b"te"})
    a, b = str(tmp_path / "a.bin"), str(tmp_path / "b.txt")
    args = SimpleNamespace(data=[a], val=[b, a, b], seq_len=4, seed=0)
    alone, joined = train.get_data(args, tokenizer)
    assert isinstance(alone.tokens, np.memmap)
    assert alone[8].tolist() == [32, 33, 34, 35, 36]
    text = [*b"te", tokenizer.eot_token]
    assert joined.tokens.tolist() == [*text, *range(40), *text]


def test_data_is_found_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(write(tmp_path, {"a.txt": TEXT}))
    args = args_of(["--data", "a.txt", "--val", "a.txt"])
    assert args.data == args.val == [str(tmp_path / "a.txt")]


# ------------------------------------------------------------------------------- checkpoints

class Keeps(GatedScreeningTiles):
    """A class that keeps a tensor, which its checkpoints have, too."""

    def __init__(self, *inputs, **options):
        super().__init__(*inputs, **options)
        self.register_buffer("kept", torch.ones(2))


@dataclass
class LongerConfig(Config):
    sharpness: float = 1.5


def test_a_loop_of_your_own_saves_its_model_whatever_its_windows_and_fields(tmp_path, monkeypatch):
    """A field that you add to Config has its default; no flag need set it."""
    monkeypatch.setattr(train, "Config", LongerConfig)
    args, path = args_of(["--model", f"{HERE}.Keeps", "--psi", "2"]), tmp_path / "ckpt.pt"
    model = train.make_model(args, train.get_tokenizer("bytes"))
    model.expand_windows(64)                           # some become infinite
    train.save_checkpoint(path, model, args)
    again, tokenizer, ckpt = train.load_checkpoint(path)
    assert not again.training and tokenizer.n_vocab == 257 and again.config.sharpness == 1.5
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert ckpt["args"]["seq_len"] == 256 and ckpt["args"]["model"] == f"{HERE}.Keeps"
    with pytest.raises(SystemExit, match="not a checkpoint of train.py"):
        command("--resume", "--out", tmp_path)         # there are no moments, no place in the data

    model.layers[0].W_Q.data[0] = math.nan
    with pytest.raises(SystemExit, match="W_Q has a NaN"):
        train.save_checkpoint(tmp_path / "new.pt", model, args)
    assert not (tmp_path / "new.pt").exists()


def test_a_file_is_whole_on_the_disk_before_it_replaces_the_old_one(tmp_path, monkeypatch):
    """Else a power cut may leave an empty file under the name of the checkpoint."""
    path, on_the_disk = write(tmp_path, {"a": "old"}) / "a", []
    monkeypatch.setattr(os, "fsync", lambda number: on_the_disk.append(
        (os.fstat(number).st_size, path.read_bytes())))
    train.write(path, b"text", lambda content, file: file.write(content))
    assert on_the_disk == [(4, b"old")]
    assert path.read_bytes() == b"text"


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("kind", ["empty", "half", "text", "evil", "other"])
def test_a_bad_checkpoint_is_one_line_and_nothing_in_it_runs(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    whole = (ROOT / "models/retrieval.pt").read_bytes()
    bad = {"empty": b"", "half": whole[:9999], "text": b"text" * 99, "evil": {"args": Evil()},
           "other": {"weights": torch.zeros(3)}}[kind]
    if isinstance(bad, dict):
        torch.save(bad, "bad.pt")
    else:
        Path("bad.pt").write_bytes(bad)
    with pytest.raises(SystemExit, match="error: bad.pt") as end:
        train.load_checkpoint("bad.pt")
    assert "\n" not in end.value.code
    assert not os.path.exists("executed")


def test_a_checkpoint_has_the_code_that_was_trained_though_it_was_edited_since(
        tmp_path, monkeypatch):
    """The next run of the same process, too: it trains the same code."""
    path = tmp_path / "model_of_mine.py"
    code = (f"from multiscreen import Multiscreen\nfrom {HERE} import Keeps\n"
            "def mine(config, dtype):\n    return Multiscreen(config, dtype, Keeps)\n")
    path.write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(train.Text, "observe", lambda self, loss: path.write_text("# an edit\n"))
    for out in ("first", "second"):
        ckpt = fit(tmp_path / out, "--model", "model_of_mine.mine")
        assert ckpt["source"]["model_of_mine"] == code
        assert ckpt["source"][HERE] == Path(__file__).read_text("utf-8")   # that of its layers


def test_the_bundled_models_answer():
    model, tokenizer, ckpt = train.load_checkpoint(ROOT / "models/retrieval.pt")
    assert ckpt["args"]["seed"] == 24 and ckpt["step"] == 2575
    for length, depth in ((256, 0.9), (1024, 0.1)):
        assert all(exact_matches(model, tokenizer, *prompts_of(tokenizer, length, depth, 2, 2)))
    model, tokenizer, ckpt = train.load_checkpoint(ROOT / "models/text.pt")
    prompt = torch.tensor([tokenizer.encode_ordinary("    def read(self")])
    assert tokenizer.decode(model.generate(prompt, 12)[0].tolist()) == ", self, self"


def test_the_programs_of_the_guide_run(tmp_path, monkeypatch, capsys):
    texts = re.findall(r"```python\n(.*?)```", (ROOT / "docs/data.md").read_text(), re.S)
    (tmp_path / "models").symlink_to(ROOT / "models")
    monkeypatch.chdir(tmp_path)
    for text in texts:
        exec(text, {})
    assert capsys.readouterr().out.startswith("12\n")
    assert train.read_checkpoint("mine.pt")["args"]["seq_len"] == 128

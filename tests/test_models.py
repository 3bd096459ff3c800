"""Tests of the trained model and the measurements in the repository."""
import hashlib
import re
import shutil

import pytest

from abcdigits import exact_matches, generate_by_token_count
from support.checkpoint import load_checkpoint
from tests.helpers import ROOT


def test_the_file_is_the_one_that_is_described():
    said = (ROOT / "models/README.md").read_text()
    found = hashlib.sha256((ROOT / "models/retrieval.pt").read_bytes()).hexdigest()
    assert re.search(r"SHA-256 (\w+)", said)[1] == found


@pytest.mark.usefixtures("quick_choice")
def test_only_a_checkpoint_of_yours_is_told_of_other_code(tmp_path, capsys):
    """The answers of a model in models/ are tested below."""
    load_checkpoint(ROOT / "models/retrieval.pt")
    assert capsys.readouterr().err == ""
    shutil.copy(ROOT / "models/retrieval.pt", tmp_path)
    load_checkpoint(tmp_path / "retrieval.pt")
    assert capsys.readouterr().err == (
        f"{tmp_path / 'retrieval.pt'} was trained with another multiscreen.py\n")


@pytest.mark.usefixtures("quick_choice")
def test_it_retrieves_beyond_its_training_length():
    model, tokenizer, _ = load_checkpoint(ROOT / "models/retrieval.pt")

    def count(line):
        return len(tokenizer.encode_ordinary(line))

    for length, depth in ((256, 0.9), (1024, 0.1)):
        texts = generate_by_token_count(length, depth, count, 2, 4)
        prompts, answers = [t[:-2] for t in texts], [t[-2:] for t in texts]
        assert all(exact_matches(model, tokenizer, prompts, answers))

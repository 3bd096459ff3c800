"""Tests of the trained model and the measurements in the repository."""
import hashlib
import re

import pytest

from abcdigits import exact_matches, generate_by_token_count
from support.checkpoint import load_checkpoint, read_checkpoint
from support.source import digest
from tests.helpers import ROOT


def test_the_file_is_the_one_that_is_described():
    said = (ROOT / "models/README.md").read_text()
    found = hashlib.sha256((ROOT / "models/retrieval.pt").read_bytes()).hexdigest()
    assert re.search(r"SHA-256 (\w+)", said)[1] == found


def test_its_source_is_that_of_its_equations():
    ckpt = read_checkpoint(ROOT / "models/retrieval.pt")
    assert digest(ckpt["source"], ckpt["classes"]) == ckpt["equations"]


@pytest.mark.usefixtures("quick_choice")
def test_it_retrieves_beyond_its_training_length():
    model, tokenizer, _ = load_checkpoint(ROOT / "models/retrieval.pt")

    def count(line):
        return len(tokenizer.encode_ordinary(line))

    for length, depth in ((256, 0.9), (1024, 0.1)):
        texts = generate_by_token_count(length, depth, count, 2, 4)
        prompts, answers = [t[:-2] for t in texts], [t[-2:] for t in texts]
        assert all(exact_matches(model, tokenizer, prompts, answers))

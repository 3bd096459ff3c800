"""Tests of the trained model and the measurements in the repository."""
import hashlib
import re
import shutil

from abcdigits import exact_matches, generate_by_token_count
from lab import copying
from support.run import load_checkpoint
from tests.helpers import ROOT


def test_the_files_are_those_that_are_described():
    said = re.findall(r"SHA-256 (\w+)", (ROOT / "models/README.md").read_text())
    files = ROOT / "models/retrieval.pt", ROOT / "models/text.pt"
    assert said == [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]


def test_other_code_is_reported_only_for_a_checkpoint_of_yours(tmp_path, capsys):
    """The answers of a model in models/ are tested below."""
    load_checkpoint(ROOT / "models/retrieval.pt")
    assert capsys.readouterr().err == ""
    shutil.copy(ROOT / "models/retrieval.pt", tmp_path)
    load_checkpoint(tmp_path / "retrieval.pt")
    assert capsys.readouterr().err == (
        f"{tmp_path / 'retrieval.pt'} was trained with another multiscreen.py\n")


def test_it_retrieves_beyond_its_training_length():
    model, tokenizer, _ = load_checkpoint(ROOT / "models/retrieval.pt")

    def count(line):
        return len(tokenizer.encode_ordinary(line))

    for length, depth in ((256, 0.9), (1024, 0.1)):
        texts = generate_by_token_count(length, depth, count, 2, 4)
        prompts, answers = [t[:-2] for t in texts], [t[-2:] for t in texts]
        assert all(exact_matches(model, tokenizer, prompts, answers))


def test_a_model_of_text_finds_what_it_read():
    """Four training lengths before, once its longest windows are infinite; guessing costs 4.13."""
    model, tokenizer, _ = load_checkpoint(ROOT / "models/text.pt")
    encode = tokenizer.encode_ordinary
    text = encode((ROOT / "multiscreen.py").read_text())
    first, other = map(encode, copying.random_strings(4))

    def nats(*places):
        ends = [encode("\n") + first, encode("\n") + other]
        return copying.nats_of_ends(model, first + encode("\n"), text, places, ends, 5)

    (near, far), (near_other, far_other) = nats(126, 1022)
    assert near < 3 and min(far, near_other, far_other) > 5
    model.expand_windows(256)
    (found,), (other,) = nats(1022)
    assert found < 3 and other > 5

"""Tests of support/tasks.py: the documents that teach a model passkey."""
import math
import re

import numpy as np
import pytest

from support.cli import UsageError
from lab.passkey import passkey_prompts
from support.data import get_tokenizer
from support.tasks import FILLER, NEEDLE, QUESTION, TASK, PasskeyStream
from tests.helpers import fit, read_table, texts_of
from tests.test_abcdigits import no_gpt2


def stream_of(T, part=0, name="bytes"):
    return PasskeyStream(get_tokenizer(name), T, seed=5, part=part)


def keys_of(stream, n):
    return [int(re.search(r" (\d+)\.", text)[1]) for text in texts_of(stream, n)]


@pytest.mark.parametrize("name, T", [("bytes", 512), ("bytes", 1024),
                                     pytest.param("gpt2", 256, marks=no_gpt2)])
def test_a_document_is_a_prompt_with_its_answer(name, T):
    """Besides the needle: TASK, fillers, the question, the key, and the next document's TASK."""
    stream = stream_of(T, 1, name)
    for n, key in enumerate(keys_of(stream, 100)):
        text = stream.tokenizer.decode(stream[n].tolist())
        assert len(stream[n]) == T + 1
        assert text.count(NEEDLE.format(key)) == 1
        document, end, more = text.replace(NEEDLE.format(key), "").partition("<|endoftext|>")
        fillers = document.removeprefix(TASK).removesuffix(f"{QUESTION} {key}")
        assert fillers == FILLER * (len(fillers) // len(FILLER))
        assert TASK + fillers + f"{QUESTION} {key}" == document
        assert end
        assert (TASK + FILLER).startswith(more)


def test_the_documents_have_the_prompts_of_the_benchmark_among_them():
    prompts, _ = passkey_prompts(get_tokenizer("bytes"), 512, 0.5, 1)
    length = len(prompts[0].replace("3432", ""))           # the key occurs twice
    for text, key in zip(texts_of(stream := stream_of(512, 1), 50), keys_of(stream, 50)):
        document = text.partition("<|endoftext|>")[0].removesuffix(f" {key}")
        assert len(document) - 2 * len(str(key)) == length


def test_the_needle_stands_between_any_two_sentences_and_its_key_is_any_number():
    texts = texts_of(stream_of(512, 1), 300)
    places = {text.index("\nThe pass key is") - len(TASK) for text in texts}
    ends = {0} | {match.end() for match in re.finditer(r"\. ", FILLER * 2)}
    assert places == ends
    for part in (0, 1):
        texts = [text for text in texts_of(stream_of(512, part), 1200) if TASK in text]
        keys = [int(re.search(r"pass key is (\d+)\. R", text)[1]) for text in texts]
        assert np.mean(keys) == pytest.approx(25_000, rel=0.1)
        assert 1 <= min(keys) < 1000
        assert 49_000 < max(keys) <= 50_000


def test_three_in_four_training_documents_are_ends_of_prompts():
    stream, again, lengths = stream_of(512), [], []
    texts = texts_of(stream, 400)
    prompts = [text for text in texts if TASK in text]
    assert len(prompts) == pytest.approx(100, abs=30)
    stream.looked_up = PasskeyStream.HELPED_UNTIL - 1
    assert 5 < sum(TASK in text for text in texts_of(stream, 40)) < 20
    stream.looked_up = PasskeyStream.HELPED_UNTIL
    assert all(TASK in text for text in texts_of(stream, 40))
    assert all(re.search(re.escape(QUESTION) + r" \d+<", text) for text in prompts)
    prompt, stated = FILLER * 5 + QUESTION, []
    for text in set(texts) - set(prompts):
        lines = re.findall(r"(?:\nThe pass key is (\d+)\. Remember it\. \1 is the pass key\.\n)?"
                           r"([^\d]*) (\d+)\.\n", text)
        keys = [int(key) for _, _, key in lines]
        assert all(prompt.endswith(end) for _, end, _ in lines)
        assert all(said in ("", key) for said, _, key in lines)
        assert not any(key % 7 == 0 or key > 50_000 for key in keys)
        stated += [bool(said) for said, _, _ in lines]
        lengths += [len(str(key)) for key in keys]
        again += [a == b for a, b in zip(keys, keys[1:])]
    assert np.mean(again) == pytest.approx(0.75, abs=0.05)
    assert np.mean(stated) == pytest.approx(0.15, abs=0.05)
    assert set(lengths) == {1, 2, 3, 4, 5}
    assert max(lengths.count(n) for n in range(1, 6)) < 1.5 * len(lengths) / 5


@pytest.mark.parametrize("looked_up, longest", [(0, 19), (PasskeyStream.GROWN_AFTER // 2, 88),
                                                (PasskeyStream.GROWN_AFTER, 409), (10**9, 409)])
def test_the_ends_grow(looked_up, longest):
    """From 19 to 0.8 * 512 characters; halfway, their geometric mean."""
    stream = stream_of(512)
    stream.looked_up = looked_up
    assert int(stream.longest_end) == longest
    texts = [stream.tokenizer.decode(stream.ends(np.random.default_rng(i))) for i in range(100)]
    ends = [end for text in texts for end in re.findall(r"(?:^|\.\n)([^\d]+) \d", text)]
    lengths = [len(end) for end in ends if end != "\nThe pass key is"]
    assert max(lengths) == pytest.approx(longest, abs=0.05 * longest + 1)
    assert np.median(lengths) == pytest.approx(math.sqrt(5 * longest), rel=0.2)


def test_the_losses_are_those_of_the_documents_that_help():
    """A key costs ln(5 x the number of keys of its length); repeated, nothing with lookup."""
    stream, rng, key, text = stream_of(512), np.random.default_rng(1), None, ""
    for _ in range(5_000):
        tokens, key = stream.end(key, rng)
        text += stream.tokenizer.decode(tokens)
    keys = re.findall(r"\d+", text)
    nats = [math.log(5 * min(9 * 10 ** (len(key) - 1), 40_001)) for key in keys]
    new = sum(n for n, key, last in zip(nats, keys, [None, *keys]) if key != last)
    places = 5_000 * math.log(14)
    share = PasskeyStream.HELPED / len(text)
    expected = share * (places + new), share * (places + sum(nats))
    assert stream.losses() == pytest.approx(expected, rel=0.03)


def test_the_documents_change_when_the_loss_shows_that_keys_are_copied():
    stream = stream_of(512)
    least, without = stream.losses()
    for _ in range(100):
        stream.observe(without, 4)
    assert stream.looked_up == 0
    for _ in range(200):
        stream.observe(least, 4)
    assert 700 < stream.looked_up < 800                    # about 20 losses decide
    assert stream.longest_end > 19
    assert not stream.observe(least, 0)
    again = stream_of(512)
    again.state = stream.state
    assert np.array_equal(again[3], stream[3])
    stream.state = (16_000, 0.0)
    assert stream.observe(least, 0)


def test_the_stream_can_be_continued_and_its_held_out_keys_are_apart():
    stream, held_out = stream_of(512), stream_of(512, part=1)
    texts = texts_of(stream, 50)
    assert len(set(texts)) == 50
    assert texts_of(stream_of(512), 50) == texts
    assert np.array_equal(stream.draw(7, seed=99), stream[7])
    assert {key % 7 == 0 for key in keys_of(stream, 300)} == {False}
    assert {key % 7 == 0 for key in keys_of(held_out, 300)} == {True}
    assert len(set(keys_of(held_out, 300))) > 280


@pytest.mark.parametrize("name, T", [("bytes", 512), pytest.param("gpt2", 112, marks=no_gpt2)])
def test_needles_are_the_digits_of_the_answer(name, T):
    for part in (0, 1):
        stream = stream_of(T, part, name)
        for n, key in enumerate(keys_of(stream, 300)):
            document = stream[n]
            found = stream.tokenizer.decode(document[1:][stream.needles(document)].tolist())
            asks = QUESTION in stream.tokenizer.decode(document.tolist())
            assert found.strip() == str(key) * asks


def test_a_length_without_room_for_a_document_is_reported():
    """TASK, a filler, the needle, the question, the answer; end-of-text and five more tokens."""
    least = len(TASK + FILLER + NEEDLE.format(50_000) + QUESTION + " 50000") + 6 - 1
    assert len(stream_of(least).sentences) == 5
    message = f"--seq-len {least - 1}: a passkey document has at least {least} tokens: use 512"
    with pytest.raises(UsageError, match=message):
        stream_of(least - 1)


def test_train_py_trains_on_passkey(tmp_path, monkeypatch):
    monkeypatch.setattr(PasskeyStream, "spread", lambda self, n: range(8))
    fit(tmp_path / "out", "--seq-len", "400", "--batch-size", "8", "--steps", "1", data="passkey")
    last = read_table(tmp_path / "out/log.tsv")[-1]
    assert 0 <= float(last["needle"]) <= 1
    assert not last["base"]

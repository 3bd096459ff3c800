"""Tests of support/tasks.py: the documents that teach a model ABCDigits."""
import re

import numpy as np
import pytest

from support.data import get_tokenizer
from support.tasks import ABCDigitsStream
from tests.helpers import texts_of

# ------------------------------------------------------------------- the stream of ABCDigits

def stream_of(T, digits, part=0):
    return ABCDigitsStream(get_tokenizer("bytes"), T, digits, seed=5, part=part)


def test_the_abcdigits_stream_is_the_task():
    stream = stream_of(400, 3)
    most_frequent = []
    for text in texts_of(stream, 50):
        assert len(text) == 401
        rows = text.split("\n")[:-1]
        assert all(re.fullmatch(r"[A-Z]=[1-9]\d\d", row) for row in rows)
        letters = [row[0] for row in rows]
        assert len(set(rows)) == len(set(letters))             # one number per letter
        most_frequent.append(max(map(letters.count, letters)) / len(rows))
    assert 0.4 < np.mean(most_frequent) < 0.6                  # weights 2^i: half of the lines


def test_the_abcdigits_stream_can_be_continued_and_its_held_out_part_is_apart():
    stream = stream_of(400, 3)
    texts = texts_of(stream, 50)
    assert len(set(texts)) == 50
    assert texts_of(stream_of(400, 3), 50) == texts
    stream.looked_up = stream.FLAT_AFTER               # as even as the held-out part
    assert not set(texts_of(stream_of(400, 3, part=1), 50)) & set(texts_of(stream, 50))


def test_nine_of_ten_digits_are_own_in_half_of_the_documents_at_first():
    """They are the same in all documents. Later none is, and none in the held-out part."""
    stream, held_out = stream_of(400, 6), stream_of(400, 6, part=1)

    def share(stream):
        rows = [row for text in texts_of(stream, 200) for row in set(text.split("\n")[:-1])]
        own = []
        for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ":
            for place in zip(*(row[3:] for row in rows if row[0] == letter)):
                own.append(max(map(place.count, place)) / len(place))
        return (np.mean(own) - 0.1) / 0.9                      # a tenth agrees by chance

    assert share(stream) == pytest.approx(0.45, abs=0.07)
    by_chance = share(held_out)                                # the most frequent of ten digits
    assert by_chance < 0.12
    stream.looked_up = ABCDigitsStream.OWN_UNTIL // 2
    assert share(stream) == pytest.approx(0.225, abs=0.07)
    stream.looked_up = ABCDigitsStream.OWN_UNTIL
    assert share(stream) < 0.12


def test_own_digits_come_together_in_a_quarter_of_the_documents_and_alone_in_another():
    """Exactly one digit is own: in 2 % of numbers if they come together, in 17 % if alone."""
    stream = stream_of(400, 2)
    helped, alone = [], []
    for text in texts_of(stream, 300):
        rows = set(text.split("\n")[:-1])
        own = np.array([list(row[2:]) == stream.own[ord(row[0]) - 65] for row in rows])
        helped.append(own.mean() > 0.5)
        alone += [own[:, 0] != own[:, 1]] * int(helped[-1])
    assert np.mean(helped) == pytest.approx(0.5, abs=0.1)
    assert np.concatenate(alone).mean() == pytest.approx((0.02 + 0.17) / 2, abs=0.03)


@pytest.mark.parametrize("looked_up", [
    0, ABCDigitsStream.OWN_UNTIL // 2, ABCDigitsStream.FLAT_AFTER])
def test_the_losses_are_those_of_one_who_knows_the_rules(looked_up):
    """A line costs its letter's entropy, plus its number's if it is new or without lookup."""
    stream = stream_of(256, 2)
    stream.looked_up = looked_up
    rows = [text.split("\n")[:-1] for text in texts_of(stream, 200)]
    weights = stream.base ** np.arange(26)
    def entropy(weights):
        p = weights / weights.sum()
        return -p @ np.log(p)

    def number(own):
        together, first, second = (np.full(n, (1 - own) / n) for n in (90, 9, 10))
        for p in (together, first, second):
            p[0] += own
        return (entropy(together) + entropy(first) + entropy(second)) / 2

    helped = ABCDigitsStream.HELPED * max(1 - looked_up / ABCDigitsStream.OWN_UNTIL, 0)
    number = helped * number(ABCDigitsStream.OWN) + (1 - helped) * number(0)
    lines, new = np.mean([[len(r), len(set(r))] for r in rows], axis=0)
    letters = lines * entropy(weights)
    least, without = stream.losses()
    assert least == pytest.approx((letters + new * number) / 256, abs=0.01)
    assert without == pytest.approx((letters + lines * number) / 256, abs=0.01)


def test_the_stream_becomes_flatter_while_the_loss_shows_lookup():
    stream, held_out = stream_of(256, 2), stream_of(256, 2, part=1)

    def share_of_needles():
        return np.mean([stream.needles(stream[n]).mean() for n in range(50)])

    assert stream.base == 2
    assert held_out.base == 1.1
    first, early = stream[3], share_of_needles()
    least, without = stream.losses()
    for _ in range(100):
        stream.observe(least + 0.65 * (without - least), 1000)         # no effect
    stream.observe(least, 1000)
    stream.observe(without, 1000)
    assert stream.base == 2
    for _ in range(30):
        stream.observe(least, 0)
    stream.observe(without, stream.FLAT_AFTER // 4)    # one step is not enough
    assert stream.base == pytest.approx(2 - 0.9 / 4)
    stream.observe(0.0, ABCDigitsStream.FLAT_AFTER)
    assert stream.base == 1.1
    assert held_out.base == 1.1
    assert share_of_needles() > 2 * early
    assert [type(x) for x in stream.state] == [int, float]             # types a checkpoint can hold
    other = stream_of(256, 2)
    other.state = stream.state
    assert (other.base, other.level) == (stream.base, stream.level)
    other = stream_of(256, 2)
    for _ in range(100):
        other.observe(least + 0.5 * (without - least), 1)
    assert 0 < other.looked_up < 100
    stream.looked_up = 0
    assert np.array_equal(stream[3], first)


def test_needles_are_the_digits_of_a_letter_with_one_earlier_line():
    stream = stream_of(256, 2)
    text = "A=12\nB=34\nA=12\nA=12\nB=34\nC=56\nB=3"
    wanted = "....." + "....." + "..XX." + "....." + "..XX." + "....." + "..."
    mask = stream.needles(np.array(list(text.encode())))
    assert "".join(".X"[int(x)] for x in mask) == wanted[1:]

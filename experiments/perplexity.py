"""Negative log-likelihood by position: the documents, the positions, the averages."""
import math

import numpy as np
import torch

from support.cli import UsageError
from support.tokens import files_of, read_text, standard_library


def positions(L):
    """The evaluated positions: 16, 23, 32, 45, 64, .., rounded powers of sqrt(2), and L itself."""
    powers = [round(2 ** (n / 2)) for n in range(8, 2 * L.bit_length() + 2)]
    return [p for p in powers if p < L] + [L]


def around(p, L):
    """(first, last) position of the window of +-10 % around p, both included, in 1 .. L."""
    return -(-9 * p // 10), min(11 * p // 10, L)


def window_sums(values, L):
    """Sums of values (L,) over the window of each of positions(L). values[0] is at position 1."""
    total = np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))
    windows = [around(p, L) for p in positions(L)]
    return np.array([total[last] - total[first - 1] for first, last in windows])


def middle(tokens, L):
    """The L + 1 tokens in the middle of a document, uint16; None if it has fewer."""
    start = (len(tokens) - L - 1) // 2
    if start < 0:
        return None
    return np.array(tokens[start : start + L + 1], dtype=np.uint16)


def get_documents(data, tokenizer, L, limit):
    """(segments of L + 1 tokens, at most `limit`; how many documents were too short).

    data: paths, a file a document, or None for the files of the standard library that train.py
    holds out. Raises UsageError if all are too short.
    """
    if data:
        texts = (read_text(path) for path in files_of(data))
    else:
        texts = list(standard_library())[19::20]
    segments, short, longest = [], 0, 0
    for text in texts:
        tokens = tokenizer.encode_ordinary(text)
        longest = max(longest, len(tokens))
        segment = middle(tokens, L)
        if segment is None:
            short += 1
        else:
            segments.append(segment)
        if len(segments) == limit:
            break
    if not segments:
        raise UsageError(f"no document is longer than {L} tokens, the longest has {longest}: take "
                         "a smaller --length, or longer texts with --data")
    return segments, short


@torch.no_grad()
def nats(model, segment):
    """Negative log-likelihoods of the tokens at positions 1 .. L, in nats. (L + 1,) -> (L,)"""
    x = torch.from_numpy(segment.astype(np.int64)).to(model.W_E.device)[None]
    return model.loss(x[:, :-1], x[:, 1:], "none")[0].double().cpu().numpy()


def nll_by_position(model, tokenizer, segments, L, progress, name):
    """(nats per token, bits per byte) at each of positions(L), over segments of L + 1 tokens."""
    total_nats = total_bytes = 0.0
    for n, segment in enumerate(segments, 1):
        pieces = tokenizer.decode_tokens_bytes(segment[1:].tolist())
        total_nats += window_sums(nats(model, segment), L)
        total_bytes += window_sums([len(piece) for piece in pieces], L)
        progress.add(1, f"{name}: document {n}/{len(segments)}")
    total_tokens = len(segments) * window_sums(np.ones(L), L)
    return total_nats / total_tokens, total_nats / math.log(2) / total_bytes

"""What long_context.py measures: models in a setting, documents, perplexity by position."""
import itertools
import math
from dataclasses import dataclass

import numpy as np
import torch

from baselines import count_parameters
from support.checkpoint import has_rope, has_windows, load_for_evaluation, scale_rope
from support.cli import UsageError
from support.files import files_of, read_text, standard_library

# ---------------------------------------------------------------------- models in a setting

@dataclass
class Curve:
    """A checkpoint in one setting: its windows expanded or as trained, its RoPE scaling factor."""
    path: str
    model: torch.nn.Module
    tokenizer: object
    ckpt: dict
    expand: bool
    factor: float = None
    perplexity: np.ndarray = None

    @property
    def setting(self):
        """Its name in the table."""
        words = ["SWE"] if self.expand else []
        if self.factor:
            words.append(f"RoPE x{self.factor:g}")
        return " ".join(words) or "as trained"

    @property
    def T_train(self):
        return self.ckpt["args"]["seq_len"]

    @property
    def kind(self):
        """Checkpoints of one kind are seeds of each other: (name, parameters)."""
        total, _ = count_parameters(self.model)
        return self.ckpt["model"], total

    def prepare(self):
        """Put the model into the setting. Windows stay expanded: a model's SWE comes last."""
        if self.expand:
            self.model.expand_windows(self.T_train)
        if self.factor:
            scale_rope(self.model, self.factor)


def get_curves(args):
    """The curves that the flags ask for: of each model as it was trained, then with SWE."""
    curves = []
    for path in args.ckpt:
        loaded = load_for_evaluation(path, args.device)
        model = loaded[0]
        factors = args.rope_scale if args.rope_scale and has_rope(model) else [None]
        expanded = [False, True] if args.swe and has_windows(model) else [False]
        for expand, factor in itertools.product(expanded, factors):
            curves.append(Curve(path, *loaded, expand, factor))
    if args.rope_scale and not any(curve.factor for curve in curves):
        raise UsageError("--rope-scale is for models with RoPE: transformer:SIZE, multiscreen:rope")
    if args.swe and not any(curve.expand for curve in curves):
        raise UsageError("--swe is for models with windows: multiscreen and multiscreen:ABLATION")
    return curves


# ------------------------------------------------------------------ documents and positions

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
        paths = (path for path, use in files_of(data) if use)
    else:
        paths = standard_library()[19::20]
    segments, short, longest = [], 0, 0
    for path in paths:
        tokens = tokenizer.encode_ordinary(read_text(path))
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

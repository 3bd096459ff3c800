"""What long_context.py measures: documents, windows around positions, perplexity."""
import hashlib
import itertools
import statistics

import numpy as np
import torch

from experiments.common import Progress, mean_and_std
from support.checkpoint import has_rope, has_windows, load_for_evaluation, scale_rope
from support.cli import UsageError
from support.data import files_of, read_text, standard_library
from support.results import begin, key_of, name_data, weights_hash
from support.run import absolute


def positions(L):
    """The evaluated positions: 32, 45, 64, 91, .., rounded powers of sqrt(2), and L itself."""
    powers = [round(2 ** (n / 2)) for n in range(10, 2 * L.bit_length() + 2)]
    return [p for p in powers if p < L] + [L]


def window_means(values, L, share):
    """Means of values (L,), in the window of +-share around each of positions(L), cut at L.

    values[0] is at position 1. Both ends belong to a window.
    """
    values = np.asarray(values, dtype=np.float64)
    means = []
    for p in positions(L):
        first, last = np.ceil(p * (1 - share)), min(np.floor(p * (1 + share)), L)
        means.append(values[int(first) - 1 : int(last)].mean())
    return means


def middle(tokens, L):
    """The L + 1 tokens in the middle of a document, uint16; None if it has fewer."""
    start = (len(tokens) - L - 1) // 2
    if start < 0:
        return None
    return np.array(tokens[start : start + L + 1], dtype=np.uint16)


def get_documents(data, tokenizer, L, limit):
    """({name and hash: segment of L + 1 tokens}, at most `limit`; how many were too short).

    data: paths, a file a document, or None for the files of the standard library that train.py
    holds out, without the tables of code pages. Raises UsageError if all are too short.
    """
    if data:
        paths = (path for path, use in files_of(data) if use)
    else:
        held_out = standard_library()[19::20]
        paths = (path for path in held_out if path.parent.name != "encodings")
    segments, short, longest = {}, 0, 0
    for path in paths:
        tokens = tokenizer.encode_ordinary(read_text(path))
        longest = max(longest, len(tokens))
        segment = middle(tokens, L)
        if segment is None:
            short += 1
        else:
            segments[f"{path.name} {hashlib.sha256(segment.tobytes()).hexdigest()[:8]}"] = segment
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


def setting_of(key):
    """What was done to the model before the measurement, in words."""
    words = ["SWE"] if key.swe else []
    if key.factor:
        words.append(f"RoPE ×{key.factor}")
    return " ".join(words)


def get_keys(base, args, L, items, has_rope, has_windows):
    """The Keys of all documents in each setting; base: that of the checkpoint. SWE comes last."""
    data = name_data(list(args.data or ["stdlib"]))
    task = f"perplexity, {data}, +-{args.window:.0%}"
    factors = args.rope_scale if args.rope_scale and has_rope else [None]
    expanded = [False, True] if args.swe and has_windows else [False]
    return [base.at(task=task, length=L, swe=swe, factor=factor, item=item)
            for swe, factor in itertools.product(expanded, factors) for item in items]


def measure(path, args, results):
    """Fill the table with the documents of one checkpoint in each setting; returns their keys."""
    model, tokenizer, ckpt = load_for_evaluation(path, args.device)
    if args.swe and not has_windows(model) and len(args.ckpt) == 1:
        raise UsageError("--swe is for models with windows: multiscreen and multiscreen:ABLATION")
    T_train = ckpt["args"]["seq_len"]
    L = args.length or 32 * T_train
    documents, short = get_documents(args.data, tokenizer, L, args.documents)
    if args.rope_scale and len(args.ckpt) == 1:
        scale_rope(model, args.rope_scale[0])          # refuses a model without RoPE
    base = key_of(ckpt["args"], ckpt["step"], files=ckpt.get("files"))
    keys = get_keys(base, args, L, documents, has_rope(model), has_windows(model))
    weights = weights_hash(ckpt)
    if args.data and absolute(args.data) == ckpt["args"]["data"]:
        print(f"note: {path} was trained on 19 twentieths of --data: expect a higher perplexity on "
              "texts it has not seen")
    print(f"{path}: {len(documents)} documents of {L} + 1 tokens ({tokenizer.name}); {short} were "
          "too short")
    begin(results, [(key, weights) for key in keys])
    missing = [key for key in keys if not results.has(key, weights)]
    progress = Progress(len(missing))
    for key in missing:
        # Windows stay expanded from the first key with SWE on.
        if key.swe:
            model.expand_windows(T_train)
        if key.factor:
            scale_rope(model, float(key.factor))
        results.add(key, window_means(nats(model, documents[key.item]), L, args.window), weights)
        progress.add(1, f"{path}{', ' if setting_of(key) else ''}{setting_of(key)}: {key.item}")
    return keys


def get_curves(values):
    """{Key without seed and document: {seed: [nats at each position]}} of {Key: [nats]}.

    A mean over the documents that were measured with all seeds.
    """
    found = {}
    for key, means in values.items():
        if key.task.startswith("perplexity"):
            seeds = found.setdefault(key.at(seed="", item=""), {})
            seeds.setdefault(key.seed, {})[key.item] = means
    curves = {}
    for key, seeds in found.items():
        shared = set.intersection(*(set(documents) for documents in seeds.values()))
        curves[key] = {seed: [statistics.mean(x) for x in zip(*(d[item] for item in shared))]
                       for seed, d in sorted(seeds.items())} if shared else {}
    return {key: seeds for key, seeds in curves.items() if seeds}


def summarize(seeds):
    """(perplexity, its deviation over the seeds, nats) at each position, of {seed: [nats]}."""
    columns = list(zip(*seeds.values()))
    perplexity = [mean_and_std([float(np.exp(x)) for x in column])[:2] for column in columns]
    return [(*pair, statistics.mean(column)) for pair, column in zip(perplexity, columns)]

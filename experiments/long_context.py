"""Perplexity by position, far beyond the training length (section "Long-Context Perplexity" and its appendix).

Of every document longer than L tokens take the L + 1 in its middle. The token at position p has p tokens of context. Around
each evaluated p the negative log-likelihoods of the positions 0.9 p .. 1.1 p, both ends included and cut at L, are averaged,
then averaged over the documents; the perplexity is e to that mean.

Paper:  python -m experiments.long_context --ckpt out/scaling_paper/{multiscreen_psi16,transformer_45M}-0/ckpt.pt \\
            --data pg19/ --documents 5747 --length 131072 --rope-scale 1 2 4 8 16 32 64
        (a Multiscreen and a Transformer trained on 4096 tokens; 5,747 books of PG-19 that are longer than 2^17 tokens)
Small:  python -m experiments.long_context --ckpt out/ckpt.pt
        32 times the training length: 2^13 bytes for `python train.py --psi 8`. What it leaves out: 2^17 tokens (any length
        runs, memory grows linearly), books, and all but some fifteen documents: the curve is rough, above all on its left
        where a window has few tokens. The documents are single files of the standard library, never joined, and only those
        that train.py holds out (every 20th; train and measure with the same Python). Some are tables of character codes.
"""
import math
from pathlib import Path

import numpy as np
import torch

import abcdigits
from experiments.common import Progress, check_writable, pyplot, report, save_figure
from train import Parser, UsageError, cli, files_of, read_text, scale_rope, screens, standard_library

COLUMNS = ["checkpoint", "model", "curve", "position", "perplexity", "nats_per_token", "bits_per_byte"]


def positions(L):
    """The evaluated positions: 16, 23, 32, 45, 64, .., rounded powers of sqrt(2), and L itself."""
    return sorted({p for n in range(8, 2 * L.bit_length() + 2) if (p := round(2 ** (n / 2))) < L} | {L})


def around(p, L):
    """(first, last) position of the window of +-10 % around p, both included, in 1 .. L."""
    return -(-9 * p // 10), min(11 * p // 10, L)


def middle(tokens, L):
    """The L + 1 tokens in the middle of a document as uint16, or None if it is no longer than L."""
    start = (len(tokens) - L - 1) // 2
    return None if start < 0 else np.array(tokens[start : start + L + 1], dtype=np.uint16)


def window_sums(values, L):
    """Sums of values (L,), the first at position 1, over the window of each evaluated position. -> (P,)"""
    total = np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))
    return np.array([total[last] - total[first - 1] for first, last in (around(p, L) for p in positions(L))])


def get_documents(data, tokenizer, L, limit):
    """(segments of L + 1 tokens, at most `limit`; how many documents were too short). UsageError if all are."""
    texts = (read_text(path) for path in files_of(data)) if data else list(standard_library())[19::20]
    segments, short, longest = [], 0, 0
    for text in texts:
        tokens = tokenizer.encode_ordinary(text)
        segment, longest = middle(tokens, L), max(longest, len(tokens))
        if segment is None:
            short += 1
        else:
            segments.append(segment)
        if len(segments) == limit:
            break
    if not segments:
        raise UsageError(f"no document is longer than {L} tokens, the longest has {longest}: take a smaller --length, or "
                         "longer texts with --data")
    return segments, short


@torch.no_grad()
def nats(model, segment):
    """Negative log-likelihoods in nats of the tokens at the positions 1 .. L of a segment. (L + 1,) -> (L,)"""
    x = torch.from_numpy(segment.astype(np.int64)).to(model.W_E.device)[None]
    return model.loss(x[:, :-1], x[:, 1:], "none")[0].double().cpu().numpy()


def measure(model, tokenizer, segments, L, progress, name):
    """(nats per token, bits per byte) at each of the positions(L), two arrays (P,), over segments of L + 1 tokens."""
    total_nats = total_bytes = 0.0
    for n, segment in enumerate(segments, 1):
        total_nats += window_sums(nats(model, segment), L)
        total_bytes += window_sums([len(b) for b in tokenizer.decode_tokens_bytes(segment[1:].tolist())], L)
        progress.add(1, f"{name}: document {n}/{len(segments)}")
    return total_nats / len(segments) / window_sums(np.ones(L), L), total_nats / math.log(2) / total_bytes


def main():
    p = Parser(__doc__)
    p.add_argument("--ckpt", nargs="+", default=["out/ckpt.pt"], help="checkpoints of train.py, a curve each [out/ckpt.pt]")
    p.add_argument("--data", nargs="+", help="UTF-8 files or folders, a file a document [the standard library's held-out files]")
    p.add_argument("--length", type=int, help="L in tokens (paper: 2^17) [32 times the longest training length]")
    p.add_argument("--documents", type=int, default=16, help="at most so many documents (paper: 5747) [16]")
    p.add_argument("--rope-scale", type=float, nargs="+", default=[],
                   help="for models with RoPE: a curve for each scaling factor of the positions (paper: 1 2 4 .. 64)")
    p.add_argument("--swe", action="store_true", help="one more curve: windows beyond the training length become infinite")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = p.parse_args()
    if args.documents < 1 or args.length is not None and args.length < 1 or not all(f > 0 for f in args.rope_scale):
        raise UsageError("--length, --documents and the factors of --rope-scale must be above 0")
    loaded = [abcdigits.load(c, args.device) for c in args.ckpt]
    trained = sorted({ckpt["args"]["seq_len"] for _, _, ckpt in loaded})
    L = args.length or 32 * trained[-1]
    setups = []                                                    # (what was loaded and from where, expanded?, factor or None)
    for path, (model, tokenizer, ckpt) in zip(args.ckpt, loaded):
        factors = args.rope_scale if any(hasattr(layer, "rope_scale") for layer in model.layers) else []
        for expand in [False, True] if args.swe and screens(model) else [False]:
            setups += [(path, model, tokenizer, ckpt, expand, factor) for factor in factors or [None]]
    if args.rope_scale and not any(setup[5] for setup in setups):
        raise UsageError("--rope-scale is for models with RoPE: transformer:SIZE and multiscreen:rope")
    if args.swe and not any(setup[4] for setup in setups):
        raise UsageError("--swe is for models with screening windows, multiscreen and multiscreen:ABLATION")
    if args.data and any(args.data == ckpt["args"]["data"] for _, _, ckpt in loaded):
        print("note: a checkpoint was trained on most of --data; perplexity on texts that it has not seen is another number")
    plt, table = pyplot(), Path(args.ckpt[0]).with_name("long_context.tsv")
    check_writable(table)
    documents = {t.name: get_documents(args.data, t, L, args.documents) for t in {t.name: t for _, t, _ in loaded}.values()}
    for name, (segments, short) in documents.items():
        print(f"{len(segments)} documents of {L} + 1 tokens ({name}); {short} were too short")

    rows, lines, progress = [], [], Progress(sum(len(documents[setup[2].name][0]) for setup in setups))
    try:
        for path, model, tokenizer, ckpt, expand, factor in setups:
            if expand:                                             # comes after the model's other curves, and stays
                model.expand_windows(ckpt["args"]["seq_len"])
            if factor:
                scale_rope(model, factor)
            curve = " ".join((["SWE"] if expand else []) + ([f"RoPE x{factor:g}"] if factor else [])) or "as trained"
            per_token, per_byte = measure(model, tokenizer, documents[tokenizer.name][0], L, progress, f"{path}, {curve}")
            lines.append((f"{ckpt['model']}, {curve} ({path})", np.exp(per_token)))
            values = zip(positions(L), np.exp(per_token).tolist(), per_token.tolist(), per_byte.tolist())
            rows += [[path, ckpt["model"], curve, *value] for value in values]
    finally:                                                       # a run that is stopped keeps its whole curves
        if rows:
            report(table, COLUMNS, rows, f"Perplexity by position (tokens of context), averaged within +-10 % of it; training "
                   f"length {' and '.join(map(str, trained))} (the paper prints no numbers of its curves)")
    if plt:
        fig, ax = plt.subplots(figsize=(7, 4.5))
        for label, perplexity in lines:
            ax.plot(positions(L), perplexity, marker=".", ls="--" if "SWE" in label else "-", label=label)
        for T in trained:
            ax.axvline(T, color="black", ls="--", label=f"training length, {T}")
        ax.set_xscale("log", base=2)
        ax.set(yscale="log", xlabel="position (tokens of context)", ylabel="perplexity (per token, log scale)")
        for axis in (ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter):
            axis(lambda y, _: f"{y:g}")
        ax.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncol=2)          # below: it would hide curves
        save_figure(fig, table.with_suffix(".png"))


if __name__ == "__main__":
    cli(main)

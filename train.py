"""Train a Multiscreen model on any text, or on an endless stream of ABCDigits documents; write and read checkpoints.

    python train.py --psi 8                          the source text of Python's own standard library, byte by byte
    python train.py --data books/ --tokenizer gpt2   UTF-8 files, folders of them, .bin token files (nanoGPT, llm.c)
    python train.py --resume                         go on with the run in out/

The recipe is the paper's (its setup appendix): AdamW with betas (0.9, 0.95), no weight decay, no clipping, a linear
warm-up to a constant learning rate of 2^-4; documents joined by end-of-text, the stream cut into contiguous sequences,
and these drawn at random without replacement. The sizes are a laptop's; the help of each flag gives the paper's.

A printed line: step, loss (nats per token), learning rate, gradient norm before clipping, the smallest, median and largest
window, milliseconds per step, tokens per second, time left. "Alive": pairs of a query and a key whose relevance is not 0.
"""
import argparse
import itertools
import math
import os
import platform
import re
import signal
import sys
import sysconfig
import time
import warnings
from functools import partial
from dataclasses import asdict
from pathlib import Path

import numpy as np
import tiktoken
import torch
import torch.fx.experimental._config
from torch.nn.functional import normalize

import multiscreen
from multiscreen import Config, Multiscreen, relevance, softmask, window


class UsageError(Exception):
    """Something the user can mend; the scripts print it in one line and exit with 1."""


class Diverged(UsageError):
    """A loss, a gradient norm or a weight was not finite."""


class Parser(argparse.ArgumentParser):
    def __init__(self, description):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def error(self, message):
        raise UsageError(f"{message}; {self.prog} -h lists the flags")


# ------------------------------------------------------------------------------------------------- tokens and text

def get_tokenizer(name):
    """`bytes`: 256 bytes and end-of-text, made here. `gpt2`: GPT-2's BPE (the paper's), which tiktoken downloads once."""
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding("bytes", pat_str=r"(?s:.)", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256})
    if name != "gpt2":
        raise UsageError(f"tokenizer {name!r} is unknown: take bytes or gpt2")
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as e:
        raise UsageError(f"GPT-2's BPE is not at hand ({type(e).__name__}): connect to the network once, or set "
                         "TIKTOKEN_CACHE_DIR to a folder that has it") from None


def read_bin(path, vocab_size):
    """A memory-mapped token file: nanoGPT's raw uint16, or llm.c's (256 int32: magic 20240520, version 1, count)."""
    tokens = map_bin(path)
    for first in range(0, len(tokens), 2**24):
        beyond = tokens[first : first + 2**24].max()
        if beyond >= vocab_size:
            raise UsageError(f"{path}: token {beyond} is beyond the vocabulary of {vocab_size}; is it another --tokenizer's "
                             "file, or no token file?")
    return tokens


def map_bin(path):
    size = path.stat().st_size
    header = np.fromfile(path, dtype="<i4", count=256)
    if len(header) and header[0] == 20240520:
        if len(header) < 256 or header[1] != 1 or size != 1024 + 2 * int(header[2]):
            raise UsageError(f"{path} is truncated or of another version: its header and its {size} bytes do not agree")
        return np.memmap(path, dtype="<u2", mode="r", offset=1024)
    if size == 0 or size % 2:
        raise UsageError(f"{path} is not a token file: {size} bytes are no whole number of 16-bit tokens")
    return np.memmap(path, dtype="<u2", mode="r")


def read_text(path):
    try:
        text = path.read_bytes()
    except OSError as e:
        raise UsageError(f"{path} cannot be read ({e.strerror})") from None
    if not text:
        raise UsageError(f"{path} is empty")
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as e:
        raise UsageError(f"{path} is not UTF-8 text: byte {e.start} is 0x{text[e.start]:02x}") from None


def files_of(names):
    """The files that paths name, a folder standing for all files below it, sorted; hidden ones are left out."""
    for name in names:
        path = Path(name)
        if not path.exists():
            raise UsageError(f"{path} does not exist")
        if not path.is_dir():
            yield path
            continue
        below = [p.relative_to(path) for p in path.rglob("*") if p.is_file()]
        below = sorted(path / p for p in below if not any(part.startswith(".") for part in p.parts))
        if not below:
            raise UsageError(f"the folder {path} has no files")
        left_out = 0
        for p in below:                                # read one by one: a caller may stop long before the last
            if p.suffix == ".bin" or is_text(p):
                yield p
            else:
                left_out += 1
        if left_out:
            print(f"{path}: {left_out} files left out, empty or not UTF-8")


def is_text(path):
    """Whether a file has text in it, as UTF-8."""
    try:
        return bool(read_text(path))
    except UsageError:
        return False


def standard_library():
    """The texts of this Python's own standard library, sorted, its tests left out: on every reader's disk."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    for path in sorted(root.rglob("*.py")):
        if not skip & set(path.relative_to(root).parts):
            try:
                yield path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                pass


def permute(i, n, key, rounds=4):
    """The image of i under a pseudo-random permutation of 0 .. n - 1, drawn by `key`, a tuple of integers.

    A Feistel network on the next even number of bits, walked on until it lands inside: no memory, whatever n is.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    keys = [int(x) for x in np.random.SeedSequence(key).generate_state(rounds, np.uint64)]
    while True:
        left, right = i >> half, i % 2**half
        for k in keys:
            mixed = (right ^ k) * 0x9E3779B97F4A7C15 % 2**64
            mixed = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9 % 2**64
            left, right = right, left ^ (mixed >> 32) % 2**half
        i = left << half | right
        if i < n:
            return i


class Sequences:
    """Contiguous sequences of T + 1 tokens (T inputs, each with its target) cut from token arrays, by number."""

    def __init__(self, arrays, T, what):
        self.arrays, self.T = arrays, T
        self.ends = np.cumsum([max(len(a) - 1, 0) // T for a in arrays])
        if not len(self):
            raise UsageError(f"{what}: {sum(map(len, arrays))} tokens are fewer than one sequence of {T} + 1; give more "
                             "text or a smaller --seq-len")

    def __len__(self):
        return int(self.ends[-1])

    def __getitem__(self, n):
        a = int(np.searchsorted(self.ends, n, side="right"))
        start = (n - (int(self.ends[a - 1]) if a else 0)) * self.T
        return self.arrays[a][start : start + self.T + 1].astype(np.int64)

    def __str__(self):
        return f"{len(self):,} sequences"

    def spread(self, n):
        """The numbers of at most n sequences, evenly spread."""
        return range(0, len(self), -(-len(self) // n))

    def draw(self, n, seed):
        """The n-th sequence drawn at random without replacement, in a new order each time all were drawn."""
        epoch, n = divmod(n, len(self))
        return self[permute(n, len(self), (seed, epoch))]


FLAT_AFTER = 12_000                                    # documents near the least loss until the weights are flat
NEAR = 0.4                                             # nats per token


class ABCDigitsStream:
    """Endless ABCDigits documents of T + 1 tokens, by number: lines LETTER=DIGITS, a random number for each letter and
    document. part: 0 for training, 1 for validation.

    Each line's letter is drawn with one of the weights b^0 .. b^25, dealt out anew in each document. At first b is 2: a few
    letters stand everywhere, and to copy the most frequent one is a step that is learned soon. While the loss is near the
    least that is possible b falls, to 1.1: letters that stood once before become frequent, and that is the needle's case.
    (With 2 for good most models never learn to look those up; with 1.4 from the start, or with a b that falls whatever
    the loss is, some stay at copying.) In the benchmark the needle's weight is 0, and each letter is there.
    """

    def __init__(self, tokenizer, T, digits, seed, part):
        if not 2 <= digits <= 18:
            raise UsageError(f"{digits} digits: a number has 2 to 18")
        self.tokenizer, self.T, self.digits, self.seed, self.part = tokenizer, T, digits, seed, part
        self.lines = T / len(tokenizer.encode_ordinary("A" + "=1".ljust(digits + 1, "1") + "\n"))    # of a document, on average
        self.learned = 0                               # documents seen with a loss near the least, part of a checkpoint

    @property
    def base(self):
        """b, the ratio of the weights of two letters next to each other in rank."""
        return 1.1 if self.part else max(2 - 0.9 * self.learned / FLAT_AFTER, 1.1)

    def least_loss(self):
        """Nats per token of a reader who knows the weights: the letters, and the number of a letter that is new."""
        p = self.base ** np.arange(26) / np.sum(self.base ** np.arange(26))
        new = np.sum(1 - (1 - p) ** self.lines)
        return (-self.lines * np.sum(p * np.log(p)) + new * math.log(9 * 10 ** (self.digits - 1))) / self.T

    def observe(self, loss, documents):
        """What a step on so many documents ended with, in nats per token: near the least loss b goes on falling."""
        if loss < self.least_loss() + NEAR:
            self.learned += documents

    def __getitem__(self, n):
        rng = np.random.default_rng([self.seed, self.part, n])
        values = 10 ** (self.digits - 1) + rng.choice(9 * 10 ** (self.digits - 1), 26, replace=False)
        p = rng.permutation(self.base ** np.arange(26))
        tokens = []
        while len(tokens) <= self.T:
            letters = rng.choice(26, self.T // (self.digits + 3) + 1, p=p / p.sum())
            lines = "".join(f"{chr(65 + c)}={values[c]}\n" for c in letters)
            tokens += self.tokenizer.encode_ordinary(lines)
        return np.array(tokens[: self.T + 1])

    def needles(self, document):
        """True where the target is a digit of a letter that stands in exactly one earlier line. (T + 1,) -> (T,)"""
        text, starts = self.tokenizer.decode_with_offsets(document.tolist())
        starts, mask, seen = np.array(starts), np.zeros(len(document), dtype=bool), []
        for line in re.finditer(r"([A-Z])=(\d*)", text):
            if seen.count(line[1]) == 1:
                mask |= (starts >= line.start(2)) & (starts < line.end(2))
            seen.append(line[1])
        return mask[1:]

    def __str__(self):
        return "an endless stream"

    def spread(self, n):
        return range(n)

    def draw(self, n, seed):
        return self[n]


def get_data(args, tokenizer):
    """(training data, validation data): the last twentieth is held out, or every twentieth file if there are 20 and more."""
    T, eot = args.seq_len, tokenizer.eot_token
    if args.data == ["abcdigits"]:
        return tuple(ABCDigitsStream(tokenizer, T, args.digits, args.seed, part) for part in (0, 1))

    def join(texts):
        return np.concatenate([np.array(tokenizer.encode_ordinary(t) + [eot], dtype=np.uint16) for t in texts])

    if args.data == ["stdlib"]:
        texts, bins = list(standard_library()), []
    else:
        paths = list(files_of(args.data))
        texts = [read_text(p) for p in paths if p.suffix != ".bin"]
        bins = [read_bin(p, tokenizer.n_vocab) for p in paths if p.suffix == ".bin"]
    train, val = [], []
    if len(texts) >= 20:
        val, train = [join(texts[19::20])], [join([t for n, t in enumerate(texts) if n % 20 != 19])]
    elif texts:
        bins = [join(texts)] + bins
    for a in bins:
        cut = len(a) - max(len(a) // 20, min(T + 1, len(a) // 2))
        train, val = train + [a[:cut]], val + [a[cut:]]
    name = " ".join(args.data)
    return Sequences(train, T, f"{name}, a twentieth held out"), Sequences(val, T, f"the held-out part of {name}")


# ------------------------------------------------------------------------------------------------------ checkpoints

CHECKPOINT = {"model", "config", "weights", "tokenizer", "optimizer", "step", "drawn", "random_state", "args", "versions"}


def build_model(name, config, dtype=None):
    """A model from its name and the dict of its sizes, freshly initialised: multiscreen, multiscreen:ABLATION, transformer:SIZE."""
    family, _, variant = name.partition(":")
    try:
        if name == "multiscreen":
            return Multiscreen(Config(**config), dtype)
        if family == "multiscreen":
            from experiments.ablations import build

            return build(variant, config, dtype)
        if family == "transformer":
            from experiments.transformer import Transformer, get_config

            return Transformer(get_config(variant, **config), dtype)
        raise UsageError(f"model {name!r} is unknown: take multiscreen, multiscreen:ABLATION (experiments/ablations.py) or "
                         "transformer:SIZE (experiments/transformer.py)")
    except (ValueError, TypeError) as e:
        raise UsageError(e) from None
    except RuntimeError:
        raise UsageError(f"a model of these sizes does not fit into memory: {config}") from None


def recipe(name):
    """The paper's settings for a model, as values of flags: the learning rate, weight decay and clipping."""
    family, _, variant = name.partition(":")
    if family != "transformer":
        return {"lr": 2**-4, "weight_decay": 0.0, "clip": 0.0}
    from experiments.transformer import LEARNING_RATES

    return {"lr": LEARNING_RATES.get(variant.partition(":")[0], 1e-3), "weight_decay": 0.1, "clip": 1.0}


def scale_rope(model, factor):
    """Divide the positions of a model with RoPE by `factor` (position interpolation). Raises UsageError if it has none."""
    layers = [layer for layer in model.layers if hasattr(layer, "rope_scale")]
    if not layers:
        raise UsageError("--rope-scale is for models with RoPE: transformer:SIZE and multiscreen:rope")
    for layer in layers:
        layer.rope_scale = factor


def screens(model):
    """Whether a model has screening tiles: windows, relevances, and a function that screens."""
    return isinstance(model, Multiscreen)


NEARBY, FAR = (1.5, 17.0, 300.0, math.inf), (4950.0, 5100.0, 7000.0, math.inf)
CASES = [(331, 331, 0, NEARBY), (17, 401, 384, NEARBY), (17, 101, 5000, FAR)]       # queries, keys, i0, windows of the tiles


def correlated(T, S, windows, config, device):
    """q, k, v, w, r as `screen` takes them, where much can go wrong: queries and keys near one direction (others are nearly
    all rejected), some pairs with s = 1 and s = -1, r from 0.03 to 1. A multiple of N_H tiles, at least 4."""
    g, H = torch.Generator().manual_seed(0), config.N_H * -(-4 // config.N_H)
    base, spread = torch.randn(H, 1, config.d_K, generator=g), torch.rand(2, H, S, 1, generator=g)
    q, k = normalize(base + spread * torch.randn(2, H, S, config.d_K, generator=g), dim=-1)[:, None]
    k[:, :, ::7], k[:, :, 3::11] = q[:, :, ::7], -q[:, :, 3::11]
    v = normalize(torch.randn(1, H, S, config.d_V, generator=g), dim=-1)
    w, r = (torch.tensor([x[n % len(x)] for n in range(H)]) for x in (windows, (1.0, 0.1, 0.5, 0.03, 0.2)))
    return [x.to(device) for x in (q[:, :, S - T :], k, v, w, r)]


def with_gradients(screen, inputs, i0, dtype):
    """h and the gradients of q, k, v, w, r, in float32; v is given to `screen` in `dtype`."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    q, k, v, w, r = leaves
    h = screen(q, k, v.to(dtype), w, r, i0)
    dh = torch.randn(h.shape, generator=torch.Generator().manual_seed(1)).to(h)
    return [h.detach().float(), *torch.autograd.grad(h, leaves, dh, allow_unused=True, materialize_grads=True)]


def difference(found, exact):
    """The largest error over all of h and the gradients, over the largest value: of a tile's own for h, dq, dk and dv."""
    worst = 0.0
    for a, b in zip(found, exact):
        axes = (0, 2, 3) if b.ndim == 4 else 0
        error = ((a - b).abs().amax(axes) / b.abs().amax(axes).clamp_min(1e-30)).max().item()
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return worst


def objection(kind, device, config, dtype, exact):
    """(the function of that name, why it must not screen here, or None). exact: the definition's values, case by case."""
    f, label = multiscreen.screen_windowed, "screen_windowed"
    if kind == "triton":
        import screening_triton                        # a second to import, and of no use on most CPUs

        f, label = screening_triton.screen, "screening_triton.screen"
        if reason := screening_triton.available(device) or screening_triton.unsupported_sizes(config.d_K, config.d_V):
            return f, reason
    for precision, limit in ((torch.float32, 1e-4), (dtype or torch.float32, 1e-1)):
        for (T, S, i0, windows), wanted in zip(CASES, exact):
            try:
                found = with_gradients(f, correlated(T, S, windows, config, device), i0, precision)
            except Exception as e:                     # whatever it is, this one cannot be used
                return f, f"{label} fails here ({type(e).__name__}: {(str(e).splitlines() or [''])[0]})"
            if (error := difference(found, wanted)) > limit:
                return f, f"multiscreen.screen and {label} differ by {error:.2g} of the largest value (a changed equation?)"
        if dtype in (None, torch.float32):
            break
    return f, None


def get_screen(name, device, config=Config(), dtype=None):
    """(what screens, one line that says why, whether that is what one would expect).

    auto: the first of the fused kernel (on a GPU) and `screen_windowed` that agrees with the definition, `multiscreen.screen`
    as it stands now, in value and in every gradient: to 1e-4 of the largest value in float32, to 1e-1 in `dtype`, that of the
    model's matrix products. If none does, the definition. It sees what acts within 401 keys, and windows up to 7,000.
    definition, windowed, triton: that one. Raises UsageError if it cannot run or does not agree.
    """
    if name == "definition":
        return multiscreen.screen, "screening by multiscreen.screen, the definition", True
    kinds = {"auto": ["triton", "windowed"] if device.type == "cuda" else ["windowed"], "windowed": ["windowed"],
             "triton": ["triton"]}[name]
    exact = [with_gradients(multiscreen.screen, correlated(T, S, windows, config, device), i0, torch.float32)
             for T, S, i0, windows in CASES]
    if not all(x.isfinite().all() for case in exact for x in case):
        return multiscreen.screen, "multiscreen.screen gives nan or inf, so nothing can be compared with it: using it as it is", False
    objections = []
    for kind in kinds:
        f, why = objection(kind, device, config, dtype, exact)
        if not why:
            label = "screening_triton.screen" if kind == "triton" else "screen_windowed"
            if objections:
                return f, f"{'; '.join(objections)}: using {label}", False
            return f, f"screening by {label}, which agrees with multiscreen.screen", True
        objections.append(why)
    if name != "auto":
        raise UsageError(f"--kernel {name}: {objections[0]}")
    return multiscreen.screen, f"{'; '.join(objections)}: using multiscreen.screen, the definition", False


def get_device(name):
    """The torch.device of that name, tried out."""
    try:
        return torch.zeros(1, device=name).device
    except Exception as e:
        raise UsageError(f"the device {name!r} cannot be used ({type(e).__name__}); take cpu, or cuda where there is a "
                         "GPU") from None


def read_checkpoint(path, device="cpu"):
    """The dict that train.py wrote. Nothing in the file is executed. Raises UsageError if it is no such file."""
    try:
        file = open(path, "rb")
    except OSError as e:
        raise UsageError(f"{path} cannot be read ({e.strerror}): train a model first (python train.py), or name a checkpoint with --ckpt") from None
    try:
        with file, warnings.catch_warnings(action="ignore"):
            ckpt = torch.load(file, map_location=device, weights_only=True)
        ckpt["args"].setdefault("model", ckpt["model"])            # older checkpoints have it in one place only
        assert CHECKPOINT <= ckpt.keys() and set(FIXED) <= ckpt["args"].keys()
    except Exception as e:
        raise UsageError(f"{path} is no checkpoint of train.py, or is truncated ({type(e).__name__})") from None
    return ckpt


def load_weights(model, weights, path):
    shapes = {name: p.shape for name, p in model.state_dict().items()}
    weights = {name: p.reshape(1) if p.ndim == 0 and shapes.get(name) == (1,) else p for name, p in weights.items()}
    try:                                               # s_E and s_F had no axis in older checkpoints
        model.load_state_dict(weights)
    except RuntimeError:
        raise UsageError(f"{path}: its weights are not those of the model it names") from None


def load_checkpoint(path, device="cpu", dtype=None):
    """(model, tokenizer, dict) from a checkpoint; the model is in eval mode on `device`. Raises UsageError.

    What screens is chosen anew, by what can run here; only a run with --kernel definition keeps it.
    """
    ckpt = read_checkpoint(path, device)
    model = build_model(ckpt["model"], ckpt["config"], dtype)
    load_weights(model, ckpt["weights"], path)
    if screens(model):
        kernel = "definition" if ckpt["args"].get("kernel") == "definition" else "auto"
        model.screen, line, expected = get_screen(kernel, torch.device(device), model.config, dtype)
        if not expected:
            print(line, file=sys.stderr)
    return model.to(device).eval(), get_tokenizer(ckpt["tokenizer"]), ckpt


def unused(path):
    """The first of NAME-1, NAME-2, ... (before the suffix, if there is one) that does not exist."""
    return next(p for n in itertools.count(1) if not (p := path.with_stem(f"{path.stem}-{n}")).exists())


def set_aside(path):
    """Move the file at `path`, if there is one, to NAME-old-1, NAME-old-2, ..., the first that is free."""
    if path.exists():
        os.replace(path, unused(path.with_stem(f"{path.stem}-old")))


def save_checkpoint(path, ckpt):
    """Write to a temporary file first and rename: the file at `path` is whole at any time."""
    temporary = path.with_suffix(".tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(ckpt, file)
            file.flush()
            os.fsync(file.fileno())                    # or a power cut could leave the new name without its bytes
        os.replace(temporary, path)
    except (OSError, RuntimeError) as e:
        temporary.unlink(missing_ok=True)
        raise UsageError(f"{path} cannot be written ({str(e).splitlines()[0]}); what was there before is untouched") from None


# ------------------------------------------------------------------------------------------------------- evaluation

@torch.no_grad()
def evaluate(model, data, n, batch_size, tokenizer):
    """(nats per token, bits per byte) over n sequences, always the same ones, spread evenly over the data."""
    numbers, device = data.spread(n), model.W_E.device
    nats = tokens = length = 0
    for first in range(0, len(numbers), batch_size):
        x = torch.from_numpy(np.stack([data[i] for i in numbers[first : first + batch_size]])).to(device)
        nats += model.loss(x[:, :-1], x[:, 1:], "none").double().sum().item()
        tokens += x[:, 1:].numel()
        length += len(tokenizer.decode_bytes([t for t in x[:, 1:].flatten().tolist() if t != tokenizer.eot_token]))
    return nats / tokens, nats / math.log(2) / max(length, 1)


@torch.no_grad()
def needle_accuracy(model, data, n, batch_size):
    """The share of right digits where a number stood once before, in the first n documents of an ABCDigitsStream."""
    right = total = 0
    for first in range(0, n, batch_size):
        documents = [data[i] for i in range(first, min(first + batch_size, n))]
        mask = torch.from_numpy(np.stack([data.needles(d) for d in documents])).to(model.W_E.device)
        tokens = torch.from_numpy(np.stack(documents)).to(model.W_E.device)
        guesses = model.logits(model.hidden(tokens[:, :-1])[mask]).argmax(-1)
        right, total = right + (guesses == tokens[:, 1:][mask]).sum().item(), total + mask.sum().item()
    return right / total if total else math.nan


@torch.no_grad()
def alive_fraction(model, tokens):
    """The fraction of the pairs inside the windows whose relevance is not zero, over all tiles. tokens: (B, T)."""
    alive = inside = 0

    @torch.compiler.disable
    def count(q, k, v, w, r, i0=0):
        nonlocal alive, inside
        for a in range(0, q.shape[2], 256):
            part = slice(a, a + 256)
            alive += (relevance(q[:, :, part], k, w, r, i0 + a) > 0).sum().item()
            i = i0 + a + torch.arange(q[:, :, part].shape[2], device=q.device)
            d = torch.arange(k.shape[2], device=q.device) - i[:, None]
            inside += q.shape[0] * (softmask(d, w[:, None, None]) > 0).sum().item()
        return chosen(q, k, v, w, r, i0)

    chosen, model.screen = model.screen, count
    try:
        model.hidden(tokens, chunk=tokens.shape[1])
    finally:
        model.screen = chosen
    return alive / inside


# --------------------------------------------------------------------------------------------------------- training

def get_parser():
    p = Parser(__doc__)

    def flag(name, default, text, **kw):
        shown = "psi" if default is None else default if not isinstance(default, list) else default[0]
        p.add_argument(name, default=default, help=f"{text} [{shown}]", **({"type": type(default)} | kw))

    flag("--model", "multiscreen", "multiscreen, multiscreen:ABLATION (rope, nope, no-tanhnorm, no-gate, fixed-r), or "
         "transformer:8M, 45M, 353M, 1.3B")
    flag("--psi", 8, "size: psi layers of psi tiles, width psi^2 (paper: 8, 16, 32, 48, 64)")
    flag("--layers", None, "number of layers, if not the model's own", type=int)
    flag("--data", ["stdlib"], "stdlib, abcdigits, or paths: UTF-8 files, folders, .bin token files (paper: SlimPajama)",
         nargs="+", type=str)
    flag("--tokenizer", "bytes", "bytes or gpt2 (paper: gpt2)")
    flag("--digits", 6, "digits of a value for --data abcdigits (paper: 6, in evaluation only)")
    flag("--seq-len", 256, "tokens in a sequence (paper: 4096)")
    flag("--batch-size", 8, "sequences in a forward pass (paper: 2^22 tokens in a step)")
    flag("--accumulate", 1, "forward passes in a step")
    flag("--steps", 620, "optimizer steps (paper: 2^16)")
    flag("--warmup", 50, "steps of linear warm-up, after which the learning rate is constant (paper: 4096)")
    flag("--lr", 2**-4, "learning rate (paper: 2^-4; Transformer: 1e-3 to 2e-4 by size, taken by itself)")
    flag("--weight-decay", 0.0, "AdamW's weight decay, on matrices (paper: 0; Transformer: 0.1, taken by itself)")
    flag("--clip", 0.0, "clip the gradient norm to this, 0 for never (paper: 0; Transformer: 1, taken by itself)")
    flag("--seed", 0, "seed of the initial weights and of the order of the data")
    flag("--device", "cuda" if torch.cuda.is_available() else "cpu", "cpu, cuda, ...")
    flag("--dtype", "auto", "of matrix products; auto is bfloat16 on a GPU (paper: bfloat16)",
         choices=["auto", "float32", "bfloat16"])
    flag("--kernel", "auto", "what screens: definition (multiscreen.screen), windowed (screen_windowed), triton (the fused kernel), "
         "or auto: the fastest that can run here and agrees with the definition", choices=["auto", "definition", "windowed", "triton"])
    p.add_argument("--compile", action="store_true", help="torch.compile each layer and `screen` (needs a C++ compiler on a CPU)")
    flag("--log-every", 10, "steps between printed lines")
    flag("--eval-every", 250, "steps between evaluations, each followed by a checkpoint")
    flag("--out", "out", "folder for ckpt.pt and log.tsv; an older run's move to OUT/old-1, old-2, ...")
    p.add_argument("--resume", action="store_true", help="go on from OUT/ckpt.pt, with its flags unless given anew")
    return p


FIXED = ("model", "psi", "layers", "data", "tokenizer", "digits", "seq_len", "seed")       # what a resumed run cannot change
MEASURED = ("abcdigits", "passkey", "long_context", "windows", "relevance_maps")    # tables and figures beside a checkpoint
COLUMNS = ("step", "loss", "lr", "grad_norm", "w_min", "w_median", "w_max", "ms", "tokens_per_s",
           "val_loss", "val_bpb", "alive", "needle", "base")


def get_args(argv):
    """(arguments, checkpoint to resume from or None)."""
    parser = get_parser()
    parser.set_defaults(**recipe(parser.parse_args(argv).model))
    args = parser.parse_args(argv)
    ckpt = None
    if args.resume:
        path = Path(args.out) / "ckpt.pt"
        ckpt = read_checkpoint(path)
        parser.set_defaults(**{k: v for k, v in ckpt["args"].items() if k not in ("out", "resume", "device")})
        args = parser.parse_args(argv)
        args.kernel = {"torch": "windowed"}.get(args.kernel, args.kernel)      # its name in older checkpoints
        for name in FIXED:
            if getattr(args, name) != ckpt["args"][name]:
                raise UsageError(f"{path} was trained with --{name.replace('_', '-')} {ckpt['args'][name]}: --resume cannot "
                                 f"change it to {getattr(args, name)}")
    for name, least in [("seq_len", 1), ("batch_size", 1), ("accumulate", 1), ("steps", 1), ("log_every", 1), ("eval_every", 1),
                        ("warmup", 0), ("lr", 0), ("weight_decay", 0), ("clip", 0), ("seed", 0)]:
        if not least <= getattr(args, name) < 2**63:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: it must be a number from {least} on")
    return args, ckpt


def prepare_out(args, ckpt):
    """Make sure that the folder can be written before any work; move an older run's files to OUT/old-N, or cut the log of
    the run that goes on to its checkpoint."""
    out = Path(args.out)
    log, head = out / "log.tsv", "\t".join(COLUMNS) + "\n"
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "ckpt.tmp").write_bytes(b"")
        (out / "ckpt.tmp").unlink()
        rows = []
        if ckpt:
            lines = log.read_text(errors="replace").splitlines(keepends=True) if log.exists() else []
            rows = [row for row in lines if row.split("\t")[0].isdigit() and int(row.split("\t")[0]) <= ckpt["step"]]
        elif (out / "ckpt.pt").exists() or log.exists() and log.read_text(errors="replace").count("\n") > 1:
            old = unused(out / "old")
            old.mkdir()
            for pattern in ("ckpt.pt", "log.tsv", "diverged.txt", *(f"{name}*.{end}" for name in MEASURED for end in ("tsv", "png"))):
                for path in out.glob(pattern):
                    os.replace(path, old / path.name)
            print(f"{out} held a run already: moved to {old}")
        (out / "log.tmp").write_text(head + "".join(rows))
        os.replace(out / "log.tmp", log)
    except OSError as e:
        raise UsageError(f"--out {out} cannot be written ({e.strerror})") from None
    return out / "ckpt.pt", log


def clock(seconds):
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"


def main(argv=None):
    """Train as the flags say; a program that calls it gets its own signal handlers back."""
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        train(*get_args(argv))
    finally:
        for s, handler in handlers.items():
            if handler is not None:                    # None: not installed by Python, and not to be had back
                signal.signal(s, handler)


def train(args, ckpt):
    if ckpt and ckpt["step"] >= args.steps:
        print(f"{args.out} is at step {ckpt['step']} of {args.steps} already: give more --steps to go on")
    device, tokenizer = get_device(args.device), get_tokenizer(args.tokenizer)
    dtypes = {"float32": None, "bfloat16": torch.bfloat16, "auto": torch.bfloat16 if device.type == "cuda" else None}
    dtype = dtypes[args.dtype]
    torch.manual_seed(args.seed)
    config = ckpt["config"] if ckpt else {"psi": args.psi, "N_L": args.layers, "vocab_size": tokenizer.n_vocab}
    model = build_model(args.model, config, dtype).to(device)
    screening = None
    if screens(model):
        model.screen, screening, _ = get_screen(args.kernel, device, model.config, dtype)
    train_data, val_data = get_data(args, tokenizer)

    groups = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": args.weight_decay},
              {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    step = drawn = 0
    if ckpt:
        load_weights(model, ckpt["weights"], "the checkpoint")
        optimizer.load_state_dict(ckpt["optimizer"])
        for p, state in optimizer.state.items():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state[name].reshape(p.shape)
        torch.set_rng_state(ckpt["random_state"].cpu())            # nothing draws from it yet; your dropout may
        step, drawn = ckpt["step"], ckpt["drawn"]
        if isinstance(train_data, ABCDigitsStream):
            train_data.learned = ckpt.get("learned", 0)            # older streams had the weights 2^i for good
    if args.compile:
        # Windows change with every step: a few graphs for all sizes (two that are equal by chance get no graph of their own),
        # and an error instead of running eager unseen when there are too many.
        torch.fx.experimental._config.use_duck_shape = False
        torch._dynamo.config.recompile_limit, torch._dynamo.config.fail_on_recompile_limit_hit = 64, True
        for layer in model.layers:
            layer.compile(dynamic=True)
        if model.screen is multiscreen.screen_windowed:
            model.screen = partial(multiscreen.screen_windowed, screen=torch.compile(multiscreen.screen, dynamic=True))
    path, log = prepare_out(args, ckpt)

    per_step = args.batch_size * args.accumulate
    total = sum(p.numel() for p in model.parameters())
    print(f"{args.model}, {total:,} parameters ({total - model.W_E.numel():,} non-embedding), {device}, {dtype or 'float32'}\n"
          f"{' '.join(args.data)}: {train_data} of {args.seq_len} tokens; {args.steps} steps of {per_step * args.seq_len:,} tokens")
    if screening:
        print(screening)

    def check(**values):
        """Raise if the run has diverged, before anything of it is saved."""
        if not all(math.isfinite(value) for value in values.values()):
            kept = f"{path} holds step {read_checkpoint(path)['step']}" if path.exists() else "nothing was saved yet"
            raise Diverged(f"training diverged: at step {step} " + ", ".join(f"{k} is {v:g}" for k, v in values.items())
                             + f"; {kept}; try a smaller --lr")

    def save():
        check(sum_of_weights=sum(p.detach().double().abs().sum() for p in model.parameters()).item())
        save_checkpoint(path, {
            "model": args.model, "config": asdict(model.config), "weights": model.state_dict(),
            "tokenizer": args.tokenizer, "optimizer": optimizer.state_dict(), "step": step, "drawn": drawn,
            "learned": getattr(train_data, "learned", 0),
            "random_state": torch.get_rng_state(), "args": vars(args),
            "versions": {"python": platform.python_version(), "torch": str(torch.__version__)}})

    stop = []
    for s in (signal.SIGINT, signal.SIGTERM):          # the first asks to save and end, a second ends at once
        signal.signal(s, lambda number, _: (stop.append(number), signal.signal(number, signal.SIG_DFL)))
    print(f"{'step':>13} {'loss':>8} {'lr':>8} {'|grad|':>8} {'w min':>6} {'median':>7} {'max':>8} "
          f"{'ms':>7} {'tok/s':>8} {'left':>8}", flush=True)
    started, first = time.perf_counter(), step
    while step < args.steps and not stop:
        began, loss = time.perf_counter(), 0.0
        lr = args.lr * min(1.0, (step + 1) / max(args.warmup, 1))
        for group in optimizer.param_groups:
            group["lr"] = lr
        for _ in range(args.accumulate):
            x = np.stack([train_data.draw(drawn + n, args.seed) for n in range(args.batch_size)])
            x = torch.from_numpy(x).to(device)
            part = model.loss(x[:, :-1], x[:, 1:]) / args.accumulate
            part.backward()
            drawn, loss = drawn + args.batch_size, loss + part.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip or math.inf).item()
        step += 1
        check(loss=loss, grad_norm=norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if isinstance(train_data, ABCDigitsStream):
            train_data.observe(loss, per_step)

        row, now = {"step": step}, time.perf_counter()
        if step % args.log_every == 0 or step in (1, args.steps):
            row |= {"loss": loss, "lr": lr, "grad_norm": norm, "ms": (now - began) * 1e3}
            shown = " " * 23
            if screens(model):
                w = torch.cat([window(tile.s_w.detach()) for tile in model.layers])
                row |= {"w_min": w.min().item(), "w_median": w.median().item(), "w_max": w.max().item()}
                shown = f"{row['w_min']:6.2f} {row['w_median']:7.1f} {row['w_max']:8.4g}"
            row["tokens_per_s"] = per_step * args.seq_len / (now - began)
            left = (now - started) / (step - first) * (args.steps - step)
            print(f"{step:>6}/{args.steps:<6} {loss:8.4f} {lr:8.2g} {norm:8.4f} {shown} "
                  f"{row['ms']:7.0f} {row['tokens_per_s']:8.0f} {clock(left):>8}",
                  flush=True)
        if step % args.eval_every == 0 or step == args.steps:
            row["val_loss"], row["val_bpb"] = evaluate(model, val_data, 256, args.batch_size, tokenizer)
            shown = ""
            if screens(model):
                row["alive"] = alive_fraction(model, torch.from_numpy(val_data[0][None, :-1]).to(device))
                shown = f"; {row['alive']:.1%} of the pairs inside the windows alive"
            if isinstance(val_data, ABCDigitsStream):
                row["base"] = train_data.base
                row["needle"] = needle_accuracy(model, val_data, 64, args.batch_size)
                shown += f"; {row['needle']:.1%} of the needle-like digits right, b = {row['base']:.2f}"
            check(val_loss=row["val_loss"])
            save()
            print(f"{step:>6}/{args.steps:<6} validation loss {row['val_loss']:.4f}, {row['val_bpb']:.3f} bits per byte{shown}; "
                  f"saved {path}", flush=True)
        if len(row) > 1:
            with open(log, "a") as f:
                f.write("\t".join(f"{row[c]:.6g}" if c in row else "" for c in COLUMNS) + "\n")

    if stop:
        save()
        print(f"stopped at step {step} and saved {path}; python train.py --out {args.out} --resume goes on from there")
        return
    start = torch.from_numpy(val_data[0][None, :32]).to(device)
    more = model.generate(start, 256, temperature=0.7, generator=torch.Generator(device).manual_seed(0))
    print(f"a sample, after its first 32 tokens:\n{tokenizer.decode(torch.cat([start, more], 1)[0].tolist())}")


def cli(main):
    """Run a script's main; a UsageError ends it with one line and exit code 1, Ctrl-C with exit code 130."""
    sys.stdout.reconfigure(errors="replace")
    try:
        main()
    except UsageError as e:
        sys.exit(f"error: {e}")
    except BrokenPipeError:                                        # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except KeyboardInterrupt as e:
        print(*e.args, file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    cli(main)

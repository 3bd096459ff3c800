"""What latency.py times: a model in a setting, one forward pass, milliseconds, ratios."""
import itertools
import time
import warnings
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend

from support.checkpoint import build_model, has_windows, load_for_evaluation, require_windows
from support.choose import compile_layers, get_screen
from support.results import Key, key_of, weights_hash

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}


@dataclass
class Cell:
    """A row of the table: a model in a setting at one length, and the Transformer beside it."""
    label: str
    model: torch.nn.Module
    setting: str
    length: int
    baseline: str = None
    T_train: int = None
    key: Key = None
    weights: str = ""


def random_model(name, config, device):
    """A model with random weights, its products in bfloat16 on a GPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else None
    with device:
        model = build_model(name, config, dtype)
    if has_windows(model):
        model.screen, line, as_expected = get_screen(model)
        if not as_expected:
            print(line, flush=True)
    return model


def name_of(screen):
    return f"{screen.__module__}.{screen.__name__}"


def get_multiscreens(args, device, vocab):
    """[[(label, model, T_train, Key, weights) of each seed] of each size]: trained, or random."""
    if not args.ckpt:
        sizes = []
        for psi in args.psi:
            model = random_model("multiscreen", {"psi": psi} | vocab, device)
            key = untrained(f"multiscreen --psi {psi}", vocab)
            sizes.append([(f"Psi = {psi}", model, 2**12, key, "")])
        return sizes
    sizes = {}
    for path in args.ckpt:
        model, _, ckpt = load_for_evaluation(path, device)
        require_windows(model, path, ckpt["model"])
        key = key_of(ckpt["args"], ckpt["step"], "latency", ckpt.get("files"))
        seed = path, model, ckpt["args"]["seq_len"], key, weights_hash(ckpt)
        sizes.setdefault((key.run, key.step), []).append(seed)
    return list(sizes.values())


def untrained(name, vocab):
    """The Key of a model with random weights."""
    tokenizer = "gpt2" if vocab["vocab_size"] == 50257 else "bytes"
    return Key("latency", f"--model {name} --tokenizer {tokenizer}", "0", "0")


def get_cells(args, device):
    """The cells of the table, in its order, and the name of what screens.

    The n-th Multiscreen is compared with the n-th Transformer, where both are there. Of the largest
    such pair all lengths are timed, of all others the longest only.
    """
    cuda = device.type == "cuda"
    backends = list(BACKENDS) if cuda else ["flash", "math"]       # a CPU has no others
    vocab = {"vocab_size": 50257 if cuda else 257}
    settings = ["initial", "trained-like", "trained-like + SWE"]
    if args.ckpt:
        settings = ["trained", "trained + SWE"]
    sizes = get_multiscreens(args, device, vocab)
    largest, cells, screening = min(len(sizes), len(args.transformer)) - 1, [], None
    for n, (seeds, size) in enumerate(itertools.zip_longest(sizes, args.transformer)):
        used, baseline = args.lengths if n == largest else args.lengths[-1:], None

        # The Transformer first.
        if size:
            baseline = f"transformer:{size.removeprefix('transformer:')}"
            model = random_model(baseline, vocab, device)
            if args.compile:
                compile_layers(model)
            for backend in backends:
                for T in used:
                    if backend != "math" or T <= 2**12:
                        cells.append(Cell(baseline, model, backend, T, baseline,
                                          key=untrained(baseline, vocab)))
        for label, model, T_train, key, weights in seeds or []:
            screening = name_of(model.screen)
            if args.compile:
                compile_layers(model)
            for setting in settings:
                for T in used:
                    cells.append(Cell(label, model, setting, T, baseline, T_train, key,
                                      weights))
    return cells, screening


def trained_like(n, seed=0):
    """n shuffled windows (n,), log-uniform in three ranges.

    5 % (at least one) are in 4096 .. 65536, 25 % in 256 .. 4096, the rest in 2 .. 128.
    """
    rng = torch.Generator().manual_seed(seed)
    n_far, n_middle = max(round(0.05 * n), 1), round(0.25 * n)
    bounds = [(4096.0, 65536.0)] * n_far + [(256.0, 4096.0)] * n_middle
    bounds = torch.tensor(bounds + [(2.0, 128.0)] * (n - len(bounds)))
    low, high = bounds[torch.randperm(n, generator=rng)].log().T
    return (low + (high - low) * torch.rand(n, generator=rng)).exp()


@torch.no_grad()
def prepare(model, setting, T_train):
    """Put a model into a setting, in place: the backend of its attention, or its windows.

    SWE expands those that are there; "initial" and "trained" leave them as they are.
    """
    if setting in BACKENDS:
        model.screen = BACKENDS[setting]
    if setting.startswith("trained-like"):
        sizes = [len(tile.s_w) for tile in model.layers]
        for tile, w in zip(model.layers, trained_like(sum(sizes)).split(sizes)):
            tile.s_w.copy_((w - 1).log())
    if setting.endswith("SWE"):
        model.expand_windows(T_train)


@torch.no_grad()
def forward_pass(model, tokens):
    """Hidden states of all tokens at once, then all logits in parts of 2^29. tokens: (1, T)"""
    x = model.hidden(tokens, chunk=tokens.shape[1])
    for part in x.split(max(2**29 // model.config.vocab_size, 1), 1):
        model.logits(part)


def time_cell(cell, device, repeats):
    """([milliseconds of each pass], None) after 2 that do not count, or ([], why there is none).

    The reason is a lack of memory, or a backend of attention that cannot run here.
    """
    def now():
        """Milliseconds, when the last kernel has finished."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return 1e3 * time.perf_counter()

    prepare(cell.model, cell.setting, cell.T_train)
    n_vocab, times = cell.model.config.vocab_size, []
    try:
        # PyTorch warns at length of a backend that it cannot use.
        with warnings.catch_warnings(action="ignore"):
            for _ in range(2 + repeats):
                tokens = torch.randint(n_vocab, (1, cell.length), device=device)
                began = now()
                forward_pass(cell.model, tokens)
                times.append(now() - began)
        return times[2:], None
    except (RuntimeError, MemoryError) as e:
        no_memory = isinstance(e, (torch.OutOfMemoryError, MemoryError))
        if not (cell.setting in BACKENDS or no_memory or "allocate memory" in str(e)):
            raise
        return [], (str(e) or "out of memory").splitlines()[0]


def ratios(ms, transformer):
    """[x_flash, x_fastest, fastest]: how many times as fast as a Transformer; None where unknown.

    transformer: its milliseconds by backend.
    """
    if ms is None or not transformer:
        return [None, None, None]
    fastest = min(transformer, key=transformer.get)
    x_flash = transformer["flash"] / ms if "flash" in transformer else None
    return [x_flash, transformer[fastest] / ms, fastest]

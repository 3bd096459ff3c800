"""What latency.py times: a model in a setting, one forward pass, milliseconds, ratios."""
import time
import warnings
from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend

from support.checkpoint import build_model, has_windows, load_for_evaluation, require_windows
from support.kernel import compile_layers, get_screen

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}


@dataclass
class Cell:
    """A row of the table: a model in a setting at one length, and the Transformer beside it."""
    label: str
    model: torch.nn.Module
    setting: str
    length: int
    baseline: str
    T_train: int = None


def random_model(name, config, device):
    """A model with random weights, its products in bfloat16 on a GPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else None
    with device:
        model = build_model(name, config, dtype)
    if has_windows(model):
        model.screen, *_ = get_screen("auto", device, model.config, dtype)
    return model


def get_cells(args, device):
    """The cells of the table, in its order, and the name of what screens.

    Of the smaller models only the longest length is timed.
    """
    cuda = device.type == "cuda"
    backends = list(BACKENDS) if cuda else ["flash", "math"]       # a CPU has no others
    settings = ["initial", "trained-like", "trained-like + SWE"]
    if args.ckpt:
        settings = ["trained", "trained + SWE"]
    cells, sources = [], args.ckpt or args.psi
    for source, size in zip(sources, args.transformer):
        # The two models.
        if args.ckpt:
            model, _, ckpt = load_for_evaluation(source, device)
            label, T_train = source, ckpt["args"]["seq_len"]
            require_windows(model, source, ckpt["model"])
        else:
            config = {"psi": source, "vocab_size": 50257 if cuda else 257}
            model = random_model("multiscreen", config, device)
            label, T_train = f"Psi = {source}", 2**12
        baseline = f"transformer:{size.removeprefix('transformer:')}"
        other = random_model(baseline, {"vocab_size": model.config.vocab_size}, device)
        screening = f"{model.screen.__module__}.{model.screen.__name__}"
        if args.compile:
            compile_layers(model)
            compile_layers(other)

        # Their cells, the Transformer's first.
        used = args.lengths if source == sources[-1] else args.lengths[-1:]
        for backend in backends:
            for T in used:
                if backend != "math" or T <= 2**12:
                    cells.append(Cell(baseline, other, backend, T, baseline))
        for setting in settings:
            for T in used:
                cells.append(Cell(label, model, setting, T, baseline, T_train))
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

    SWE expands the windows that are there; "initial" and "trained" leave them as they are.
    """
    if setting in BACKENDS:
        model.screen = BACKENDS[setting]
    elif setting.endswith("SWE"):
        model.expand_windows(T_train)
    elif setting == "trained-like":
        sizes = [len(tile.s_w) for tile in model.layers]
        for tile, w in zip(model.layers, trained_like(sum(sizes)).split(sizes)):
            tile.s_w.copy_((w - 1).log())


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

"""What latency.py times: a model in a setting, one forward pass, milliseconds."""
import itertools
import statistics
import time
import warnings
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend

from baselines import count_parameters
from support.checkpoint import (
    build_model,
    has_windows,
    load_for_evaluation,
    require_windows,
    weights_hash,
)
from support.choose import get_screen
from support.table import RUN, describe_run

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}


class Timed(NamedTuple):
    """A model in a setting at one length. pair: the number of the Transformer beside it."""
    model: torch.nn.Module
    run: dict
    setting: str
    length: int
    pair: int
    T_train: int


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


def get_models(args, device):
    """[[(model, columns of RUN, training length, settings) of a pair]], and the hash of weights.

    The Transformer of a pair comes first. Either may be missing.
    """
    cuda = device.type == "cuda"
    vocab = {"vocab_size": 50257 if cuda else 257}

    def untrained(name, sizes, settings):
        model = random_model(name, sizes | vocab, device)
        run = dict.fromkeys(RUN) | {"model": name, "parameters": count_parameters(model)[0],
                                    "seed": 0, "step": 0}
        return model, run, 2**12, settings

    trained = ""
    if args.ckpt:
        model, _, ckpt = load_for_evaluation(args.ckpt, device)
        require_windows(model, args.ckpt, ckpt["model"])
        trained = f"{weights_hash(ckpt)}-"
        screening = [(model, describe_run(ckpt), ckpt["args"]["seq_len"],
                      ["trained", "trained + SWE"])]
    else:
        settings = ["initial", "trained-like", "trained-like + SWE"]
        screening = [untrained("multiscreen", {"psi": psi}, settings) for psi in args.psi]
    backends = list(BACKENDS) if cuda else ["flash", "math"]       # a CPU has no others
    attending = [untrained(f"transformer:{size.removeprefix('transformer:')}", {}, backends)
                 for size in args.transformer]
    pairs = [[found for found in pair if found]
             for pair in itertools.zip_longest(attending, screening)]
    return pairs, min(len(attending), len(screening)) - 1, trained


def get_timed(pairs, largest, lengths):
    """What to time, in the table's order: of the pair `largest` all lengths, else the longest."""
    found = []
    for n, pair in enumerate(pairs):
        for model, run, T_train, settings in pair:
            for setting in settings:
                for T in lengths if n == largest else lengths[-1:]:
                    if setting != "math" or T <= 2**12:
                        found.append(Timed(model, run, setting, T, n, T_train))
    return found


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
def apply_setting(model, setting, T_train):
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


def time_passes(timed, device, repeats):
    """(milliseconds of a pass, None): a mean, after 2 that do not count; or (None, why not).

    The reason is a lack of memory, or a backend of attention that cannot run here.
    """
    def now():
        """Milliseconds, when the last kernel has finished."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return 1e3 * time.perf_counter()

    apply_setting(timed.model, timed.setting, timed.T_train)
    n_vocab, times = timed.model.config.vocab_size, []
    try:
        # PyTorch warns at length of a backend that it cannot use.
        with warnings.catch_warnings(action="ignore"):
            for _ in range(2 + repeats):
                tokens = torch.randint(n_vocab, (1, timed.length), device=device)
                began = now()
                forward_pass(timed.model, tokens)
                times.append(now() - began)
        return statistics.mean(times[2:]), None
    except (RuntimeError, MemoryError) as e:
        no_memory = isinstance(e, (torch.OutOfMemoryError, MemoryError))
        if not (timed.setting in BACKENDS or no_memory or "allocate memory" in str(e)):
            raise
        return None, (str(e) or "out of memory").splitlines()[0]

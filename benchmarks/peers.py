"""Other public implementations of the paper beside this one: agreement, time, memory.

    mkdir peers && cd peers
    git clone https://github.com/dieOD/multiscreen-pytorch                   # 8abea13
    git clone https://github.com/kuroganegames/Multiscreen-HF                # 2764ef0, transformers
    git clone https://github.com/exveria1015/screening-is-enough-pytorch     # 4501562
    git clone https://github.com/FreshMedlar/screening                       # dc947e1
    cd .. && python -m benchmarks.peers peers

After each: the commit tried, and what it needs besides PyTorch. Our model gets the peer's weights,
and the two take turns. OUT/peers.tsv has a row for each way of training (2,048
tokens a step) and decoding:

ours_ms, theirs_ms, ratio    medians; a ratio above 1 means that ours is faster
ours_MiB, theirs_MiB         peak tensor memory of a step, above what it started with
difference                   largest difference between the logits of the timed models

Rerun the command to measure what is missing. Peers without a cache are not timed in decoding.
Two more peers are other models: lucidrains/multiscreen (each update orthogonal to x),
p1atdev/screening (d_K = d_V = d_E / N_H).
"""
import importlib
import re
import subprocess
import sys
from collections import defaultdict
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from baselines import recipe
from benchmarks.measure import (
    cached,
    get_decoder,
    measure_missing,
    peak_memory,
    take_turns,
    training_step,
)
from multiscreen import Config
from support.cli import Parser, UsageError, cli, get_device, own_folder
from support.compiled import compile_model
from support.timing import random_model

COLUMNS = ("ours_ms", "theirs_ms", "ratio", "ours_MiB", "theirs_MiB", "difference")
TOKENS, STEPS, DECODED = 2048, 10, 32                  # of a step; that are timed
VOCABULARY, LONGEST = 257, 2**20                       # bytes; beyond every length that is timed
SETTINGS = [("train", "eager", 256), ("train", "compiled", 256), ("train", "eager", 1024),
            ("train", "compiled", 1024), ("decode", "eager", 256), ("decode", "eager", 8192)]


# ------------------------------------------------------------------------------ their models

class Peer(torch.nn.Module):
    """A model of a peer, with random weights. `build` makes it, `decode` reads with a cache.

    sign: of s_r, relative to ours; most have r = 1 / (exp(s_r) + 1).
    """
    package, sign = "multiscreen", -1

    def __init__(self, folder, psi):
        super().__init__()
        self.config = Config(psi, VOCABULARY)
        self.model = self.build(import_from(folder / self.folder, self.package), psi)
        for p in self.parameters():                    # s_r is 0 at first, whatever its sign
            p.data += 0.1 * torch.randn_like(p) * (p.dim() < 2)

    def forward(self, tokens):
        found = self.model(tokens)
        return found if torch.is_tensor(found) else found[0]

    def loss(self, tokens, targets):
        return cross_entropy(self(tokens).flatten(0, 1), targets.flatten())


class DieOD(Peer):
    folder = "multiscreen-pytorch"

    def build(self, package, psi):
        config = package.MultiscreenConfig.from_psi(psi, VOCABULARY, max_seq_len=LONGEST)
        return package.MultiscreenModel(config)

    def decode(self, tokens, seen):
        i, caches = seen or (0, None)
        z, caches = self.model(tokens, i, caches)
        return z[:, -1], (i + tokens.shape[1], caches)


class HuggingFace(Peer):
    folder, package = "Multiscreen-HF", "multiscreen_transformers"

    def build(self, package, psi):
        config = package.MultiscreenConfig.from_psi(psi, VOCABULARY, max_seq_len=LONGEST,
                                                    use_cache=False,
                                                    mipe_position_mode="paper_absolute")
        return package.MultiscreenForCausalLM(config).train()

    def decode(self, tokens, seen):
        found = self.model(tokens, past_key_values=seen, use_cache=True)
        return found.logits[:, -1], found.past_key_values


class Exveria(Peer):
    folder, package = "screening-is-enough-pytorch/src", "multiscreen.model"

    def build(self, package, psi):
        config = package.MultiscreenConfig.from_psi(psi, vocab_size=VOCABULARY, max_seq_len=LONGEST)
        return package.MultiscreenLM(config)


class FreshMedlar(Peer):
    folder, sign = "screening", 1

    def build(self, package, psi):
        return package.Multiscreen(VOCABULARY, psi**2, psi, psi)


def import_from(folder, name):
    """A module of a peer. Most are called multiscreen; ours, which is loaded, keeps the name."""
    for old in [old for old in sys.modules if old.startswith("multiscreen.")]:
        del sys.modules[old]
    ours = sys.modules.pop("multiscreen")
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
        sys.modules["multiscreen"] = ours


PEERS = DieOD, HuggingFace, Exveria, FreshMedlar


# ----------------------------------------------------------------------------- their weights

# What they call a weight, without "weight" at its end, and we; the others have our names.
NAMES = {"embed": "W_E", "embedding": "W_E", "s_e": "s_E", "s_f": "s_F", "q_proj": "W_Q",
         "k_proj": "W_K", "v_proj": "W_V", "g_proj": "W_G", "o_proj": "W_O", "sw": "s_w",
         "sr": "s_r", "sO": "s_O", "s_o": "s_O"}


def to_ours(theirs, sign):
    """Our weights from (name, weight) of a peer: one matrix a layer, or one a tile in its order."""
    found = defaultdict(list)
    for name, x in theirs:
        last = name.removesuffix(".weight").rpartition(".")[2]
        layer = "".join(re.findall(r"layers\.\d+\.", name))
        found[layer + NAMES.get(last, last)].append(x.detach())

    weights = {}
    for name, xs in found.items():
        layer, last = name[:-3], name[-3:]
        if last[0] == "s":
            x = torch.cat([x.flatten() for x in xs]) * (sign if last == "s_r" else 1)
        elif last == "W_E":
            x, = xs
        else:
            H = sum(x.numel() for x in found[layer + "s_w"])
            if last == "W_O":                          # (E, H V) -> (H, V, E)
                x = torch.cat(xs, 1).unflatten(1, (H, -1)).permute(1, 2, 0)
            else:                                      # (H D, E) -> (E, H, D)
                x = torch.cat(xs).unflatten(0, (H, -1)).permute(2, 0, 1)
        weights[name] = x.contiguous()
    return weights


# --------------------------------------------------------------------------------- a row

@torch.no_grad()
def read(decode, tokens):
    """(The logits after a text, a function that decodes one more token.) Reads 256 at a time."""
    seen = None
    for part in tokens.split(256, 1):
        z, seen = decode(part, seen)
    return z, get_decoder(decode, seen)


def measure(args, peer, what, setting, T):
    """A row: ours with the weights of a peer, beside it."""
    theirs = peer(args.folder, args.psi)
    ours = random_model("multiscreen", {"psi": args.psi, "vocab_size": VOCABULARY}, "cpu")
    ours.load_state_dict(to_ours(theirs.model.named_parameters(), theirs.sign))
    if setting == "compiled":
        compile_model(ours)
        theirs.model.compile()

    if what == "train":
        tokens, repeats = torch.randint(VOCABULARY, (TOKENS // T, T)), STEPS
        z = [model(tokens).detach() for model in (ours, theirs)]
        runs = [training_step(x, recipe("multiscreen"), *tokens.shape) for x in (ours, theirs)]
    else:
        tokens, repeats = torch.randint(VOCABULARY, (1, T)), DECODED
        z, runs = zip(*(read(f, tokens) for f in (cached(ours), theirs.eval().decode)))
    times, sizes = take_turns(runs, repeats), [peak_memory(run) for run in runs]
    return {"ours_ms": 1e3 * times[0], "theirs_ms": 1e3 * times[1], "ratio": times[1] / times[0],
            "ours_MiB": sizes[0], "theirs_MiB": sizes[1],
            "difference": (z[0] - z[1]).abs().max().item()}


def cells(args):
    about = {"psi": args.psi, "threads": torch.get_num_threads()}
    peers = [peer for peer in PEERS if (args.folder / peer.folder).exists()]
    if not peers:
        raise UsageError(f"{args.folder} has no repository of a peer: -h says how to get them")
    for peer in peers:
        git = ["git", "-C", args.folder / peer.folder, "rev-parse", "--short=7", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
        for what, setting, T in SETTINGS:
            if what == "train" or hasattr(peer, "decode"):
                yield ({"peer": peer.__name__, "commit": commit, "what": what, "setting": setting,
                        "T": T} | about, partial(measure, args, peer, what, setting, T))


def main():
    p = Parser(__doc__)
    p.add_argument("folder", type=Path, nargs="?", default=Path("peers"),
                   help="folder with the repositories [peers]")
    p.add_argument("--psi", type=int, default=8, help="size of the models [8]")
    p.add_argument("--out", type=own_folder, default=Path("out/peers"),
                   help="folder of peers.tsv [out/peers]")
    args = p.parse_args()
    get_device("cpu")                                  # as train.py: glibc keeps freed memory
    path = args.out / "peers.tsv"
    torch.manual_seed(0)
    measure_missing(path, COLUMNS, cells(args))
    print(f"wrote {path}")


if __name__ == "__main__":
    cli(main)

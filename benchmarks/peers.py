"""Other public implementations of the paper beside this one: agreement, time, memory.

    mkdir peers && cd peers
    git clone https://github.com/dieOD/multiscreen-pytorch                   # 8abea13
    git clone https://github.com/kuroganegames/Multiscreen-HF                # 2764ef0, transformers
    git clone https://github.com/exveria1015/screening-is-enough-pytorch     # 4501562
    git clone https://github.com/FreshMedlar/screening                       # dc947e1
    cd .. && python -m benchmarks.peers peers

Behind each are the commit that was tried and what it needs besides PyTorch. Our model gets the
weights of the peer, and the two take turns. OUT/peers.tsv has a row for each way of training (2,048
tokens a step) and decoding:

ours_ms, theirs_ms, ratio    medians; a ratio above 1 means that ours is faster
ours_MiB, theirs_MiB         most tensor memory of a step above what it began with
difference                   largest difference of two logits, of the models that are timed

Rerun the command to measure what is missing. Peers without a cache are not timed in decoding.
Two more peers are other models: lucidrains/multiscreen (each update orthogonal to x),
p1atdev/screening (d_K = d_V = d_E / N_H).

    python -m benchmarks.peers --convert model.safetensors --out out-peer/ckpt.pt

turns one of their checkpoints into ours; `train.py --init` continues from it.
"""
import subprocess
from functools import partial
from pathlib import Path

import torch

from baselines import recipe
from benchmarks.measure import measure_missing, peak_memory, take_turns, training_step
from benchmarks.peer_models import PEERS, VOCABULARY
from benchmarks.peer_weights import convert, to_ours
from support.choose import compile_layers
from support.cli import Parser, UsageError, cli, get_device
from support.timing import random_model

COLUMNS = ("ours_ms", "theirs_ms", "ratio", "ours_MiB", "theirs_MiB", "difference")
TOKENS, STEPS, DECODED = 2048, 10, 32                  # of a step; that are timed
SETTINGS = [("train", "eager", 256), ("train", "compiled", 256), ("train", "eager", 1024),
            ("train", "compiled", 1024), ("decode", "eager", 256), ("decode", "eager", 8192)]


@torch.no_grad()
def get_decoder(decode, tokens):
    """(The logits after a text, a function that decodes one more token.) Reads 256 at a time."""
    seen = None
    for part in tokens.split(256, 1):
        z, seen = decode(part, seen)
    last = z

    @torch.no_grad()
    def step():
        nonlocal last, seen
        last, seen = decode(last.argmax(-1, keepdim=True), seen)

    return z, step


def measure(args, peer, what, setting, T):
    """A row: ours with the weights of a peer, beside it."""
    theirs = peer(args.folder, args.psi)
    ours = random_model("multiscreen", {"psi": args.psi, "vocab_size": VOCABULARY}, "cpu")
    ours.load_state_dict(to_ours(theirs.model.state_dict()))
    if setting == "compiled":
        compile_layers(ours)
        theirs.model.compile()

    def decode_ours(tokens, caches):
        caches = caches or ours.new_caches()
        return ours.logits(ours.hidden(tokens, caches)[:, -1]), caches

    if what == "train":
        tokens, repeats = torch.randint(VOCABULARY, (TOKENS // T, T)), STEPS
        z = [model(tokens).detach() for model in (ours, theirs)]
        runs = [training_step(x, recipe("multiscreen"), *tokens.shape) for x in (ours, theirs)]
    else:
        tokens, repeats = torch.randint(VOCABULARY, (1, T)), DECODED
        z, runs = zip(*(get_decoder(f, tokens) for f in (decode_ours, theirs.eval().decode)))
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
    p.add_argument("--convert", type=Path, metavar="FILE", help="a checkpoint of a peer")
    p.add_argument("--out", type=Path, help="folder of peers.tsv [out/peers]; file of --convert")
    args = p.parse_args()
    if args.convert:
        convert(args.convert, args.out or Path("out-peer/ckpt.pt"))
        return
    get_device("cpu")                                  # as train.py: glibc keeps freed memory
    path = (args.out or Path("out/peers")) / "peers.tsv"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    measure_missing(path, COLUMNS, cells(args))
    print(f"wrote {path}")


if __name__ == "__main__":
    cli(main)

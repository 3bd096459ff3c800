"""Train a Multiscreen model on any text, or on endless documents of ABCDigits or passkey.

    python train.py --psi 8                          the source of Python's own standard library
    python train.py --data books/ --tokenizer gpt2   text, folders, .bin token files
    python train.py --resume --steps 1240            continue the run in out/, to step 1240
    torchrun --nproc_per_node 8 train.py ...         the same on 8 GPUs

Ctrl-C saves a checkpoint; add --resume to continue. With --resume, a run is started, continued or
reported as finished. Without it, a folder that already holds a run is refused.

The recipe is the paper's: AdamW with betas (0.9, 0.95), no weight decay, no clipping, and a linear
warm-up to a constant rate of 2^-4. Documents are joined by end-of-text and cut into contiguous
sequences, which are drawn at random without replacement. The default sizes suit a laptop.

A printed line has the step's loss in nats per token, its learning rate, gradient norm before
clipping, median and largest window, and, over the steps since the line before, the milliseconds per
step and the minutes that the rest will take at this speed.

The run's folder, OUT, contains ckpt.pt, which is all you need to resume; log.tsv, with a row for
each line of numbers; source/, the code that ran; and more, listed in support/run.py.
"""
import math
import shlex
import time
from argparse import BooleanOptionalAction
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils import clip_grad_norm_

from support import check, cli
from support import distributed as dist  # one process or many, of which only number 0 prints
from support.data import TASKS, absolute, batches, get_data, get_tokenizer
from support.fast import make_fast
from support.models import SIZES, build_model, recipe, set_seeds, windows
from support.run import (
    FIXED,
    FREE,
    Run,
    find_checkpoint,
    load_checkpoint,
    load_weights,
    read_checkpoint,
    require_same_flags,
    save_checkpoint,
)
from support.tasks import get_documents

__all__ = ["load_checkpoint", "main", "save_checkpoint", "train"]      # for your own code


def train(out, args, ckpt=None, init=None):
    """Train a run in the folder `out`.

    ckpt: the contents of OUT/ckpt.pt if that run continues; init: those of --init's checkpoint for
    a new run. Both are dicts or None; `main`, at the end of this file, reads them.
    """
    # The model comes before a large corpus: if it cannot be built, you learn so at once.
    tokenizer = get_tokenizer(args.tokenizer)
    device = cli.get_device(args.device)
    dtype = cli.products_dtype(device, args.dtype)
    args.dtype = "bfloat16" if dtype else "float32"    # what `auto` has become
    sizes = {field: getattr(args, name) for name, field in SIZES.items()}
    set_seeds(args.seed)
    model = build_model(args.model, sizes | {"vocab_size": tokenizer.n_vocab}, dtype).to(device)
    get = get_documents if args.data in TASKS else get_data
    data, val_data = get(args, tokenizer)
    if ckpt:
        load_weights(model, ckpt["weights"], out / "ckpt.pt")
    elif init:
        load_weights(model, init["weights"], args.init)
    make_fast(model, args)                             # in place: choose the screen, compile
    run = Run(out, args, model, data, ckpt)            # counts the steps, and writes into `out`
    dist.shard(model)                                  # over the processes of torchrun, if any
    optimizer = get_optimizer(model, args)             # it must see the sharded weights
    if ckpt:
        run.resume(ckpt, model, optimizer, data)

    # The loop. `unread` holds the losses and gradient norms of the steps since they were last read,
    # on the device: to read them, the CPU must wait for the GPU.
    unread, since = [], time.perf_counter()
    last = stopping = False
    with run.begin(), cli.stop_requests() as signals:  # Ctrl-C, SIGTERM, SIGHUP
        print(f"{args.model}, {run.facts['parameters']:,} parameters, {device}, {args.dtype}")
        print(f"{data} of {args.seq_len} tokens; steps {run.step} to {args.steps}, each of "
              f"{args.batch_tokens:,} tokens", flush=True)
        if run.owes_evaluation:                        # the run was stopped in one
            log_evaluation(run, model, data, val_data, args, tokenizer, signals)
            run.save(model, optimizer, data)
            last = run.learned or run.step >= args.steps
            stopping = run.owes_evaluation
            since = time.perf_counter()
        while not last and not stopping:
            lr = set_rate(optimizer, args, run.step)
            loss, norm = train_step(model, data, args, run.drawn)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            run.step += 1
            run.drawn += args.batch_tokens // args.seq_len
            run.learned = data.observe(loss, args.batch_tokens // args.seq_len)
            unread.append((loss, norm))
            last = run.learned or run.step == args.steps           # a task ends when it is learned
            stopping = dist.total(len(signals)) > 0    # if any of the processes got one

            logs = last or run.step == 1 or run.step % args.log_every == 0
            evaluates = last or run.step % args.eval_every == 0
            saves = last or run.step % args.save_every == 0
            if not (logs or evaluates or saves or stopping):
                continue
            # A checkpoint is only written if all numbers before it were finite.
            pairs = torch.stack([torch.stack(pair) for pair in unread]).tolist()
            for step, (loss, norm) in enumerate(pairs, run.step - len(pairs) + 1):
                run.require_finite(step, loss=loss, grad_norm=norm)
            unread.clear()
            loss, norm = pairs[-1]
            if logs:
                seconds = (time.perf_counter() - since) / len(pairs)           # per step
                left = seconds * (args.steps - run.step)
                run.log(loss=loss, lr=lr, grad_norm=norm, **windows(model), ms=1e3 * seconds,
                        tokens_per_s=args.batch_tokens / seconds, min_left=left / 60)
            if evaluates:
                log_evaluation(run, model, data, val_data, args, tokenizer, signals)
                stopping = stopping or run.owes_evaluation
            if saves or stopping:
                run.save(model, optimizer, data)
            since = time.perf_counter()
    if run.owes_evaluation or (stopping and not last):           # `cli` prints no traceback
        raise KeyboardInterrupt(f"stopped at step {run.step}, saved {out / 'ckpt.pt'}; to go on, "
                                "repeat the command with --resume, without --force and --init")
    if dist.world() == 1:
        try:
            check.warn(model, check.LONG)              # a leak may grow while a model trains
            text = sample(model, val_data, tokenizer)
            print(f"a sample that continues held-out text:\n{text}")
        except KeyboardInterrupt:                      # the run is finished, and saved
            print("the sample was stopped")
    next_command = f"python {data.next_command} --ckpt {shlex.quote(str(out / 'ckpt.pt'))}"
    print(f"next: {cli.pasteable(next_command)}")


def get_optimizer(model, args):
    """AdamW as in the paper. Weight decay is for matrices only."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": args.weight_decay},
              {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)


def set_rate(optimizer, args, step):
    """Set the learning rate of step 0, 1, ..: linear warm-up, then constant. Returns the rate."""
    lr = args.lr * min(1.0, (step + 1) / max(args.warmup, 1))
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def train_step(model, data, args, drawn):
    """Run a step's passes forward and backward. Returns (loss, gradient norm before clipping).

    Both are tensors on the device. drawn: the sequences that were drawn before this step.
    """
    mine = dist.my_share(range(drawn, drawn + args.batch_tokens // args.seq_len))
    passes = [mine[n : n + args.batch_size] for n in range(0, len(mine), args.batch_size)]
    total = 0.0
    for numbers in passes:
        is_last = numbers is passes[-1]
        dist.average_in_next_backward(model, is_last)
        x = get_batch(data, numbers, args.seed, model.W_E.device)
        loss = model.loss(x[:, :-1], x[:, 1:]) / len(passes)
        loss.backward()
        total = total + loss.detach()
    largest = args.clip if args.clip > 0 else math.inf
    norm = clip_grad_norm_(model.parameters(), largest)
    return dist.mean(total), dist.full(norm)


def get_batch(data, numbers, seed, device):
    """The sequences of these numbers on the device, (len(numbers), T + 1)."""
    x = torch.from_numpy(np.stack([data.draw(n, seed) for n in numbers]))
    # From pinned memory a GPU copies while it computes.
    if device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=x.is_pinned())


def log_evaluation(run, model, data, val_data, args, tokenizer, signals):
    """Evaluate and log, unless a signal asks to stop: then --resume begins with this evaluation."""
    try:
        # To compile once more, without gradients, costs more than a run's few evaluations gain.
        with torch.compiler.set_stance("force_eager"):
            row = evaluate(model, data, val_data, args, tokenizer, signals)
    except KeyboardInterrupt:
        run.owes_evaluation = True
        return
    run.owes_evaluation = False
    run.require_finite(run.step, val_loss=row["val_loss"])
    run.log(**row)


@torch.no_grad()
def evaluate(model, data, val_data, args, tokenizer, signals=()):
    """Evaluate in eval mode. Returns a row of the log: nats per token, bits per byte, alive pairs.

    Raises KeyboardInterrupt between two passes once there is a signal in `signals`.

    The losses are over up to 256 sequences, spread evenly over the validation data, and the share
    of alive pairs is over the first 512 tokens of one. A task adds columns of its own, over 64
    documents. If there are several processes, each of them computes all of this.
    """
    def until_signal(n):
        for x in batches(val_data, n, args.batch_size):
            if dist.total(len(signals)) > 0:           # if any of the processes got one
                raise KeyboardInterrupt
            yield x

    model.eval()
    device = model.W_E.device
    nats = n_tokens = n_bytes = 0
    for x in until_signal(256):
        x = x.to(device)
        nats += model.loss(x[:, :-1], x[:, 1:], "none").cpu().double().sum().item()
        targets = x[:, 1:].flatten().tolist()
        n_tokens += len(targets)
        if tokenizer.eot_token is not None:            # numbers stand for no bytes
            text = [t for t in targets if t != tokenizer.eot_token]
            n_bytes += len(tokenizer.decode_bytes(text))
    row = {"val_loss": nats / n_tokens}
    if n_bytes > 0:
        row["val_bpb"] = nats / math.log(2) / n_bytes

    # Called on the training data, whose state says how much help the task still gives.
    row |= data.extra_columns(model, until_signal(64))

    # Transformers have no relevance maps, nor do layers that do not call their `screen`.
    tokens = torch.from_numpy(val_data[0][:-1][:512])[None].to(device)
    row |= check.alive_pairs(model, tokens)
    model.train()
    return row


def sample(model, val_data, tokenizer):
    """The first 32 tokens of the validation data and the model's continuation of them, as text."""
    prompt = torch.from_numpy(val_data[0][:32])[None].to(model.W_E.device)
    generator = torch.Generator(prompt.device).manual_seed(0)
    with torch.compiler.set_stance("force_eager"):     # compiling would take longer
        answer = model.eval().generate(prompt, 256, temperature=0.7, generator=generator)
    return cli.printable(tokenizer.decode(torch.cat([prompt, answer], 1)[0].tolist()))


# ---------------------------------------------------------------------------------------- flags

def get_parser():
    p, positive, amount = cli.Parser(__doc__), cli.at_least(1), cli.at_least(0, float)
    p.flag("--model", "multiscreen", "multiscreen, transformer:SIZE, or either with :VARIANT, "
           "which may be a class of yours, FILE.CLASS; an unknown name lists all names")
    p.flag("--psi", 8, "size: psi layers of psi tiles, width psi^2 (paper: 8, 16, 32, 48, 64)",
           positive)
    p.flag("--layers", None, "number of layers [the model's own]", positive)
    p.flag("--tiles", None, "tiles in a layer [psi]", positive)
    p.flag("--d-E", None, "width of the model [psi^2]", positive)
    p.flag("--d-K", None, "dimensions of a query and a key [16]", positive)
    p.flag("--d-V", None, "dimensions of a value [64]", positive)
    p.flag("--w-th", 256.0, "windows start at 2 to w_th + 1 tokens; MiPE acts on those below w_th")
    p.flag("--data", ["stdlib"], "stdlib, abcdigits, passkey, or UTF-8 files, folders, .bin and "
           ".npy files of tokens (paper: SlimPajama)", str, nargs="+")
    p.flag("--val", None, "files and folders to hold out [those named val, valid or validation; "
           "else every twentieth text, or the last twentieth of the tokens]", str, nargs="+")
    p.flag("--tokenizer", "bytes", "bytes or gpt2 (paper: gpt2); for token files with a vocabulary "
           "of your own, its size, such as 65: samples are then printed as numbers")
    p.flag("--digits", 6, "digits per number, for --data abcdigits (paper: 6, in evaluation only)")
    p.flag("--seq-len", 256, "tokens in a sequence (paper: 4096)", positive)
    p.flag("--batch-size", 8, "sequences per forward pass, in each process", positive)
    p.flag("--batch-tokens", None, "tokens per step, over all passes and processes (paper: 2^22) "
           "[those of one pass]", positive)
    p.flag("--steps", 620, "optimizer steps; abcdigits and passkey may end earlier (paper: 2^16)",
           positive)
    p.flag("--warmup", 50, "steps of linear warm-up to a constant learning rate (paper: 4096)",
           cli.at_least(0))
    p.flag("--lr", None, "learning rate [the paper's: 2^-4; Transformer: 1e-3 to 2e-4, by size]",
           amount)
    p.flag("--weight-decay", None, "AdamW's weight decay, for matrices [the paper's: 0; "
           "Transformer: 0.1]", amount)
    p.flag("--clip", None, "largest gradient norm, 0 for none [the paper's: 0; Transformer: 1]",
           amount)
    p.flag("--seed", 0, "seed of the initial weights and of the order of the data",
           cli.at_least(0))
    p.flag("--device", cli.DEVICE, "cpu, cuda or mps")
    p.flag("--dtype", "auto", "for matrix products; auto: bfloat16 on a GPU that supports it "
           "(paper: bfloat16)", choices=["auto", "float32", "bfloat16"])
    p.flag("--kernel", "auto", "how to screen: definition (multiscreen.screen), windowed, cpp (in "
           "C++, on a CPU), triton (the fused kernel, on a GPU), or auto: the fastest that runs "
           "here, if its equations are unedited",
           choices=["auto", "definition", "windowed", "cpp", "triton"])
    p.add_argument("--compile", action=BooleanOptionalAction,
                   help="torch.compile the model, and record CUDA graphs on a GPU; on a CPU it "
                   "needs a C++ compiler [yes, on a CUDA GPU with Triton]")
    p.add_argument("--recompute", action=BooleanOptionalAction, default=False,
                   help="recompute each layer's activations in backward: saves memory, costs time")
    p.flag("--log-every", 10, "steps between printed lines", positive)
    p.flag("--eval-every", 250, "steps between evaluations", positive)
    p.flag("--save-every", None, "steps between checkpoints [--eval-every]", positive)
    p.flag("--init", None, "checkpoint to take model, tokenizer and weights from, for training on "
           "other data", str)
    p.flag("--out", "out", "folder for ckpt.pt and log.tsv")
    group = p.add_mutually_exclusive_group()
    group.add_argument("--resume", action="store_true",
                       help="continue the run in OUT, or begin it; flags that you leave out stay "
                       "as they were, except --device and --compile")
    group.add_argument("--force", action="store_true", help="overwrite the run in OUT")
    return p


def get_args(argv=None, ckpt=None, init=None):
    """All flags of a run: the command's, else the checkpoint's, the model's recipe, the defaults.

    ckpt: that of a continued run; init: that of --init. Raises UsageError for impossible flags.
    """
    parser, kept = get_parser(), {}
    if ckpt:
        kept = {name: x for name, x in ckpt["args"].items() if name not in FREE}
    elif init:
        kept = {name: x for name, x in init["args"].items() if name in FIXED}
    parser.set_defaults(**kept)
    args = parser.parse_args(argv)
    for name, x in recipe(args.model).items():
        if getattr(args, name) is None:
            setattr(args, name, x)
    for name in FIXED:
        if name in kept and getattr(args, name) != kept[name]:
            flag = cli.flag_of(name)
            was = "another" if kept[name] is None else f"{flag} {kept[name]}"
            raise cli.UsageError(f"the checkpoint was trained with {was}: leave {flag} out, or "
                                 "start a new run")
    if args.model.startswith("transformer"):
        refuse_sizes(args)

    # What follows from other flags.
    args.data = absolute(args.data)
    if args.val:
        args.val = absolute(args.val)
    args.save_every = args.save_every or args.eval_every
    world = dist.world()
    tokens_per_pass = args.batch_size * args.seq_len * world
    args.batch_tokens = args.batch_tokens or tokens_per_pass
    if args.batch_tokens % tokens_per_pass != 0:
        raise cli.UsageError(f"--batch-tokens {args.batch_tokens}: it must be a multiple of "
                             f"{tokens_per_pass} ({args.batch_size} sequences x {args.seq_len} "
                             f"tokens x {world} processes)")
    return args


def refuse_sizes(args):
    """Raise UsageError for sizes of Multiscreen that a Transformer would ignore."""
    for name in SIZES:
        if name != "layers" and getattr(args, name) != get_parser().get_default(name):
            raise cli.UsageError(f"{cli.flag_of(name)} is for Multiscreen: a Transformer's sizes "
                                 "are in its name, transformer:N_L,N_H,d_E")


@dist.joined()
def main(argv=None):
    command = get_parser().parse_args(argv)
    out, init = Path(command.out), None
    if command.resume and command.init:
        raise cli.UsageError("--init begins a run and --resume continues one: leave one of them "
                             "out")
    if command.init and Path(command.init).resolve() == (out / "ckpt.pt").resolve():
        raise cli.UsageError(f"--out {out} would overwrite {command.init}: name another --out")
    ckpt = find_checkpoint(out, command.resume, command.force)
    if command.init:
        init = read_checkpoint(command.init)
    args = get_args(argv, ckpt, init)
    is_finished = ckpt is not None and (ckpt["learned"] or ckpt["step"] >= args.steps)
    if not is_finished or ckpt.get("owes_evaluation"):
        train(out, args, ckpt, init)
    else:
        require_same_flags(ckpt, args)
        end = "it has learned the task" if ckpt["learned"] else "a larger --steps continues it"
        print(f"{out} is already finished, at step {ckpt['step']}: {end}")


if __name__ == "__main__":
    cli.cli(main)

"""Train a Multiscreen model on any text, or on an endless stream of ABCDigits documents.

    python train.py --psi 8                          the source of Python's own standard library
    python train.py --data books/ --tokenizer gpt2   text, folders, .bin token files
    python train.py --resume                         go on with the run in out/

The recipe is the paper's: AdamW with betas (0.9, 0.95), no weight decay, no clipping, a linear
warm-up to a constant learning rate of 2^-4; documents joined by end-of-text, cut into contiguous
sequences, drawn at random without replacement. The sizes are a laptop's.

A printed line: step, loss (nats per token), learning rate, gradient norm before clipping, the
smallest, median and largest window, milliseconds a step, tokens per second, time left.
"""
import math
import platform
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from baselines import count_parameters, recipe
from multiscreen import relevance, softmask, window
from support.checkpoint import (
    FIXED,
    build_model,
    has_windows,
    load_checkpoint,
    load_optimizer,
    load_weights,
    open_run,
    read_checkpoint,
    refuse_other_run,
    save_checkpoint,
)
from support.cli import Parser, UsageError, cli, clock, get_device, stop_requests
from support.kernel import compile_layers, get_screen
from support.tokens import ABCDigitsStream, get_data, get_tokenizer

__all__ = ["load_checkpoint", "main"]

COLUMNS = ("step", "loss", "lr", "grad_norm", "w_min", "w_median", "w_max", "ms", "tokens_per_s",
           "val_loss", "val_bpb", "alive", "needle", "base")


class Diverged(UsageError):
    """A loss, a gradient norm or a weight was not finite."""


# ----------------------------------------------------------------------------------- flags

def get_parser():
    p = Parser(__doc__)

    def flag(name, default, text, **options):
        shown = default[0] if isinstance(default, list) else default
        shown = "the model's own" if default is None else shown
        options = {"type": type(default)} | options
        p.add_argument(name, default=default, help=f"{text} [{shown}]", **options)

    flag("--model", "multiscreen", "multiscreen, multiscreen:ABLATION (rope, nope, no-tanhnorm, "
         "no-gate, fixed-r), or transformer:8M, 45M, 353M, 1.3B")
    flag("--psi", 8, "size: psi layers of psi tiles, width psi^2 (paper: 8, 16, 32, 48, 64)")
    flag("--layers", None, "number of layers", type=int)
    flag("--data", ["stdlib"], "stdlib, abcdigits, or paths: UTF-8 files, folders, .bin token "
         "files (paper: SlimPajama)", nargs="+", type=str)
    flag("--tokenizer", "bytes", "bytes or gpt2 (paper: gpt2)")
    flag("--digits", 6, "digits of a number, for --data abcdigits (paper: 6, in evaluation only)")
    flag("--seq-len", 256, "tokens in a sequence (paper: 4096)")
    flag("--batch-size", 8, "sequences in a forward pass (paper: 2^22 tokens in a step)")
    flag("--accumulate", 1, "forward passes in a step")
    flag("--steps", 620, "optimizer steps (paper: 2^16)")
    flag("--warmup", 50, "steps of linear warm-up to a constant learning rate (paper: 4096)")
    flag("--lr", 2**-4, "learning rate (paper: 2^-4; Transformer: 1e-3 to 2e-4, set by size)")
    flag("--weight-decay", 0.0, "AdamW's weight decay, of matrices (paper: 0; Transformer: 0.1)")
    flag("--clip", 0.0, "largest gradient norm, 0 for none (paper: 0; Transformer: 1)")
    flag("--seed", 0, "seed of the initial weights and of the order of the data")
    flag("--device", "cuda" if torch.cuda.is_available() else "cpu", "cpu, cuda, ...")
    flag("--dtype", "auto", "of matrix products; auto is bfloat16 on a GPU (paper: bfloat16)",
         choices=["auto", "float32", "bfloat16"])
    flag("--kernel", "auto", "what screens: definition (multiscreen.screen), windowed "
         "(screen_windowed), triton (the fused kernel), or auto: the fastest that can run here and "
         "agrees with the definition", choices=["auto", "definition", "windowed", "triton"])
    p.add_argument("--compile", action="store_true",
                   help="torch.compile the layers (needs a C++ compiler on a CPU)")
    flag("--log-every", 10, "steps between printed lines")
    flag("--eval-every", 250, "steps between evaluations, each followed by a checkpoint")
    flag("--out", "out", "folder for ckpt.pt and log.tsv")
    group = p.add_mutually_exclusive_group()
    group.add_argument("--resume", action="store_true",
                       help="go on from OUT/ckpt.pt, with its flags unless given anew")
    group.add_argument("--force", action="store_true",
                       help="overwrite the run in OUT, delete the tables and figures made from it")
    return p


def get_args(argv=None):
    """(arguments, checkpoint to resume from or None)."""
    parser = get_parser()
    ckpt = None
    parser.set_defaults(**recipe(parser.parse_args(argv).model))
    args = parser.parse_args(argv)
    if args.resume:
        path = Path(args.out) / "ckpt.pt"
        ckpt = read_checkpoint(path)
        anew = ("out", "resume", "force", "device")
        parser.set_defaults(**{k: v for k, v in ckpt["args"].items() if k not in anew})
        args = parser.parse_args(argv)
        args.kernel = {"torch": "windowed"}.get(args.kernel, args.kernel)      # its older name
        for name in FIXED:
            old, new = ckpt["args"][name], getattr(args, name)
            if new != old:
                raise UsageError(f"{path} was trained with --{name.replace('_', '-')} {old}: "
                                 f"--resume cannot change it to {new}")
    at_least_1 = ("seq_len", "batch_size", "accumulate", "steps", "log_every", "eval_every")
    for name in (*at_least_1, "warmup", "lr", "weight_decay", "clip", "seed"):
        least = int(name in at_least_1)
        if not least <= getattr(args, name) < 2**63:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(args, name)}: it must be at "
                             f"least {least} and below 2^63")
    return args, ckpt


# ------------------------------------------------------------------------------ evaluation

@torch.no_grad()
def evaluate(model, data, n, batch_size, tokenizer):
    """(nats per token, bits per byte) over n sequences, spread evenly over the data."""
    numbers = data.spread(n)
    device = model.W_E.device
    nats = tokens = length = 0
    for first in range(0, len(numbers), batch_size):
        x = np.stack([data[i] for i in numbers[first : first + batch_size]])
        x = torch.from_numpy(x).to(device)
        nats += model.loss(x[:, :-1], x[:, 1:], "none").double().sum().item()
        targets = x[:, 1:].flatten().tolist()
        tokens += len(targets)
        length += len(tokenizer.decode_bytes([t for t in targets if t != tokenizer.eot_token]))
    return nats / tokens, nats / math.log(2) / max(length, 1)


@torch.no_grad()
def needle_accuracy(model, data, n, batch_size):
    """The share of right digits whose number stood once before, in n documents of ABCDigits."""
    right = total = 0
    for first in range(0, n, batch_size):
        documents = [data[i] for i in range(first, min(first + batch_size, n))]
        mask = np.stack([data.needles(d) for d in documents])
        mask = torch.from_numpy(mask).to(model.W_E.device)
        tokens = torch.from_numpy(np.stack(documents)).to(model.W_E.device)
        guesses = model.logits(model.hidden(tokens[:, :-1])[mask]).argmax(-1)
        right += (guesses == tokens[:, 1:][mask]).sum().item()
        total += mask.sum().item()
    return right / total if total else math.nan


@torch.no_grad()
def alive_fraction(model, tokens):
    """The share of the pairs inside the windows with a relevance above 0. tokens: (B, T)"""
    alive = inside = 0

    # Counted while the model screens, 256 queries at a time.
    @torch.compiler.disable
    def count(q, k, v, w, r, i0=0):
        nonlocal alive, inside
        for first in range(0, q.shape[2], 256):
            q_part = q[:, :, first : first + 256]
            i = i0 + first + torch.arange(q_part.shape[2], device=q.device)
            d = torch.arange(k.shape[2], device=q.device) - i[:, None]
            inside += q.shape[0] * (softmask(d, w[:, None, None]) > 0).sum().item()
            alive += (relevance(q_part, k, w, r, i0 + first) > 0).sum().item()
        return chosen(q, k, v, w, r, i0)

    chosen, model.screen = model.screen, count
    try:
        model.hidden(tokens, chunk=tokens.shape[1])
    finally:
        model.screen = chosen
    return alive / inside


# -------------------------------------------------------------------------------- training

def main(argv=None):
    args, ckpt = get_args(argv)
    if not args.resume and not args.force:
        refuse_other_run(Path(args.out))
    if ckpt and ckpt["step"] >= args.steps:
        print(f"{args.out} is already finished, at step {ckpt['step']}: raise --steps to continue")
        return

    # The model, freshly initialised or with the weights of a checkpoint.
    device, tokenizer = get_device(args.device), get_tokenizer(args.tokenizer)
    bf16 = args.dtype == "bfloat16" or args.dtype == "auto" and device.type == "cuda"
    dtype = torch.bfloat16 if bf16 else None
    torch.manual_seed(args.seed)
    config = {"psi": args.psi, "N_L": args.layers, "vocab_size": tokenizer.n_vocab}
    model = build_model(args.model, ckpt["config"] if ckpt else config, dtype).to(device)
    if ckpt:
        load_weights(model, ckpt["weights"], "the checkpoint")
    screening = None
    if has_windows(model):
        model.screen, screening, _ = get_screen(args.kernel, device, model.config, dtype)
    if args.compile:
        compile_layers(model)

    # The data.
    train_data, val_data = get_data(args, tokenizer)
    is_abcdigits = isinstance(train_data, ABCDigitsStream)

    # The optimizer. Weight decay is for matrices only.
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": args.weight_decay},
              {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)

    # Resume: the step, how many sequences were drawn, the optimizer's moments.
    step = drawn = 0
    if ckpt:
        step, drawn = ckpt["step"], ckpt["drawn"]
        load_optimizer(optimizer, ckpt["optimizer"])
        torch.set_rng_state(ckpt["random_state"].cpu())            # for your dropout
        if is_abcdigits:
            train_data.learned = ckpt.get("learned", 0)
    path, log = open_run(Path(args.out), ckpt, COLUMNS)

    def check(**values):
        """Raise Diverged if a value is not finite, before anything of it is saved."""
        found = [f"{name} is {x:g}" for name, x in values.items() if not math.isfinite(x)]
        if found:
            saved = f"{path} holds step {last_saved}" if last_saved else "nothing was saved"
            raise Diverged(f"training diverged: at step {step} {', '.join(found)}; {saved}: "
                           "try a smaller --lr, or undo your last edit")

    def save():
        nonlocal last_saved
        weights = (p.detach().double().abs().sum().item() for p in model.parameters())
        check(sum_of_weights=sum(weights))
        save_checkpoint(path, {
            "model": args.model, "config": asdict(model.config), "weights": model.state_dict(),
            "tokenizer": args.tokenizer, "optimizer": optimizer.state_dict(),
            "step": step, "drawn": drawn, "learned": train_data.learned if is_abcdigits else 0,
            "random_state": torch.get_rng_state(), "args": vars(args),
            "versions": {"python": platform.python_version(), "torch": str(torch.__version__)}})
        last_saved = step

    last_saved = step
    per_step = args.batch_size * args.accumulate
    total, rest = count_parameters(model)
    print(f"{args.model}, {total:,} parameters ({rest:,} non-embedding), "
          f"{device}, {'bfloat16' if bf16 else 'float32'}")
    print(f"{' '.join(args.data)}: {train_data} of {args.seq_len} tokens; {args.steps} steps of "
          f"{per_step * args.seq_len:,} tokens")
    if screening:
        print(screening)
    print(f"{'step':>13} {'loss':>8} {'lr':>8} {'|grad|':>8} {'w min':>6} {'median':>7} {'max':>8} "
          f"{'ms':>7} {'tok/s':>8} {'left':>8}", flush=True)

    with stop_requests() as stop:
        started = time.perf_counter()
        first = step
        while step < args.steps and not stop:
            began = time.perf_counter()

            # The learning rate: warm-up, then constant.
            lr = args.lr * min(1.0, (step + 1) / max(args.warmup, 1))
            for group in optimizer.param_groups:
                group["lr"] = lr

            # Forward and backward passes, then one step.
            loss = 0.0
            for _ in range(args.accumulate):
                x = [train_data.draw(drawn + n, args.seed) for n in range(args.batch_size)]
                x = torch.from_numpy(np.stack(x)).to(device)
                part = model.loss(x[:, :-1], x[:, 1:]) / args.accumulate
                part.backward()
                loss += part.item()
                drawn += args.batch_size
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip or math.inf).item()
            step += 1
            check(loss=loss, grad_norm=norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if is_abcdigits:
                train_data.observe(loss, per_step)

            # A printed line.
            row = {"step": step}
            seconds = time.perf_counter() - began
            if step % args.log_every == 0 or step in (1, args.steps):
                row |= {"loss": loss, "lr": lr, "grad_norm": norm, "ms": seconds * 1e3,
                        "tokens_per_s": per_step * args.seq_len / seconds}
                shown = " " * 23
                if has_windows(model):
                    w = torch.cat([window(tile.s_w.detach()) for tile in model.layers])
                    row |= {"w_min": w.min().item(), "w_median": w.median().item(),
                            "w_max": w.max().item()}
                    shown = f"{row['w_min']:6.2f} {row['w_median']:7.1f} {row['w_max']:8.4g}"
                left = (time.perf_counter() - started) / (step - first) * (args.steps - step)
                print(f"{step:>6}/{args.steps:<6} {loss:8.4f} {lr:8.2g} {norm:8.4f} {shown} "
                      f"{row['ms']:7.0f} {row['tokens_per_s']:8.0f} {clock(left):>8}", flush=True)

            # Evaluation.
            if step % args.eval_every == 0 or step == args.steps:
                nats, bits = evaluate(model, val_data, 256, args.batch_size, tokenizer)
                check(val_loss=nats)
                row |= {"val_loss": nats, "val_bpb": bits}
                shown = f"validation loss {nats:.4f}, {bits:.3f} bits per byte"
                if has_windows(model):
                    tokens = torch.from_numpy(val_data[0][None, :-1]).to(device)
                    row["alive"] = alive_fraction(model, tokens)
                    shown += f"; {row['alive']:.1%} of the pairs inside the windows are alive"
                if is_abcdigits:
                    row["base"] = train_data.base
                    row["needle"] = needle_accuracy(model, val_data, 64, args.batch_size)
                    shown += f"; {row['needle']:.1%} of the needles, b = {row['base']:.2f}"

            # The log's row comes before the checkpoint: --resume drops rows beyond it.
            if len(row) > 1:
                with open(log, "a") as f:
                    f.write("\t".join(f"{row[c]:.6g}" if c in row else "" for c in COLUMNS) + "\n")
            if "val_loss" in row:
                save()
                print(f"{step:>6}/{args.steps:<6} {shown}; saved {path}", flush=True)

        if step < args.steps:
            save()
            raise KeyboardInterrupt(f"stopped at step {step}, saved {path}: "
                                    f"python train.py --out {args.out} --resume continues")
        if stop:
            raise KeyboardInterrupt(f"stopped after the last step, saved {path}")

    # A sample.
    start = torch.from_numpy(val_data[0][None, :32]).to(device)
    generator = torch.Generator(device).manual_seed(0)
    more = model.generate(start, 256, temperature=0.7, generator=generator)
    text = tokenizer.decode(torch.cat([start, more], 1)[0].tolist())
    print(f"a sample, after its first 32 tokens:\n{text}")


if __name__ == "__main__":
    cli(main)

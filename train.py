"""Train a Multiscreen model on any text, or on endless documents of ABCDigits or passkey.

    python train.py --psi 8                          the source of Python's own standard library
    python train.py --data books/ --tokenizer gpt2   text, folders, .bin token files
    python train.py --resume --steps 1240            continue the run in out/, for longer
    torchrun --nproc_per_node 8 train.py ...         the same on 8 GPUs

Given again, a command continues its run, or says that it is finished.

The recipe is the paper's: AdamW with betas (0.9, 0.95), no weight decay, no clipping, a linear
warm-up to a constant learning rate of 2^-4; documents joined by end-of-text, cut into contiguous
sequences, drawn at random without replacement. The sizes are a laptop's.

A printed line: step, loss (nats per token), learning rate, gradient norm before clipping, the
smallest, median and largest window, milliseconds per step, tokens per second, time left.
"""
import math
import time
from argparse import BooleanOptionalAction
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from baselines import count_parameters, recipe
from baselines.ablations import TILES
from baselines.transformer import BLOCKS, SIZES
from multiscreen import softmask, window
from support import distributed as dist
from support.checkpoint import (
    SIZE_FLAGS,
    build_model,
    has_windows,
    load_checkpoint,  # noqa: F401 (train.load_checkpoint is promised to users)
    load_moments,
    load_random_state,
    load_weights,
    read_checkpoint,
    save_checkpoint,
)
from support.choose import asks_for_screen, get_screen, products_dtype, try_to_compile
from support.cli import Parser, UsageError, cli, clock, get_device, printable, rank, stop_requests
from support.data import check_fingerprint, files_of, fingerprint, get_data
from support.run import (
    NOT_RESUMED,
    Lock,
    about_run,
    absolute,
    complete,
    find_checkpoint,
    open_run,
    passes_of,
    take_flags,
)
from support.tokens import get_tokenizer

COLUMNS = ("step", "loss", "lr", "grad_norm", "w_min", "w_median", "w_max", "ms", "tokens_per_s",
           "val_loss", "val_bpb", "alive", "needle", "base")

# ----------------------------------------------------------------------------------- flags

def get_parser():
    p = Parser(__doc__)

    def flag(name, default, text, **options):
        shown = options.pop("shown", default)
        options = {"type": type(default)} | options
        p.add_argument(name, default=default, help=f"{text} [{shown}]", **options)

    flag("--model", "multiscreen", f"multiscreen, multiscreen:ABLATION ({', '.join(TILES)}), "
         f"transformer:SIZE ({', '.join(SIZES)} or N_L,N_H,d_E), or transformer:SIZE:VARIANT "
         f"({', '.join(filter(None, BLOCKS))})")
    flag("--psi", 8, "size: psi layers of psi tiles, width psi^2 (paper: 8, 16, 32, 48, 64)")
    flag("--layers", None, "number of layers", type=int, shown="the model's own")
    flag("--tiles", None, "tiles in a layer", type=int, shown="psi")
    flag("--d-E", None, "width of the model", type=int, shown="psi^2")
    flag("--d-K", None, "dimensions of a query and a key", type=int, shown="16")
    flag("--d-V", None, "dimensions of a value", type=int, shown="64")
    flag("--w-th", 256.0, "initial windows are 2 to w_th + 1 tokens; MiPE acts below w_th")
    flag("--data", ["stdlib"], "stdlib, abcdigits, passkey, or UTF-8 files, folders, .bin token "
         "files (paper: SlimPajama)", nargs="+", type=str, shown="stdlib")
    flag("--tokenizer", "bytes", "bytes or gpt2 (paper: gpt2)")
    flag("--digits", 6, "digits of a number, for --data abcdigits (paper: 6, in evaluation only)")
    flag("--seq-len", 256, "tokens in a sequence (paper: 4096)")
    flag("--batch-size", 8, "sequences in a forward pass of one process")
    flag("--batch-tokens", None, "tokens in a step, over all passes and processes (paper: 2^22)",
         type=int, shown="those of one pass")
    flag("--steps", 620, "optimizer steps (paper: 2^16); abcdigits, passkey: at most")
    flag("--warmup", 50, "steps of linear warm-up to a constant learning rate (paper: 4096)")
    flag("--lr", 2**-4, "learning rate (paper: 2^-4; Transformer: 1e-3 to 2e-4, set by size)")
    flag("--weight-decay", 0.0, "AdamW's weight decay, for matrices (paper: 0; Transformer: 0.1)")
    flag("--clip", 0.0, "largest gradient norm, 0 for none (paper: 0; Transformer: 1)")
    flag("--seed", 0, "seed of the initial weights and of the order of the data")
    p.add_shared("--device")
    flag("--dtype", "auto", "for matrix products; auto: bfloat16 on a GPU that supports it "
         "(paper: bfloat16)",
         choices=["auto", "float32", "bfloat16"])
    flag("--kernel", "auto", "what screens: definition (multiscreen.screen), windowed, triton (the "
         "fused kernel), or auto: the fastest that can run here and agrees with the definition",
         choices=["auto", "definition", "windowed", "triton"])
    p.add_argument("--compile", action=BooleanOptionalAction,
                   help="torch.compile the model; on a CPU it needs a C++ compiler [on a CUDA GPU "
                   "with Triton]")
    p.add_argument("--recompute", action=BooleanOptionalAction, default=False,
                   help="recompute a layer's activations in backward: less memory, more time")
    flag("--shard", 1, "processes of torchrun that share one copy of weights, gradients, moments")
    flag("--log-every", 10, "steps between printed lines")
    flag("--eval-every", 250, "steps between evaluations")
    flag("--save-every", None, "steps between checkpoints", type=int, shown="--eval-every")
    flag("--init", None, "checkpoint to take model, tokenizer and weights from, for training on "
         "other data", type=str, shown="new weights")
    flag("--out", "out", "folder for ckpt.pt and log.tsv")
    group = p.add_mutually_exclusive_group()
    group.add_argument("--resume", action="store_true",
                       help="continue from OUT/ckpt.pt, with its flags unless they are given")
    group.add_argument("--force", action="store_true", help="overwrite the run in OUT")
    return p


def get_args(argv=None):
    """The arguments; --resume and --init take those left out of argv from their checkpoint."""
    parser = get_parser()
    parser.set_defaults(**recipe(parser.parse_args(argv).model))
    args = parser.parse_args(argv)
    if args.resume and args.init:
        raise UsageError("--resume and --init: give one, for the weights of OUT or of a checkpoint")
    if args.force and args.init and Path(args.init).resolve().parent == Path(args.out).resolve():
        raise UsageError(f"--force would overwrite {args.init}: name another --out")
    if args.resume:
        path = Path(args.out) / "ckpt.pt"
        ckpt = read_checkpoint(path)
        args = take_flags(parser, argv, ckpt, path, ckpt["args"].keys() - set(NOT_RESUMED))
    elif args.init is not None:
        ckpt = read_checkpoint(args.init)
        parser.set_defaults(**recipe(ckpt["model"]))
        kept = ["model", "tokenizer", *SIZE_FLAGS]
        args = take_flags(parser, argv, ckpt, args.init, kept)
    sizes = [name for name in SIZE_FLAGS if getattr(args, name) != parser.get_default(name)]
    if args.model.startswith("transformer") and {*sizes} - {"layers"}:
        raise UsageError("--psi, --tiles, --d-E, --d-K, --d-V and --w-th are for Multiscreen: a "
                         "Transformer's sizes are in its name, transformer:N_L,N_H,d_E")
    return complete(args)


# ------------------------------------------------------------------------------ evaluation

@torch.no_grad()
def evaluate(model, data, n, batch_size, tokenizer):
    """(nats per token, bits per byte) over n sequences, spread evenly over the data."""
    device = model.W_E.device
    nats = tokens = length = 0
    for x, count in dist.batches(data, data.spread(n), batch_size):
        x = x.to(device)
        nats += model.loss(x[:, :-1], x[:, 1:], "none")[:count].cpu().double().sum().item()
        targets = x[:count, 1:].flatten().tolist()
        tokens += len(targets)
        length += len(tokenizer.decode_bytes([t for t in targets if t != tokenizer.eot_token]))
    nats, tokens, length = dist.total(nats, tokens, length)
    return nats / tokens, nats / math.log(2) / max(length, 1)


def alive_fraction(model, tokens):
    """The share of the pairs inside the windows that get a weight. tokens: (B, T), T <= 512."""
    with torch.compiler.set_stance("force_eager"):
        alive = sum((alpha_d != 0).sum() for alpha_d in model.relevance_maps(tokens))
    i = torch.arange(tokens.shape[1], device=tokens.device)
    w = torch.stack([window(dist.full(tile.s_w)) for tile in model.layers])[:, :, None, None]
    inside = (softmask(i - i[:, None], w) > 0).sum() * len(tokens)
    return (alive / inside).item()


# -------------------------------------------------------------------------------- training

def main(argv=None):
    dist.join()
    args = get_args(argv)
    # Process 0 alone locks the folder and writes into it.
    with Lock(args.out) if rank() == 0 else nullcontext() as lock:
        dist.wait()
        train(args, lock)


def train(args, lock):
    out = Path(args.out)
    path = out / "ckpt.pt"
    ckpt = find_checkpoint(args)
    if ckpt and ckpt["step"] >= args.steps:
        print(f"{out} is already finished, at step {ckpt['step']}: --resume --steps N continues")
        return
    start = ckpt if ckpt or args.init is None else read_checkpoint(args.init)

    # The data.
    files, tokenizer = list(files_of(args.data)), get_tokenizer(args.tokenizer)
    fingerprints = fingerprint(files)
    if ckpt:
        check_fingerprint(ckpt["files"], fingerprints)
    train_data, val_data = get_data(args, tokenizer, files)
    if ckpt:
        train_data.load(ckpt["data_state"])
        if train_data.learned:
            print(f"{out} is already finished, at step {ckpt['step']}: it has learned")
            return

    # The model, freshly initialised or with the weights of a checkpoint.
    device = get_device(dist.own_device(args.device))
    dtypes = {"auto": products_dtype(device), "float32": None, "bfloat16": torch.bfloat16}
    dtype = dtypes[args.dtype]
    torch.manual_seed(args.seed)
    config = {size: getattr(args, name) for name, size in SIZE_FLAGS.items()
              if getattr(args, name) is not None} | {"vocab_size": tokenizer.n_vocab}
    model = build_model(args.model, start["config"] if start else config, dtype).to(device)
    if start:
        load_weights(model, start["weights"], path if ckpt else args.init)
    has_maps = has_windows(model) and asks_for_screen(model)
    if has_windows(model):
        model.screen, line, _ = get_screen(model, args.kernel)
        print(line)
    if args.recompute:
        for layer in model.layers:
            dist.recompute(layer)
    if line := try_to_compile(model, args.compile, args.batch_size, args.seq_len):
        print(line)
    size, rest = count_parameters(model)
    dist.distribute(model, args.shard, device)
    print(f"{args.model}, {size:,} parameters ({rest:,} non-embedding), "
          f"{device}{f' in {dist.world()} processes' if dist.world() > 1 else ''}, "
          f"{'bfloat16' if dtype else 'float32'}")

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
        load_moments(model, optimizer, ckpt["optimizer"], path)
        load_random_state(ckpt["random_state"], path)  # for your dropout
        del ckpt["weights"], ckpt["optimizer"]         # 12 bytes per parameter
    last_saved = step
    about = about_run(args, ckpt, start, train_data, fingerprints)
    log = open_run(args, ckpt, COLUMNS, size, about, lock) if lock else None

    def check(**values):
        """Raise UsageError if a value is not finite, before anything is saved."""
        found = [f"{name} is {x:g}" for name, x in values.items() if not math.isfinite(x)]
        if found:
            saved = f"{path} holds step {last_saved}" if last_saved else "nothing was saved"
            message = (f"training diverged: at step {step} {', '.join(found)}; {saved}: "
                       "try a smaller --lr, or undo your last edit")
            if log:
                log.end(message)
            raise UsageError(message, code=3)

    def save():
        nonlocal last_saved
        shards = (dist.local(p.detach()) for p in model.parameters())
        weights_sum, = dist.total(sum(x.abs().sum().item() for x in shards))
        check(sum_of_weights=weights_sum)
        all_weights, moments = dist.get_states(model, optimizer)
        if log:
            lock.check()
            save_checkpoint(path, {
                "model": args.model, "config": asdict(model.config), "weights": all_weights,
                "tokenizer": args.tokenizer, "optimizer": moments, "step": step, "drawn": drawn,
                "data_state": train_data.state(), "log": log.text,
                "random_state": torch.get_rng_state(),
                "args": vars(args) | {"data": absolute(args.data)}, **about})
        dist.wait()                                    # torchrun ends all when one ends
        last_saved = step

    per_step = args.batch_tokens // args.seq_len
    n_passes = passes_of(args)
    print(f"{' '.join(args.data)}: {train_data} of {args.seq_len} tokens; {args.steps} steps of "
          f"{args.batch_tokens:,} tokens")
    if start:
        print(f"continuing at step {step}" if ckpt else f"weights from {args.init}")
    print(f"{'step':>13} {'loss':>8} {'lr':>8} {'|grad|':>8} {'w min':>6} {'median':>7} {'max':>8} "
          f"{'ms':>7} {'tok/s':>8} {'left':>8}", flush=True)

    with stop_requests() as stop:
        started = time.perf_counter()
        first, stopping = step, 0
        last = False
        while not last and not stopping:
            began = time.perf_counter()

            # The learning rate: warm-up, then constant.
            lr = args.lr * min(1.0, (step + 1) / max(args.warmup, 1))
            for group in optimizer.param_groups:
                group["lr"] = lr

            # Forward and backward passes, then one step.
            losses = []
            for n in range(n_passes):
                mine = drawn + rank() * args.batch_size
                x = [train_data.draw(mine + i, args.seed) for i in range(args.batch_size)]
                x = torch.from_numpy(np.stack(x))
                # From pinned memory a GPU copies while it computes.
                if device.type == "cuda":
                    x = x.pin_memory()
                x = x.to(device, non_blocking=x.is_pinned())
                dist.average_gradients(model, n == n_passes - 1)
                pass_loss = model.loss(x[:, :-1], x[:, 1:]) / n_passes
                pass_loss.backward()
                losses.append(pass_loss.detach())
                drawn += args.batch_size * dist.world()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip or math.inf)
            step += 1

            # The one synchronisation with a GPU: training stops at a value that is not finite.
            *losses, norm = torch.stack((*losses, dist.full(norm))).tolist()
            loss, stopping = dist.total(sum(losses) / dist.world(), len(stop))
            check(loss=loss, grad_norm=norm)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            train_data.observe(loss, per_step)
            last = step == args.steps or train_data.learned

            # A printed line.
            row = {"step": step}
            seconds = time.perf_counter() - began
            if step % args.log_every == 0 or step == 1 or last:
                row |= {"loss": loss, "lr": lr, "grad_norm": norm, "ms": seconds * 1e3,
                        "tokens_per_s": args.batch_tokens / seconds}
                shown = " " * 23
                if has_windows(model):
                    w = torch.cat([window(dist.full(tile.s_w.detach())) for tile in model.layers])
                    row |= {"w_min": w.min().item(), "w_median": w.median().item(),
                            "w_max": w.max().item()}
                    shown = f"{row['w_min']:6.2f} {row['w_median']:7.1f} {row['w_max']:8.4g}"
                left = (time.perf_counter() - started) / (step - first) * (args.steps - step)
                print(f"{step:>6}/{args.steps:<6} {loss:8.4f} {lr:8.2g} {norm:8.4f} {shown} "
                      f"{row['ms']:7.0f} {row['tokens_per_s']:8.0f} {clock(left):>8}", flush=True)

            # Evaluation.
            if step % args.eval_every == 0 or last:
                model.eval()
                nats, bits = evaluate(model, val_data, 256, args.batch_size, tokenizer)
                check(val_loss=nats)
                row |= {"val_loss": nats, "val_bpb": bits}
                shown = f"validation loss {nats:.4f}, {bits:.3f} bits per byte"
                if has_maps:
                    tokens = torch.from_numpy(val_data[0][None, :-1][:, :512]).to(device)
                    row["alive"] = alive_fraction(model, tokens)
                    shown += f"; {row['alive']:.1%} of the pairs inside the windows are alive"
                some = dist.batches(val_data, val_data.spread(64), args.batch_size)
                extra = train_data.extra_columns(model, some)
                row |= extra
                shown += "".join(f"; {name} {value:.3f}" for name, value in extra.items())
                model.train()
                print(f"{step:>6}/{args.steps:<6} {shown}", flush=True)

            # The log's row comes before the checkpoint, which holds the log.
            if log and len(row) > 1:
                log.add(row)
            if step % args.save_every == 0 or last:
                save()
                end = ", the end: it has learned" * train_data.learned
                print(f"{step:>6}/{args.steps:<6} saved {path}{end}", flush=True)

        if not last:
            if step > last_saved:
                save()
            raise KeyboardInterrupt(f"stopped at step {step}, saved {path}: the same command"
                                    f"{', without --force,' * args.force} continues")

    # A sample, where one process holds the model.
    if dist.world() > 1:
        dist.wait()
        return
    begin = torch.from_numpy(val_data[0][None, :32]).to(device)
    generator = torch.Generator(device).manual_seed(0)
    more = model.eval().generate(begin, 256, temperature=0.7, generator=generator)
    text = tokenizer.decode(torch.cat([begin, more], 1)[0].tolist())
    print(f"a sample, after its first 32 tokens:\n{printable(text)}")


if __name__ == "__main__":
    cli(main)

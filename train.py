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

A printed line has the step, loss (nats per token), learning rate, gradient norm before clipping,
smallest, median and largest window, milliseconds per step, tokens per second, and time left.

The run's folder, OUT, contains ckpt.pt, which is all you need to resume; log.tsv, with a row for
each line of numbers; source/, the code that ran; and more, listed in support/folder.py.
"""
import math
import time
from argparse import BooleanOptionalAction, Namespace

import torch

from support import cli, folder  # what OUT holds, and whether a run may begin there
from support import distributed as dist  # one process or many, of which only number 0 prints
from support.checkpoint import load_checkpoint, load_moments, load_weights, read_checkpoint
from support.choose import make_fast
from support.data import absolute, batches, get_data
from support.maps import alive_pairs, windows
from support.models import build_model, recipe
from support.tokens import get_tokenizer

__all__ = ["load_checkpoint", "main", "train"]         # for your own code


def train(out, args, ckpt=None, init=None):
    """Train a run: `begin` makes or loads all that it needs, then comes the loop.

    ckpt: the contents of OUT/ckpt.pt if that run continues; init: those of --init's checkpoint for
    a new run. Both are dicts or None; `main`, at the end of this file, reads them.
    """
    model, optimizer, tokenizer, data, val_data, state = begin(out, args, ckpt, init)

    # Steps done, and sequences drawn from the data; `state` has the last saved ones.
    step, drawn = state["step"], state["drawn"]
    sequences_per_step = args.batch_tokens // args.seq_len
    began, first = time.perf_counter(), step
    last = stopping = False
    with dist.stop_requests() as signals:              # Ctrl-C, SIGTERM, SIGHUP
        while not last and not stopping:
            start = time.perf_counter()
            lr = set_rate(optimizer, args, step)
            loss, norm = train_step(model, data, args, drawn)
            step, drawn = step + 1, drawn + sequences_per_step
            require_finite(out, state, step, loss=loss, grad_norm=norm)    # before weights change
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            data.observe(loss, sequences_per_step)     # a task gets harder as it is learned
            last = step == args.steps or data.learned
            now = time.perf_counter()

            if last or step == 1 or step % args.log_every == 0:
                row = {"loss": loss, "lr": lr, "grad_norm": norm, **windows(model),
                       "ms": 1e3 * (now - start), "tokens_per_s": args.batch_tokens / (now - start)}
                left = cli.clock((now - began) / (step - first) * (args.steps - step))
                log(out, args, state, step, row, left)
            if last or step % args.eval_every == 0:
                row = evaluate(model, data, val_data, args, tokenizer)
                require_finite(out, state, step, val_loss=row["val_loss"])
                log(out, args, state, step, row)
            stopping = dist.total(len(signals)) > 0    # if any of the processes got one
            if last or stopping or step % args.save_every == 0:
                state |= {"step": step, "drawn": drawn}
                save(out, args, state, model, optimizer, data)
    if not last:                                       # `cli` prints it without a traceback
        raise KeyboardInterrupt(f"stopped at step {step}, saved {out / 'ckpt.pt'}: add --resume "
                                f"to the command{', without --force,' * args.force} to go on")
    if dist.world() == 1:
        print(f"a sample that continues 32 held-out tokens:\n{sample(model, val_data, tokenizer)}")
    print(f"next: python {data.next_command} --ckpt {out / 'ckpt.pt'}")


# ------------------------------------------------------------------------------ before the loop

def begin(out, args, ckpt, init):
    """(model, optimizer, tokenizer, training data, validation data, state) of a run.

    state: the run's checkpoint as a dict, to which `save` adds weights, moments, random state.
    """
    # Build the model before reading a large corpus: if it cannot be built, you learn so at once. A
    # size that no flag sets is None here and takes the model's default.
    tokenizer = get_tokenizer(args.tokenizer)
    device = cli.get_device(args.device)
    dtype = cli.products_dtype(device, args.dtype)
    sizes = {field: getattr(args, name) for name, field in SIZES.items()}
    torch.manual_seed(args.seed)
    model = build_model(args.model, sizes | {"vocab_size": tokenizer.n_vocab}, dtype).to(device)

    data, val_data = get_data(args, tokenizer)
    print(f"{' '.join(args.data)}: {data} of {args.seq_len} tokens; {args.steps} steps of "
          f"{args.batch_tokens:,} tokens")

    # Where the run stands, and its weights: new, --init's, or its own. `pop` frees the copied ones.
    state = folder.get_state(args, model, data, ckpt, init)
    if ckpt:
        load_weights(model, ckpt.pop("weights"), out / "ckpt.pt")
    elif init:
        load_weights(model, init.pop("weights"), args.init)

    # In place: choose the screen, compile, shard. The optimizer must see the sharded weights.
    make_fast(model, args)
    where = f"{device} in {dist.world()} processes" if dist.world() > 1 else device
    rest = state["parameters"] - model.W_E.numel()
    print(f"{args.model}, {state['parameters']:,} parameters ({rest:,} non-embedding), {where}, "
          f"{'bfloat16' if dtype else 'float32'}")

    # The optimizer. Weight decay is for matrices only.
    weights = [*model.parameters()]
    groups = [{"params": [p for p in weights if p.ndim > 1], "weight_decay": args.weight_decay},
              {"params": [p for p in weights if p.ndim <= 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)

    # The rest of a checkpoint.
    if ckpt:
        load_moments(model, optimizer, ckpt.pop("optimizer"), out / "ckpt.pt")
        if ckpt["args"]["data"] == args.data:          # other data start from the top
            data.state = ckpt["data_state"]
        torch.set_rng_state(ckpt["random_state"])      # if your layers draw random numbers
    if dist.rank() == 0:
        folder.write(out, state)                       # a new run also removes what was there
    if ckpt or init:
        print(f"continuing at step {state['step']}" if ckpt else f"weights from {args.init}")
    print(f"{'step':>13} {'loss':>8} {'lr':>8} {'|grad|':>8} {'w min':>6} {'median':>7} {'max':>8} "
          f"{'ms':>7} {'tok/s':>8} {'left' if data.files else 'at most':>8}", flush=True)
    return model, optimizer, tokenizer, data, val_data, state


# ---------------------------------------------------------------------------------- in the loop

def set_rate(optimizer, args, step):
    """Set the learning rate of step 0, 1, ..: linear warm-up, then constant. Returns the rate."""
    lr = args.lr * min(1.0, (step + 1) / max(args.warmup, 1))
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def train_step(model, data, args, drawn):
    """Run a step's passes forward and backward. Returns (loss, gradient norm before clipping).

    drawn: how many sequences all processes together have drawn before this step.
    """
    sequences_per_pass = args.batch_size * dist.world()
    n_passes = args.batch_tokens // (sequences_per_pass * args.seq_len)
    losses = []
    for n in range(n_passes):
        first = drawn + n * sequences_per_pass
        x = dist.draw(data, first, args, model.W_E.device)                   # (batch_size, T + 1)
        # Only the last backward averages gradients over the processes, as with DDP's no_sync.
        dist.average_in_next_backward(model, n == n_passes - 1)
        loss = model.loss(x[:, :-1], x[:, 1:]) / n_passes
        loss.backward()
        losses.append(loss.detach())
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if args.clip:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), args.clip, norm)

    # One transfer for all numbers, since each makes the CPU wait for the GPU.
    *losses, norm = torch.stack([*losses, dist.full(norm)]).tolist()
    return dist.total(sum(losses) / dist.world()), norm                      # mean over processes


def require_finite(out, state, step, **values):
    """Raise UsageError if a value is not finite, and keep the reason in diverged.txt."""
    found = [f"{name} is {x:g}" for name, x in values.items() if not math.isfinite(x)]
    if found:
        saved = f"{out / 'ckpt.pt'} holds step {state['step']}"
        message = (f"training diverged: at step {step} {', '.join(found)}; "
                   f"{saved if state['step'] else 'nothing was saved'}: "
                   "try a smaller --lr, or undo your last edit")
        if dist.rank() == 0:
            (out / "diverged.txt").write_text(f"{message}\n", "utf-8")
        raise cli.UsageError(message, code=3)


@torch.no_grad()
def evaluate(model, data, val_data, args, tokenizer):
    """Evaluate in eval mode. Returns a row of the log: nats per token, bits per byte, alive pairs.

    The losses are over up to 256 sequences, spread evenly over the validation data, and the share
    of alive pairs is over the first 512 tokens of one. A task adds columns of its own, over 64
    documents. If there are several processes, each of them computes all of this.
    """
    model.eval()
    device = model.W_E.device
    nats = n_tokens = n_bytes = 0
    for x in batches(val_data, 256, args.batch_size):
        x = x.to(device)
        nats += model.loss(x[:, :-1], x[:, 1:], "none").cpu().double().sum().item()
        targets = x[:, 1:].flatten().tolist()
        n_tokens += len(targets)
        if tokenizer.eot_token is not None:            # numbers stand for no bytes
            text = [t for t in targets if t != tokenizer.eot_token]
            n_bytes += len(tokenizer.decode_bytes(text))
    row = {"val_loss": nats / n_tokens}
    if n_bytes:
        row["val_bpb"] = nats / math.log(2) / n_bytes

    # Transformers have no relevance maps, nor do layers that do not call their `screen`.
    tokens = torch.from_numpy(val_data[0][:-1][:512])[None].to(device)
    row |= alive_pairs(model, tokens)

    # Called on the training data, whose state says how much help the task still gives.
    row |= data.extra_columns(model, batches(val_data, 64, args.batch_size))
    model.train()
    return row


def log(out, args, state, step, row, left=""):
    """Print a line and append a row to the log, for a step or for an evaluation.

    row: {column: number}; left: the time that is left, as text.
    """
    at = f"{step:>6}/{args.steps:<6}"
    if "loss" in row:
        found = " " * 23                               # blanks, if the model has no windows
        if "w_min" in row:
            found = f"{row['w_min']:6.2f} {row['w_median']:7.1f} {row['w_max']:8.4g}"
        print(f"{at} {row['loss']:8.4f} {row['lr']:8.2g} {row['grad_norm']:8.4f} {found} "
              f"{row['ms']:7.0f} {row['tokens_per_s']:8.0f} {left:>8}", flush=True)
    else:
        words = [f"validation loss {row['val_loss']:.4f}"]
        if "val_bpb" in row:
            words[0] += f", {row['val_bpb']:.3f} bits per byte"
        if "alive" in row:
            words.append(f"{row['alive']:.1%} of the pairs inside the windows are alive")
        words += [f"{name} {row[name]:.3f}" for name in ("needle", "base") if name in row]
        print(f"{at} {'; '.join(words)}", flush=True)
    cells = {name: f"{x:.6g}" for name, x in row.items()} | {"step": str(step)}
    line = "\t".join(cells.get(name, "") for name in folder.COLUMNS) + "\n"
    state["log"] += line
    if dist.rank() == 0:
        with cli.naming(out / "log.tsv"), open(out / "log.tsv", "a") as file:
            file.write(line)


def save(out, args, state, model, optimizer, data):
    """Write the checkpoint: `state`, weights, moments, the place in the data, the random state."""
    weights, moments = dist.get_states(model, optimizer)
    state |= {"data_state": data.state, "learned": data.learned,
              "random_state": torch.get_rng_state()}
    if dist.rank() == 0:
        with cli.replacing(out / "ckpt.pt") as file:
            torch.save(state | {"weights": weights, "optimizer": moments}, file)
    # All wait until process 0 has written: if another one ended first, torchrun would end it.
    dist.wait()
    end = ", the last step: the model has learned the task" if data.learned else ""
    print(f"{state['step']:>6}/{args.steps:<6} saved {out / 'ckpt.pt'}{end}", flush=True)


def sample(model, val_data, tokenizer):
    """The first 32 tokens of the validation data and the model's continuation of them, as text."""
    device = model.W_E.device
    prompt = torch.from_numpy(val_data[0][:32])[None].to(device)
    generator = torch.Generator(device).manual_seed(0)
    answer = model.eval().generate(prompt, 256, temperature=0.7, generator=generator)
    return cli.printable(tokenizer.decode(torch.cat([prompt, answer], 1)[0].tolist()))


# ---------------------------------------------------------------------------------------- flags

# The flags that set the sizes of Config, and the names of its fields.
SIZES = {"psi": "psi", "layers": "N_L", "tiles": "N_H", "d_E": "d_E", "d_K": "d_K", "d_V": "d_V",
         "w_th": "w_th"}


def get_parser():
    # p.flag: a flag of its default's type, at least 1 or `least`. -h shows its default, or `shown`.
    p = cli.Parser(__doc__)
    p.flag("--model", "multiscreen", "multiscreen, transformer:SIZE, or either with :VARIANT, "
           "which may be a class of yours, FILE.CLASS; an unknown name lists all names")
    p.flag("--psi", 8, "size: psi layers of psi tiles, width psi^2 (paper: 8, 16, 32, 48, 64)")
    p.flag("--layers", None, "number of layers", type=int, shown="the model's own")
    p.flag("--tiles", None, "tiles in a layer", type=int, shown="psi")
    p.flag("--d-E", None, "width of the model", type=int, shown="psi^2")
    p.flag("--d-K", None, "dimensions of a query and a key", type=int, shown="16")
    p.flag("--d-V", None, "dimensions of a value", type=int, shown="64")
    p.flag("--w-th", 256.0, "windows start at 2 to w_th + 1 tokens; MiPE acts on those below w_th")
    p.flag("--data", ["stdlib"], "stdlib, abcdigits, passkey, or UTF-8 files, folders, .bin token "
           "files (paper: SlimPajama)", nargs="+", type=str, shown="stdlib")
    p.flag("--tokenizer", "bytes", "bytes or gpt2 (paper: gpt2); for .bin token files with a "
           "vocabulary of your own, its size, such as 65: samples are then printed as numbers")
    p.flag("--digits", 6, "digits per number, for --data abcdigits (paper: 6, in evaluation only)")
    p.flag("--seq-len", 256, "tokens in a sequence (paper: 4096)")
    p.flag("--batch-size", 8, "sequences per forward pass, in each process")
    p.flag("--batch-tokens", None, "tokens per step, over all passes and processes (paper: 2^22)",
           type=int, shown="those of one pass")
    p.flag("--steps", 620, "optimizer steps; abcdigits and passkey may end earlier (paper: 2^16)")
    p.flag("--warmup", 50, "steps of linear warm-up to a constant learning rate (paper: 4096)",
           least=0)
    p.flag("--lr", 2**-4, "learning rate (paper: 2^-4; Transformer: 1e-3 to 2e-4, set by size)",
           least=0)
    p.flag("--weight-decay", 0.0, "AdamW's weight decay, for matrices (paper: 0; Transformer: 0.1)",
           least=0)
    p.flag("--clip", 0.0, "largest gradient norm, 0 for none (paper: 0; Transformer: 1)", least=0)
    p.flag("--seed", 0, "seed of the initial weights and of the order of the data", least=0)
    p.flag("--device", cli.DEVICE, "cpu, cuda or mps")
    p.flag("--dtype", "auto", "for matrix products; auto: bfloat16 on a GPU that supports it "
           "(paper: bfloat16)", choices=["auto", "float32", "bfloat16"])
    p.flag("--kernel", "auto", "how to screen: definition (multiscreen.screen), windowed, triton "
           "(the fused kernel), or auto: the fastest that runs here and agrees with the definition",
           choices=["auto", "definition", "windowed", "triton"])
    p.add_argument("--compile", action=BooleanOptionalAction,
                   help="torch.compile the model, and record a CUDA graph on a GPU; on a CPU it "
                   "needs a C++ compiler [yes, on a CUDA GPU with Triton]")
    p.add_argument("--recompute", action=BooleanOptionalAction, default=False,
                   help="recompute each layer's activations in backward: saves memory, costs time")
    p.flag("--shard", 1, "torchrun processes that share a copy of the weights, gradients, moments")
    p.flag("--log-every", 10, "steps between printed lines")
    p.flag("--eval-every", 250, "steps between evaluations")
    p.flag("--save-every", None, "steps between checkpoints", type=int, shown="--eval-every")
    p.flag("--init", None, "checkpoint to take model, tokenizer and weights from, for training on "
           "other data", type=str, shown="new weights")
    p.flag("--out", "out", "folder for ckpt.pt and log.tsv")
    group = p.add_mutually_exclusive_group()
    group.add_argument("--resume", action="store_true",
                       help="continue the run in OUT, or begin it; flags that you leave out stay "
                       "as they were, except --device, --shard and --compile")
    group.add_argument("--force", action="store_true", help="overwrite the run in OUT")
    return p


def get_args(given, ckpt=None, init=None):
    """All flags of a run, from those on the command line and those that a checkpoint keeps.

    ckpt: that of a continued run; init: that of --init. Raises UsageError for impossible flags.
    """
    # Later ones win: defaults, the paper's recipe for the model, a checkpoint's, the command's. The
    # recipe depends on the model, so the model's name is found first.
    defaults = vars(get_parser().parse_args([]))
    kept = folder.kept_flags(("model", *SIZES, "tokenizer"), given, ckpt, init)
    model = (defaults | kept | given)["model"]
    args = Namespace(**defaults | recipe(model) | kept | given)
    sizes = {name for name in SIZES if vars(args)[name] != defaults[name]}
    if model.startswith("transformer") and sizes - {"layers"}:
        raise cli.UsageError("--psi, --tiles, --d-E, --d-K, --d-V and --w-th are for Multiscreen: "
                             "a Transformer's sizes are in its name, transformer:N_L,N_H,d_E")

    # What follows from other flags.
    args.data = absolute(args.data)
    args.save_every = args.save_every or args.eval_every
    tokens_per_pass = args.batch_size * args.seq_len * dist.world()
    args.batch_tokens = args.batch_tokens or tokens_per_pass
    if args.batch_tokens % tokens_per_pass:
        raise cli.UsageError(f"--batch-tokens {args.batch_tokens}: it must be a multiple of "
                             f"{tokens_per_pass} ({args.batch_size} sequences x {args.seq_len} "
                             f"tokens x {dist.world()} processes)")
    return args


def main(argv=None):
    dist.join()
    parser = get_parser()
    given = parser.given(argv)
    with folder.locked(given.get("out", parser.get_default("out"))) as out:
        ckpt = folder.run_in(out, given)
        init = read_checkpoint(given["init"]) if "init" in given and not ckpt else None
        args = get_args(given, ckpt, init)
        if not folder.is_finished(out, args, ckpt):
            train(out, args, ckpt, init)
    dist.wait()


if __name__ == "__main__":
    cli.cli(main)

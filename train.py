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
each line of numbers; source/, the code that ran; and more, listed in support/run.py.
"""
import math
import shlex
import time
from argparse import BooleanOptionalAction
from dataclasses import asdict
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm

from support import cli, run
from support import distributed as dist  # one process or many, of which only number 0 prints
from support.cli import at_least
from support.data import absolute, batches, get_data, get_tokenizer
from support.fast import make_fast
from support.maps import alive_pairs, windows
from support.models import (
    build_model,
    count_parameters,
    name_of,
    random_states,
    recipe,
    set_random_states,
    set_seeds,
)
from support.run import load_checkpoint, load_weights, read_checkpoint

__all__ = ["load_checkpoint", "main", "save_checkpoint", "train"]      # for your own code

# The columns of the log. Only tasks have the last two.
COLUMNS = ("step", "loss", "lr", "grad_norm", "w_min", "w_median", "w_max", "ms", "tokens_per_s",
           "val_loss", "val_bpb", "alive", "needle", "base")


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
    data, val_data = get_data(args, tokenizer)

    if ckpt:
        load_weights(model, ckpt["weights"], out / "ckpt.pt")
    elif init:
        load_weights(model, init["weights"], args.init)
    run.import_all(model)
    make_fast(model, args)                             # in place: choose the screen, compile

    # What a checkpoint holds, except for what `save` adds. `texts` are those of all modules that
    # are loaded by now, the kernel's among them.
    state = {"model": args.model, "config": asdict(model.config), "tokenizer": args.tokenizer,
             "args": vars(args), "corpus": data.corpus, "source": run.texts(), "changes": [],
             "parameters": count_parameters(model), "step": 0, "drawn": 0, "learned": False,
             "log": "\t".join(COLUMNS) + "\n"}
    if ckpt:
        run.note_changes(ckpt, state)
        for name in ("step", "drawn", "log"):
            state[name] = ckpt[name]

    # The optimizer must see the sharded weights.
    dist.distribute(model, args.shard, device)
    optimizer = get_optimizer(model, args)
    if ckpt:
        dist.set_moments(model, optimizer, ckpt["optimizer"])
        if ckpt["args"]["data"] == args.data:          # other data start from the top
            data.state = ckpt["data_state"]
        set_random_states(ckpt["random_states"])       # if your layers draw random numbers
    del ckpt, init                                     # and with them their weights
    if dist.rank() == 0:
        run.begin(out, state)
    print_head(args, state, data, device)

    # The loop. `unread` holds the losses and gradient norms of the steps since they were last read,
    # on the device: to read them, the CPU must wait for the GPU. `state` is as last saved, except
    # for its log.
    step, drawn, unread = state["step"], state["drawn"], []
    sequences_per_step = args.batch_tokens // args.seq_len
    began = since = time.perf_counter()
    first_step = step
    last = stopping = False
    with dist.stop_requests() as signals:              # Ctrl-C, SIGTERM, SIGHUP
        while not last and not stopping:
            lr = set_rate(optimizer, args, step)
            loss, norm = train_step(model, data, args, drawn)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step, drawn = step + 1, drawn + sequences_per_step
            unread.append((loss, norm))
            learned = data.observe(loss, sequences_per_step)       # a task gets harder, and ends
            last = learned or step == args.steps
            stopping = dist.total(len(signals)) > 0    # if any of the processes got one

            logs = last or step == 1 or step % args.log_every == 0
            evaluates = last or step % args.eval_every == 0
            saves = last or stopping or step % args.save_every == 0
            if not (logs or evaluates or saves):
                continue
            steps = len(unread)
            loss, norm = read(out, unread, state, step)
            now = time.perf_counter()
            seconds = (now - since) / steps            # for each step since the last reading
            if logs:
                row = {"step": step, "loss": loss, "lr": lr, "grad_norm": norm, **windows(model),
                       "ms": 1e3 * seconds, "tokens_per_s": args.batch_tokens / seconds}
                left = (now - began) / (step - first_step) * (args.steps - step)
                print_step(args, row, left)
                log(out, state, row)
            if evaluates:
                row = {"step": step, **evaluate(model, data, val_data, args, tokenizer)}
                require_finite(out, state, step, val_loss=row["val_loss"])
                print_evaluation(args, row)
                log(out, state, row)
            if saves:
                place = {"step": step, "drawn": drawn, "learned": learned}
                save(out, args, state, place, model, optimizer, data)
            since = time.perf_counter()
    if stopping and not last:                          # `cli` prints it without a traceback
        raise KeyboardInterrupt(f"stopped at step {step}, saved {out / 'ckpt.pt'}: "
                                f"{how_to_go_on(args)}")
    if dist.world() == 1:
        print(f"a sample that continues 32 held-out tokens:\n{sample(model, val_data, tokenizer)}")
    command = f"python {data.next_command} --ckpt {shlex.quote(str(out / 'ckpt.pt'))}"
    print(f"next: {cli.pasteable(command)}")


def how_to_go_on(args):
    """What to do after a run was stopped, in words."""
    if args.resume:
        return "repeat the command to go on"
    begins = [flag for flag, x in (("--force", args.force), ("--init", args.init)) if x]
    if begins:
        return f"add --resume to the command, without {' and '.join(begins)}, to go on"
    return "add --resume to the command to go on"


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

    Both are tensors on the device. drawn: how many sequences all processes together have drawn
    before this step.
    """
    sequences_per_pass = args.batch_size * dist.world()
    n_passes = args.batch_tokens // (sequences_per_pass * args.seq_len)
    total = 0.0
    for n in range(n_passes):
        first = drawn + n * sequences_per_pass
        x = dist.draw(data, first, args, model.W_E.device)                   # (batch_size, T + 1)
        # Only the last backward averages gradients over the processes, as with DDP's no_sync.
        dist.average_in_next_backward(model, n == n_passes - 1)
        loss = model.loss(x[:, :-1], x[:, 1:]) / n_passes
        loss.backward()
        total = total + loss.detach()
    if args.clip > 0:
        norm = clip_grad_norm_(model.parameters(), args.clip)
    else:
        norm = get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    return dist.mean(total), dist.full(norm)


def read(out, unread, state, step):
    """The loss and gradient norm of this step, as numbers; those of earlier ones are checked, too.

    So a checkpoint is only written if all numbers before it were finite.
    """
    numbers = torch.stack([x for pair in unread for x in pair]).tolist()
    losses, norms = numbers[0::2], numbers[1::2]
    for n, (loss, norm) in enumerate(zip(losses, norms)):
        require_finite(out, state, step - len(losses) + n + 1, loss=loss, grad_norm=norm)
    unread.clear()
    return losses[-1], norms[-1]


def require_finite(out, state, step, **values):
    """Raise UsageError if a value is not finite, and keep the reason in diverged.txt."""
    for name, x in values.items():
        if not math.isfinite(x):
            raise diverged(out, state, step, f"{name} is {x:g}")


def diverged(out, state, step, reason):
    """The UsageError of a run that diverged at a step, after writing it to diverged.txt."""
    saved = "nothing was saved"
    if state["step"] > 0:
        saved = f"{out / 'ckpt.pt'} holds step {state['step']}"
    message = (f"training diverged: at step {step} {reason}; {saved}: try a smaller --lr, or undo "
               "your last edit")
    if dist.rank() == 0:
        (out / "diverged.txt").write_text(f"{message}\n", "utf-8")
    return cli.UsageError(message, code=3)


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
    if n_bytes > 0:
        row["val_bpb"] = nats / math.log(2) / n_bytes

    # Transformers have no relevance maps, nor do layers that do not call their `screen`.
    tokens = torch.from_numpy(val_data[0][:-1][:512])[None].to(device)
    row |= alive_pairs(model, tokens)

    # Called on the training data, whose state says how much help the task still gives.
    row |= data.extra_columns(model, batches(val_data, 64, args.batch_size))
    model.train()
    return row


def save(out, args, state, place, model, optimizer, data):
    """Write the checkpoint: `state`, weights, moments, the place in the data, the random states.

    place: the step that is done, how many sequences were drawn, whether the task is learned.
    """
    weights, moments = dist.get_states(model, optimizer)
    # Only process 0 has the weights, and all must agree whether the run goes on.
    infinite = [name for name, W in weights.items() if not W.isfinite().all()]
    if dist.total(len(infinite)) > 0:
        raise diverged(out, state, place["step"], "a weight is not finite")
    state |= place | {"data_state": data.state, "random_states": random_states()}
    if dist.rank() == 0:
        run.save(out / "ckpt.pt", state | {"weights": weights, "optimizer": moments})
    # All wait until process 0 has written: if another one ended first, torchrun would end it.
    dist.wait()
    end = ", the last step: the model has learned the task" if place["learned"] else ""
    print(f"{state['step']:>6}/{args.steps:<6} saved {out / 'ckpt.pt'}{end}", flush=True)


def sample(model, val_data, tokenizer):
    """The first 32 tokens of the validation data and the model's continuation of them, as text."""
    device = model.W_E.device
    prompt = torch.from_numpy(val_data[0][:32])[None].to(device)
    generator = torch.Generator(device).manual_seed(0)
    with torch.compiler.set_stance("force_eager"):     # compiling would take longer
        answer = model.eval().generate(prompt, 256, temperature=0.7, generator=generator)
    return cli.printable(tokenizer.decode(torch.cat([prompt, answer], 1)[0].tolist()))


def save_checkpoint(path, model, tokenizer="bytes", seq_len=256, seed=0, step=0, val=()):
    """Write the weights of a training loop of your own, for `load_checkpoint` and all commands.

    tokenizer, seq_len, seed: as the flags of those names; step: how many steps were trained; val:
    files and folders of text that you have held out, on which lab.perplexity and lab.copying
    measure. There are no optimizer's moments in it, so --init starts from it, and --resume cannot.
    """
    config, n_vocab = asdict(model.config), get_tokenizer(str(tokenizer)).n_vocab
    if n_vocab > config["vocab_size"]:
        raise cli.UsageError(f"--tokenizer {tokenizer} has {n_vocab} tokens, and the model's "
                             f"vocabulary {config['vocab_size']}: name the one it was trained with")
    args = {name: get_default(name) for name in (*SIZES, "digits", "kernel")}
    args |= {"model": name_of(model), "tokenizer": str(tokenizer), "seq_len": seq_len, "seed": seed,
             "data": [], "val": absolute(list(val))}
    if args["model"].startswith("multiscreen"):        # a Transformer's sizes are in its name
        args |= {name: config[field] for name, field in SIZES.items()}
    weights = {name: W.detach().cpu() for name, W in model.state_dict().items()}
    for name, W in weights.items():
        if not W.isfinite().all():
            raise cli.UsageError(f"{path} was not written: {name} is not finite")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    run.save(path, {"model": args["model"], "config": config, "weights": weights, "args": args,
                    "tokenizer": args["tokenizer"], "source": run.texts(), "step": step})


# ------------------------------------------------------------------------- what is printed

def print_head(args, state, data, device):
    """Print what the run is, and the heads of the columns."""
    rest = state["parameters"] - state["config"]["vocab_size"] * state["config"]["d_E"]
    where = f"{device} in {dist.world()} processes" if dist.world() > 1 else device
    print(f"{args.model}, {state['parameters']:,} parameters ({rest:,} non-embedding), {where}, "
          f"{args.dtype}")
    print(f"{data} of {args.seq_len} tokens; {args.steps} steps of {args.batch_tokens:,} tokens")
    if state["step"] > 0:
        print(f"continuing at step {state['step']}")
    elif args.init:
        print(f"weights from {args.init}")
    print(f"{'step':>13} {'loss':>8} {'lr':>8} {'|grad|':>8} {'w min':>6} {'median':>7} {'max':>8} "
          f"{'ms':>7} {'tok/s':>8} {'min left':>8}", flush=True)


def print_step(args, row, left):
    """Print a line of numbers. left: the seconds that are left, at most."""
    found = " " * 23                                   # blanks, if the model has no windows
    if "w_min" in row:
        found = f"{row['w_min']:6.2f} {row['w_median']:7.1f} {row['w_max']:8.4g}"
    print(f"{row['step']:>6}/{args.steps:<6} {row['loss']:8.4f} {row['lr']:8.2g} "
          f"{row['grad_norm']:8.4f} {found} {row['ms']:7.0f} {row['tokens_per_s']:8.0f} "
          f"{left / 60:8.1f}", flush=True)


def print_evaluation(args, row):
    """Print an evaluation in words."""
    words = f"validation loss {row['val_loss']:.4f}"
    if "val_bpb" in row:
        words += f", {row['val_bpb']:.3f} bits per byte"
    if "alive" in row:
        words += f"; {row['alive']:.1%} of the pairs inside the windows are alive"
    for name in ("needle", "base"):
        if name in row:
            words += f"; {name} {row[name]:.3f}"
    print(f"{row['step']:>6}/{args.steps:<6} {words}", flush=True)


def log(out, state, row):
    """Append a row to the log, in its file and in what the next checkpoint will hold."""
    cells = [f"{row[name]:.6g}" if name in row else "" for name in COLUMNS]
    cells[0] = str(row["step"])
    line = "\t".join(cells) + "\n"
    state["log"] += line
    if dist.rank() == 0:
        with run.naming(out / "log.tsv"), open(out / "log.tsv", "a") as file:
            file.write(line)


# ---------------------------------------------------------------------------------------- flags

# The flags that set the sizes of Config, and the names of its fields.
SIZES = {"psi": "psi", "layers": "N_L", "tiles": "N_H", "d_E": "d_E", "d_K": "d_K", "d_V": "d_V",
         "w_th": "w_th"}
FIXED = ("model", *SIZES, "tokenizer")                 # a checkpoint's, which no flag may change


def get_parser():
    p, positive, amount = cli.Parser(__doc__), at_least(1), at_least(0, float)
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
           at_least(0))
    p.flag("--lr", 2**-4, "learning rate (paper: 2^-4; Transformer: 1e-3 to 2e-4, set by size)",
           amount)
    p.flag("--weight-decay", 0.0, "AdamW's weight decay, for matrices (paper: 0; Transformer: 0.1)",
           amount)
    p.flag("--clip", 0.0, "largest gradient norm, 0 for none (paper: 0; Transformer: 1)",
           amount)
    p.flag("--seed", 0, "seed of the initial weights and of the order of the data",
           at_least(0))
    p.flag("--device", cli.DEVICE, "cpu, cuda or mps")
    p.flag("--dtype", "auto", "for matrix products; auto: bfloat16 on a GPU that supports it "
           "(paper: bfloat16)", choices=["auto", "float32", "bfloat16"])
    p.flag("--kernel", "auto", "how to screen: definition (multiscreen.screen), windowed, triton "
           "(the fused kernel), or auto: the fastest that runs here, if its equations are unedited",
           choices=["auto", "definition", "windowed", "triton"])
    p.add_argument("--compile", action=BooleanOptionalAction,
                   help="torch.compile the model, and record CUDA graphs on a GPU; on a CPU it "
                   "needs a C++ compiler [yes, on a CUDA GPU with Triton]")
    p.add_argument("--recompute", action=BooleanOptionalAction, default=False,
                   help="recompute each layer's activations in backward: saves memory, costs time")
    p.flag("--shard", 1, "torchrun processes that share a copy of the weights, gradients, moments",
           positive)
    p.flag("--log-every", 10, "steps between printed lines", positive)
    p.flag("--eval-every", 250, "steps between evaluations", positive)
    p.flag("--save-every", None, "steps between checkpoints [--eval-every]", positive)
    p.flag("--init", None, "checkpoint to take model, tokenizer and weights from, for training on "
           "other data", str)
    p.flag("--out", "out", "folder for ckpt.pt and log.tsv")
    group = p.add_mutually_exclusive_group()
    group.add_argument("--resume", action="store_true",
                       help="continue the run in OUT, or begin it; flags that you leave out stay "
                       "as they were, except --device, --shard and --compile")
    group.add_argument("--force", action="store_true", help="overwrite the run in OUT")
    return p


def get_args(argv=None, ckpt=None, init=None):
    """All flags of a run: the command's, else the checkpoint's, the model's recipe, the defaults.

    ckpt: that of a continued run; init: that of --init. Raises UsageError for impossible flags.
    """
    parser = get_parser()
    kept = {}
    if ckpt:
        kept = {name: x for name, x in ckpt["args"].items() if name not in run.FREE}
    elif init:
        kept = {name: x for name, x in init["args"].items() if name in FIXED}
    model = kept.get("model") or parser.parse_args(argv).model
    parser.set_defaults(**recipe(model))
    parser.set_defaults(**kept)
    args = parser.parse_args(argv)
    for name in FIXED:
        if name in kept and getattr(args, name) != kept[name]:
            flag = f"--{name.replace('_', '-')}"
            raise cli.UsageError(f"the checkpoint was trained with {flag} {kept[name]}: leave "
                                 f"{flag} out, or start a new run")
    for name in ("psi", "tiles", "d_E", "d_K", "d_V", "w_th"):
        if args.model.startswith("transformer") and getattr(args, name) != get_default(name):
            raise cli.UsageError(f"--{name.replace('_', '-')} is for Multiscreen: a Transformer's "
                                 "sizes are in its name, transformer:N_L,N_H,d_E")

    # What follows from other flags.
    args.data = absolute(args.data)
    if args.val:
        args.val = absolute(args.val)
    args.save_every = args.save_every or args.eval_every
    tokens_per_pass = args.batch_size * args.seq_len * dist.world()
    args.batch_tokens = args.batch_tokens or tokens_per_pass
    if args.batch_tokens % tokens_per_pass != 0:
        raise cli.UsageError(f"--batch-tokens {args.batch_tokens}: it must be a multiple of "
                             f"{tokens_per_pass} ({args.batch_size} sequences x {args.seq_len} "
                             f"tokens x {dist.world()} processes)")
    return args


def get_default(name):
    return get_parser().get_default(name)


def main(argv=None):
    dist.join()
    command = get_parser().parse_args(argv)
    with run.locked(command.out) as out:
        ckpt = run.find_checkpoint(out, command)
        init = read_checkpoint(command.init) if command.init and not ckpt else None
        args = get_args(argv, ckpt, init)
        finished = ckpt is not None and (ckpt["learned"] or ckpt["step"] >= args.steps)
        if not finished:
            train(out, args, ckpt, init)
        else:
            run.require_same_flags(ckpt, args)
            end = "it has learned the task" if ckpt["learned"] else "a larger --steps continues it"
            print(f"{out} is already finished, at step {ckpt['step']}: {end}")
    dist.leave()


if __name__ == "__main__":
    cli.cli(main)

"""Train a Multiscreen model on any text, or on endless documents of ABCDigits or passkey.

    python train.py --psi 8                          the source of Python's own standard library
    python train.py --data books/ --tokenizer gpt2   text, folders, .bin token files
    python train.py --resume --steps 1240            continue the run in out/, to step 1240
    torchrun --nproc_per_node 8 train.py ...         the same on 8 GPUs

Rerun a command to resume it; once the run is finished, the command says so.

The recipe is the paper's: AdamW with betas (0.9, 0.95), no weight decay, no clipping, a linear
warm-up to a constant learning rate of 2^-4; documents joined by end-of-text, cut into contiguous
sequences, drawn at random without replacement. The sizes are a laptop's.

A printed line: step, loss (nats per token), learning rate, gradient norm before clipping, the
smallest, median and largest window, milliseconds per step, tokens per second, time left.

OUT gets ckpt.pt, all that is needed to resume; log.tsv, a row for each line of numbers; flags.txt,
what the run is; and source/, the code that ran. source_until_STEP/ is the code before an edit. A
run that diverged leaves diverged.txt. The empty file lock keeps a second run out while one trains.

To read this file begin with `train`, near its end. What it calls stands above.
"""
import math
import platform
import shutil
import time
from argparse import BooleanOptionalAction
from dataclasses import asdict
from pathlib import Path

import torch

from support import distributed as dist  # one process or many
from support.checkpoint import (
    load_checkpoint,  # noqa: F401 (train.load_checkpoint is promised to users)
    load_moments,
    load_weights,
    read_checkpoint,
    weights_hash,
)
from support.choose import get_screen, require_memory
from support.cli import (
    Parser,
    UsageError,
    at_most_3,
    cli,
    clock,
    get_device,
    on_one_line,
    printable,
    products_dtype,
    replacing,
    stop_requests,
)
from support.compiled import try_to_compile
from support.data import absolute, batches, changed_files, get_data, hash_of, is_run, is_stream
from support.maps import alive_fraction
from support.models import build_model, count_parameters, has_windows, recipe
from support.source import code_hash, differences, edited_files, source_in, source_of
from support.tokens import get_tokenizer
from tasks import get_stream

# Of the log. The last two are a task's.
COLUMNS = ("step", "loss", "lr", "grad_norm", "w_min", "w_median", "w_max", "ms", "tokens_per_s",
           "val_loss", "val_bpb", "alive", "needle", "base")
# The flags for the sizes of Config, and their names there.
SIZES = {"psi": "psi", "layers": "N_L", "tiles": "N_H", "d_E": "d_E", "d_K": "d_K", "d_V": "d_V",
         "w_th": "w_th"}
# Flags that --resume and --init cannot change.
FIXED = ("model", *SIZES, "tokenizer")
# Those that do not say what is trained, and those that only say how far and how often.
FREE = ("out", "resume", "force", "device", "shard", "compile")
LENGTH = ("steps", "log_every", "eval_every", "save_every")
REPLACED = "code replaced at run time"                 # in a notebook: no file has it

# ----------------------------------------------------------------------------------- flags

def get_parser():
    p = Parser(__doc__)
    p.flag("--model", "multiscreen", "multiscreen, transformer:SIZE, or either with :VARIANT; an "
           "unknown name lists all; a class of yours is a VARIANT, FILE.CLASS")
    p.flag("--psi", 8, "size: psi layers of psi tiles, width psi^2 (paper: 8, 16, 32, 48, 64)")
    p.flag("--layers", None, "number of layers", type=int, shown="the model's own")
    p.flag("--tiles", None, "tiles in a layer", type=int, shown="psi")
    p.flag("--d-E", None, "width of the model", type=int, shown="psi^2")
    p.flag("--d-K", None, "dimensions of a query and a key", type=int, shown="16")
    p.flag("--d-V", None, "dimensions of a value", type=int, shown="64")
    p.flag("--w-th", 256.0, "initial windows are 2 to w_th + 1 tokens; MiPE acts below w_th")
    p.flag("--data", ["stdlib"], "stdlib, abcdigits, passkey, or UTF-8 files, folders, .bin token "
           "files (paper: SlimPajama)", nargs="+", type=str, shown="stdlib")
    p.flag("--tokenizer", "bytes", "bytes or gpt2 (paper: gpt2)")
    p.flag("--digits", 6, "digits of a number, for --data abcdigits (paper: 6, in evaluation only)")
    p.flag("--seq-len", 256, "tokens in a sequence (paper: 4096)")
    p.flag("--batch-size", 8, "sequences in a forward pass of one process")
    p.flag("--batch-tokens", None, "tokens in a step, over all passes and processes (paper: 2^22)",
           type=int, shown="those of one pass")
    p.flag("--steps", 620, "optimizer steps; a limit, for abcdigits and passkey (paper: 2^16)")
    p.flag("--warmup", 50, "steps of linear warm-up to a constant learning rate (paper: 4096)",
           least=0)
    p.flag("--lr", 2**-4, "learning rate (paper: 2^-4; Transformer: 1e-3 to 2e-4, set by size)",
           least=0)
    p.flag("--weight-decay", 0.0, "AdamW's weight decay, for matrices (paper: 0; Transformer: 0.1)",
           least=0)
    p.flag("--clip", 0.0, "largest gradient norm, 0 for none (paper: 0; Transformer: 1)", least=0)
    p.flag("--seed", 0, "seed of the initial weights and of the order of the data", least=0)
    p.add_shared("--device")
    p.flag("--dtype", "auto", "for matrix products; auto: bfloat16 on a GPU that supports it "
           "(paper: bfloat16)",
           choices=["auto", "float32", "bfloat16"])
    p.flag("--kernel", "auto", "what screens: definition (multiscreen.screen), windowed, triton "
           "(the fused kernel), or auto: the fastest that runs here and agrees with the definition",
           choices=["auto", "definition", "windowed", "triton"])
    p.add_argument("--compile", action=BooleanOptionalAction,
                   help="torch.compile the model; on a CPU it needs a C++ compiler [on a CUDA GPU "
                   "with Triton]")
    p.add_argument("--recompute", action=BooleanOptionalAction, default=False,
                   help="recompute a layer's activations in backward: less memory, more time")
    p.flag("--shard", 1, "processes of torchrun that share one copy of weights, gradients, moments")
    p.flag("--log-every", 10, "steps between printed lines")
    p.flag("--eval-every", 250, "steps between evaluations")
    p.flag("--save-every", None, "steps between checkpoints", type=int, shown="--eval-every")
    p.flag("--init", None, "checkpoint to take model, tokenizer and weights from, for training on "
           "other data", type=str, shown="new weights")
    p.flag("--out", "out", "folder for ckpt.pt and log.tsv")
    group = p.add_mutually_exclusive_group()
    group.add_argument("--resume", action="store_true",
                       help="continue from OUT/ckpt.pt; flags that you leave out stay as they "
                       "were, except --device, --shard and --compile")
    group.add_argument("--force", action="store_true", help="overwrite the run in OUT")
    return p


def get_args(argv=None):
    """The flags of a run.

    What argv leaves out comes from the checkpoint of --resume or --init, or else from the model's
    recipe. Raises UsageError for impossible flags.
    """
    parser = get_parser()
    args = parser.parse_args(argv)
    if args.resume and args.init:
        raise UsageError("--resume takes OUT's weights, --init those of a checkpoint: use one")
    if args.force and args.init and Path(args.init).resolve().parent == Path(args.out).resolve():
        raise UsageError(f"--force would overwrite {args.init}: name another --out")
    # Parsed twice: the first names the checkpoint, whose flags are the defaults of the second. All
    # flags of a run stay as they were, but for FREE; a new run from weights has the FIXED ones.
    if args.resume:
        path, kept = Path(args.out) / "ckpt.pt", {*vars(args)} - {*FREE}
    else:
        path, kept = args.init, FIXED
    known = read_checkpoint(path)["args"] if path else {}
    known = {name: x for name, x in known.items() if name in kept}
    parser.set_defaults(**recipe(known.get("model", args.model)) | known)
    args = parser.parse_args(argv)
    args.data = absolute(args.data)

    # What cannot be.
    for name in FIXED:
        now = getattr(args, name)
        if known.get(name, now) != now:
            raise UsageError(f"{path} was trained with {flag(name, known[name])}, not {shown(now)}:"
                             f" leave {flag(name)} out, or start a new run")
    sizes = [name for name in SIZES if getattr(args, name) != parser.get_default(name)]
    if args.model.startswith("transformer") and {*sizes} - {"layers"}:
        raise UsageError("--psi, --tiles, --d-E, --d-K, --d-V and --w-th are for Multiscreen: a "
                         "Transformer's sizes are in its name, transformer:N_L,N_H,d_E")

    # What follows from other flags.
    args.save_every = args.save_every or args.eval_every
    per_pass = args.batch_size * args.seq_len * dist.world()
    args.batch_tokens = args.batch_tokens or per_pass
    if args.batch_tokens % per_pass:
        raise UsageError(f"--batch-tokens {args.batch_tokens}: it must be a multiple of {per_pass} "
                         f"({args.batch_size} sequences x {args.seq_len} tokens x {dist.world()} "
                         "processes)")
    return args


def flag(name, *value):
    """A flag as one types it."""
    return " ".join([f"--{name.replace('_', '-')}", *map(shown, value)])


def shown(value):
    """A flag's value on one line."""
    return on_one_line(" ".join(value) if isinstance(value, list) else value)


# ------------------------------------------------------------------------------ evaluation

@torch.no_grad()
def evaluate(model, train_data, val_data, args, tokenizer):
    """A row of the log, in eval mode: nats per token, bits per byte, the share of alive pairs.

    Losses over up to 256 sequences, spread evenly over the validation data; alive pairs among the
    first 512 tokens of one. A task adds columns of its own, over 64 documents. Several processes
    compute the same.
    """
    model.eval()
    device = model.W_E.device
    nats = n_tokens = n_bytes = 0
    for x in batches(val_data, 256, args.batch_size):
        x = x.to(device)
        nats += model.loss(x[:, :-1], x[:, 1:], "none").cpu().double().sum().item()
        targets = x[:, 1:].flatten().tolist()
        text = [t for t in targets if t != tokenizer.eot_token]
        n_tokens += len(targets)
        n_bytes += len(tokenizer.decode_bytes(text))
    row = {"val_loss": nats / n_tokens, "val_bpb": nats / math.log(2) / max(n_bytes, 1)}

    # Layers that do not call their `screen` have no relevance maps.
    tokens = torch.from_numpy(val_data[0][:-1][:512])[None].to(device)
    if has_windows(model) and (alive := alive_fraction(model, tokens)) is not None:
        row["alive"] = alive

    # The task's state, such as how much help it still gives, is that of the training data.
    row |= train_data.extra_columns(model, batches(val_data, 64, args.batch_size))
    model.train()
    return row


@torch.no_grad()
def describe(model):
    """More columns of the log: the smallest, median and largest window of a model that has some."""
    if not has_windows(model):
        return {}
    w = torch.cat([dist.full(layer.reach()) for layer in model.layers])
    return {"w_min": w.min().item(), "w_median": w.median().item(), "w_max": w.max().item()}


# -------------------------------------------------------------------------- a run's folder

def resumable(out, args, state):
    """(this run as its checkpoint, or None for a new run; what has changed since, for flags.txt).

    state: what this command would save. If --out holds another run, this prints what differs and
    raises UsageError; with --resume it goes on. A run that diverged, and files of no run, are
    refused, too.
    """
    for name in ("ckpt.pt", "log.tsv", "flags.txt", "source"):
        if (out / name).exists() and not is_run(out):
            raise UsageError(f"{out / name} belongs to no run: name another --out")
    if args.force:
        return None, []

    # A run that was killed before its first checkpoint is a new run.
    ckpt, changes = None, []
    if (out / "ckpt.pt").exists():
        ckpt = read_checkpoint(out / "ckpt.pt")
        lines, changes = what_differs(ckpt, state)
        if lines:
            print(f"{out} at step {ckpt['step']}, before | now:", *lines, sep="\n")
        if lines and not args.resume:
            raise UsageError(f"{out} holds another run: --resume continues it with these changes, "
                             "--force overwrites it, another --out starts a new run")

    # Exit code 3: the scripts of runs/ take it for a result, if this very command has diverged.
    if (out / "diverged.txt").exists() and not args.resume:
        said = (out / "diverged.txt").read_text("utf-8").strip()
        raise UsageError(f"{out}: {said}; --force overwrites it, another --out starts a new run",
                         3 if is_of(out, state) else 1)
    return ckpt, changes


def what_differs(old, new):
    """What differs between two checkpoints: (lines for the screen, words for flags.txt).

    The words leave out how far and how often, and name files, not their lines.
    """
    texts = [hash_of(state["files"]) for state in (old, new)]
    flags = {name: f"{flag(name, old['args'].get(name))} | {shown(now)}"
             for name, now in new["args"].items()
             if name not in FREE and old["args"].get(name) != now}
    if texts[0] == texts[1] != "":                     # the same text at another path
        flags.pop("data", None)
    others = []
    if texts[0] != texts[1]:
        others.append(at_most_3(changed_files(old["files"], new["files"])))
    if None in (old["equations"], new["equations"]):
        others.append(REPLACED)
    lines = [f"  {line}" for line in [*flags.values(), *others]]
    lines += differences(old["source"], new["source"])
    words = [line for name, line in flags.items() if name not in LENGTH]
    words += [*others, *edited_files(old["source"], new["source"])]
    return lines, words


def is_of(out, state):
    """Whether flags.txt and source/ of a run's folder are those of this very command."""
    known = (out / "flags.txt").read_text("utf-8").splitlines()
    same_code = not edited_files(source_in(out), state["source"])
    return same_code and {*what_is_trained(state)} <= {*known}


def what_is_trained(state):
    """Lines of flags.txt: what is trained, on what, from which weights."""
    lines = {name: x for name, x in state["args"].items() if name not in FREE}
    lines |= {"corpus": hash_of(state["files"])}
    lines |= {name: state[name] for name in ("equations", "parameters", "init_weights")}
    return [f"{name}\t{shown(x)}" for name, x in lines.items()]


def write_folder(out, state, ckpt):
    """Write flags.txt, by which a folder is known as a run's, then log.tsv and source/.

    A new run deletes an old one; what ran before an edit stays in source_until_STEP/.
    """
    lines = [*what_is_trained(state), f"changes\t{shown('; '.join(state['changes']))}",
             f"versions\t{state['versions']}"]
    files = {"flags.txt": "\n".join(lines) + "\n", "log.tsv": state["log"]}
    files |= {f"source/{name}": text for name, text in state["source"].items()}
    if ckpt and ckpt["source"] != state["source"]:
        files |= {f"source_until_{state['step']}/{name}": text
                  for name, text in ckpt["source"].items()}
    old = [out / "source", out / "diverged.txt", *out.glob("ckpt.pt.*.tmp")]
    if not ckpt:
        old += [out / "ckpt.pt", *out.glob("source_until_*")]
    for path in old:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for name, text in files.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        with replacing(out / name) as file:
            file.write(text.encode())


def save(out, args, state, model, optimizer, data):
    """Write the checkpoint: what state holds, weights, moments, and where data and chance are."""
    weights, moments = dist.get_states(model, optimizer)
    state |= {"data_state": data.state, "learned": data.learned,
              "random_state": torch.get_rng_state()}
    if dist.rank() == 0:
        with replacing(out / "ckpt.pt") as file:
            torch.save(state | {"weights": weights, "optimizer": moments}, file)
    # Until process 0 has written: when one process ends torchrun ends all.
    dist.wait()
    end = ", the end: it has learned the task" if data.learned else ""
    print(f"{state['step']:>6}/{args.steps:<6} saved {out / 'ckpt.pt'}{end}", flush=True)


def log(out, args, state, step, row, left=""):
    """Print a line, and add a row to the log: of a step, or of an evaluation.

    row: numbers by column; left: the time.
    """
    at = f"{step:>6}/{args.steps:<6}"
    if "loss" in row:
        windows = " " * 23                             # three columns, for a model without
        if "w_min" in row:
            windows = f"{row['w_min']:6.2f} {row['w_median']:7.1f} {row['w_max']:8.4g}"
        print(f"{at} {row['loss']:8.4f} {row['lr']:8.2g} {row['grad_norm']:8.4f} {windows} "
              f"{row['ms']:7.0f} {row['tokens_per_s']:8.0f} {left:>8}", flush=True)
    else:
        words = [f"validation loss {row['val_loss']:.4f}, {row['val_bpb']:.3f} bits per byte"]
        if "alive" in row:
            words.append(f"{row['alive']:.1%} of the pairs inside the windows are alive")
        words += [f"{name} {row[name]:.3f}" for name in ("needle", "base") if name in row]
        print(f"{at} {'; '.join(words)}", flush=True)
    row = {name: f"{x:.6g}" for name, x in row.items()} | {"step": str(step)}
    line = "\t".join(row.get(name, "") for name in COLUMNS) + "\n"
    state["log"] += line
    if dist.rank() == 0:
        with open(out / "log.tsv", "a") as file:
            file.write(line)


# -------------------------------------------------------------------------------- training

def set_rate(optimizer, args, step):
    """Set the learning rate of step 0, 1, ..: a linear warm-up, then constant. Returns it."""
    lr = args.lr * min(1.0, (step + 1) / max(args.warmup, 1))
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def train_step(model, data, args, drawn):
    """Forward and backward passes of a step: (loss, gradient norm before clipping).

    drawn: how many sequences all processes have drawn before.
    """
    per_pass = args.batch_size * dist.world()          # sequences
    n_passes = args.batch_tokens // (per_pass * args.seq_len)
    losses = []
    for n in range(n_passes):
        x = dist.draw(data, drawn + n * per_pass, args, model.W_E.device)    # (batch, T + 1)
        # Processes average their gradients in the last pass; until then each adds up its own.
        dist.average_gradients(model, n == n_passes - 1)
        loss = model.loss(x[:, :-1], x[:, 1:]) / n_passes
        loss.backward()
        losses.append(loss.detach())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip or math.inf)

    # One transfer for all numbers, since each makes the CPU wait for the GPU. Then the mean over
    # the processes.
    *losses, norm = torch.stack((*losses, dist.full(norm))).tolist()
    loss, = dist.total(sum(losses) / dist.world())
    return loss, norm


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
        raise UsageError(message, code=3)


def train(out, args):
    # The data: text, or the documents of a task. Sequences in support/data.py says what both have.
    tokenizer = get_tokenizer(args.tokenizer)
    get = get_stream if is_stream(args.data) else get_data
    train_data, val_data = get(args, tokenizer)
    print(f"{' '.join(args.data)}: {train_data} of {args.seq_len} tokens; {args.steps} steps of "
          f"{args.batch_tokens:,} tokens")

    # The model. A size that no flag sets is the model's own.
    device = get_device(args.device)
    dtype = products_dtype(device, args.dtype)
    sizes = {field: getattr(args, name) for name, field in SIZES.items()}
    torch.manual_seed(args.seed)
    model = build_model(args.model, sizes | {"vocab_size": tokenizer.n_vocab}, dtype).to(device)
    parameters, non_embedding = count_parameters(model)

    # Where the run stands. `state` is what the next checkpoint has, but for what `save` adds: first
    # that of a new run, then that of the run in --out. Rows of the log beyond it are made again.
    initial = read_checkpoint(args.init) if args.init and not args.resume else None
    equations = code_hash(model)                       # None for code replaced in a notebook
    state = {"model": args.model, "config": asdict(model.config), "tokenizer": args.tokenizer,
             "args": vars(args), "files": train_data.files, "equations": equations,
             "source": source_of(model, train_data), "parameters": parameters,
             "init_weights": weights_hash(initial) if initial else "",
             "versions": f"python {platform.python_version()}, torch {torch.__version__}",
             "changes": [] if equations else [f"from step 0: {REPLACED}"],
             "step": 0, "drawn": 0, "log": "\t".join(COLUMNS) + "\n"}
    ckpt, changes = resumable(out, args, state)
    if ckpt and (ckpt["learned"] or ckpt["step"] >= args.steps):
        end = "it has learned the task" if ckpt["learned"] else "--resume --steps N continues"
        print(f"{out} is already finished, at step {ckpt['step']}: {end}")
        return
    if ckpt:
        state |= {name: ckpt[name] for name in ("step", "drawn", "log", "init_weights", "changes")}
        if changes:
            state["changes"] = [*ckpt["changes"], f"from step {ckpt['step']}: {', '.join(changes)}"]
        load_weights(model, ckpt["weights"], out / "ckpt.pt")
    elif initial:
        load_weights(model, initial["weights"], args.init)

    # What screens, and what saves memory or time.
    if has_windows(model):
        choice = get_screen(model, args.kernel)
        model.screen = choice.screen
        print(choice.line)
        require_memory(model, args.batch_size, args.seq_len, args.recompute)
    if args.recompute:
        dist.recompute(model)
    if line := try_to_compile(model, args.compile, args.batch_size, args.seq_len):
        print(line)
    dist.distribute(model, args.shard, device)
    where = f"{device} in {dist.world()} processes" if dist.world() > 1 else device
    print(f"{args.model}, {parameters:,} parameters ({non_embedding:,} non-embedding), {where}, "
          f"{'bfloat16' if dtype else 'float32'}")

    # The optimizer. Weight decay is for matrices only.
    weights = [*model.parameters()]
    groups = [{"params": [p for p in weights if p.ndim > 1], "weight_decay": args.weight_decay},
              {"params": [p for p in weights if p.ndim <= 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)

    # Go on from the checkpoint.
    if ckpt:
        load_moments(model, optimizer, ckpt["optimizer"], out / "ckpt.pt")
        if ckpt["args"]["data"] == args.data:          # another task begins at its beginning
            train_data.state = ckpt["data_state"]
        torch.set_rng_state(ckpt["random_state"])      # for your dropout, on a CPU
    if dist.rank() == 0:
        write_folder(out, state, ckpt)
    if ckpt or initial:
        print(f"continuing at step {state['step']}" if ckpt else f"weights from {args.init}")
    ckpt = initial = None                              # the files need not stay in memory

    print(f"{'step':>13} {'loss':>8} {'lr':>8} {'|grad|':>8} {'w min':>6} {'median':>7} {'max':>8} "
          f"{'ms':>7} {'tok/s':>8} {'at most' if is_stream(args.data) else 'left':>8}", flush=True)
    # Steps done, sequences drawn; `state` has those of the last save.
    step, drawn = state["step"], state["drawn"]
    per_step = args.batch_tokens // args.seq_len       # sequences
    began, first = time.perf_counter(), step
    last = stopping = False
    with stop_requests() as stop:
        while not last and not stopping:
            start = time.perf_counter()
            lr = set_rate(optimizer, args, step)
            loss, norm = train_step(model, train_data, args, drawn)
            step, drawn = step + 1, drawn + per_step
            require_finite(out, state, step, loss=loss, grad_norm=norm)    # before weights change
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            train_data.observe(loss, per_step)         # a task gets harder as it is learned
            last = step == args.steps or train_data.learned
            now = time.perf_counter()

            if last or step == 1 or step % args.log_every == 0:
                row = {"loss": loss, "lr": lr, "grad_norm": norm, **describe(model),
                       "ms": 1e3 * (now - start), "tokens_per_s": args.batch_tokens / (now - start)}
                left = clock((now - began) / (step - first) * (args.steps - step))
                log(out, args, state, step, row, left)
            if last or step % args.eval_every == 0:
                row = evaluate(model, train_data, val_data, args, tokenizer)
                require_finite(out, state, step, val_loss=row["val_loss"])
                log(out, args, state, step, row)
            stopping = any(dist.total(len(stop)))      # all stop when one was told to
            if last or stopping or step % args.save_every == 0:
                state |= {"step": step, "drawn": drawn}
                save(out, args, state, model, optimizer, train_data)
    # Told to stop: all work is saved, and the exit code is 130.
    if not last:
        raise KeyboardInterrupt(f"stopped at step {step}, saved {out / 'ckpt.pt'}: rerun the "
                                f"command{' without --force' * args.force} to resume")

    # A sample, where one process holds the model.
    if dist.world() == 1:
        prompt = torch.from_numpy(val_data[0][:32])[None].to(device)
        generator = torch.Generator(device).manual_seed(0)
        answer = model.eval().generate(prompt, 256, temperature=0.7, generator=generator)
        text = tokenizer.decode(torch.cat([prompt, answer], 1)[0].tolist())
        print(f"a sample, after its first 32 tokens:\n{printable(text)}")
    tasks = {"abcdigits": "abcdigits.py", "passkey": "-m experiments.passkey"}
    command = tasks.get(args.data[0], "-m experiments.sample")
    print(f"next: python {command} --ckpt {out / 'ckpt.pt'}")


def main(argv=None):
    dist.join()
    args = get_args(argv)
    with dist.locked(args.out) as out:
        train(out, args)
    dist.wait()


if __name__ == "__main__":
    cli(main)

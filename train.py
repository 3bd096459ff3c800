"""Train a Multiscreen model on any text.

    python train.py --psi 8                          the source of Python's own standard library
    python train.py --data books/ --tokenizer gpt2   texts, folders of them, .bin files of tokens
    python train.py --resume --steps 1240            continue the run in out/, to step 1240
    python train.py --model mine.Tiles               a class of layers in your mine.py
    torchrun --nproc_per_node 8 train.py ...         on 8 GPUs, --batch-size sequences on each

The recipe is the paper's: AdamW with betas (0.9, 0.95), no weight decay, no clipping, and a linear
warm-up to a constant rate of 2^-4. Documents are joined by end-of-text and cut into contiguous
sequences, which are drawn at random without replacement. The default sizes suit a laptop. Read
`train` first, from `while` on, then `accumulate_gradients` and `Text`: all else is checks,
checkpoints and flags.

In a printed line losses are in nats per token, grad_norm is from before clipping, ms are per step,
windows w are in tokens, and min_left is how many minutes the remaining steps will take.

Ctrl-C saves a checkpoint; add --resume to continue, bit for bit on a CPU. The run's folder, OUT,
contains ckpt.pt, which is all you need to continue, and log.tsv, a row for each line of numbers.

Where a flag takes MODULE or MODULE.NAME, write MODULE.py beside train.py or in this folder:

    --model       a subclass of GatedScreeningTiles, or f(config, dtype) -> a model with the methods
                  of Multiscreen. Class or f may have a `recipe`, defaults of flags: {"lr": 1e-3}
    --data        f(args, tokenizer, part) -> documents, for part "train" or "val", with the methods
                  and the `state` of `Text`; `abcdigits` stands for abcdigits.Documents
    --tokenizer   an object with name, n_vocab, eot_token, encode_ordinary, decode, as tiktoken's
    --kernel      a module with a function `screen`, which is tried before it is used
"""
import argparse
import ast
import hashlib
import inspect
import math
import os
import signal
import sys
import sysconfig
import textwrap
import time
import zlib
from dataclasses import asdict, fields
from functools import cache, partial
from importlib import import_module
from pathlib import Path

import numpy as np
import tiktoken
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

import multiscreen
from multiscreen import Config, GatedScreeningTiles, KeyCache, Multiscreen, unit

if os.getcwd() not in sys.path:                        # for what MODULE.NAME names there
    sys.path.append(os.getcwd())

RANK = int(os.environ.get("RANK", 0))                  # this process, of those of torchrun
WORLD = int(os.environ.get("WORLD_SIZE", 1))           # how many there are
COLUMNS = ("step", "loss", "lr", "grad_norm", "w_median", "w_max", "ms", "val_loss")   # of log.tsv


def train(args, ckpt=None, stop=()):
    """Train a run, or go on from its checkpoint. Returns whether the run is finished.

    stop: a list; once there is something in it, the run saves a checkpoint and returns.
    """
    path, device, tokenizer = Path(args.out, "ckpt.pt"), args.device, get_tokenizer(args.tokenizer)
    try_model(make_model(args, tokenizer).to(device), args)            # this one is thrown away
    torch.manual_seed(args.seed)
    model = make_model(args, tokenizer, getattr(torch, args.dtype)).to(device)
    data, val_data = get_data(args, tokenizer)
    text = f"{fingerprint(data)} and {fingerprint(val_data)}"
    source = source_of(model, args.model)
    if ckpt:
        require_same(ckpt, text, source)
    if ckpt or args.init:
        load_weights(model, ckpt or read_checkpoint(args.init))
    say(choose_screen(model, args.kernel))
    if args.compile or (args.compile is None and device == "cuda"):
        compile_model(model)
    if WORLD > 1:
        shard(model)
    optimizer = make_optimizer(model, args.lr, args.weight_decay)
    step, log, finished = 0, "\t".join(COLUMNS) + "\n", False
    if ckpt:
        set_moments(model, optimizer, ckpt["optimizer"])
        torch.set_rng_state(ckpt["rng"])               # for layers that draw random numbers
        step, log, data.state = ckpt["step"], ckpt["log"], ckpt["data_state"]
        longer = args.steps > ckpt["args"]["steps"]
        finished = step >= args.steps or (ckpt["finished"] and not longer)
    say(f"{args.model}, {sum(p.numel() for p in model.parameters()):,} parameters, {device}, "
        f"{args.dtype}; {len(data):,} sequences of {args.seq_len} tokens; steps {step} to "
        f"{args.steps}, each of {args.batch_tokens:,} tokens")
    path.parent.mkdir(parents=True, exist_ok=True)

    since, logged, stopped = time.perf_counter(), step, False
    while not finished and not stopped:
        lr = args.lr * min(1.0, (step + 1) / max(args.warmup, 1))
        for group in optimizer.param_groups:
            group["lr"] = lr
        loss = accumulate_gradients(model, data, args, step)
        largest = args.clip if args.clip > 0 else math.inf
        norm = whole(clip_grad_norm_(model.parameters(), largest))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        finished = data.observe(loss) or step == args.steps
        stopped = total(float(len(stop))) > 0          # in any of the processes

        logs = finished or stopped or step == 1 or step % args.log_every == 0
        evaluates = finished or step % args.eval_every == 0
        if not (logs or evaluates):
            continue                                   # without waiting for the GPU
        row = {"step": step, "loss": loss.item(), "lr": lr, "grad_norm": norm.item()}
        row["ms"] = 1e3 * (time.perf_counter() - since) / (step - logged)
        if evaluates and not has_diverged(row):
            row["val_loss"] = evaluate(model, val_data, args.batch_size)
        row |= windows(model)
        log += "\t".join(f"{row[name]:.6g}" if name in row else "" for name in COLUMNS) + "\n"
        if RANK == 0:
            write(path.with_name("log.tsv"), log, lambda log, file: file.write(log.encode()))
        row["min_left"] = row["ms"] * (args.steps - step) / 60e3
        say("  ".join(f"{name} {x:<7.5g}" for name, x in row.items()))
        if has_diverged(row):
            print(f"error: training has diverged; {path} was not written again: try a smaller "
                  "--lr, or undo your last edit", file=sys.stderr)
            sys.exit(3)
        if evaluates or stopped:
            save_checkpoint(path, model, args, step=step, finished=finished, log=log, text=text,
                            source=source, optimizer=get_moments(model, optimizer),
                            data_state=data.state, rng=torch.get_rng_state())
            say(f"saved {path}")
        since, logged = time.perf_counter(), step
    if finished:
        say(f"{args.out} is finished, at step {step}: --resume with a larger --steps continues it")
    return finished


# ---------------------------------------------------------------------------------------- a step

def make_optimizer(model, lr, weight_decay):
    """AdamW as in the paper; weight decay, if any, is for matrices alone."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay},
              {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


def accumulate_gradients(model, data, args, step):
    """Run the passes of a step forward and backward. Returns the mean loss, on the device.

    Each process reads its share of the step's sequences, --batch-size of them in a pass.
    """
    per_step = args.batch_tokens // args.seq_len       # sequences
    mine = range(step * per_step, (step + 1) * per_step)[RANK::WORLD]
    passes = [mine[i : i + args.batch_size] for i in range(0, len(mine), args.batch_size)]
    loss = 0.0
    for numbers in passes:
        x = to_device([data.draw(n) for n in numbers], model.W_E.device)
        part = model.loss(x[:, :-1], x[:, 1:]) / len(passes)
        part.backward()
        loss = loss + part.detach()
    return total(loss) / WORLD


def has_diverged(row):
    """Whether a row of the log has a loss that is not finite, or a gradient of 0, inf or NaN."""
    losses_are_finite = math.isfinite(row["loss"]) and math.isfinite(row.get("val_loss", 0.0))
    return not (losses_are_finite and 0 < row["grad_norm"] < math.inf)


def to_device(sequences, device):
    """Sequences (T + 1,) as one tensor on the device. A GPU copies them while it computes."""
    x = torch.from_numpy(np.stack(sequences))
    if device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def windows(model):
    """Columns of the log: the median and the largest window, of a model that has some."""
    if not hasattr(model.layers[0], "s_w"):
        return {}
    w = torch.cat([whole(layer.w.detach()) for layer in model.layers])
    return {"w_median": w.median().item(), "w_max": w.max().item()}


def say(text):
    """Print a line. If nobody reads the pipe any longer, the run goes on in silence."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")


@torch.no_grad()
@torch.compiler.set_stance("force_eager")              # compiling takes longer than it saves
def evaluate(model, data, batch_size):
    """Nats per token of at most 256 sequences, evenly spread. Each process computes all of it."""
    model.eval()
    numbers, nats = range(0, len(data), math.ceil(len(data) / 256)), []
    for first in range(0, len(numbers), batch_size):
        some = [data[n] for n in numbers[first : first + batch_size]]
        x = to_device(some, model.W_E.device)
        nats.append(model.loss(x[:, :-1], x[:, 1:], "none").cpu().double().flatten())
    model.train()
    return torch.cat(nats).mean().item()


# ---------------------------------------------------------------------------- several processes

def total(x):
    """The sum over all processes of a number, or of a tensor on its device. Returns a tensor."""
    x = torch.as_tensor(x)
    if WORLD > 1:
        dist.all_reduce(x)
    return x


def shard(model):
    """Let several processes hold one copy of a model between them, by FSDP2, in place."""
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    for part in (*model.layers, model):
        fully_shard(part, reshard_after_forward=True)
    register_fsdp_forward_method(model, "loss")


def whole(x):
    """A tensor put together from the shards of all processes, which must all take part."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def get_moments(model, optimizer):
    """The optimizer's state: {parameter's name: {moment's name: whole tensor}}."""
    return {name: {key: whole(x).cpu() for key, x in optimizer.state[p].items()}
            for name, p in model.named_parameters() if p in optimizer.state}


def set_moments(model, optimizer, moments):
    """Give an optimizer what get_moments returned, whatever the number of processes was."""
    for name, p in model.named_parameters():
        for key, x in moments.get(name, {}).items():
            x = x.to(p.device)
            if hasattr(p, "placements") and x.ndim > 0:
                x = dist.tensor.distribute_tensor(x, p.device_mesh, p.placements)
            optimizer.state[p][key] = x


# ---------------------------------------------------------------------------------- checkpoints

def write(path, content, save):
    """Write a file by save(content, file). The file at `path` is always whole, the old or the new.
    """
    temporary = Path(f"{path}.tmp")
    try:
        with open(temporary, "wb") as file:
            save(content, file)
            file.flush()
            os.fsync(file.fileno())                    # a power cut must not leave an empty file
        os.replace(temporary, path)
    except (OSError, RuntimeError) as e:               # torch hides a full disk behind the latter
        temporary.unlink(missing_ok=True)
        sys.exit(f"error: {path} could not be written, it is as it was ({e.__context__ or e})")


def save_checkpoint(path, model, args, **more):
    """Write a checkpoint. If a weight is NaN, end the program instead.

    From a training loop of your own: save_checkpoint("mine.pt", model, get_args([...])), with the
    flags that say how it was made: --model and its sizes, --seq-len, --tokenizer, --data. more:
    what --resume needs; all other commands do without.
    """
    weights = {name: whole(W).cpu() for name, W in model.state_dict().items()}
    for name, W in weights.items():
        if W.isnan().any():
            sys.exit(f"error: {path} was not written: {name} has a NaN")
    contents = {"args": vars(args), "config": asdict(model.config),
                "source": source_of(model, args.model), "weights": weights, **more}
    if RANK == 0:
        write(path, contents, torch.save)


def read_checkpoint(path, *more):
    """The dict that save_checkpoint wrote. Nothing in it is executed. more: what must be in it."""
    try:
        ckpt = torch.load(path, "cpu", weights_only=True)
        needed = ("args", "config", "source", "weights", *more)
        return {name: ckpt[name] for name in needed} | ckpt
    except FileNotFoundError:
        sys.exit(f"error: {path} does not exist: train a model first, or name its ckpt.pt")
    except Exception:                                  # torch raises seven kinds of them
        sys.exit(f"error: {path} is damaged, or not a checkpoint of train.py")


def load_weights(model, ckpt):
    """Put the weights of a checkpoint into a model. If they do not fit, end the program."""
    try:
        model.load_state_dict(ckpt["weights"])
    except RuntimeError as e:
        reason = " ".join(str(e).split())
        sys.exit(f"error: the checkpoint does not fit the model that is built now: {reason}")


def load_checkpoint(path, device="cpu", dtype=None):
    """(model, tokenizer, dict) of a checkpoint; the model is in eval mode.

    dtype: for matrix products, such as torch.bfloat16. A line says if code was edited since.
    """
    ckpt = read_checkpoint(path)
    model = build_model(ckpt["args"]["model"], ckpt["config"], dtype)
    for name in edited(ckpt, source_of(model, ckpt["args"]["model"])):
        print(f"{path} was trained with another {name}.py", file=sys.stderr)
    load_weights(model, ckpt)
    model.to(device).eval()
    print(choose_screen(model), file=sys.stderr)
    return model, get_tokenizer(ckpt["args"]["tokenizer"]), ckpt


def require_same(ckpt, text, source):
    """End the program if a resumed run would read another text, or run other code."""
    undo = "undo this, or begin another run from the weights of this one, with --init and --out"
    for name in edited(ckpt, source):
        refuse(f"{name}.py was edited since the run began: {undo}")
    if ckpt["text"] != text:
        refuse(f"--data was {ckpt['text']} and is {text} now: {undo}")


def edited(ckpt, source):
    """The modules of a checkpoint whose code is another now."""
    return [name for name, text in ckpt["source"].items()
            if plain_code(text) != plain_code(source.get(name, ""))]


@cache
def plain_code(text):
    """Python code without its comments and docstrings: to change these is no edit."""
    tree, may_have_one = ast.parse(text), (ast.Module, ast.ClassDef, ast.FunctionDef)
    for part in ast.walk(tree):
        if isinstance(part, may_have_one) and ast.get_docstring(part) is not None:
            del part.body[0]
    return ast.unparse(tree)                           # ast.dump differs from Python to Python


def refuse(reason):
    """End the program as argparse does for a wrong flag."""
    print(f"error: {reason}", file=sys.stderr)
    sys.exit(2)


def source_of(model, name):
    """{module: text} of multiscreen.py, --model's module, and its layers' classes and bases."""
    classes = {base for part in (model, *model.layers) for base in type(part).__mro__}
    names = {"multiscreen", *(base.__module__ for base in classes)}
    if "." in name:                                    # it may name a function, not a class
        names.add(name.rpartition(".")[0])
    files = {name: getattr(sys.modules[name], "__file__", None) for name in sorted(names)}
    return {name: read_once(Path(file), "utf-8") for name, file in files.items()
            if file and not name.startswith("torch.")}


read_once = cache(Path.read_text)                      # a process runs the code that it began with


# ---------------------------------------------------------------------------------------- model

def named(name):
    """What MODULE.NAME names, in a file beside this one or in the current folder."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, SyntaxError, ValueError) as e:
        sys.exit(f"error: {name} is not found, as a file or MODULE.NAME: {e}")


def build_model(name, sizes, dtype=None):
    """The model that --model names, freshly initialised. sizes: the arguments of Config."""
    make = Multiscreen if name == "multiscreen" else named(name)
    if isinstance(make, type) and issubclass(make, GatedScreeningTiles):
        make = partial(Multiscreen, tiles=make)
    try:
        return make(Config(**sizes), None if dtype == torch.float32 else dtype)
    except ValueError as e:
        sys.exit(f"error: {e}")


def make_model(args, tokenizer, dtype=None):
    """The model of the flags, for a tokenizer's vocabulary."""
    # A field that you add to Config needs no flag: it has its default.
    sizes = {field.name: vars(args)[field.name] for field in fields(Config) if field.name in args}
    return build_model(args.model, sizes | {"vocab_size": tokenizer.n_vocab}, dtype)


@torch.no_grad()
def magnify(model):
    """Make a new model's layers accept more keys and add more to x, in place: faults then show."""
    for name, p in model.layers.named_parameters():
        if name.endswith(".s_r"):
            p.fill_(4.0)                               # r = 0.98
        elif p.ndim > 1:
            p.mul_(4.0)


@torch.no_grad()
def try_model(model, args):
    """Warn if losses see later tokens, or do not fit the logits of `forward`. Changes the model.

    A second pass changes tokens: in row 0 all after the first third, in row 1 the last one only.
    """
    choose_screen(model, args.kernel)
    magnify(model.eval())
    N, T, device = model.config.vocab_size, args.seq_len, model.W_E.device
    x, y = torch.randint(N, (2, 2, T), generator=torch.Generator().manual_seed(0)).to(device)
    kept = (torch.arange(T) < torch.tensor([[T // 3 + 1], [T - 1]])).to(device)
    nats = model.loss(x, y, "none")
    changes = (model.loss(torch.where(kept, x, (x + 1) % N), y, "none") - nats)[kept].abs()
    logits = model(x[:, :64]).float()
    errors = nats[:, :64] - F.cross_entropy(logits.mT, y[:, :64], reduction="none")
    largest, more = nats.abs().max(), "`python -m lab.check` with the flags of this run says more"
    if not changes.max() <= 1e-5 * largest:            # experts sum in an order of their own
        say(f"warning: losses change by {changes.max():.1g} nats with later tokens: does a layer "
            f"see them, or keep something of another pass? {more}")
    elif not errors.abs().max() <= 1e-4 * largest:
        say("warning: `loss` is not the cross-entropy of `forward` on the first 64 tokens: "
            f"{more}")


def choose_screen(model, kernel="auto"):
    """Let a model screen by a twin of multiscreen.screen, in place, if one can be used.

    Returns a line that says which screen runs. kernel: a module with a function `screen`, or
    `auto`. A twin repeats equations of multiscreen, and your edit of one must act. So a twin is
    used only if its numbers are those of the definition and its EQUATIONS, if it has any, are still
    the hash of these equations. Else `auto` falls back on the definition.
    """
    if not hasattr(model.layers[0], "s_w") or model.screen is not Multiscreen.screen:
        return "this model does not screen by multiscreen.screen"
    name, twins = kernel, {"cuda": "screening_triton", "cpu": "screening_cpu"}
    if kernel == "auto":
        name = twins.get(model.W_E.device.type, "multiscreen")
    if name == "multiscreen":
        return "layers are given multiscreen.screen, the definition"
    try:
        twin, equations = import_module(name), hash_of_equations()
        if getattr(twin, "EQUATIONS", equations) != equations:
            raise ValueError("an equation that it repeats was edited")
        if hasattr(twin, "prepare"):
            twin.prepare(model)                        # raises if it cannot run here
        try_screen(twin.screen, model)
        model.screen = twin.screen
        return f"layers are given {name}.screen"
    except Exception as e:
        if kernel != "auto":
            sys.exit(f"error: --kernel {kernel}: {e}")
        return f"layers are given multiscreen.screen, the definition, which is slow ({name}: {e})"


def hash_of_equations():
    """A hash of the functions that a twin of multiscreen.screen repeats."""
    functions = (multiscreen.trim, multiscreen.softmask, multiscreen.relevance, multiscreen.screen,
                 Multiscreen.screen, KeyCache.append)
    texts = [textwrap.dedent(inspect.getsource(inspect.unwrap(f))) for f in functions]
    code = "".join(plain_code(text) for text in texts)
    return hashlib.sha256(code.encode()).hexdigest()[:12]


@torch.enable_grad()
def try_screen(screen, model):
    """Raise ValueError unless a screen has the values and the gradients of the definition.

    One case: two sequences of 64 queries, a whole block, after 3,000 cached keys; windows from 1.5
    to infinite, so that each loop of a kernel runs.
    """
    device, c = model.W_E.device, model.config
    dtype, limit = (torch.float32, 1e-3) if model.dtype is None else (model.dtype, 2e-2)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 5, n, D, generator=generator)
               for n, D in ((64, c.d_K), (3064, c.d_K), (3064, c.d_V)))
    # A third of the keys point away: Trim keeps some and rejects others.
    q, k = q + 1, k + torch.where(torch.arange(3064) % 3 == 0, -1, 1)[:, None]
    w, r = torch.tensor([1.5, 17, 250, 2000, math.inf]), torch.tensor([0.5, 0.9, 0.7, 0.5, 0.3])
    inputs = [unit(q), unit(k), unit(v).to(dtype), w, r]

    def results(f):
        given = [x.to(device).detach().requires_grad_() for x in inputs]
        h = f(*given, 3000)
        return [h.detach(), *torch.autograd.grad(h.float().square().sum(), given)]

    names = ("h", "dq", "dk", "dv", "dw", "dr")
    for name, ours, right in zip(names, results(screen), results(multiscreen.screen)):
        # w and r of all tiles are compared together, other numbers tile by tile.
        axes = (0, 2, 3) if right.ndim == 4 else 0
        error = (ours.double() - right.double()).abs().amax(axes) / right.double().abs().amax(axes)
        if not error.max() <= limit:
            raise ValueError(f"{name} is off by {error.max():.1g} of its largest value")
    inputs[0][0, :, 5] = math.nan
    if not results(screen)[0].isnan().equal(results(multiscreen.screen)[0].isnan()):
        raise ValueError("NaN in a row of q must make that row of h NaN, and no other")


def compile_model(model):
    """torch.compile the head, `nats` and the layers (which share one graph), in place.

    Not the embedding: compiled, its gradient varies between runs. Without the option an angle, in
    float64, would be computed again for each number that it rotates.
    """
    options = {"options": {"realize_opcount_threshold": 12}}
    for layer in model.layers:
        layer.compile(**options)
    model.head, model.nats = (torch.compile(f, **options) for f in (model.head, model.nats))


# ----------------------------------------------------------------------------------------- data

def get_tokenizer(name):
    """`bytes`: 256 bytes and end-of-text; `gpt2`: GPT-2's BPE (the paper's), downloaded once."""
    if name == "bytes":
        ranks = {bytes([i]): i for i in range(256)}
        return tiktoken.Encoding("bytes", pat_str=r"(?s:.)", mergeable_ranks=ranks,
                                 special_tokens={"<|endoftext|>": 256})
    if name == "gpt2":
        return tiktoken.get_encoding(name)
    return named(name)


class Text:
    """Contiguous sequences of T + 1 tokens, T inputs and T targets, cut from arrays of tokens.

    data[n] is the n-th in the text, data.draw(n) the n-th in a random order. The order depends on
    the seed alone, so a resumed run goes on with what comes next.
    """
    state = None                                       # what a checkpoint keeps of a curriculum

    def __init__(self, arrays, args, n_vocab):
        self.T, self.seed, self.n_vocab, self.epoch = args.seq_len, args.seed, n_vocab, None
        # Texts are joined, so that short files lose no tokens; one .bin file stays on the disk.
        self.tokens = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        if len(self) == 0:
            sys.exit(f"error: {len(self.tokens)} tokens of --data or --val are fewer than one "
                     f"sequence of {self.T} + 1: use more text or a smaller --seq-len")

    def __len__(self):
        return max(len(self.tokens) - 1, 0) // self.T

    def __getitem__(self, n):
        tokens = self.tokens[n * self.T : (n + 1) * self.T + 1].astype(np.int64)
        if tokens.max() >= self.n_vocab:
            sys.exit(f"error: there is a token {tokens.max()}, but --tokenizer has {self.n_vocab}")
        return tokens

    def draw(self, n):
        epoch, n = divmod(n, len(self))
        if self.epoch != epoch:
            self.epoch = epoch
            self.order = np.random.default_rng([self.seed, epoch]).permutation(len(self))
        return self[self.order[n]]

    def observe(self, loss):
        """Called with the loss of each step, on the device. Returns whether training may end."""
        return False


def fingerprint(data):
    """Identifies data: the number of its sequences, and a checksum of 64 of them."""
    some = np.stack([data[n * len(data) // 64] for n in range(64)])
    return f"{len(data):,} sequences with checksum {zlib.crc32(some.tobytes()):08x}"


SUFFIXES = (".txt", ".md", ".py")                      # the files that a folder stands for


def files_of(names):
    """The files that --data names; for a folder all with SUFFIXES, in it and below."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    files = []
    for name in names:
        if name == "stdlib":
            files += [path for path in sorted(stdlib.rglob("*.py"))
                      if not skip & set(path.relative_to(stdlib).parts)]
        elif os.path.isdir(name):
            texts = [path for path in sorted(Path(name).rglob("*"))
                     if path.suffix.lower() in SUFFIXES]
            if not texts:
                sys.exit(f"error: {name} has no files {', '.join(SUFFIXES)}: name your files")
            files += texts
        else:
            files.append(Path(name))
    return files


def encode(text, tokenizer):
    """The tokens of a document, with end-of-text behind them."""
    if tokenizer.name == "bytes":                      # a byte is its own token
        tokens = np.frombuffer(text.encode(), np.uint8)
    else:
        tokens = np.array(tokenizer.encode_ordinary(text))
    dtype = dtype_of(tokenizer)
    return np.append(tokens.astype(dtype), dtype(tokenizer.eot_token))


def dtype_of(tokenizer):
    """The type of tokens in a .bin file: uint16, or uint32 for a vocabulary of more than 65,536."""
    return np.uint16 if tokenizer.n_vocab <= 2**16 else np.uint32


def read_file(path, tokenizer):
    """The tokens of a file: a text in UTF-8, or a .bin of nothing but tokens, left on the disk."""
    if path.suffix.lower() in (".json", ".jsonl", ".ndjson", ".parquet"):
        sys.exit(f"error: {path} is no plain text: python -m lab.prepare FOLDER {path} --tokenizer "
                 f"{tokenizer.name} makes .bin files of it")
    try:
        if path.suffix == ".bin":
            return np.memmap(path, dtype_of(tokenizer), "r")
        return encode(path.read_bytes().decode("utf-8-sig"), tokenizer)
    except UnicodeDecodeError:
        sys.exit(f"error: {path} is not UTF-8; iconv -f UTF-16 -t UTF-8 FILE > NEW converts UTF-16 "
                 "to it, and so on for other encodings")
    except (OSError, ValueError) as e:                 # not a whole number of tokens
        sys.exit(f"error: {path}: {e}")


def get_data(args, tokenizer):
    """(training data, validation data) of the flags.

    Validation data is --val, else every twentieth file, if there are 20; else the end of each file:
    a twentieth, or one sequence if that is more, but at most half.
    """
    if args.data != ["stdlib"] and not any(map(os.path.exists, args.data)):
        make = named("abcdigits.Documents" if args.data == ["abcdigits"] else args.data[0])
        return make(args, tokenizer, "train"), make(args, tokenizer, "val")
    arrays = [read_file(path, tokenizer) for path in files_of(args.data)]
    if args.val:
        val = [read_file(path, tokenizer) for path in files_of(args.val)]
    elif len(arrays) >= 20:
        val = arrays[19::20]
        del arrays[19::20]
    else:
        cuts = [len(x) - max(len(x) // 20, min(args.seq_len + 1, len(x) // 2)) for x in arrays]
        val = [x[cut:] for x, cut in zip(arrays, cuts)]
        arrays = [x[:cut] for x, cut in zip(arrays, cuts)]
    return Text(arrays, args, tokenizer.n_vocab), Text(val, args, tokenizer.n_vocab)


# ---------------------------------------------------------------------------------------- flags

# --resume restores flags that you leave out, except OF_A_COMMAND. You may change those in FREE; the
# others are the run's recipe. --init restores OF_A_MODEL alone, and you may change them.
OF_A_COMMAND = ("device", "out", "resume", "force")
FREE = (*OF_A_COMMAND, "steps", "batch_size", "log_every", "eval_every", "kernel", "compile")
OF_A_MODEL = ("model", "tokenizer", *(field.name for field in fields(Config)))


def get_parser():
    p = argparse.ArgumentParser(description=__doc__, allow_abbrev=False,
                                formatter_class=argparse.RawDescriptionHelpFormatter)

    def flag(name, default, help, type=None, **options):
        shown = "" if default is None else f" [{default}]"
        p.add_argument(name, default=default, type=type or default.__class__, help=help + shown,
                       **options)

    def positive(text):
        if int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text}; expected at least 1")
        return int(text)

    flag("--model", "multiscreen", "multiscreen, or MODULE.NAME")
    flag("--psi", 8, "size: psi layers of psi tiles, width psi^2 (paper: 8, 16, 32, 48, 64)")
    flag("--layers", None, "number of layers [psi]", int, dest="N_L")
    flag("--tiles", None, "tiles in a layer [psi]", int, dest="N_H")
    flag("--d-E", None, "width of the model [psi^2]", int)
    flag("--d-K", 16, "dimensions of a query and a key")
    flag("--d-V", 64, "dimensions of a value")
    flag("--w-th", 256.0, "windows start at 2 to w_th + 1 tokens; MiPE acts on those below w_th")
    flag("--data", ["stdlib"], "texts, folders, .bin files, stdlib, abcdigits, or MODULE.NAME",
         str, nargs="+")
    flag("--val", None, "validation texts [a twentieth of --data, held out]", str, nargs="+")
    flag("--tokenizer", "bytes", "bytes, gpt2 (the paper's), or MODULE.NAME")
    flag("--seq-len", 256, "tokens in a sequence (paper: 4096)", positive)
    flag("--batch-size", 8, "sequences per forward pass, in each process", positive)
    flag("--batch-tokens", None, "tokens per step (paper: 2^22) [those of one pass]", positive)
    flag("--steps", 620, "optimizer steps (paper: 2^16)", positive)
    flag("--warmup", 50, "steps of linear warm-up to a constant learning rate (paper: 4096)")
    flag("--lr", 2**-4, "learning rate")
    flag("--weight-decay", 0.0, "AdamW's weight decay, for matrices")
    flag("--clip", 0.0, "largest gradient norm, 0 for none")
    flag("--seed", 0, "seed of the initial weights and of the order of the data")
    flag("--device", "cuda" if torch.cuda.is_available() else "cpu", "what to train on",
         choices=("cpu", "cuda", "mps"))
    bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    flag("--dtype", "bfloat16" if bf16 else "float32", "for products",
         choices=("float32", "bfloat16"))
    flag("--kernel", "auto", "the module whose `screen` to use; multiscreen has the definition")
    flag("--log-every", 10, "steps between printed lines", positive)
    flag("--eval-every", 250, "steps between evaluations and checkpoints", positive)
    flag("--init", None, "a checkpoint to take model, tokenizer and weights from", str)
    flag("--out", "out", "the run's folder")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction,
                   help="torch.compile the model [on a CUDA GPU]")
    p.add_argument("--force", action="store_true", help="overwrite the run in OUT")
    p.add_argument("--resume", action="store_true", help="continue the run in OUT, or begin it; "
                   "flags that you leave out stay as they were")
    return p


def get_args(argv=None, ckpt=None):
    """The flags of a run: those typed, else the checkpoint's, the model's recipe, the default.

    ckpt: that of the run to go on with.
    """
    p = get_parser()
    args, kept = p.parse_args(argv), {}
    if ckpt:
        kept = {name: x for name, x in ckpt["args"].items() if name not in OF_A_COMMAND}
    elif args.init:
        kept = {name: x for name, x in read_checkpoint(args.init)["args"].items()
                if name in OF_A_MODEL}
    # argparse leaves alone what stands in the namespace, unless it is typed.
    args = p.parse_args(argv, argparse.Namespace(**kept))
    if args.model != "multiscreen":
        recipe = getattr(named(args.model), "recipe", {})
        words = [f"--{flag.replace('_', '-')}={x}" for flag, x in recipe.items()]
        defaults = vars(p.parse_args(words))
        args = p.parse_args(argv, argparse.Namespace(**defaults | kept))

    # The run may go on from another folder, so a file gets its whole path.
    args.data = [os.path.abspath(name) if os.path.exists(name) else name for name in args.data]
    if args.val:
        args.val = [os.path.abspath(name) for name in args.val]

    for action in p._actions:
        flag, name = action.option_strings[0], action.dest
        if ckpt and name in kept and name not in FREE and vars(args)[name] != kept[name]:
            refuse(f"{flag} was {kept[name]} and is {vars(args)[name]} now: a run has one recipe; "
                   "leave it out, or begin another run in another --out")
    one_pass = args.batch_size * args.seq_len * WORLD
    if args.batch_tokens is None:
        args.batch_tokens = one_pass
    if args.batch_tokens % one_pass != 0:
        refuse(f"--batch-tokens is {args.batch_tokens}; expected a multiple of {one_pass}, the "
               "tokens of one pass of all processes")
    return args


def main(argv=None):
    if WORLD > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if RANK > 0:
        sys.stdout = open(os.devnull, "w")
    typed, ckpt, stop = get_parser().parse_args(argv), None, []
    path = Path(typed.out, "ckpt.pt")
    if path.exists() and typed.resume:                 # without a run --resume begins one
        ckpt = read_checkpoint(path, "optimizer")      # a loop of your own saves no moments
    elif path.exists() and not typed.force:
        sys.exit(f"error: {typed.out} holds a run: --resume continues it, --force overwrites it, "
                 "another --out begins a new one")
    args = get_args(argv, ckpt)

    def note(number, frame):
        """Ask the run to stop. A second time ends the process at once, without a checkpoint."""
        stop.append(number)
        if WORLD == 1:                                 # torchrun repeats signals itself
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    finished = train(args, ckpt, stop)
    if WORLD > 1:
        dist.destroy_process_group()
    if not finished:
        print(f"stopped, saved {path}; to go on, repeat the command with --resume",
              file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    try:
        main()
    except OSError as e:
        sys.exit(f"error: {e}")

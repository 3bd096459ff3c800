"""Train a Multiscreen model on any text, or on endless documents of ABCDigits or passkey.

    python train.py --psi 8                          the source of Python's own standard library
    python train.py --data books/ --tokenizer gpt2   text, folders, .bin token files
    python train.py --resume --steps 1240            continue the run in out/, for longer
    torchrun --nproc_per_node 8 train.py ...         the same on 8 GPUs

Rerun a command to resume it; once the run is finished, the command says so.

The recipe is the paper's: AdamW with betas (0.9, 0.95), no weight decay, no clipping, a linear
warm-up to a constant learning rate of 2^-4; documents joined by end-of-text, cut into contiguous
sequences, drawn at random without replacement. The sizes are a laptop's.

A printed line: step, loss (nats per token), learning rate, gradient norm before clipping, the
smallest, median and largest window, milliseconds per step, tokens per second, time left.
"""
import math
import time
from argparse import BooleanOptionalAction

import torch

from baselines import BLOCKS, count_parameters
from baselines.ablations import TILES
from baselines.transformer import SIZES
from support import distributed as dist  # without torchrun it does nothing
from support.checkpoint import (
    SIZE_FLAGS,
    build_model,
    has_windows,
    load_checkpoint,  # noqa: F401 (train.load_checkpoint is promised to users)
    load_weights,
)
from support.choose import get_screen, require_memory
from support.cli import Parser, cli, get_device, printable, products_dtype
from support.compiled import try_to_compile
from support.data import get_data, is_stream
from support.maps import alive_fraction
from support.run import Run, passes_of
from support.tokens import get_tokenizer
from tasks import get_stream

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
    flag("--steps", 620, "optimizer steps; at most, for abcdigits and passkey (paper: 2^16)")
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
                       help="continue from OUT/ckpt.pt, with its flags unless given anew")
    group.add_argument("--force", action="store_true", help="overwrite the run in OUT")
    return p


# ------------------------------------------------------------------------------ evaluation

@torch.no_grad()
def evaluate(model, train_data, val_data, args, tokenizer):
    """A row of the log, in eval mode: nats per token, bits per byte, the share of alive pairs.

    Losses over 256 sequences, spread evenly over the validation data; alive pairs among the first
    512 tokens of one. A task adds columns of its own, over 64 documents.
    """
    model.eval()
    device = model.W_E.device
    nats = n_tokens = n_bytes = 0
    for x, count in dist.batches(val_data, val_data.spread(256), args.batch_size):
        # The first `count` sequences count. The rest keep a process busy that has too few.
        x = x.to(device)
        nats += model.loss(x[:, :-1], x[:, 1:], "none")[:count].cpu().double().sum().item()
        targets = x[:count, 1:].flatten().tolist()
        text = [t for t in targets if t != tokenizer.eot_token]
        n_tokens += len(targets)
        n_bytes += len(tokenizer.decode_bytes(text))
    nats, n_tokens, n_bytes = dist.total(nats, n_tokens, n_bytes)
    row = {"val_loss": nats / n_tokens, "val_bpb": nats / math.log(2) / max(n_bytes, 1)}

    # Transformers have no relevance maps, nor do layers that do not call their `screen`.
    if getattr(model, "has_maps", False):
        tokens = torch.from_numpy(val_data[0][:-1][:512])[None].to(device)
        row["alive"] = alive_fraction(model, tokens)

    # The task's state, such as how much help it still gives, is that of the training data.
    documents = dist.batches(val_data, val_data.spread(64), args.batch_size)
    row |= train_data.extra_columns(model, documents)
    model.train()
    return row


@torch.no_grad()
def describe(model):
    """More columns of the log: the smallest, median and largest window of a model that has some."""
    if not has_windows(model):
        return {}
    w = torch.cat([dist.full(layer.reach()) for layer in model.layers])
    return {"w_min": w.min().item(), "w_median": w.median().item(), "w_max": w.max().item()}


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
    n_passes = passes_of(args)
    losses = []
    for n in range(n_passes):
        first = drawn + n * args.batch_size * dist.world()
        x = dist.draw(data, first, args, model.W_E.device)
        # Processes average their gradients in the last pass; until then each adds up its own.
        dist.average_gradients(model, n == n_passes - 1)
        loss = model.loss(x[:, :-1], x[:, 1:]) / n_passes
        loss.backward()
        losses.append(loss.detach())
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip or math.inf)

    # One transfer for all numbers, since each makes the CPU wait for the GPU.
    *losses, norm = torch.stack((*losses, dist.full(norm))).tolist()
    loss, = dist.total(sum(losses) / dist.world())
    return loss, norm


def train(args, run):
    # The data: text, or the documents of a task.
    tokenizer = get_tokenizer(args.tokenizer)
    if is_stream(args.data):
        train_data, val_data = get_stream(args, tokenizer)
    else:
        train_data, val_data = get_data(args, tokenizer, run.files)
    print(f"{' '.join(args.data)}: {train_data} of {args.seq_len} tokens; {args.steps} steps of "
          f"{args.batch_tokens:,} tokens")

    # The flags that are given set the model's sizes.
    flags = {field: getattr(args, name) for name, field in SIZE_FLAGS.items()}
    sizes = {field: size for field, size in flags.items() if size is not None}
    sizes["vocab_size"] = tokenizer.n_vocab

    # The model, new or with the sizes and weights of a checkpoint: of this run, or of --init.
    device = get_device(dist.own_device(args.device))
    dtypes = {"auto": products_dtype(device), "float32": None, "bfloat16": torch.bfloat16}
    dtype = dtypes[args.dtype]
    torch.manual_seed(args.seed)
    if run.initial:
        sizes = run.initial["config"]
    model = build_model(args.model, sizes, dtype).to(device)
    if run.initial:
        load_weights(model, run.initial["weights"], run.path if run.ckpt else args.init)

    # What screens, and what saves memory or time.
    if has_windows(model):
        model.screen, line, _ = get_screen(model, args.kernel)
        print(line)
        require_memory(model, args.batch_size, args.seq_len, args.recompute)
    if args.recompute:
        dist.recompute(model)
    if line := try_to_compile(model, args.compile, args.batch_size, args.seq_len):
        print(line)

    # Count before `distribute`: after it a process may hold only a part.
    parameters, non_embedding = count_parameters(model)
    dist.distribute(model, args.shard, device)
    where = f"{device} in {dist.world()} processes" if dist.world() > 1 else device
    print(f"{args.model}, {parameters:,} parameters ({non_embedding:,} non-embedding), {where}, "
          f"{'bfloat16' if dtype else 'float32'}")

    # The optimizer. Weight decay is for matrices only.
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": args.weight_decay},
              {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)

    # Where the run stands, new or resumed: steps done, sequences drawn.
    step, drawn = run.begin(model, optimizer, train_data, parameters)
    per_step = args.batch_tokens // args.seq_len       # sequences

    last = stopping = False
    while not last and not stopping:
        began = time.perf_counter()
        lr = set_rate(optimizer, args, step)
        loss, norm = train_step(model, train_data, args, drawn)
        step, drawn = step + 1, drawn + per_step
        run.check(step, loss=loss, grad_norm=norm)     # before a weight changes
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        train_data.observe(loss, per_step)             # a task gets harder as it is learned
        last = step == args.steps or train_data.learned
        seconds = time.perf_counter() - began

        if last or step == 1 or step % args.log_every == 0:
            run.log(step, loss=loss, lr=lr, grad_norm=norm, **describe(model), ms=1e3 * seconds,
                    tokens_per_s=args.batch_tokens / seconds)
        if last or step % args.eval_every == 0:
            run.log(step, **evaluate(model, train_data, val_data, args, tokenizer))
        stopping = run.told_to_stop()
        if last or stopping or step % args.save_every == 0:
            run.save(model, optimizer, step, drawn, train_data)
    # Told to stop: all work is saved, and the exit code is 130.
    if not last:
        raise run.interrupt(step)

    # A sample, where one process holds the model.
    if dist.world() == 1:
        prompt = torch.from_numpy(val_data[0][:32])[None].to(device)
        generator = torch.Generator(device).manual_seed(0)
        answer = model.eval().generate(prompt, 256, temperature=0.7, generator=generator)
        text = tokenizer.decode(torch.cat([prompt, answer], 1)[0].tolist())
        print(f"a sample, after its first 32 tokens:\n{printable(text)}")
    print(f"next: {next_command(args, run.path)}")


def next_command(args, path):
    """What to do with a trained model."""
    if args.data == ["abcdigits"]:
        return f"python abcdigits.py --ckpt {path}"
    if args.data == ["passkey"]:
        return f"python -m experiments.passkey --ckpt {path}"
    return (f"python -m experiments.sample --ckpt {path}, python -m experiments.tiles --ckpt "
            f"{path}, python -m experiments.compare {path.parent}")


def main(argv=None):
    dist.join()
    with Run(get_parser(), argv) as run:
        if not run.finished:
            train(run.args, run)
    dist.wait()


if __name__ == "__main__":
    cli(main)

"""Retrieval on a grid, depth by length: the flags, the measurement, the table as text."""
import statistics
from typing import NamedTuple

from support.checkpoint import load_for_evaluation, model_hash, rope_factor, scale_rope
from support.cli import Parser, UsageError
from support.table import RUN, Progress, Table, beside, describe_run, print_table

CELL = ("length", "depth", "factor", "swe", "trials")


def get_parser(doc):
    """The flags of a retrieval benchmark."""
    p = Parser(doc)
    p.add_argument("--lengths", type=int, nargs="+", help="context lengths in tokens (paper: 2^12 "
                   ".. 2^17) [1, 2, 4 .. 32 times the training length]")
    p.add_argument("--depths", type=float, nargs="+", default=[0.1, 0.3, 0.5, 0.7, 0.9],
                   help="where the needle is: 0 first, 1 last [.1 .3 .5 .7 .9]")
    p.add_argument("--trials", type=int,
                   help="prompts in a cell (paper: 1000) [10 on a CPU, 1000 on a GPU]")
    p.add_argument("--swe", action="store_true",
                   help="screening-window expansion: windows beyond the training length become "
                   "infinite")
    p.add_argument("--rope-scale", type=rope_factor, nargs="+", default=[],
                   help="for models with RoPE: scaling factors of the positions, or of theta, as "
                   "ntk4; in each cell the best one counts (paper: 1 2 4 .. 64)")
    p.add_shared("--ckpt", "--device")
    return p


def measure_grid(args, name, get_task, exact_matches):
    """Fill NAME.tsv beside the checkpoint, lengths x depths x factors, and print the cells.

    get_task(count_tokens, ckpt) -> (columns of its own, get_prompts); get_prompts(length, depth,
    trials) -> (prompts, answers), or UsageError for a short length; exact_matches: abcdigits.py's.
    """
    model, tokenizer, ckpt = load_for_evaluation(args.ckpt, args.device, args.swe)
    own, get_prompts = get_task(lambda text: len(tokenizer.encode_ordinary(text)), ckpt)
    trials, T_train = args.trials, ckpt["args"]["seq_len"]
    if trials is None:
        trials = 1000 if args.device.startswith("cuda") else 10
    lengths = args.lengths or possible_lengths(get_prompts, T_train)

    # Refuse what cannot be done before any work.
    if max(lengths) > 2**24:
        raise UsageError(f"--lengths {max(lengths)}: at most 2^24 tokens")
    for depth in args.depths:
        get_prompts(min(lengths), depth, min(trials, 1))
    for factor in args.rope_scale:
        scale_rope(model, factor)

    run = describe_run(ckpt) | own | {"swe": args.swe, "trials": trials}
    cells = [run | {"length": length, "depth": depth, "factor": factor} for length in lengths
             for depth in args.depths for factor in args.rope_scale or [None]]
    table = Table(beside(args.ckpt, f"{name}.tsv"), (*RUN, *own, *CELL), ["accuracy"],
                  model_hash(ckpt))
    missing = table.missing(cells)
    progress = Progress(sum(cell["length"] for cell in missing))
    with table.measuring():
        for cell in missing:
            length, depth, factor = cell["length"], cell["depth"], cell["factor"]
            if factor:
                scale_rope(model, factor)
            prompts, answers = get_prompts(length, depth, trials)
            accuracy = statistics.mean(exact_matches(model, tokenizer, prompts, answers))
            table.add(cell, accuracy=accuracy)
            words = f"length {length:>7} depth {depth:g}{f' x{factor}' if factor else ''}"
            progress.add(length, f"{words}: {accuracy:6.1%}")

    words = [name, *(f"{x} {what}" for what, x in own.items()), *["expanded windows"] * args.swe]
    title = (f"{', '.join(words)}, {trials} trials in a cell: accuracy by depth and length, in "
             f"tokens ([{T_train}]: the training length)"
             f"{', x the best RoPE scaling, ntk: of theta' * bool(args.rope_scale)}; {table.path}")
    print_table(*as_grid(get_cells(table.rows_of(cells)), T_train), title)


def possible_lengths(get_prompts, T_train):
    """1, 2, 4 .. 32 times the training length, without those that are too short for a prompt."""
    lengths = []
    for length in (T_train * 2**n for n in range(6)):
        try:
            get_prompts(length, 0.5, 1)
        except UsageError:
            continue
        lengths.append(length)
    if not lengths:
        raise UsageError(f"no prompt has {length} tokens or fewer: give longer --lengths")
    return lengths


# ------------------------------------------------------------------------------------- cells

class Cell(NamedTuple):
    """The share of right answers and the number of prompts by seed; the RoPE factor, or None."""
    shares: dict
    prompts: dict
    factor: str = None

    @property
    def mean(self):
        return statistics.mean(self.shares.values())


def get_cells(rows):
    """{(length, depth): Cell} of the rows of one model.

    For each seed the measurement with the most prompts counts. Of the RoPE factors, the one with
    the best mean over the seeds counts; of several, the smallest.
    """
    found = {}
    for row in sorted(rows, key=lambda row: int(row["trials"])):
        by_factor = found.setdefault((int(row["length"]), float(row["depth"])), {})
        factor = row["factor"] or None
        cell = by_factor.setdefault(factor, Cell({}, {}, factor))
        cell.shares[row["seed"]] = float(row["accuracy"])
        cell.prompts[row["seed"]] = int(row["trials"])
    cells = {}
    for place, by_factor in sorted(found.items()):
        candidates = sorted(by_factor.values(), key=lambda cell: size_of(cell.factor))
        cells[place] = max(candidates, key=lambda cell: (len(cell.shares), cell.mean))
    return cells


def size_of(factor):
    """For sorting: "2", "4", "ntk2", "ntk4"; None is first."""
    return (0, 0.0) if factor is None else (
        factor.startswith("ntk"), float(factor.removeprefix("ntk")))


def mean_by_length(cells):
    """{length: {seed: mean share over the depths}}

    Seeds measured at fewer depths than others are left out: their mean covers other cells.
    """
    columns = {}
    for (length, _), cell in cells.items():
        for seed, share in cell.shares.items():
            columns.setdefault(length, {}).setdefault(seed, []).append(share)
    return {length: {seed: statistics.mean(shares) for seed, shares in column.items()
                     if len(shares) == max(map(len, column.values()))}
            for length, column in columns.items()}


def as_grid(cells, T_train):
    """(columns, rows): the cells by depth and length, and their means over the depths."""
    def show(cell):
        if cell.factor is None:
            return f"{cell.mean:.1%}"
        return "--" if cell.mean == 0 else f"{cell.mean:.1%} x{cell.factor}"

    lengths, depths = (sorted(set(x)) for x in zip(*cells))
    columns = ["depth", *(f"[{n}]" if n == T_train else str(n) for n in lengths)]
    rows = [[d, *(show(cells[n, d]) for n in lengths)] for d in depths]
    means = mean_by_length(cells)
    rows.append(["mean", *(f"{statistics.mean(means[n].values()):.1%}" for n in lengths)])
    return columns, rows

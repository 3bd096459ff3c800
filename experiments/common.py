"""Shared by the experiments: runs of train.py, tables, figures, progress."""
import math
import statistics
from pathlib import Path
from typing import NamedTuple

from experiments.style import ABLATIONS, SETTINGS, label_models, variant_of
from support.cli import Parser, UsageError, own_folder, replacing
from support.table import (
    RANGES,
    WHOLE,
    cell_text,
    how_trained,
    is_right,
    keep_rows,
    print_table,
    read_file,
    read_rows,
    read_tables,
    write_rows,
)

# What a table says about each run: flags of train.py, the number of weights, the equations' hash.
FACTS = ("model", "psi", "w_th", "parameters", "data", "tokenizer", "seq_len", "batch_tokens",
         "steps", "warmup", "lr", "weight_decay", "clip", "init_weights", "changes", "equations",
         "seed", "val_loss")
# Losses are compared only between runs that agree in these.
BUDGET = ("data", "tokenizer", "seq_len", "batch_tokens", "steps")
VOCABULARY = {"bytes": 257, "gpt2": 50257}


# ------------------------------------------------------------------------------------ runs

class Run(NamedTuple):
    """A run of train.py. flags: text by name; rows: of its log; loss: NaN if it diverged."""
    folder: Path
    flags: dict
    rows: list
    loss: float


def read_run(folder):
    """The Run in a folder that train.py wrote; its loss is the last validation loss."""
    folder = Path(folder)
    if not (folder / "log.tsv").exists() or not (folder / "flags.txt").exists():
        raise UsageError(f"{folder} holds no run: train one, python train.py --out {folder}")
    text = (folder / "flags.txt").read_text(encoding="utf-8", errors="replace")
    flags = dict(line.partition("\t")[::2] for line in text.splitlines())
    wrong = [x for x in FACTS[:-1] if x not in flags or not is_right(x, flags[x], FACTS)
             or not flags[x] and x not in ("init_weights", "changes")]
    if wrong:
        raise UsageError(f"{folder / 'flags.txt'} is damaged: {', '.join(wrong)}")
    rows = [{name: float(x) for name, x in row.items() if x and name in RANGES | WHOLE}
            for row in read_file(folder / "log.tsv")[0]]
    if rows and "step" not in rows[0]:
        raise UsageError(f"{folder / 'log.tsv'} is not a log of train.py")
    return Run(folder, flags, rows, final_loss(rows, (folder / "diverged.txt").exists()))


def final_loss(rows, diverged):
    """The last validation loss of a log, nats per token, or NaN if the run diverged.

    Diverged: train.py stopped it, or it ended more than half a nat above its first loss, or above
    the least mean over an eighth of the logged rows.
    """
    losses = [row["loss"] for row in rows if "loss" in row]
    if diverged or not losses:
        return math.nan
    n = max(len(losses) // 8, 1)
    best = min(losses[0], *(sum(losses[i : i + n]) / n for i in range(len(losses) - n + 1)))
    last = ([row["val_loss"] for row in rows if "val_loss" in row] or losses)[-1]
    return last if last <= best + 0.5 else math.nan


def summarize_run(folder):
    """A finished run as a row of FACTS, all text."""
    run = read_run(folder)
    flags, stopped = run.flags, (run.folder / "diverged.txt").exists()
    step = max((row["step"] for row in run.rows), default=0)
    if not stopped and step < int(flags["steps"]):
        raise UsageError(f"{folder} is at step {step:g} of {flags['steps']}: give its command "
                         "again, and it continues")
    if not stopped and not any("val_loss" in row for row in run.rows):
        raise UsageError(f"{folder / 'log.tsv'} has no validation loss")
    if flags["model"].startswith("transformer"):
        flags = flags | {"psi": "-", "w_th": "-"}
    # Two folders may have one name.
    own = flags["data"] not in ("stdlib", "abcdigits", "passkey")
    known = flags | {"val_loss": f"{run.loss:.6g}"}
    known["data"] += f" {flags['corpus'][:8]}" * own
    return {name: known[name] for name in FACTS}


def read_runs(paths):
    """Rows of FACTS: from folders of runs, and from tables of such rows. Without duplicates.

    Raises UsageError if they differ in what makes losses comparable.
    """
    runs = {}
    for path in map(Path, paths):
        found = read_rows(path, FACTS) if path.suffix == ".tsv" else [summarize_run(path)]
        runs |= {tuple(run[name] for name in FACTS[:-1]): run for run in found}
    if not runs:
        raise UsageError(f"no run in {', '.join(map(str, paths))}")
    for name in BUDGET:
        values = sorted({run[name] for run in runs.values()})
        if len(values) != 1:
            raise UsageError(f"the runs differ in {name} ({', '.join(values)}): draw them "
                             "separately")
    return list(runs.values())


def keep_runs(args, name):
    """Read the runs of the command line, and write them to NAME.tsv in --out."""
    runs = read_runs(args.runs)
    keep_rows(args.out / f"{name}.tsv", runs)
    return runs


def group_runs(runs, *names):
    """{values of the columns `names`: {seed: loss}}. Other columns must not differ."""
    groups = {}
    for run in runs:
        groups.setdefault(tuple(run[name] for name in names), []).append(run)
    for key, found in groups.items():
        for name in FACTS[:-2]:
            if len({(run | how_trained(run))[name] for run in found}) > 1:
                raise UsageError(f"runs of {', '.join(key)} differ in {name}: draw them separately")
    return {key: {run["seed"]: float(run["val_loss"]) for run in found}
            for key, found in groups.items()}


def runs_parser(description, runs="folders of train.py, or a table of runs that this script wrote"):
    """The flags of a script that draws from runs."""
    p = Parser(description)
    p.add_argument("runs", nargs="+", metavar="RUN", help=runs)
    p.add_argument("--out", type=own_folder, default=Path("out"),
                   help="folder for the results [out]")
    return p


# ---------------------------------------------------------------------------------- tables

def report(path, columns, rows, title):
    """Print rows as a table and write them to `path` as TSV. None and NaN are shown as -."""
    print_table(columns, rows, title)
    if path.exists():
        read_file(path, columns)                       # refuses a table of something else
    write_rows(path, [dict(zip(columns, map(cell_text, row))) for row in rows])
    print(f"wrote {path}")


def mean_and_std(losses):
    """(mean, standard deviation, number of NaNs) of losses. A NaN counts only in the last."""
    good = [x for x in losses if not math.isnan(x)]
    mean = statistics.mean(good) if good else math.nan
    std = statistics.stdev(good) if len(good) > 1 else math.nan
    return mean, std, len(losses) - len(good)


def paired_change(losses, original):
    """(mean, standard deviation) of losses - original, by seed, over the seeds that both have.

    Runs of one seed see equal data in equal order.
    """
    changes = [losses[seed] - original[seed] for seed in losses.keys() & original.keys()]
    return mean_and_std(changes)[:2]


def with_deviation(row):
    """A row of latency.tsv with the mean of its times as `ms`, and their `std`; NaN for one."""
    mean, std, _ = mean_and_std([float(ms) for ms in row["ms"].split()])
    return row | {"ms": mean, "std": std}


def signed(x):
    """A difference as a cell of a table; NaN stays NaN."""
    return x if math.isnan(x) else f"{x:+.4f}"


# --------------------------------------------------------------------------------- figures

def pyplot():
    """matplotlib.pyplot without a window, or None after one line that says how to get it."""
    try:
        import matplotlib
    except ImportError:
        print("no figure: `pip install matplotlib` and run this again to draw it")
        return None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update(SETTINGS)
    return plt


def save_figure(fig, path):
    """Write a figure as PNG, 150 dots per inch."""
    with replacing(path) as file:
        fig.savefig(file, format="png", dpi=150, bbox_inches="tight")
    print(f"wrote {path}")


# ------------------------------------------------------------- figures of tables of measurements

def get_figure(description, value):
    """(rows to draw, path of the figure, {(model, parameters): label}) by the command line.

    value: the column that was measured. Beside ablations the plain Multiscreen is "Original". With
    --out the rows are kept beside the figure.
    """
    p = Parser(description)
    p.add_argument("tables", nargs="+", metavar="TSV",
                   help="tables of measurements, also with a label: mine=out/table.tsv")
    p.add_argument("--out", type=Path, help="path of the figure, .png; its rows are written beside "
                   "it as .tsv [beside the first table]")
    args = p.parse_args()
    if args.out and args.out.suffix != ".png":
        raise UsageError(f"--out {args.out}: name a figure, .png")
    rows = read_tables(args.tables, value)
    first = args.tables[0] if Path(args.tables[0]).exists() else args.tables[0].partition("=")[2]
    out = args.out or Path(first).with_suffix(".png")
    models = {(row["model"], int(row["parameters"])) for row in rows}
    labels = {(name, str(n)): label for (name, n), label in label_models(models).items()}
    if any(variant_of(name) in ABLATIONS for name, _ in models):
        known = {f"multiscreen:{variant}": label for variant, label in ABLATIONS.items()}
        known["multiscreen"] = "Original"
        labels = {(name, n): known.get(name, label) for (name, n), label in labels.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    if args.out:
        keep_rows(out.with_suffix(".tsv"), rows)
    return rows, out, labels

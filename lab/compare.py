"""Which run is better, by how much, and what differs between them?

    python -m lab.compare out my=out-edit
    python -m lab.compare 'out/idea/original-*' 'out/idea/mine-*'
    python -m lab.compare 'Ours=out/m_lr*' 'Theirs=out/t_lr*' --by lr --table out/rates.tsv

A RUN is a folder that train.py has written, or a table that this command has written with --table,
which has a row for each run. Runs with the same label form a group, whose runs may differ only in
their seed, and with --by in that flag. Without a label, the name of the folder counts, without the
seed at its end. All runs must have read the same text. The columns are:

seeds           the seeds that are in the mean: how many, and which
diverged        those that are in none. A run has diverged if train.py stopped it, or if both its
                validation loss and its training loss are higher at the end than they were at the
                first evaluation
val_loss, std   the mean validation loss and its standard deviation over the seeds, at the last step
                at which all runs were evaluated
pairs           the seeds that both this group and the first one have: runs with the same seed see
                the same data in the same order
change, ± std   the difference from the first group, averaged over the pairs, and its deviation
t95             half the 95 % interval of the change, by Student's t. If it is larger than the
                change, no difference is shown: other seeds may well turn it around. With three
                seeds it is 2.48 times the deviation
grad            the median gradient norm of the second half of the steps until then
spikes          logged losses more than 5 standard deviations above the mean of the ten before
                (--before)
alive, w_max    at that step: the share of the pairs in the windows whose relevance is above 0, and
                the largest window
tokens_per_s    compare them only if each run had a machine to itself

Below the table you find what each change says in words, and the flags, and the lines of code, in
which the groups differ.
`python -m lab.figures logs` and `losses` draw runs.
"""
import difflib
import math
from pathlib import Path

from support.cli import Parser, at_least, cli
from lab.alike import FACTS, flags_that_differ, group_runs, mean_and_std, seeds_in_words
from lab.paired import difference
from lab.runs import last_common_step, read_runs, row_of_run
from support.tables import print_table, write_table


def compare(runs, by=None):
    """(a row for each group, {its name: its runs}, the step at which they are compared)"""
    groups, step = group_runs(runs, by), last_common_step(runs)
    rows = []
    for name, group in groups.items():
        losses = losses_of(group, step)
        first = [run for run in runs if run.label == runs[0].label
                 and run.flags.get(by) == group[0].flags.get(by)]
        change = difference(losses, {} if first == group else losses_of(first, step))
        loss, std = mean_and_std(losses.values())
        row = {"run": name, "seeds": seeds_in_words(losses),
               "diverged": seeds_in_words(run.seed for run in group if run.diverged),
               "parameters": group[0].flags["parameters"], "val_loss": loss, "std": std,
               "pairs": None if first == group else seeds_in_words(change.seeds),
               "change": change.mean, "± std": change.std, "t95": change.t95}
        known = [run.facts_at(step) for run in group if not run.diverged]
        for fact in FACTS:                             # old tables have those of one seed
            row[fact], _ = mean_and_std([x[fact] for x in known if not math.isnan(x[fact])])
        rows.append(row)
    return rows, groups, step


def losses_of(runs, step):
    """{seed: loss after a step} of the runs that did not diverge."""
    return {run.seed: run.loss(step) for run in runs if not run.diverged}


def print_rows(rows, runs, step):
    first = runs[0].label
    print_table(rows, f"Validation loss after {step} steps, nats per token; change: against "
                f"{first}, by seed")
    changed = [row for row in rows if not math.isnan(row["t95"])]
    if len(changed) > 1:
        print("each interval is of one comparison by itself, not corrected for their number")
    for row in changed:
        low, high = row["change"] - row["t95"], row["change"] + row["t95"]
        verdict = f"no difference from {first} is shown"
        if high < 0:
            verdict = f"the loss is lower than that of {first}"
        if low > 0:
            verdict = f"the loss is higher than that of {first}"
        print(f"{row['run']}: {verdict}: {row['change']:+.4f}, 95 % interval {low:+.4f} to "
              f"{high:+.4f}")


def print_differences(one, other, by):
    """Print the flags, but for `by`, and the lines of code in which two runs differ."""
    print(f"\n{one.label} | {other.label}")
    for name in flags_that_differ(one.flags, other.flags):
        if name != by:
            print(f"  {name} {one.flags[name]} | {other.flags[name]}")
    if not one.source or not other.source:
        return
    for path in sorted(one.source.keys() | other.source.keys()):
        lines = difflib.unified_diff(one.source.get(path, []), other.source.get(path, []), n=0,
                                     lineterm="")
        lines = [line for line in list(lines)[2:] if not line.startswith("@@")]
        if lines:
            print(f"  {path}", *lines, sep="\n    ")


def main():
    p = Parser(__doc__)
    p.add_argument("runs", nargs="+", metavar="RUN", help="folders that train.py has written, "
                   "label=folder, or tables that this command has written")
    p.add_argument("--by", help="a row for each value of this flag of train.py, such as lr")
    p.add_argument("--table", type=Path, help="write a row for each run to this file")
    p.add_argument("--before", type=at_least(2), default=10,
                   help="how many losses before one say whether it is a spike [10]")
    args = p.parse_args()
    runs = read_runs(args.runs, args.before)
    rows, _, step = compare(runs, args.by)
    print_rows(rows, runs, step)
    firsts = {}
    for run in runs:
        one = firsts.setdefault(run.label, run)
        if run is one and run is not runs[0]:
            print_differences(runs[0], run, args.by)
        elif run.source != one.source:
            print(f"\nseeds {one.seed} and {run.seed} of {run.label} ran different code:")
            print_differences(one, run, args.by)
    if args.table:
        write_table(args.table, [row_of_run(run, step) for run in runs])


if __name__ == "__main__":
    cli(main)

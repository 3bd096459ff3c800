"""The paper's whole evaluation: trained, measured, drawn, and written up in OUT/report.md.

    python -m experiments.paper --scale tiny --list        what is there, what is missing
    python -m experiments.paper --scale tiny               all that is missing
    python -m experiments.paper --scale paper --list       the paper's own runs, as commands

tiny: a check that everything runs, under 20 minutes on two cores; nothing is learned. small: a
night on two cores, three seeds. experiments/paper_plan.py is the list of both. Stop it and start it
again as you like. Processes with one --out share the work. OUT/results.tsv holds each measurement:
what is in it is not made again, where the checkpoints are gone, too.
"""
if not __package__:
    raise SystemExit("error: run python -m experiments.paper in the folder above")

from importlib.util import find_spec
from pathlib import Path

from experiments.paper_plan import FIGURES, SCALES
from experiments.paper_report import read, write_report
from experiments.paper_steps import as_lines, call, get_runs, get_steps, seconds, show_paper
from experiments.runs import do_all
from experiments.training_curves import are_there
from support.cli import Parser, UsageError, cli, clock
from support.results import Results
from support.run import InUse


def work(steps, results):
    """Do what is missing; what another process does is left to it, and waited for at the end.

    Returns {command: message} of the steps that cannot be done.
    """
    failed = {}

    def do(step):
        results.refresh()
        try:
            if step.missing(results):
                step.do()
        except InUse:
            raise
        except UsageError as e:
            failed[step.alone] = str(e)
            print(f"not run: {step.alone}: {e}", flush=True)

    do_all(steps, do)
    results.refresh()
    return failed


def drawing(name, scale, found, out, results):
    """[[program, flags ..]] that draw a figure from the table; maps and windows from a model."""
    (by_script, runs), commands = found, []
    for script in by_script.keys() & set(FIGURES[name].scripts):
        commands.append([f"experiments.{script}", *scale.scripts[script].split(), "--out", out])
    for program in FIGURES[name].draw:
        if program == "experiments.training_curves":
            logs = [run.folder(out) / "log.tsv" for run in by_script.get("lr_sweep", [])
                    if run.seed == 0]
            commands.append([program, *logs, "--out", out])
        elif program == "experiments.retrieval":
            commands.append([program, results.path])
        else:
            commands.append([program, "--results", results.path])
    if name == "latency":
        commands.append(["experiments.latency", *scale.latency.split(), "--out", out])
    if name in ("maps", "windows"):
        program = {"maps": "relevance_maps", "windows": "windows"}[name]
        run = runs[scale.shown][0]
        commands.append([f"experiments.{program}", "--ckpt", run.folder(out) / "ckpt.pt"])
    return commands


def draw(name, commands, shown, out):
    """Run the commands of `drawing`. What is there stays where its model or its logs are not.

    Those are maps and windows, of the run `shown`, and the curves of training.
    """
    for program, *flags in commands:
        if program == "experiments.training_curves" and not are_there(flags[:-2]):
            continue
        if name in ("maps", "windows"):
            folder = shown.folder(out)
            images = FIGURES[name].images if find_spec("matplotlib") else ()
            if (read(folder / f"{program.partition('.')[2]}.tsv")
                    and all((folder / image).exists() for image in images)):
                continue
            shown.checkpoint(out)                      # trained again where it is gone
            flags.append("--force")                    # its table may be of a killed process
        call(program, *flags)


def show(name, steps, results):
    """Print a figure's commands, what is there, how long the rest takes; returns the rest."""
    keys = {key for step in steps for key in step.keys}
    if not keys:
        print(f"\n{name}: {FIGURES[name].title}. Measured where it is drawn")
        return set()
    left = {key for step in steps for key in step.missing(results)}
    time_left = f", about {clock(sum(map(seconds, left)))} of one core left" if left else ""
    print(f"\n{name}: {FIGURES[name].title}. {len(keys) - len(left)} of {len(keys)} rows are there"
          f"{time_left}")
    for command, n, missing in as_lines(steps, results):
        state = f"{missing} of {n} missing" if missing else "there"
        print(f"{state:>17}: {command}")
    return left


def main():
    p = Parser(__doc__)
    p.add_argument("--scale", choices=SCALES, required=True, help="how large")
    p.add_argument("--out", help="folder of all [out/paper-SCALE]")
    p.add_argument("--only", nargs="+", choices=FIGURES, metavar="FIGURE", default=[*FIGURES],
                   help=f"some of: {' '.join(FIGURES)} [all]")
    p.add_argument("--list", action="store_true", help="show the commands and what is missing")
    args = p.parse_args()
    scale, out = SCALES[args.scale], Path(args.out or f"out/paper-{args.scale}")
    if args.scale == "paper":
        if not args.list:
            raise UsageError("--scale paper is for --list: its runs take 60,000 GPU hours")
        return show_paper(scale)
    results, found = Results(out / "results.tsv"), get_runs(scale, out)
    steps = {name: get_steps(name, scale, found, out, results) for name in FIGURES}
    if args.list:
        left = set().union(*(show(name, steps[name], results) for name in args.only))
        time_left = clock(sum(map(seconds, left)))
        print(f"\n{len(left)} rows are missing in all, about {time_left} of one core")
        return

    failed = {}
    for name in args.only:
        failed |= work(steps[name], results)
        try:
            draw(name, drawing(name, scale, found, out, results), found[1][scale.shown][0], out)
        except UsageError as e:
            failed[name] = str(e)
            print(f"not drawn: {name}: {e}", flush=True)
    commands = {}
    for name in FIGURES:
        marks = {command: f"      # not finished: {missing} of {n}" * (missing > 0)
                 for command, n, missing in as_lines(steps[name], results)}
        for command in drawing(name, scale, found, out, results):
            marks.setdefault(f"python -m {' '.join(map(str, command))}", "")
        commands[name] = [command + mark for command, mark in marks.items()]
    write_report(args.scale, scale.note, out, commands, failed)


if __name__ == "__main__":
    cli(main)

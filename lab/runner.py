"""Run the commands of experiments: stages one after another, and in each stage some jobs at a time.

A job is a list of commands that run one after another, such as a training and its measurements. A
stage is a list of jobs. Finished work is not repeated: train.py continues runs, and measuring
commands keep their rows. So after Ctrl-C, which waits until each run has saved its checkpoint,
repeat the command to go on. A command that fails stops its job only, and is listed at the end. A
run that diverges is a result, not a failure; its job has no more to measure.
"""
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from support.cli import ROOT, Parser, UsageError, at_least, pasteable

TRAIN = "python train.py --resume"


def parser(doc):
    """The flags of every command that runs experiments."""
    p = Parser(doc)
    p.add_argument("--seeds", type=at_least(0), nargs="+", help="the seeds to train")
    p.add_argument("--lanes", type=at_least(1), default=2,
                   help="how many commands run at a time [2]")
    p.add_argument("--print", action="store_true", help="print the commands and run nothing")
    return p


def run_or_print(stages, args):
    """Run stages, or only print their commands, as the flags say."""
    if args.print:
        for jobs in stages:
            for job in jobs:
                print(*map(pasteable, job), sep="\n")
        return
    # One thread for each command, so that the numbers do not depend on the number of cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    run_all(stages, args.lanes)


def run_all(stages, lanes):
    """Run stages one after another, and the jobs of each in `lanes` at a time."""
    failed = []
    for jobs in stages:
        pool = ThreadPoolExecutor(lanes)
        try:
            for future in [pool.submit(run_job, job, failed) for job in jobs]:
                future.result()
        except KeyboardInterrupt:                      # running commands got it, too, and save
            pool.shutdown(cancel_futures=True)
            raise KeyboardInterrupt("stopped: repeat the command to go on") from None
    if failed:
        raise UsageError("these commands failed: " + "; ".join(failed))


def run_job(job, failed):
    """Run the commands of a job until one fails. Exit code 3 is of a run that diverged."""
    for command in job:
        print(f"+ {pasteable(command)}", flush=True)
        python, *words = shlex.split(command)
        if words[0] != "-m":                           # a script of ours, from any folder
            words[0] = str(ROOT / words[0])
        code = subprocess.run([sys.executable, *words]).returncode
        if code == 3:
            return
        if code != 0:
            failed.append(pasteable(command))
            return

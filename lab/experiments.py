"""Repeat the experiments of the report.

    python -m lab.experiments scaling                 one experiment, two commands at a time
    python -m lab.experiments scaling text --lanes 1 --seeds 0 1 2 3 4
    python -m lab.experiments all --print             only print the commands
    python -m lab.experiments tiny                    do all tools run? Nothing is learned

An experiment is a function below. It yields stages, lists of jobs, and a job is a list of commands:
lab/runner.py runs them, and goes on where it was when you repeat the command. Unless you name
--seeds, they are those of the report. To try an idea of your own, use lab.idea.
"""
from itertools import chain
from pathlib import Path

from support.cli import UsageError, cli
from lab.runner import TRAIN, parser, run_or_print
from lab.runs import read_folder

# ------------------------------------------------------------------------ what experiments share

def train(runs, models, seeds, recipe, *tools):
    """A job for each seed and model: train it, then measure it by tools.

    models: {name: (label, flags of training, flags of the tools)}. A run is RUNS + name + seed.
    """
    jobs = []
    for seed in seeds:
        for name, (_, flags, measuring) in models.items():
            run = f"{runs}{name}-{seed}"
            jobs.append([f"{TRAIN} {flags} {recipe} --seed {seed} --out {run}"])
            jobs[-1] += [f"python {tool} {measuring} --ckpt {run}/ckpt.pt" for tool in tools]
    return jobs


def words(runs, models, table="", seeds=("*",)):
    """The runs of models, or their tables, for a command: 'Ours=out/text_ours-*/perplexity.tsv'"""
    return " ".join(f"'{label}={runs}{name}-{seed}{table}'"
                    for name, (label, *_) in models.items() for seed in seeds)


def draw(figure, tables, path):
    return f"python -m lab.figures {figure} {tables} --out {path}.png"


def compare(runs, path):
    return f"python -m lab.compare {runs} --table {path}.tsv"


# --------------------------------------------------------------------------------- the experiments

def scaling(out, seeds):
    """The loss by size, for four Multiscreens and four Transformers, each at several rates."""
    models = {f"multiscreen_psi{psi}_lr{lr}": ("Multiscreen", f"--psi {psi} --lr {lr}", "")
              for psi in (3, 4, 5, 6) for lr in (2**-6, 2**-4, 2**-2)}
    models |= {f"transformer_{size}_lr{lr}": ("Transformer",
                                              f"--model transformer:{size} --lr {lr}", "")
               for size in ("2,2,28", "2,2,48", "3,4,64", "4,4,80")
               for lr in (0.00025, 0.001, 2**-8, 2**-6)}
    # Is the Transformer held back by weight decay or by clipping?
    theirs, ours = "transformer_3,4,64_lr0.001", "multiscreen_psi5_lr0.0625"
    flags = "--model transformer:3,4,64"
    chosen = {theirs: models[theirs],
              "no_decay": ("Transformer, no weight decay", f"{flags} --weight-decay 0", ""),
              "no_clipping": ("Transformer, no clipping", f"{flags} --clip 0", ""),
              ours: models[ours]}
    yield train(f"{out}/", models | chosen, seeds,
                "--seq-len 128 --batch-size 8 --steps 2000 --warmup 125 --log-every 1")
    sizes, sanity = f"{out}/report/scaling", f"{out}/report/sanity"
    yield [[compare(f"'{out}/multiscreen_psi?_lr*-*' '{out}/transformer_?,?,*_lr*-*'", sizes),
            f"python -m lab.scaling {sizes}.tsv --out {sizes}.png"],
           [compare("--before 64 " + words(f"{out}/", chosen), sanity),
            draw("changes", f"{sanity}.tsv", sanity)]]


def rates(out, seeds):
    """The loss at six learning rates. With one seed: are models of 16 layers stable at two?"""
    families = {"multiscreen": ("Multiscreen", "--psi 5"),
                "transformer": ("Transformer", "--model transformer:8,4,48"),
                "qknorm": ("Transformer + QKNorm", "--model transformer:8,4,48:qknorm")}
    models = {f"{name}_lr{lr}": (label, f"{flags} --lr {lr}", "")
              for lr in (2**-10, 2**-8, 2**-6, 2**-4, 2**-2, 1)
              for name, (label, flags) in families.items()}
    deep = {f"deep_{name}{lr}": ("", f"{flags} --lr {lr}", "") for lr in (2**-4, 2**-3)
            for name, flags in (("m", "--psi 5 --layers 16"), ("t", "--model transformer:16,4,48"))}
    small = "--seq-len 128 --batch-size 8"
    yield [*train(f"{out}/", models, seeds, f"{small} --steps 1000 --warmup 62 --log-every 2"),
           *train(f"{out}/", deep, [0], f"{small} --steps 6000 --warmup 188 --log-every 1")]
    runs = (f"'Transformer={out}/transformer_lr*-*' 'Transformer + QKNorm={out}/qknorm_lr*-*' "
            f"'Multiscreen={out}/multiscreen_lr*-*'")
    logs = {f"{name}_lr{lr}": (f"{families[name][0]}, {lr_words}",)
            for lr, lr_words in ((2**-8, "2^-8"), (2**-4, "2^-4"), (1, "1"))
            for name in ("multiscreen", "transformer")}
    logs, report = words(f"{out}/", logs, seeds=seeds[:1]), f"{out}/report"
    yield [[draw("losses --by lr", runs, f"{report}/lr_sweep")],
           [compare(f"--by lr {runs}", f"{report}/lr_sweep")],
           [compare(f"--by lr --before 64 'Transformer, 16 layers={out}/deep_t*' "
                    f"'Multiscreen, 16 layers={out}/deep_m*'", f"{report}/deep")],
           [draw("logs", logs, f"{report}/curves"), compare(logs, f"{report}/curves")]]


def text(out, seeds):
    """Perplexity at up to 32 times the training length, and what the tiles have learned."""
    models = {"multiscreen": ("Multiscreen, 0.93M", "--psi 8", ""),
              "transformer": ("Transformer, 1.2M", "--model transformer:8M",
                              "--rope-scale 1 4 16 ntk4 ntk16")}
    others = {"w_th16": ("Multiscreen, w_th 16", "--psi 8 --w-th 16", "")}
    runs, table, report = f"{out}/text_", "/perplexity.tsv", f"{out}/report"
    yield train(runs, models | others, seeds, "--steps 620", "-m lab.perplexity --length 8192")
    yield [[draw("perplexity", words(runs, models, table), f"{report}/long_context")],
           [draw("perplexity", words(runs, others, table), f"{report}/long_context_w_th16")],
           [compare(words(runs, models | others), f"{report}/text_losses")],
           [f"python -m lab.tiles --ckpt {runs}multiscreen-{seeds[0]}/ckpt.pt"]]


SCALES = "--rope-scale 1 2 4 8 ntk2 ntk4 ntk8 ntk16 ntk32"
LENGTHS = "--lengths 256 512 1024 2048 4096 8192"
NEEDLES = f"--layers 4 --w-th 16 --lr {2**-6} --steps 4800"        # Multiscreen's recipe
TASK = "--data abcdigits --digits 2"


def abcdigits(out, seeds):
    """Find answers at up to 128 times the training length, beside the two best Transformers."""
    ours = {"multiscreen": ("Multiscreen", NEEDLES, f"{LENGTHS} 16384 32768 --swe")}
    theirs = {"local": ("Transformer, local",
                        f"--model transformer:4,4,96:local --lr {2**-10} --steps 8000", LENGTHS),
              "transformer": ("Transformer, RoPE",
                              f"--model transformer:4,4,96 --lr {2**-11} --steps 8000",
                              f"{LENGTHS} {SCALES}")}
    runs = f"{out}/needles_"
    yield train(runs, ours | theirs, seeds, TASK, "abcdigits.py")
    yield [[draw("retrieval", words(runs, ours | theirs, "/abcdigits.tsv"),
                 f"{out}/report/abcdigits")]]
    # Two models whose keys compete for weight, with the first three seeds.
    compete = {name: (label, f"--model multiscreen:{name} {NEEDLES}", f"{LENGTHS} --swe")
               for name, label in (("compete", "keys compete"), ("softmax", "softmax"))}
    yield train(runs, compete, seeds[:3], TASK, "abcdigits.py")
    yield [[draw("retrieval", words(runs, ours | compete, "/abcdigits.tsv", seeds[:3]),
                 f"{out}/report/competition")]]


def ablations_abcdigits(out, seeds):
    """What does each part of the model add to retrieval? Run this after `abcdigits`."""
    models = {}
    for name, label in (("rope", "MiPE → RoPE"), ("softmax-rope", "softmax, RoPE"),
                        ("nope", "MiPE → NoPE"), ("no-tanhnorm", "w/o TanhNorm"),
                        ("fixed-r", "r fixed to 1")):
        measure = f"{LENGTHS} --swe"
        if "rope" in name:
            measure += f" {SCALES}"
        models[name] = (label, f"--model multiscreen:{name} {NEEDLES}", measure)
    # The model without a gate has five layers, so that its size is the original's, and three rates.
    for lr in (2**-7, 2**-6, 2**-5):
        flags = f"--model multiscreen:no-gate --layers 5 --w-th 16 --lr {lr} --steps 4800"
        models[f"no-gate_{lr}"] = ("w/o gate", flags, f"{LENGTHS} --swe")
    runs, table, report = f"{out}/needles_", "/abcdigits.tsv", f"{out}/report"
    yield train(runs, models, seeds, TASK, "abcdigits.py")
    best = {name: model for name, model in models.items()
            if name not in (f"no-gate_{2**-7}", f"no-gate_{2**-5}")}
    best["multiscreen"] = ("Multiscreen",)
    yield [[draw("retrieval", words(runs, best, table, seeds), f"{report}/abcdigits_ablations")]]
    yield [[draw("retrieval", words(runs, {f"no-gate_{2**power}": (f"w/o gate, 2^{power}",)},
                                    table), f"{report}/no_gate_lr{2**power}")]
           for power in (-7, -5)]


def tune_transformers(out, seeds):
    """Which small Transformer finds the most in long contexts, and at which rate?"""
    models = {f"{kind or ':rope'}_{lr}": (
        "", f"--model transformer:4,4,96{kind} --lr {lr} --steps 8000", scales)
        for lr in (2**-8, 2**-6, 2**-10, 2**-11)
        for kind, scales in (("", SCALES), (":nope", ""), (":local", ""), (":ssmax", ""))}
    yield train(f"{out}/tune", models, seeds, TASK,
                "abcdigits.py --lengths 256 512 1024 2048 --trials 20")


def passkey(out, seeds):
    """Train on passkey until it is learned, then find keys at up to 16 times that length."""
    models = {"multiscreen": ("Multiscreen", f"--w-th 8192 --layers 4 --lr {2**-6}", "--swe"),
              "transformer": ("Transformer, RoPE", f"--model transformer:4,4,96 --lr {2**-9}",
                              "--rope-scale 1 4 16")}
    yield train(f"{out}/keys_", models, seeds, "--data passkey --seq-len 512 --batch-size 4 "
                "--steps 6000", "-m lab.passkey --lengths 512 1024 2048 4096 8192")
    yield [[draw("retrieval", words(f"{out}/keys_", models, "/passkey.tsv"),
                 f"{out}/report/passkey")]]


def ablations(out, seeds):
    """What each part of the model adds to the loss, and to perplexity far beyond training."""
    models = {"original": ("Original", "--model multiscreen", "")}
    for name, label in (("rope", "MiPE → RoPE"), ("nope", "MiPE → NoPE"),
                        ("no-tanhnorm", "w/o TanhNorm"), ("no-gate", "w/o Gate"),
                        ("fixed-r", "r fixed to 1"), ("compete", "Keys compete"),
                        ("softmax", "Softmax")):
        scales = "--rope-scale 1 4 16 ntk4" if name == "rope" else ""
        models[name] = (label, f"--model multiscreen:{name}", scales)
    runs, report = f"{out}/loss_", f"{out}/report"
    yield train(runs, models, seeds, "--psi 6 --seq-len 128 --batch-size 8 --steps 1000 "
                "--warmup 250 --log-every 50", "-m lab.perplexity --length 4096")
    yield [[compare(words(runs, models), f"{report}/ablations"),
            draw("changes", f"{report}/ablations.tsv", f"{report}/ablations")],
           [draw("perplexity", words(runs, models, "/perplexity.tsv"),
                 f"{report}/long_context_ablations")]]


# {name: (label, flags of training, flags of lab.copying)}
COPIERS = {"multiscreen": ("Multiscreen", f"--psi 8 --lr {2**-7}", "--swe"),
           "softmax": ("Transformer, RoPE", f"--model transformer:6,4,112 --lr {2**-10}", ""),
           "local": ("Transformer, local", f"--model transformer:6,4,112:local --lr {2**-9}", "")}


def copying(out, seeds):
    """How far back does a model of text find what it has read, and when does that begin?"""
    jobs = []
    for seed in seeds:
        for name in COPIERS:
            run, training, measure = copier(out, "copying", name, seed)
            job = []
            for step in range(1000, 20001, 1000):      # two distances after each 1,000 steps
                job += [f"{training} --steps {step}",
                        f"{measure} --strings 10 --distances 128 1024 "
                        f"--table {run}/copying_steps.tsv"]
            jobs.append([*job, f"{measure} --strings 10"])
    yield from copiers(out, "copying", COPIERS, jobs, {
        "copying": ("copying", "copying"), "copying_steps": ("copying_steps", "copying_steps")})


def controls(out, seeds):
    """The new seeds of docs/copying.md: the two families that copy from afar, and all controls."""
    models, jobs = {name: COPIERS[name] for name in ("multiscreen", "local")}, []
    for seed in seeds:
        for name in models:
            run, training, measure = copier(out, "controls", name, seed)
            three = f"{measure} --distances 128 1024 4096"
            many = f"{three} --strings 32 --table {run}/candidates.tsv"
            jobs.append([f"{training} --dtype float32 --compile --steps 8000",
                         f"{measure} --strings 10",
                         f"{three} --strings 10 --before 4096 --table {run}/before.tsv",
                         f"{many} --candidates 2 --before 990", f"{many} --candidates 32"])
    yield from copiers(out, "controls", models, jobs, {
        "controls": ("gain", "copying"), "controls_before": ("gain", "before"),
        "controls_candidates": ("candidates", "candidates")})


def copier(out, folder, name, seed):
    """(the run's folder, the command that trains one of COPIERS, and the one that measures it)"""
    _, flags, swe = COPIERS[name]
    data, run = f"--data {out}/copying/text", f"{out}/{folder}/{name}-{seed}"
    return (run, f"{TRAIN} {flags} {data} --eval-every 1000 --seed {seed} --out {run}",
            f"python -m lab.copying {swe} {data}/val --ckpt {run}/ckpt.pt")


def copiers(out, folder, models, jobs, pictures):
    """The stages: the text, the jobs, the pictures {name: (figure, table)}, and the losses."""
    runs = f"{out}/{folder}/"
    yield [[f"python -m lab.collect {out}/copying/text"]]
    yield jobs
    yield [[draw(figure, words(runs, models, f"/{table}.tsv"), f"{out}/report/{name}")]
           for name, (figure, table) in pictures.items()]
    yield [[compare(words(runs, models), f"{out}/report/{folder}_losses")]]


# Rates that won on seed 20, as log2: mechanism, rate on text, rate on the task.
MECHANISMS = (("softmax", -8, -11), ("nope", -10, -10), ("local", -8, -11), ("alibi", -10, -11),
              ("ssmax-rope", -8, -11), ("off-by-one", -8, -11), ("sigmoid", -10, -11),
              ("entmax", -10, -11), ("stick-breaking", -10, -11), ("forgetting", -10, -12),
              ("selective", -10, -11), ("screening", -8, -10), ("multiscreen", -6, -8))
# Where a setting of its own won: alibi's slopes, sigmoid's bias, screening's windows, .. by task.
SETTINGS = {"text alibi": "alibi-steep", "text sigmoid": "sigmoid-fixed",
            "text screening": "screening-wide", "task forgetting": "forgetting-late"}
# {task: (flags of training, the tool)}
RECIPES = {"text": ("--seq-len 128 --steps 1000 --eval-every 500",
                    "-m lab.perplexity --length 2048"),
           "task": (f"{TASK} --seq-len 256 --steps 4800", "abcdigits.py --lengths 256 1024 4096")}


def mechanisms(out, seeds):
    """Twelve ways to attend on one backbone, and Multiscreen of the same size."""
    on_text = {name: mechanism(name, "text", 2.0**log) for name, log, _ in MECHANISMS}
    on_task = {name: mechanism(name, "task", 2.0**log) for name, _, log in MECHANISMS}
    runs = f"{out}/mechanisms/"
    yield [*train(f"{runs}text_", on_text, seeds, *RECIPES["text"]),
           *train(f"{runs}task_", on_task, seeds, *RECIPES["task"])]
    yield [[f"python -m lab.mechanisms {words(f'{runs}*_', on_text)} "
            f"--out {out}/report/mechanisms.png"]]


TEXT_RATES = (2**-10, 2**-8, 2**-6)
TASK_RATES = (2**-10, 2**-8)


def tune_mechanisms(out, seeds):
    """The rates of `mechanisms`, on seed 20. Each mechanism's own settings are chosen by hand.

    Where the best rate is at the edge of its list, add one beyond it, a factor of 4 further on text
    and of 2 on the task, and repeat the command; to try another setting, edit SETTINGS.
    """
    jobs = []
    for task, rates in (("text", TEXT_RATES), ("task", TASK_RATES)):
        for lr in rates:
            models = {name: mechanism(name, task, lr) for name, _, _ in MECHANISMS}
            jobs += train(f"{out}/tuning/lr{lr}/{task}_", models, seeds, RECIPES[task][0])
    yield jobs
    yield [[f"python -m lab.compare --by lr {name}='{out}/tuning/*/{task}_{name}-*'"]
           for name, _, _ in MECHANISMS for task in ("text", "task")]


def mechanism(name, task, lr):
    """(label, flags of training, flags of measuring) on "text", or on the "task" of retrieval."""
    model, measure = f"--model transformer:4,4,72:{SETTINGS.get(f'{task} {name}', name)}", ""
    if name in ("screening", "multiscreen"):
        measure = "--swe"
    if name == "softmax":
        model, measure = "--model transformer:4,4,72", "--rope-scale 1 4 8 16 ntk4 ntk16 ntk64"
    if name == "multiscreen":
        model = "--layers 4 --tiles 4 --d-E 72 --w-th 16"
    return name, f"{model} --lr {lr}", measure


# Softmax is the Transformer itself; its name in the layout of lab/baselines/local.py is `local`.
IN_LAYOUTS = (("nope", "NoPE"), ("alibi", "ALiBi"), ("ssmax-rope", "SSMax"),
              ("off-by-one", "OffByOne"), ("sigmoid", "Sigmoid"), ("entmax", "Entmax"),
              ("stick-breaking", "StickBreaking"), ("forgetting", "Forgetting"),
              ("selective", "Selective"), ("screening", "Screening"))


def copying_mechanisms(out, seeds):
    """The twelve on the protocol of `copying`, each in two layouts, and Multiscreen.

    Each rate is chosen on seed 20 after 2,000 steps. One set of weights answers all questions.
    """
    size = "transformer:6,4,112"
    models = {"softmax": f"--model {size}", "local": f"--model {size}:local"}
    for name, block in IN_LAYOUTS:
        models[name] = f"--model {size}:{name}"
        models[f"local-{name}"] = f"--model {size}:lab.baselines.local.{block}"
    models["multiscreen"] = "--psi 8"
    rates = dict.fromkeys(models, (2**-8, 2**-9, 2**-10)) | {"multiscreen": (2**-6, 2**-7, 2**-8)}
    settings = {"screening": "--swe", "multiscreen": "--swe",
                "softmax": "--rope-scale 1 4 16 ntk4 ntk16 ntk64 ntk256"}
    runs, report = f"{out}/copying_mechanisms/", f"{out}/report/copying_mechanisms"
    data = f"--data {out}/copying/text"

    yield [[f"python -m lab.collect {out}/copying/text"]]
    # All models at one rate, then at the next: what a model has compiled, it finds again.
    tried = {}
    for n in range(3):
        for name in models:
            lr = rates[name][n]
            tried[f"{name}_lr{lr}"] = (name, f"{models[name]} --lr {lr}",
                                       f"{data}/val {settings.get(name, '')}")
    yield train(f"{runs}tuning/", tried, [20], f"{data} --steps 2000 --eval-every 2000")
    chosen = {}
    for name in models:
        lr = best_rate({lr: f"{runs}tuning/{name}_lr{lr}-20" for lr in rates[name]})
        chosen[f"{name}_lr{lr}"] = tried[f"{name}_lr{lr}"]
    yield train(runs, chosen, seeds, f"{data} --steps 8000 --eval-every 1000",
                "-m lab.perplexity --length 8192",
                "-m lab.copying --strings 10 --distances 128 256 512 1024 2048 4096 8192")
    yield [[compare(f"--by lr {words(f'{runs}tuning/', tried, seeds=[20])}", f"{report}_rates")],
           [compare(words(runs, chosen), f"{report}_losses")],
           [f"python -m lab.mechanisms {words(runs, chosen)} --out {report}.png"]]


def best_rate(runs):
    """The rate of the run with the lowest last validation loss. runs: {rate: folder}, ascending.

    The middle rate where none has ended, as when the commands are only printed.
    """
    losses = {}
    for lr, folder in runs.items():
        if (Path(folder) / "ckpt.pt").exists():
            run = read_folder(Path(folder), "")
            losses[lr] = run.loss(max(run.losses))
    losses = {lr: loss for lr, loss in losses.items() if loss == loss}             # not diverged
    return min(losses, key=losses.get, default=sorted(runs)[len(runs) // 2])


def reason(out, seeds):
    """Is screening the reason? Softmax and screening in the layout of `local`: docs/copying.md."""
    size = "--model transformer:6,4,112:"
    models = {"softmax": f"{size}local", "screening": f"{size}lab.baselines.local.Screening"}
    rates, runs, data = (2**-8, 2**-9, 2**-10), f"{out}/reason/", f"--data {out}/copying/text"
    recipe = f"{data} --dtype float32 --compile --eval-every 1000"
    tried = {f"{name}_lr{lr}": ("", f"{flags} --lr {lr}", "")
             for lr in rates for name, flags in models.items()}
    yield [[f"python -m lab.collect {out}/copying/text"]]
    yield train(f"{runs}tuning/", tried, [20], f"{recipe} --steps 3000")
    chosen = {}
    for name in models:
        lr = best_rate({lr: f"{runs}tuning/{name}_lr{lr}-20" for lr in rates})
        chosen[name] = ("", f"{models[name]} --lr {lr}", f"{data}/val")
    yield train(runs, chosen, seeds, f"{recipe} --steps 8000", "-m lab.reason")


def latency(out, seeds):
    """Milliseconds of a training step, a token and a forward pass. Run it on a quiet machine."""
    table = f"{out}/report/latency"
    yield [[f"python -m lab.bench --table {table}.tsv", draw("latency", f"{table}.tsv", table)]]


def tiny(out, seeds):
    """Each tool once. Nothing is learned, so its numbers say nothing."""
    models = {"m": ("m", "--psi 2", ""), "t": ("t", "--model transformer:2,2,16", ""),
              "l": ("l", "--model transformer:2,2,16:lab.baselines.local.Selective", "")}
    recipe = "--seq-len 128 --batch-size 2 --steps 4 --kernel definition"
    yield train(f"{out}/text_", models, (0, 1), recipe,
                "-m lab.perplexity --length 256 --documents 1",
                "-m lab.copying --strings 1 --distances 40 80",
                "-m lab.passkey --lengths 512 --trials 1 --depths 0.5")
    yield train(f"{out}/task_", models, [0], f"{recipe} {TASK}",
                "abcdigits.py --lengths 256 --trials 1")
    runs = words(f"{out}/text_", models)
    yield [[compare(runs, f"{out}/runs")],
           [f"python -m lab.scaling '{out}/text_m-*' '{out}/text_t-*' --out {out}/scaling.png"],
           [f"python -m lab.mechanisms {words(f'{out}/*_', models)} --out {out}/mechanisms.png"],
           [f"python -m lab.tiles --ckpt {out}/text_m-0/ckpt.pt"],
           [f"python -m lab.sample --tokens 4 --ckpt {out}/text_m-0/ckpt.pt"],
           [f"python -m lab.bench --psi 2 --models multiscreen transformer:1,2,8 --lengths 64 "
            f"--train-length 16 --repeats 1 --table {out}/latency.tsv",
            draw("latency", f"{out}/latency.tsv", f"{out}/latency")],
           [draw("changes", runs, f"{out}/changes")],
           [draw("losses --by parameters", runs, f"{out}/losses")],
           [draw("logs", f"{out}/text_m-0 {out}/text_t-0", f"{out}/logs")]]
    yield [[draw(figure, f"'{out}/text_*-*/{table}.tsv'", f"{out}/{figure}")]
           for figure, table in (("perplexity", "perplexity"), ("copying", "copying"),
                                 ("gain", "copying"), ("copying_steps", "copying"),
                                 ("retrieval", "passkey"))]


EXPERIMENTS = {f.__name__: f for f in (scaling, rates, text, abcdigits, ablations_abcdigits,
                                       tune_transformers, passkey, ablations, copying, controls,
                                       mechanisms, tune_mechanisms, copying_mechanisms, reason,
                                       latency, tiny)}
# The seeds of the report, if they are not 0, 1, 2; recipes were tuned on others.
SEEDS = {"abcdigits": range(24, 32), "ablations_abcdigits": range(24, 27), "passkey": range(6),
         "copying": range(32, 35), "controls": range(40, 45), "mechanisms": range(32, 35),
         "tune_mechanisms": [20], "copying_mechanisms": range(32, 35), "reason": range(45, 49),
         "tune_transformers": [20, 21]}


def main():
    p = parser(__doc__)
    p.add_argument("names", nargs="+", metavar="NAME", help=f"{', '.join(EXPERIMENTS)}, or all")
    p.add_argument("--out", default="out/lab", help="the folder of all runs [out/lab]")
    args = p.parse_args()
    names = args.names
    if names == ["all"]:
        names = [name for name in EXPERIMENTS if name != "tiny" and not name.startswith("tune")]
    for name in names:
        if name not in EXPERIMENTS:
            raise UsageError(f"{name} is no experiment: use {', '.join(EXPERIMENTS)}, or all")
    # A stage is made when those before it have run: it may depend on their results.
    run_or_print(chain.from_iterable(
        EXPERIMENTS[name](args.out, list(args.seeds or SEEDS.get(name, range(3))))
        for name in names), args)


if __name__ == "__main__":
    cli(main)

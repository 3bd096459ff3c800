"""How far back can a model find what it has read? It copies a random string, by distance.

The paper asks models of text for a number in the context (section "Retrieval Ability"). A model too
small to understand that question can still do this: it reads 32 random letters and digits, then
other text, then the first four of the characters again. Does it know how they go on? The measure is
the negative log-likelihood of the other 28, in nats per token; guessing costs log 62 = 4.13 nats.
For comparison, the table also has what another random string costs there, one that the model has
not read.

    python -m lab.copying --ckpt out/ckpt.pt --swe

The text in between is that of the standard library's files which train.py holds out, or that of
--data. The distance is counted in tokens, from the end of the string to where it begins again. Each
string has text of its own and a row of copying.tsv, beside the checkpoint: the nats at all
distances, first of the string itself, then of the other one. If you rerun the command, it measures
only what is missing.

    python -m lab.copying out/copying.tsv out-t/copying.tsv --out out/figure.png

prints and draws such tables. If there are several factors of --rope-scale, the best one at each
distance counts. If a table has several steps of one run, from checkpoints that were kept, the
figure shows when copying begins.

    python -m lab.copying --ckpt out/ckpt.pt --digits 2

asks for the numbers of ABCDigits instead. Where exact match says 0 %, this still tells in how many
prompts the right number is likelier than every other number of the prompt, and by how much.

The paper has no such experiment: it asks for the number directly, as abcdigits.py does.
"""
import math
import random
import re
import string
from typing import NamedTuple

import numpy as np
import torch

from abcdigits import abcdigits_prompts, possible_lengths
from lab.common import (
    add_settings,
    add_tables,
    get_figure,
    pyplot,
    save_figure,
    settings_of,
    steps_of,
    stretch,
)
from lab.perplexity import documents_in
from lab.style import WIDTH, count_of, labels_of, legend_below, look, plot_with_band
from support.cli import Parser, UsageError, cli
from support.data import read_text
from support.measure import (
    RUN,
    add_flags,
    beside,
    describe_run,
    fill,
    load_for_evaluation,
    print_table,
    require_finite,
)
from support.run import identity

KEYS = (*RUN, "data", "distances", "swe", "factor", "string")
LENGTH, CUE = 32, 4                                    # characters of a string, and of its cue
CHARACTERS = string.ascii_letters + string.digits
GUESS = math.log(len(CHARACTERS))                      # nats of each without any knowledge


# --------------------------------------------------------------------------------- measuring

def random_strings(n):
    """Two different random strings for the n-th measurement: one to read, one to compare with."""
    rng = random.Random(n)
    return ["".join(rng.choices(CHARACTERS, k=LENGTH)) for _ in range(2)]


def get_texts(data, tokenizer, n, size):
    """n lists of `size` tokens, evenly spread over the texts of `data`, or the held-out files.

    Raises UsageError if the texts are shorter than that.
    """
    text = "".join(map(read_text, documents_in(data)))
    tokens = tokenizer.encode_ordinary(text)
    if len(tokens) < size:
        raise UsageError(f"the text has {len(tokens):,} tokens, fewer than {size:,}: use smaller "
                         "--distances, or more text with --data")
    starts = np.linspace(0, len(tokens) - size, n).astype(int)
    return [tokens[start : start + size] for start in starts]


@torch.no_grad()
def nats_of_ends(model, start, text, places, ends, cue):
    """What each of several ends costs behind start + text[:place], for all places.

    All are lists of tokens; places are ascending. Returns an array (len(ends), len(places)): the
    mean negative log-likelihood of the tokens of an end behind its first `cue`.
    """
    def tensor(tokens):
        return torch.tensor([tokens], device=model.W_E.device)

    caches, head = model.new_caches(), model.head()
    found = np.zeros((len(ends), len(places)))
    for n, (before, place) in enumerate(zip([0, *places], places)):
        new = start + text[:place] if n == 0 else text[before:place]
        for piece in model.pieces(tensor(new)) if new else ():
            model.hidden(piece, caches)

        # Each end continues from here. Its keys are overwritten by what comes next.
        here = [cache.end for cache in caches]
        for m, end in enumerate(ends):
            x = model.hidden(tensor(end), caches)[0, cue - 1 : -1]
            targets = tensor(end)[0, cue:]
            found[m, n] = model.nats(x, targets, head).double().mean().item()
            for cache, position in zip(caches, here):
                cache.end = position
    require_finite(torch.from_numpy(found), "losses")
    return found


def measure(args):
    """Measure what is missing. Returns (the rows that args ask for, path of their figure)."""
    model, tokenizer, ckpt = load_for_evaluation(args.ckpt, args.device)
    settings = settings_of(args, model)
    distances = sorted(set(args.distances))
    if distances[0] < 2:
        raise UsageError(f"--distances {distances[0]}: at least 2, for the two line ends between")
    encode = tokenizer.encode_ordinary
    texts = get_texts(args.data, tokenizer, args.strings, distances[-1])

    run = describe_run(ckpt) | {"data": " ".join(args.data or ["stdlib"]),
                                "distances": " ".join(map(str, distances))}
    cells = [run | setting | {"string": n} for setting in settings for n in range(args.strings)]
    line_end = encode("\n")
    places = [distance - 2 * len(line_end) for distance in distances]

    def costs(cell):
        stretch(model, cell, ckpt["args"]["seq_len"])
        first, other = map(encode, random_strings(cell["string"]))
        found = nats_of_ends(model, first + line_end, texts[cell["string"]], places,
                             [line_end + first, line_end + other], len(line_end) + CUE)
        return " ".join(f"{x:.6g}" for x in found.flat)

    path = beside(args.ckpt, "copying.tsv", args.table)
    return fill(path, cells, "nats", identity(ckpt), costs), path.with_suffix(".png")


def rank_numbers(model, tokenizer, length, digits, n):
    """Nats of the right number and of the likeliest wrong one, for n prompts of ABCDigits. (n, 2)

    The prompts of a length in the middle of whose context the needle stands.
    """
    found = []
    for prompt, answer in zip(*abcdigits_prompts(tokenizer, length, 0.5, n, digits)):
        context, cue = prompt[:-2], prompt[-2:]        # the cue is "Q="
        numbers = [answer, *{*re.findall(r"=(\d+)", context)} - {answer}]
        cue, *ends = map(tokenizer.encode_ordinary, [cue, *(cue + number for number in numbers)])
        means = nats_of_ends(model, tokenizer.encode_ordinary(context), [], [0], ends, len(cue))
        nats = [mean * (len(end) - len(cue)) for mean, end in zip(means[:, 0], ends)]
        found.append((nats[0], min(nats[1:])))
    return np.array(found)


def print_ranks(args):
    """Print `rank_numbers` at 1, 2, 4 .. 32 times the training length."""
    model, tokenizer, ckpt = load_for_evaluation(args.ckpt, args.device, args.swe)
    rows, digits = [], {"digits": args.digits}
    for length in possible_lengths(ckpt["args"]["seq_len"], tokenizer, abcdigits_prompts, digits):
        nats = rank_numbers(model, tokenizer, length, args.digits, args.strings)
        rows.append([length, f"{(nats[:, 0] < nats[:, 1]).mean():.0%}", *nats.mean(0)])
    print_table(["length", "right is likeliest", "nats of the right one", "of the likeliest other"],
                rows, f"ABCDigits with {args.digits} digits, {args.strings} prompts a length; "
                "guessing among the numbers of a prompt: 4 %")


# ------------------------------------------------------------------------------------ curves

class Curve(NamedTuple):
    """What copying costs by distance, means over strings and then over seeds.

    steps: the first and the last of the seeds' steps. error: the deviation over the seeds, or of
    one seed the standard error over its strings. other: what a string costs that the model has not
    read. x: distances. Arrays (len(x),)
    """
    label: str
    steps: tuple
    n_seeds: int
    T_train: int
    x: list
    mean: np.ndarray
    error: np.ndarray
    other: np.ndarray


def get_curves(rows):
    """The Curves of rows, in their order. Raises UsageError if they have not all the same texts.

    Seeds that ended at different steps are averaged in one curve. If some run has several
    checkpoints, each step has its own curve.
    """
    for name in ("data", "distances"):
        if len(values := {row[name] for row in rows}) > 1:
            raise UsageError(f"the tables differ in {name} ({', '.join(sorted(values))}): draw "
                             "those that are equal")
    x = [int(distance) for distance in rows[0]["distances"].split()]
    labels, groups, kept = labels_of(rows), {}, are_kept(rows)
    for row in rows:
        label = labels[row["model"]] + " + SWE" * (row["swe"] == "yes")
        factor = row["factor"] or "1"
        # The unscaled model has a curve of its own, and is also one of the choices.
        names = [label] * (factor == "1") + [f"{label} + best RoPE scaling"] * bool(row["factor"])
        for name in names:
            by_factor = groups.setdefault((name, row["step"] if kept else None), {})
            by_factor.setdefault(factor, []).append(row)
    curves = []
    for (label, _), by_factor in groups.items():
        found = [average(found) for found in by_factor.values()]
        # At each distance the factor with which copying costs least.
        best = np.argmin([mean for mean, _, _ in found], axis=0)
        mean, error, other = (np.choose(best, choices) for choices in zip(*found))
        some = next(iter(by_factor.values()))
        seeds = {row["seed"] for row in some}
        steps = [int(row["step"]) for row in some]
        T_train = int(some[0]["seq_len"])
        curves.append(Curve(label, (min(steps), max(steps)), len(seeds), T_train, x, mean, error,
                            other))
    return curves


def are_kept(rows):
    """Whether some run has several checkpoints, of different steps."""
    return any(len(found) > 1 for found in steps_of(rows).values())


def in_words(steps):
    return " to ".join(f"{step:,}" for step in sorted({*steps}))


def average(rows):
    """(mean, error, mean of the other string) of the rows of one setting, as Curve has them."""
    seeds = {}
    for row in rows:
        nats = np.array(row["nats"].split(), dtype=float)
        seeds.setdefault(row["seed"], []).append(nats.reshape(2, -1))
    means = np.array([np.mean(found, 0) for found in seeds.values()])        # (seeds, 2, distances)
    one, = seeds.values() if len(seeds) == 1 else (None,)
    if one is None:
        error = means[:, 0].std(0, ddof=1)
    elif len(one) > 1:
        error = np.std(one, 0, ddof=1)[0] / math.sqrt(len(one))
    else:
        error = np.full(means.shape[2], math.nan)
    return means[:, 0].mean(0), error, means[:, 1].mean(0)


def print_curves(curves):
    """Two rows for each curve: the string that was read, and another one."""
    rows = []
    for curve in curves:
        first = [curve.label, in_words(curve.steps), curve.n_seeds]
        cells = [f"{mean:.2f}" + ("" if math.isnan(error) else f" ± {error:.2f}")
                 for mean, error in zip(curve.mean, curve.error)]
        rows.append([*first, "yes", *cells])
        rows.append([*first, "no", *(f"{x:.2f}" for x in curve.other)])
    print_table(["model", "steps", "seeds", "read before", *map(str, curves[0].x)], rows,
                f"Nats per token of a random string by distance; guessing: {GUESS:.2f}; ± one "
                "deviation over the seeds, or the standard error over the strings of one seed")


def styles_of(curves):
    """{label: look}. A model has one colour, as trained and with what is done at inference time."""
    styles, models = {}, {}
    for curve in curves:
        model, _, changed = curve.label.partition(" + ")
        style = look(models.setdefault(model, len(models))) | {"ls": "--" if changed else "-"}
        styles[curve.label] = style | {"mfc": "white"} if changed else style           # hollow
    return styles


def draw_by_distance(plt, curves, path):
    """What the string that was read costs by distance, and dotted what another one costs."""
    steps = {step for curve in curves for step in curve.steps}
    styles = styles_of(curves)
    fig, ax = plt.subplots(figsize=(WIDTH, 4.2), layout="constrained")
    for curve in curves:
        style = styles[curve.label]
        label = f"{curve.label}, {count_of(curve.n_seeds, 'seed')}"
        label += f", {in_words(curve.steps)} steps" * (len(steps) > 1)
        plot_with_band(ax, curve.x, curve.mean, curve.error, **style, label=label)
        ax.plot(curve.x, curve.other, color=style["color"], ls=":", lw=1)
    ax.plot([], [], color="0.4", ls=":", lw=1, label="the same for a string not read before")
    for T in sorted({curve.T_train for curve in curves}):
        ax.axvline(T, color="black", ls=(0, (5, 3)), lw=1, label=f"training length, {T:,} tokens")
    ax.axhline(GUESS, color="0.6", lw=0.8, label="guessing a letter or digit")
    ax.set_xscale("log", base=2)
    ax.set_xticks(curves[0].x, [f"{x:,}" for x in curves[0].x])
    ax.set_ylim(0)
    ax.set(xlabel="distance between the string and its repetition (tokens)",
           ylabel="nats per token of the repetition")
    legend_below(fig)
    save_figure(fig, path)


def draw_by_step(plt, curves, path):
    """What the string that was read costs by training step, a panel for each distance."""
    by_label, styles = {}, styles_of(curves)
    for curve in curves:
        by_label.setdefault(curve.label, []).append(curve)
    x = curves[0].x
    fig, axes = plt.subplots(1, len(x), figsize=(WIDTH, 4), sharey=True, squeeze=False,
                             layout="constrained")
    for place, (ax, distance) in enumerate(zip(axes[0], x)):
        for label, found in by_label.items():
            found = sorted(found, key=lambda curve: curve.steps)
            steps, mean, error = zip(*((curve.steps[0], curve.mean[place], curve.error[place])
                                       for curve in found))
            plot_with_band(ax, steps, mean, error, label=label, **styles[label])
        ax.axhline(GUESS, color="0.6", lw=0.8, label="guessing a letter or digit")
        ax.set(title=f"repeated after {distance:,} tokens", xlabel="training step")
        ax.locator_params(axis="x", nbins=5)
        ax.xaxis.set_major_formatter("{x:,.0f}")
    axes[0, 0].set_ylim(0)
    axes[0, 0].set_ylabel("nats per token of the repetition")
    legend_below(fig)
    save_figure(fig, path)


def main():
    p = Parser(__doc__)
    add_tables(p, "*")
    p.add_argument("--data", nargs="+", help="UTF-8 files or folders with the text in between [the "
                   "standard library's held-out files]")
    p.add_argument("--distances", type=int, nargs="+", default=[2**n for n in range(7, 16)],
                   help="distances to measure, in tokens [128 256 512 .. 32768]")
    p.flag("--strings", 8, "how many strings, each with text of its own")
    add_settings(p)
    p.flag("--digits", None, "ask for ABCDigits' numbers of this many digits instead", int)
    add_flags(p)
    args = p.parse_args()
    if args.digits:
        for name in ("tables", "data", "distances", "rope_scale", "table", "out"):
            if getattr(args, name) != p.get_default(name) and getattr(args, name) != []:
                raise UsageError(f"--digits prints numbers of its own: leave {name} out")
        print_ranks(args)
        return
    rows, out = get_figure(p, "nats", measure)
    curves = get_curves(rows)
    print_curves(curves)
    if plt := pyplot():
        (draw_by_step if are_kept(rows) else draw_by_distance)(plt, curves, out)


if __name__ == "__main__":
    cli(main)

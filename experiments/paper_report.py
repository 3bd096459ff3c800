"""report.md of experiments.paper: figures, tables, commands, and where they agree with the paper.

The sentences are made from the tables, so they say what is there, whatever it is.
"""
import math

from experiments.paper_plan import FIGURES
from experiments.style import ABLATIONS, count_of, paper_name


def read(path):
    """The rows of a table as dicts of text; [] if it is not there, or empty."""
    if not path.exists() or not path.stat().st_size:
        return []
    head, *rows = [line.split("\t") for line in path.read_text().splitlines()]
    return [dict(zip(head, row)) for row in rows]


def markdown(rows):
    """A table in Markdown."""
    if not rows:
        return ""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(row.values()).replace(" |  |", " | |") + " |" for row in rows]
    return "\n".join(lines) + "\n\n"


def spread(rows, name, column, value):
    """A table in Markdown: a line for each name(row), value(row) in a column for each row[column].
    """
    lines = {}
    for row in rows:
        lines.setdefault(name(row), {})[row[column]] = value(row)
    columns = sorted({x for line in lines.values() for x in line}, key=float)
    return markdown([{"": name} | {x: line.get(x, "") for x in columns}
                     for name, line in lines.items()])


# ------------------------------------------------------------------------------ the sentences

def scaling(out):
    seeds = sorted({row["seeds"] for row in read(out / "scaling.tsv")})
    for row in read(out / "fits.tsv"):
        if row["size"] == "total" and row["saving"] != "-":
            return (f"Here Multiscreen saves {row['saving']} of the parameters at the same loss "
                    f"({row['at_loss']}), with a standard deviation of {row['std']} by the fits; "
                    "below 0 it needs more. The paper says roughly 30 %. Seeds of a size: "
                    f"{' or '.join(seeds)}. The Transformers' learning rate is the paper's, not "
                    "tuned for this scale.")
    return "Here the fitted lines have no loss in common, or do not fall: there is no saving."


def lr_sweep(out):
    rows = read(out / "lr_sweep.tsv")
    found = []
    for name in [c for c in rows[0] if c not in ("exponent", "rate") and "std" not in c]:
        losses = {float(row[name]): row["exponent"] for row in rows if "diverged" not in row[name]}
        bad = [f"2^{row['exponent']}" for row in rows if "diverged" in row[name]]
        best = f"is best at 2^{losses[min(losses)]}" if losses else "trains at no rate"
        end = f"at least one seed diverges at {', '.join(bad)}" if bad else "no seed diverges"
        found.append(f"{paper_name(name)} {best}, {end}")
    return (f"Here {'; '.join(found)} (tried up to 2^{rows[-1]['exponent']}). In the paper the "
            "Transformer's limit is below 2^-4, Multiscreen's is not reached.\n\n"
            "The table has validation losses in nats per token, means over the seeds that did not "
            "diverge; a model without std has one seed. The curves of training are of one seed a "
            "rate, and of the rates whose logs were there.")


def sanity(out):
    rows = read(out / "sanity.tsv")
    changes = [f"{row['run']}: {'diverged' if row['change'] == '-' else row['change']}"
               for row in rows[1:]]
    norms = [float(row["grad_median"]) for row in read(out / "sanity_curves.tsv")
             if row["grad_median"] != "-"]
    said = f"Here the change of the loss against the Transformer is {', '.join(changes)}. "
    if len(norms) < len(rows):
        return f"{said}The logs of their gradient norms are not all there."
    return (f"{said}Multiscreen's median gradient norm is {norms[-1] / norms[0]:.2g} times the "
            "Transformer's before clipping; in the paper much smaller.")


def is_ablated(row):
    """Whether a row of a table is of an ablation."""
    return any(name in row["model"] for name in (*ABLATIONS.values(), "Original"))


def perplexities(out, ablated):
    """The curves at powers of two, those of the ablations or all others, as a table."""
    rows = [row for row in read(out / "long_context.tsv") if is_ablated(row) == ablated
            and float(row["x_training"]) >= 1 and math.log2(float(row["x_training"])).is_integer()]
    tasks = len({row["task"] for row in rows})

    def name(row):
        words = [row["task"]] * (tasks > 1) + [row["model"], row["curve"]]
        return f"{', '.join(words)} ({count_of(int(row['seeds']), 'seed')})"

    table = spread(rows, name, "x_training", lambda row: f"{float(row['perplexity']):.3g}")
    return f"Perplexity per token, by times the training length:\n\n{table or 'not measured'}"


def perplexity(out):
    return (f"{perplexities(out, False)}In the paper Multiscreen's is stable and the Transformer's "
            "rises sharply. Bands: one standard deviation.")


def retrieved(out, task):
    """The rows of a task in the table of retrieval, without those of ablations."""
    return [row for row in read(out / "retrieval.tsv")
            if row["task"].startswith(task) and not is_ablated(row)]


def retrieval(rows):
    models = {}
    for row in rows:
        models.setdefault(row["model"], []).append(row)
    found = [f"{model} {rows[0]['mean']} at {rows[0]['length']} and {rows[-1]['mean']} at "
             f"{rows[-1]['length']} tokens (seeds: {rows[0]['seeds']} and {rows[-1]['seeds']})"
             for model, rows in models.items()]
    return f"Needles found: {'; '.join(found) or 'not measured'}."


def latency(out):
    rows = [row for row in read(out / "latency.tsv") if row["x_flash"] != "-"]
    if not rows:
        return "Not measured."
    curves = {}
    for row in rows:
        curves.setdefault(f"{row['model']}, {row['setting']}", []).append(
            f"{float(row['x_flash']):.2f} at {row['length']} tokens")
    found = [f"{name} {' and '.join(dict.fromkeys((said[0], said[-1])))}"
             for name, said in curves.items()]
    return ("The time of the Transformer beside it, with flash attention, over Multiscreen's: "
            f"{'; '.join(found)}. In the paper it is above 1, on a GPU. `initial` windows are "
            "those before training, `trained-like` ones a guess at those after it.")


def ablations(out):
    rows = [row for row in read(out / "ablations.tsv")[1:] if row["change"] != "-"]
    others = [row for row in read(out / "retrieval.tsv") if is_ablated(row)]
    table = spread(others, lambda row: f"{row['model']} ({count_of(int(row['seeds']), 'seed')})",
                   "length", lambda row: row["mean"])
    more = (f"{perplexities(out, True)}Needles found, by tokens of context; the original's are "
            f"under ABCDigits:\n\n{table or 'not measured'}")
    if not rows:
        return f"Here no validation loss can be compared: runs diverged. {more}"
    changes = [f"{ABLATIONS[row['model'].partition(':')[2]]} {row['change']} "
               f"({row['paper_change']})" for row in rows]
    return f"Change of the validation loss here (in the paper): {', '.join(changes)}.\n\n{more}"


def maps(out):
    for path in sorted(out.glob("*/relevance_maps.tsv")):
        shares = [float(row["alive"]) for row in read(path)]
        return (f"Here {1 - sum(shares) / len(shares):.0%} of the pairs inside the windows are "
                f"zero, as a mean over the {len(shares)} tiles of seed 0, on one text; "
                f"{shares.count(0)} tiles accept nothing there, the most open one rejects "
                f"{1 - max(shares):.0%}. Above a map stand the tile's window w, acceptance width "
                "r, and Pr, the share of its pairs that are not zero.")
    return "Not drawn."


def windows(out):
    for path in sorted(out.glob("*/windows.tsv")):
        row = read(path)[-1]
        return (f"Here the median window of seed 0 is {row['w_median']} tokens, "
                f"{row['w>T_train']} of {row['tiles']} exceed the training length, and the median "
                f"r is {row['r_median']}.")
    return "Not drawn."


GRIDS = ("Bands: one standard deviation over the seeds. A Transformer has the best of its RoPE "
         "scaling factors in each cell; in the second figure ×n names it.")
SENTENCES = {"scaling": scaling, "lr_sweep": lr_sweep, "sanity": sanity, "perplexity": perplexity,
             "retrieval": lambda out: f"{retrieval(retrieved(out, 'abcdigits'))} {GRIDS}",
             "passkey": lambda out: retrieval(retrieved(out, "passkey")),
             "latency": latency, "ablations": ablations, "maps": maps, "windows": windows}


# --------------------------------------------------------------------------------- the file

def write_report(name, note, out, commands, failed):
    """Write OUT/report.md. commands: {figure: [command]}; failed: {command: why}."""
    text = [f"# The paper's evaluation, scale `{name}`\n",
            f"`python -m experiments.paper --scale {name} --out {out}` draws this from the rows of "
            "[results.tsv](results.tsv). What that table holds is not measured again: begin with "
            f"a copy of it in {out}. Commands whose rows are not all there are marked; the "
            "table may also have rows of other commands, with other seeds or fewer prompts.\n"]
    text.append(f"{note}\n")
    for key, figure in FIGURES.items():
        images = [path for image in figure.images
                  for path in [out / image, *sorted(out.glob(f"*/{image}"))] if path.exists()]
        text.append(f"## {figure.title}\n\nThe paper: {figure.paper}\n")
        measured = next(out.glob(figure.source), None)
        text.append(f"{SENTENCES[key](out) if measured else 'Not finished.'}\n")
        text += [f"![{figure.title}]({path.relative_to(out).as_posix()})\n" for path in images]
        rows = read(out / figure.table) if figure.table else []
        if figure.table == "retrieval.tsv":
            rows = retrieved(out, "passkey" if key == "passkey" else "abcdigits")
        text.append(markdown(rows))
        lines = "\n".join(commands[key])
        text.append("<details><summary>The commands</summary>\n\n"
                    f"```sh\n{lines}\n```\n\n</details>\n")
    if failed:
        text.append("## Not run\n\n" + "\n".join(f"* `{x}`: {why}" for x, why in failed.items()))
    (out / "report.md").write_text("\n".join(text).replace("\n\n\n", "\n\n"))
    print(f"wrote {out / 'report.md'}")

"""report.md of experiments.paper: figures, tables, commands, and where they agree with the paper.

The sentences are made from the tables, so they say what is there, whatever it is.
"""
from experiments.paper_plan import FIGURES
from experiments.style import ABLATIONS


def read(path):
    """The rows of a table as dicts of text; [] if it is not there."""
    if not path.exists():
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


# ------------------------------------------------------------------------------ the sentences

def scaling(out):
    for row in read(out / "fits.tsv"):
        if row["size"] == "total" and row["saving"] != "-":
            return (f"Here Multiscreen needs {row['saving']} fewer parameters at the same loss "
                    f"({row['at_loss']}); the paper says roughly 30 %.")
    return "Here the fitted lines have no loss in common, or do not fall: there is no saving."


def lr_sweep(out):
    rows = read(out / "lr_sweep.tsv")
    found = []
    for name in [c for c in rows[0] if c not in ("exponent", "rate") and "std" not in c]:
        stable = [int(row["exponent"]) for row in rows if "diverged" not in row[name]]
        losses = {float(row[name]): row["exponent"] for row in rows if "diverged" not in row[name]}
        found.append(f"{name} trains up to 2^{max(stable)} and is best at 2^{losses[min(losses)]}"
                     if stable else f"{name} diverges at each rate")
    return (f"Here {'; '.join(found)} (tried up to 2^{rows[-1]['exponent']}). In the paper the "
            "Transformer's limit is below 2^-4, Multiscreen's is not reached.")


def sanity(out):
    changes = [f"{row['run']}: {row['change']}" for row in read(out / "sanity.tsv")[1:]]
    norms = {row["run"]: float(row["grad_median"]) for row in read(out / "sanity_curves.tsv")
             if row["grad_median"] != "-"}
    if not norms:
        return f"Here the change of the loss is {', '.join(changes)}; the logs are not there."
    *_, multiscreen = norms.values()
    first = next(iter(norms.values()))
    return (f"Here the change of the loss against the Transformer is {', '.join(changes)}. "
            f"Multiscreen's median gradient norm is {multiscreen / first:.2g} times the "
            "Transformer's before clipping; in the paper much smaller.")


def perplexity(out):
    ends = {}
    for row in read(out / "long_context.tsv"):
        ablated = any(name in row["model"] for name in ABLATIONS.values())
        if not ablated and float(row["x_training"]) >= 1:
            ends.setdefault((row["model"], row["curve"]), []).append(row)
    found = [f"{model}{'' if curve == 'as trained' else ' ' + curve} "
             f"{float(rows[0]['perplexity']):.3g} and {float(rows[-1]['perplexity']):.3g}"
             for (model, curve), rows in ends.items()]
    x = max((float(rows[-1]["x_training"]) for rows in ends.values()), default=0)
    return (f"Perplexity per token at the training length and at {x:g} times it: "
            f"{'; '.join(found)}. In the paper Multiscreen's is stable and the Transformer's rises "
            "sharply. Bands: one standard deviation.")


def retrieval(out, task="abcdigits"):
    found = {}
    for row in read(out / "retrieval.tsv"):
        if row["task"].startswith(task):
            found.setdefault(row["model"], []).append(row)
    said = [f"{model} {rows[0]['mean']} at {rows[0]['length']} and {rows[-1]['mean']} at "
            f"{rows[-1]['length']} tokens (there measured for {rows[-1]['seeds']} of "
            f"{rows[0]['seeds']} seeds)"
            for model, rows in found.items()]
    return f"Here: {'; '.join(said)}." if said else "Not measured."


def latency(out):
    rows = [row for row in read(out / "latency.tsv") if row["x_flash"] != "-"]
    if not rows:
        return "Not measured."
    return "The Transformer's time over Multiscreen's: " + "; ".join(
        f"{row['model']}, {row['setting']}, {row['length']} tokens: {float(row['x_flash']):.2f}"
        for row in rows) + ". The paper's is above 1 on a GPU; this is this machine."


def ablations(out):
    rows = [row for row in read(out / "ablations.tsv")[1:] if row["change"] != "-"]
    if not rows:
        return f"The original diverged here, so no loss can be compared. {retrieval(out)}"
    dearer = [row["model"].partition(":")[2] for row in rows if row["change"].startswith("+")]
    worst = max(rows, key=lambda row: float(row["val_loss"]))
    return (f"{len(dearer)} of {len(rows)} ablations cost validation loss here "
            f"({', '.join(dearer) or 'none'}), all 5 in the paper; the costliest is "
            f"{worst['model']}, in the paper multiscreen:no-gate. {retrieval(out)}")


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
        return (f"Here the median window is {row['w_median']} tokens, {row['w>T_train']} of "
                f"{row['tiles']} exceed the training length, and the median r is "
                f"{row['r_median']}.")
    return "Not drawn."


SENTENCES = {"scaling": scaling, "lr_sweep": lr_sweep, "sanity": sanity, "perplexity": perplexity,
             "retrieval": retrieval, "passkey": lambda out: retrieval(out, "passkey"),
             "latency": latency, "ablations": ablations, "maps": maps, "windows": windows}


# --------------------------------------------------------------------------------- the file

def write_report(name, out, commands, failed):
    """Write OUT/report.md. commands: {figure: [command]}; failed: {command: why}."""
    text = [f"# The paper's evaluation, scale `{name}`\n",
            f"`python -m experiments.paper --scale {name} --out {out}` draws this from the rows of "
            "[results.tsv](results.tsv). Commands whose rows are not all there are marked; the "
            "table may also have rows of other commands, with other seeds or fewer prompts.\n"]
    if name == "tiny":
        text.append("`tiny` is a check that everything runs. Nothing is learned: its numbers say "
                    "nothing of the paper.\n")
    for key, figure in FIGURES.items():
        images = [path for image in figure.images
                  for path in [out / image, *sorted(out.glob(f"*/{image}"))] if path.exists()]
        text.append(f"## {figure.title}\n\nThe paper: {figure.paper}\n")
        measured = next(out.glob(figure.source), None)
        unmeasured = "Not finished." if images else "Not run at this scale."
        text.append(f"{SENTENCES[key](out) if measured else unmeasured}\n")
        text += [f"![{figure.title}]({path.relative_to(out).as_posix()})\n" for path in images]
        rows = read(out / figure.table) if figure.table else []
        if figure.table == "retrieval.tsv":
            rows = [row for row in rows if row["task"].startswith("passkey") == (key == "passkey")]
        text.append(markdown(rows[:60]))
        lines = "\n".join(commands[key])
        text.append("<details><summary>The commands</summary>\n\n"
                    f"```sh\n{lines}\n```\n\n</details>\n")
    if failed:
        text.append("## Not run\n\n" + "\n".join(f"* `{x}`: {why}" for x, why in failed.items()))
    (out / "report.md").write_text("\n".join(text).replace("\n\n\n", "\n\n"))
    print(f"wrote {out / 'report.md'}")

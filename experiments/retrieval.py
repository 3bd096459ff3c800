"""The retrieval figures (section "Retrieval Ability", appendices "ABCDigits" and "Passkey Retrieval Results"): accuracy by
context length and depth as colours, a panel for each TSV that abcdigits.py or experiments.passkey wrote.

Paper:  python abcdigits.py --ckpt out/scaling_paper/multiscreen_psi48-0/ckpt.pt --lengths 4096 8192 16384 32768 65536 131072
            (for each model; with --swe, and for Transformers with --rope-scale 1 2 4 8 16 32 64)
        python -m experiments.retrieval out/scaling_paper/{transformer_1.3B,multiscreen_psi32,multiscreen_psi48}-0/abcdigits.tsv
Small:  python -m experiments.retrieval out-abc/abcdigits.tsv
        the model of the README. What it leaves out: language; it was trained on this very task.

The paper prints, averaged over the depths at 4,096 tokens, its training length: 99.18 % for the 286M Multiscreen and 95.98 % for
the 1.3B Transformer with the best of its RoPE scaling factors in each cell.
"""
from pathlib import Path

from experiments.common import pyplot, report, save_figure
from train import Parser, UsageError, cli, read_checkpoint


def read_grid(path):
    """({(length, depth): (accuracy, RoPE scaling factor or None)}, "n digits") from a TSV of abcdigits.py or of
    experiments.passkey."""
    try:
        head, *rows = [line.split("\t") for line in Path(path).read_text().splitlines()]
        rows = [dict(zip(head, row, strict=True)) for row in rows]
        return {(int(r["length"]), float(r["depth"])): (float(r["accuracy"]), float(r["rope_scale"]) if r.get("rope_scale") else None)
                for r in rows}, f"{rows[0]['digits']} digits"
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist: `python abcdigits.py --ckpt .../ckpt.pt` writes it beside the checkpoint") from None
    except (OSError, ValueError, LookupError) as e:
        raise UsageError(f"{path} is no table of abcdigits.py or experiments.passkey ({type(e).__name__})") from None


def draw(plt, grids, path):
    """One panel for each (title, cells, training length or None), to a PNG."""
    widths = [max(2 + len({n for n, _ in cells}), 4) for _, cells, _ in grids]
    fig, axes = plt.subplots(1, len(grids), figsize=(0.72 * sum(widths) + 1, 3.2), squeeze=False, sharey=True,
                             gridspec_kw={"width_ratios": widths}, layout="constrained")
    for ax, (title, cells, T_train) in zip(axes[0], grids):
        lengths, depths = (sorted(set(x)) for x in zip(*cells))
        image = ax.imshow([[cells.get((n, d), (float("nan"),))[0] for n in lengths] for d in depths], vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        for (n, d), (accuracy, scale) in cells.items():
            text = "--" if accuracy == 0 else f"{100 * accuracy:.0f}" + (f"\n$\\times${scale:g}" if scale else "")
            ax.text(lengths.index(n), depths.index(d), text, ha="center", va="center", fontsize=8,
                    color="black" if 0.2 < accuracy < 0.8 else "white")
        if T_train:                                                # where the lengths beyond it begin
            ax.axvline(sum(n <= T_train for n in lengths) - 0.5, color="black", ls="--", lw=1.5, label="training length")
        ax.set(title=title, xlabel="context (tokens)", xticks=range(len(lengths)), yticks=range(len(depths)))
        ax.set_xticklabels(lengths, rotation=45, ha="right")
        ax.set_yticklabels([f"{d:g}" for d in depths])
        ax.title.set_fontsize(9)
    axes[0, 0].set_ylabel("depth of the needle")
    if grids[0][2]:
        axes[0, 0].legend(loc="upper left", bbox_to_anchor=(0, -0.28), fontsize=8, frameon=False)
    fig.colorbar(image, ax=axes[0, -1], label="accuracy")
    save_figure(fig, path)


def main():
    p = Parser(__doc__)
    p.add_argument("tables", nargs="+", help="TSV files of abcdigits.py or experiments.passkey, each beside its checkpoint")
    p.add_argument("--out", default="out/retrieval", help="folder [out/retrieval]")
    args = p.parse_args()
    grids, rows = [], []
    for path in map(Path, args.tables):
        (cells, digits), ckpt = read_grid(path), read_checkpoint(path.with_name("ckpt.pt"))
        title = f"{ckpt['model']}{', SWE' if '_swe' in path.stem else ''}"
        grids.append((f"{title}\n{path.parent.name}/{path.stem}, {digits}", cells, ckpt["args"]["seq_len"]))
        for n in sorted({n for n, _ in cells}):
            part = [accuracy for (m, _), (accuracy, _) in cells.items() if m == n]
            rows.append([str(path), title, n, n / ckpt["args"]["seq_len"], f"{sum(part) / len(part):.1%}", f"{min(part):.1%}"])
    report(Path(args.out) / "retrieval.tsv", ["table", "model", "length", "x_training", "mean", "worst_depth"], rows,
           "Retrieval, mean over the depths (paper, ABCDigits at its training length: Multiscreen 286M 99.18 %, Transformer 1.3B 95.98 %)")
    if plt := pyplot():
        draw(plt, grids, Path(args.out) / "retrieval.png")


if __name__ == "__main__":
    cli(main)

"""What weights do the attention mechanisms give to the same keys, before any training?

`python -m lab.mechanisms` draws this figure. It shows what happens to the weight of one
matching key when the number of other keys grows. One layer of each mechanism in
lab/baselines/attention.py is given the same scores s = q . k / sqrt(K). One key, 24 tokens back,
matches the query with s = 6; the scores of all other keys are random, with mean 0 and standard
deviation 1.5. The weights are drawn once among the last 64 keys and once among all 1,024. The match
is at the same distance in both cases, so only the number of other keys changes.

RoPE is turned off, because it would change the scores. Whatever is trained, such as slopes, gates,
r and windows, has its initial value. The weights are those of the last head, which sees farthest.
Screening's TanhNorm is left out.
"""
import math

import torch
import torch.nn.functional as F

from lab.baselines.attention import Forgetting, Screening
from lab.baselines.transformer import Block, TransformerConfig
from lab.common import pyplot, save_figure
from lab.style import COLORS, WIDTH, legend_below
from multiscreen import screen
from support.measure import print_table
from support.models import class_of

# The rows of the table in lab/baselines/attention.py, and what a figure calls them.
TITLES = {
    "softmax": "softmax (RoPE)",
    "nope": "softmax, no positions",
    "local": "local: the nearest 64 keys",
    "alibi": "ALiBi: s - m · distance",
    "ssmax-rope": "Scalable-Softmax: s log n",
    "off-by-one": "off by one: exp s / (1 + Σ)",
    "sigmoid": "sigmoid(s - log n)",
    "entmax": "1.5-entmax",
    "stick-breaking": "stick-breaking",
    "forgetting": f"forgetting: f = {torch.tensor(Forgetting.b_0).sigmoid():.2g}",
    "selective": "selective",
    "screening": f"screening: r = {Screening.r_0}",
}

N_KEYS = 64, 1024
MATCH = 24                                             # its distance from the query
SCORE = 6.0                                            # the match's; 1.5, of others the deviation
LOWEST = 1e-4                                          # weights below it are drawn in a lane
CONFIG = TransformerConfig(N_L=1, N_H=4, d_E=64, vocab_size=1)


def draw_tokens(n, matching=True):
    """(the query's token (1, 1, E), n tokens whose keys it meets (1, n, E)), the nearest last.

    The last tokens are the same for every n. A head's part of a token has q . q / sqrt(K) = SCORE.
    In the first head, which says for `selective` what old tokens called for, each token is of one
    of 15 kinds and calls for those of its kind; the match is of a kind of its own.
    """
    K, g = CONFIG.d_K, torch.Generator().manual_seed(7)
    x = torch.randn(max(N_KEYS) + 1, CONFIG.N_H, K, generator=g, dtype=torch.float64)
    kinds = torch.randint(K - 1, (len(x),), generator=g)
    other, x, kinds = x[0], x[1:].flip(0), kinds[1:].flip(0)
    kinds[-1 - MATCH] = K - 1
    x[:, 0] = F.one_hot(kinds, K)
    length = math.sqrt(SCORE * math.sqrt(K))
    x, other = (length * F.normalize(y, dim=-1) for y in (x, other))
    query = x[-1 - MATCH].clone()
    if not matching:
        x[-1 - MATCH, 1:] = other[1:]
    return query.view(1, 1, -1), x[-n:].reshape(1, n, -1)


def block_of(name):
    """The layer of a mechanism by its name: softmax, a word of VARIANTS, or FILE.CLASS."""
    return Block if name == "softmax" else class_of(name, "attention", Block)


@torch.no_grad()
def get_weights(name, n, matching=True):
    """The weight that a mechanism gives each of n keys, the nearest first. (n,)

    It is found by passing the identity matrix as values.
    """
    layer = block_of(name)(CONFIG).double()
    layer.rope_scale = None                            # the scores are the same for all
    for W in layer.parameters():
        if W.ndim > 1:
            W.zero_()
    for W in (layer.W_Q, layer.W_K):
        W.copy_(torch.eye(CONFIG.d_E))

    query, x = draw_tokens(n, matching)
    i, screened = torch.arange(n), []
    q, k = layer.project(query, i[-1:])[0], layer.project(x, i)[1]
    e = torch.eye(n, dtype=q.dtype).expand(1, CONFIG.N_H, n, n)

    def record(*inputs):
        screened.append(screen(*inputs))
        return screened[0]

    h = layer.mix(q, k, e, n - 1, record)
    return (screened or [h])[0][0, -1, 0].flip(0)


def is_zero(p):
    """Which weights are exactly 0, not merely too small for float64, as a nearer one almost is."""
    smallest = p.where(p > 0, 1.0).cummin(0).values
    return (p == 0) & (smallest > 1e-200)


def summarize(name):
    """(the match's weight among each of N_KEYS, zeros of the last, totals without a match)"""
    weights = [get_weights(name, n) for n in N_KEYS]
    totals = [get_weights(name, n, matching=False).sum().item() for n in N_KEYS]
    return [p[MATCH].item() for p in weights], is_zero(weights[-1]).sum().item(), totals


def words_of(match, zeros, totals):
    """What a panel's numbers say, in three lines."""
    few, many = match
    if many < LOWEST:
        found = f"match: under {LOWEST:.4f}, lost"
    else:
        found = f"match: {few:.2f} → {many:.2f}, {'kept' if many > 0.9 * few else 'diluted'}"
    if all(abs(total - 1) < 1e-6 for total in totals):
        total = "no match: total 1, must attend"
    else:
        total = "no match: total {:.2f} → {:.2f}".format(*totals)
    return f"{found}\n{total}\nexactly 0: {zeros:,} of {N_KEYS[-1]:,} keys"


def draw_weights(plt, names, path):
    """A panel for each mechanism: the weight of each key by its distance, for both N_KEYS."""
    tiny, zero = LOWEST / 3, LOWEST / 15               # two lanes below the axis
    looks = ({"edgecolor": COLORS[0], "color": "none", "s": 14, "marker": "o", "lw": 0.8},
             {"color": COLORS[4], "s": 6, "marker": "o", "lw": 0})
    columns = min(3, len(names))
    lines = math.ceil(len(names) / columns)
    fig, axes = plt.subplots(lines, columns, figsize=(WIDTH, 2.4 * max(lines, 1.4) + 1),
                             sharex=True, sharey=True, squeeze=False, layout="constrained")
    for ax, name in zip(axes.flat, names):
        ax.axhspan(zero / 2, LOWEST / 1.8, color="0.93", lw=0)
        for n, look, z in zip(N_KEYS, looks, (2, 1)):
            p, d = get_weights(name, n), torch.arange(n)
            y = p.clamp(min=LOWEST).masked_fill(p < LOWEST, tiny).masked_fill(is_zero(p), zero)
            ax.scatter(d, y, **look, zorder=z, label=f"each of {n:,} keys")
            ax.scatter(d[MATCH], y[MATCH], **look | {"marker": "*", "s": 170}, zorder=z + 2,
                       label=f"the key that matches, among {n:,}")
        ax.set_title(TITLES.get(name, name), loc="left", pad=42, fontweight="bold")
        ax.text(0, 1.04, words_of(*summarize(name)), transform=ax.transAxes, fontsize=9,
                va="bottom")
        ax.set(yscale="log", ylim=(zero / 2, 3), xlim=(-0.3, 1.3 * N_KEYS[-1]))
        ax.set_xscale("symlog", linthresh=1, linscale=0.4)
        ax.set_xticks([0, 1, 10, 100, 1000], ["0", "1", "10", "100", "1,000"])
        ax.set_yticks([zero, tiny, 1e-4, 1e-3, 1e-2, 0.1, 1],
                      ["0", "< 0.0001", "0.0001", "0.001", "0.01", "0.1", "1"])
        ax.minorticks_off()
    for ax in axes.flat[len(names):]:
        ax.axis("off")
    for ax in axes[-1]:
        ax.set_xlabel("distance from the query")
    for ax in axes[:, 0]:
        ax.set_ylabel("weight of a key")
    fig.suptitle("One key matches the query with score s = 6; all others are random, 0 ± 1.5.\n"
                 "match: its weight among 64 keys → among 1,024. no match: the sum of all weights "
                 "if none matches.\nGates, slopes, windows and r are untrained.", fontsize=10)
    legend_below(fig)
    save_figure(fig, path)


def show_weights(names, out):
    """Print and draw the weights that mechanisms give, by their names."""
    rows = [[name, *match, zeros, *totals]
            for name in names for match, zeros, totals in [summarize(name)]]
    print_table(["mechanism", *(f"match of {n}" for n in N_KEYS), "exactly 0",
                 *(f"total of {n}" for n in N_KEYS)], rows,
                f"Weights: of the match among so many keys, how many of {N_KEYS[-1]:,} are exactly "
                "0, and their sum if no key matches")
    if plt := pyplot():
        draw_weights(plt, names, out)

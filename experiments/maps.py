"""Maps of relevance as pictures: by key, as in the paper, and by distance."""
import numpy as np

from experiments.style import WIDTH

OUTSIDE = (0.3, 0.3, 0.3, 1.0)                         # dark gray


def inside(T, w):
    """Which pairs (i, j) of T positions are in the past and nearer than w. (T, T) booleans"""
    d = np.arange(T) - np.arange(T)[:, None]
    return (-w < d) & (d <= 0)


def alive(alpha_d, w):
    """Pr(alpha_d > 0) among the pairs inside the window w. alpha_d: (T, T)"""
    return float((alpha_d > 0)[inside(len(alpha_d), w)].mean())


def by_distance(alpha_d, w):
    """alpha_d with the distance i - j in place of j, as far as the window reaches; NaN before 0.

    (T, T) -> (T, distances)
    """
    T = len(alpha_d)
    d = np.arange(T)[None]
    d = d[:, : int(min(np.ceil(w), T))]                # the last with d < w
    j = np.arange(T)[:, None] - d
    return np.where(j >= 0, alpha_d[np.arange(T)[:, None], np.maximum(j, 0)], np.nan)


def get_colors(plt, maps):
    """One colour scale for all maps. It starts far from white, which is exactly 0."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, PowerNorm

    cmap = ListedColormap(plt.cm.plasma_r(np.linspace(0.25, 1, 256)))
    return ScalarMappable(PowerNorm(0.5, 0, max(float(maps.max()), 1e-6)), cmap)


def paint(values, outside, colors):
    """Values as a picture: white where they are exactly 0. (..) -> (.., 4)"""
    image = colors.cmap(colors.norm(np.nan_to_num(values)))
    image[values == 0] = 1.0
    image[outside] = OUTSIDE
    return image


def short_width(w):
    """A window in four characters: 8.2, 150, 2.1k, 153k."""
    if w < 1000:
        return f"{w:.2g}" if w < 10 else f"{w:.0f}"
    return f"{w / 1000:.1f}k" if w < 10_000 else f"{w / 1000:.0f}k"


def draw_maps(plt, maps, rows):
    """The grid of all maps, (N_L, N_H, T, T), with w, r and Pr of each; one colour scale for all.

    8 tiles a layer fit the width of a page. More make the figure wider.
    """
    N_L, N_H = maps.shape[:2]
    colors = get_colors(plt, maps)
    fig, axes = plt.subplots(N_L, N_H, figsize=(max(WIDTH, N_H), 1.3 * N_L + 1.5), squeeze=False,
                             layout="constrained")
    for ax, alpha_d, row in zip(axes.flat, maps.reshape(-1, *maps.shape[2:]), rows):
        _, _, w, r, share = row
        ax.imshow(paint(alpha_d, ~inside(len(alpha_d), w), colors))
        title = f"w {short_width(w)} r {r:.2f}\nPr {share:.2f}"
        ax.set_title(title.replace(" 0.", " ."), fontsize=9, pad=2)
        ax.set(xticks=[], yticks=[])
    for n, ax in enumerate(axes[:, 0], 1):
        ax.set_ylabel(f"layer {n}", fontsize=9)
    for n, ax in enumerate(axes[-1], 1):
        ax.set_xlabel(f"tile {n}", fontsize=9)

    explain(plt, fig, axes, colors)
    last = maps.shape[-1] - 1
    fig.supxlabel(f"in a map: query i = 0 .. {last} down, key j = 0 .. {last} to the right",
                  fontsize=10)
    return fig


def explain(plt, fig, axes, colors):
    """The colour bar, and what white and gray are."""
    fig.colorbar(colors, ax=axes, location="bottom", shrink=0.6, fraction=0.02, pad=0.01,
                 label=r"distance-aware relevance $\alpha^\mathrm{d}$")
    handles = [plt.Rectangle((0, 0), 1, 1, facecolor="white", edgecolor="black"),
               plt.Rectangle((0, 0), 1, 1, facecolor=OUTSIDE)]
    fig.legend(handles, ["inside, exactly 0", "outside the window, or in the future"],
               loc="outside upper center", ncols=2, frameon=False)


def draw_distances(plt, maps, rows, characters):
    """All tiles by distance, and a large map of one of them with the characters on its axes.

    The large one: of the tiles with windows beyond 16 the one whose Pr is nearest to .15.
    """
    N_L, N_H = maps.shape[:2]
    colors = get_colors(plt, maps)
    height = 0.9 * N_L
    fig = plt.figure(figsize=(max(WIDTH, N_H), height + WIDTH), layout="constrained")
    above, below = fig.subfigures(2, 1, height_ratios=[WIDTH, height])
    tiles = [(tile, alpha_d, row) for tile, (alpha_d, row)
             in enumerate(zip(maps.reshape(-1, *maps.shape[2:]), rows))]
    _, alpha_d, row = min(tiles, key=lambda tile: (tile[2][2] <= 16, abs(tile[2][4] - 0.15)))
    n = min(len(characters), 64)
    ax = above.subplots()
    ax.imshow(paint(alpha_d[:n, :n], ~inside(n, row[2]), colors))
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_ticks(range(n), characters[:n], fontsize=7, family="monospace")
    ax.set(xlabel="key j", ylabel="query i",
           title=f"layer {row[0]}, tile {row[1]}: w {short_width(row[2])}, r {row[3]:.2f}, "
           f"Pr {row[4]:.2f}; the first {n} tokens")

    axes = below.subplots(N_L, N_H, squeeze=False)
    for ax, (_, alpha_d, row) in zip(axes.flat, tiles):
        values = by_distance(alpha_d, row[2])
        ax.imshow(paint(values, np.isnan(values), colors), aspect="auto", interpolation="nearest")
        ax.set(xticks=[0, values.shape[1] - 1] if values.shape[1] > 1 else [0], yticks=[])
        ax.tick_params(labelsize=7, pad=1)
    for n, ax in enumerate(axes[:, 0], 1):
        ax.set_ylabel(f"layer {n}", fontsize=9)
    for n, ax in enumerate(axes[0], 1):
        ax.set_title(f"tile {n}", fontsize=9)
    explain(plt, below, axes, colors)
    below.supxlabel("distance i - j to the right, up to the window; query i down", fontsize=10)
    return fig

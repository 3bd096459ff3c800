# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
r"""
# A look at screening

Trim, Softmask and MiPE beside their equations, the questions of part 1, the maps of a trained
model, and part 4's kernel on a GPU. Every equation is imported from `multiscreen.py`: change one
there, restart, and look again.

This notebook is made from `exercises/notebook.py`. Change that file, then make it again:
`jupytext --to ipynb --update exercises/notebook.py`.
"""

# %% [markdown]
"""
## Where it runs

In a clone of this repository the next cell just finds it. On a hosted notebook set `ADDRESS` to the
repository's address: the cell clones it and installs what it needs.
"""

# %%
import os
import subprocess
import sys
from pathlib import Path

ADDRESS = ""
here = Path.cwd()
ROOT = next((p for p in (here, *here.parents) if (p / "multiscreen.py").exists()), None)
if ROOT is None and not ADDRESS:
    raise SystemExit("no multiscreen.py here: set ADDRESS to the repository's address")
if ROOT is None:
    ROOT = here / "multiscreen"
    subprocess.run(["git", "clone", "--depth", "1", ADDRESS, ROOT], check=True)
    install = [sys.executable, "-m", "pip", "install", "-q", "-e", f"{ROOT}[figures]"]
    subprocess.run(install, check=True)

# Kernels are compiled here. The tests of part 4 interpret them.
sys.path.insert(0, str(ROOT))
os.environ["TRITON_INTERPRET"] = "0"

# %%
import math

import matplotlib.pyplot as plt
import torch

from multiscreen import mipe, mipe_angle, relevance, screen, softmask, trim, window
from support.checkpoint import load_checkpoint

LINES = ("-", "--", "-.", ":")

# %% [markdown]
r"""
## Trim, Eq. 9

$$\alpha_{ij} = \left[\max\left(1 - \frac{1 - s_{ij}}{r},\; 0\right)\right]^2$$

A key's relevance depends only on its similarity $s$ to the query. At $s = 1 - r$ and below it is
exactly 0.
"""

# %%
s = torch.linspace(-1, 1, 401)
fig, ax = plt.subplots(figsize=(6, 3), layout="constrained")
for r, line in zip((0.25, 0.5, 1.0), LINES):
    ax.plot(s, trim(s, r), line, label=f"r = {r:g}")
ax.set(xlabel="similarity s", ylabel="relevance α")
ax.legend(frameon=False)
plt.show()

# %% [markdown]
r"""
## Softmask, Eq. 10

$$m_{ij}(w) = \begin{cases} \frac{1}{2}\left(\cos\frac{\pi (j - i)}{w} + 1\right),
& -w < j - i \le 0,\\ 0, & \text{otherwise} \end{cases}$$

The window $w$ is learned. For later keys, and at distance $w$ or more, the mask is exactly 0.
"""

# %%
d = torch.arange(-80, 11)
fig, ax = plt.subplots(figsize=(6, 3), layout="constrained")
for w, line in zip((8.0, 32.0, 64.0, math.inf), LINES):
    ax.plot(d, softmask(d, torch.tensor(w)), line, label=f"w = {w:g}")
ax.set(xlabel="key minus query position, j - i", ylabel="m")
ax.legend(frameon=False)
plt.show()

# %% [markdown]
r"""
## MiPE, Eqs. 6 and 7

$$\phi(i, w) = \frac{\pi i\, \gamma(w)}{w}, \qquad
\gamma(w) = \begin{cases} \frac{1}{2}\left(\cos\frac{\pi w}{w_\text{th}} + 1\right),
& w < w_\text{th},\\ 0, & w \ge w_\text{th} \end{cases}$$

The first two dimensions of queries and keys turn by the angle $\phi$. Left: the turn from one
position to the next. Right: the similarity of a query to the keys before it, which are all
equal and lie in these two dimensions.
"""

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
w = torch.linspace(1, 300, 300)
left.semilogy(w, mipe_angle(torch.tensor([1]), w, 256.0))
left.set(xlabel="window w", ylabel="turn in radians, w_th = 256", ylim=(1e-6, 4))

distance = torch.arange(33)
x = torch.tensor([1.0, 0.0, 0.0]).expand(1, 4, 33, 3)
w = torch.tensor([8.0, 32.0, 128.0, 256.0])
turned = mipe(x, mipe_angle(distance, w, 256.0))
similarity = (turned[0, :, :1] * turned[0]).sum(-1)
for row, w_n, line in zip(similarity, w.tolist(), LINES):
    right.plot(distance, row, line, label=f"w = {w_n:g}")
right.set(xlabel="distance", ylabel="similarity s")
fig.legend(loc="outside right center", frameon=False)
plt.show()

# %% [markdown]
"""
## Observe, part 1

A key turns slowly away from the query, in an infinite window with r = 0.5. Where does its relevance
become exactly 0? Answer before you run the cell.
"""

# %%
one = torch.ones(1)
query = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2)
degrees = torch.arange(0, 91, 10)
keys = torch.stack((degrees.deg2rad().cos(), degrees.deg2rad().sin()), -1)[None, None]
alpha_d = relevance(query, keys, one * math.inf, one * 0.5, len(degrees))[0, 0, 0]
for angle, similarity, a in zip(degrees.tolist(), keys[0, 0, :, 0].tolist(), alpha_d.tolist()):
    print(f"{angle:2d} degrees: similarity {similarity:5.2f}, relevance {a:.3g}")

# %% [markdown]
"""
Add a copy of the key. Does the first one's relevance change? Does its weight in softmax?
"""

# %%
key = torch.tensor([0.8, 0.6]).view(1, 1, 1, 2)
for n in (1, 2, 10):
    copies = key.expand(1, 1, n, 2)
    screened = relevance(query, copies, one * math.inf, one * 0.5, n)[0, 0, 0, 0]
    attended = (query @ copies.mT).softmax(-1)[0, 0, 0, 0]
    print(f"{n:2d} equal keys: screening {screened:.2f}, softmax {attended:.2f}, for the first")

# %% [markdown]
r"""
## A trained model

`models/retrieval.pt` has learned to look up letters. Each map is one tile; each row is one layer.
Queries go down, keys to the right. Gray: outside the window $w$, or after the query. White: inside
it, and exactly 0.
"""

# %%
model, tokenizer, _ = load_checkpoint(ROOT / "models/retrieval.pt")
NEEDLE = "R=89\n"
LETTERS = "F=31\nK=75\nB=64\nK=75\nT=50\n" + NEEDLE + "K=75\nF=31\nD=22\nB=64\nK=75\nF=31\nR="


def tokens_of(text):
    return torch.tensor([tokenizer.encode_ordinary(text)])


tokens = tokens_of(LETTERS)
maps = torch.cat(model.relevance_maps(tokens))
i = torch.arange(tokens.shape[1])
colors = plt.get_cmap("viridis_r").with_extremes(under="white", bad="gray")
fig, axes = plt.subplots(*maps.shape[:2], figsize=(10, 6), layout="constrained")
for layer, row, tile_maps in zip(model.layers, axes, maps):
    for ax, w, alpha_d in zip(row, window(layer.s_w.detach()), tile_maps):
        inside = softmask(i - i[:, None], w) > 0
        image = ax.imshow(alpha_d.where(inside, math.nan), cmap=colors, vmin=1e-9, vmax=1)
        ax.set_title(f"w {w:,.0f}" if w > 10 else f"w {w:.1f}", fontsize=8)
        ax.set(xticks=[], yticks=[])
fig.colorbar(image, ax=axes, label="relevance $\\alpha_d$", shrink=0.5)
plt.show()

# %% [markdown]
"""
What does the last token, the "=" of the question, accept in the tile with the widest window? R=[8]
is the 8 of that line. Then the needle is deleted. The model must still write an answer: where can
you see that it has found nothing?
"""

# %%
widths = torch.stack([window(layer.s_w.detach()) for layer in model.layers])
layer, tile = divmod(widths.argmax().item(), widths.shape[1])
print(f"layer {layer + 1}, tile {tile + 1}: w = {widths.max():,.0f}")
for text in (LETTERS, LETTERS.replace(NEEDLE, "")):
    tokens = tokens_of(text)
    answer = tokenizer.decode(model.generate(tokens, 2)[0].tolist())
    alpha_d = model.relevance_maps(tokens)[layer][0, tile, -1]
    accepted = []
    for j in alpha_d.nonzero().flatten().tolist():
        line = text[:j].rpartition("\n")[2]
        accepted.append(f"{line}[{text[j]}] {alpha_d[j]:.2f}")
    print(f"{'with' if NEEDLE in text else 'without'} the needle: accepted "
          f"{', '.join(accepted) or 'nothing'}; the answer is {answer}")

# %% [markdown]
"""
## Part 4's kernel on a GPU

The solution's kernels, compiled. Set `EXERCISES` to "" to run yours, and restart after an edit of
them. They are compared with `screen`, which holds all T x T similarities.
"""

# %%
os.environ["EXERCISES"] = "reference"


def run_on_gpu(T=4096, w=256.0, r=0.5, K=16, V=64, BI=32, BJ=16):
    """Forward and dL/dq of one tile, by the kernels and by the definition."""
    import triton
    from triton.testing import do_bench

    from exercises.adapters import mine

    torch.manual_seed(0)
    q, k = torch.nn.functional.normalize(0.5 + torch.randn(2, T, K, device="cuda"), dim=-1)
    v = torch.nn.functional.normalize(torch.randn(T, V, device="cuda"), dim=-1)
    dh = torch.randn(T, V, device="cuda")
    w, r = torch.tensor([[w], [r]], device="cuda")
    blocks = (triton.cdiv(T, BI),)

    def forward():
        h = torch.empty_like(v)
        mine.forward_kernel[blocks](q, k, v, w, r, h, 0, T, T, K=K, V=V, BI=BI, BJ=BJ)
        return h

    def backward():
        dq = torch.empty_like(q)
        mine.dq_kernel[blocks](q, k, v, w, r, dh, dq, 0, T, T, K=K, V=V, BI=BI, BJ=BJ)
        return dq

    def definition():
        return screen(*(x[None, None] for x in (q, k, v)), w, r)[0, 0]

    # Products in full float32, as in the kernel.
    torch.set_float32_matmul_precision("highest")
    q.requires_grad_()
    wanted = definition()
    wanted_dq, = torch.autograd.grad(wanted, q, dh)
    q.requires_grad_(False)
    print(f"{torch.cuda.get_device_name()}, T = {T}, w = {w.item():g}, kernels of "
          f"{mine.forward_kernel.fn.__module__}")
    print(f"largest difference: h {(forward() - wanted).abs().max():.1e}, "
          f"dq {(backward() - wanted_dq).abs().max():.1e}")
    for name, f in (("the definition", definition), ("forward_kernel", forward),
                    ("dq_kernel", backward)):
        print(f"{name}: {do_bench(f):.3f} ms")


if torch.cuda.is_available():
    run_on_gpu()
else:
    print("There is no GPU here, so the kernels did not run. `pytest exercises -k part4` runs "
          "them in Triton's interpreter.")

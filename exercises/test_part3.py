"""Part 3: each formula against autograd in float64, then all of them block by block."""
import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import multiscreen as ms
from exercises.adapters import mine
from exercises.checks import Wrong, check, correlated, expect, gradient, random

INF = math.inf


def some_block(w=9.0, r=0.3, I=12, J=10, first=6):  # noqa: E741
    """q, k, v, dh, w, r, i, j of a block: queries from position `first` on, keys from 0."""
    q, k, v = (x[0, 0] for x in correlated(0, 1, 1, I, J))
    dh = torch.randn(I, 8, generator=random(1), dtype=torch.float64)
    w, r = torch.tensor(w, dtype=torch.float64), torch.tensor(r, dtype=torch.float64)
    return q, k, v, dh, w, r, first + torch.arange(I), torch.arange(J)


def z_c_d(q, k, w, r, i, j):
    d = i[:, None] - j
    return ms.trim(q @ k.T, r).sqrt(), ms.softmask(-d, w).sqrt(), d


def test_pairs():
    for w in (9.0, 3.5, INF):
        q, k, _, _, w, r, i, j = some_block(w)
        z, c, d = mine.pairs(q, k, w, r, i, j)
        s = q @ k.T
        z_right, c_right, d_right = z_c_d(q, k, w, r, i, j)
        expect(d, d_right, "d", [(-d_right, "d is i - j here, not j - i: positive in the past")])
        expect(z, z_right, f"z for w = {w}",
               [(z_right.square(), "z is Trim before its square: alpha_d = (z c)^2"),
                (1 - (1 - s) / r, "z is at least 0: the max of Trim is missing"),
                ((1 - (1 - s) * r).relu(), "1 - s must be divided by r, not multiplied by it")])
        check((c[d_right < 0] == 0).all(), "c is not 0 for a later key, d < 0: it sees the future")
        check((c[d_right >= w] == 0).all(), "c is not 0 at distance w and beyond")
        expect(c, c_right, f"c for w = {w}",
               [(c_right.square(), "c is the root of Softmask: cos(pi d/(2 w)), alpha_d = (z c)^2"),
                (c_right * (d_right != 0), "a query sees its own key: c is 1 at d = 0"),
                (torch.cos(math.pi * d_right / w) * (c_right > 0),
                 "the angle is halved in c: pi d / (2 w), since m = c^2")], tolerance=1e-6)


def test_dv_block():
    q, k, v, dh, w, r, i, j = some_block()
    z, c, _ = z_c_d(q, k, w, r, i, j)
    right, = gradient(lambda v: (z * c).square() @ v, v, dh=dh)
    expect(mine.dv_block(z, c, dh), right, "dv",
           [((z * c).T @ dh, "alpha_d is (z c)^2: the square is missing"),
            ((z.square() * c).T @ dh, "c is squared too: alpha_d = (z c)^2"),
            (z.square().T @ dh, "the softmask does not act: alpha_d = (z c)^2")], tolerance=1e-6)


def test_dz_block():
    q, k, v, dh, w, r, i, j = some_block()
    z, c, _ = z_c_d(q, k, w, r, i, j)
    right, = gradient(lambda z: (z * c).square() @ v, z, dh=dh)
    expect(mine.dz_block(z, c, v, dh), right, "dz",
           [(right / 2, "the 2 of the square's derivative is missing"),
            (2 * z * c * (dh @ v.T), "one factor c is missing: y = z c, and dy/dz = c"),
            (2 * z.square() * c * (dh @ v.T), "this is dL/dc: for dL/dz z and c change places"),
            (dh @ v.T, "this is dL/d(alpha_d): dL/dz = dL/d(alpha_d) times the slope of (z c)^2"),
            (2 * z * (dh @ v.T), "both factors c are missing: alpha_d = (z c)^2"),
            (c.square() * (dh @ v.T), "z is missing: the slope of a square is twice its base")],
           tolerance=1e-6)


def of_s(what, f, right, dz, k_or_q, r, *more):
    """dq and dk: the same mistakes."""
    expect(f(dz, k_or_q, r), right, what,
           [*more, (right * r, "1/r is missing: dz/ds = 1/r"),
            (right * r * r, "divide by r, dz/ds = 1/r; this multiplies"),
            (right / r, "divided by r twice"), (-right, "the sign: z grows with s")],
           tolerance=1e-6)


def test_dq_block():
    q, k, v, dh, w, r, i, j = some_block()
    z, c, _ = z_c_d(q, k, w, r, i, j)
    dz = 2 * z * c.square() * (dh @ v.T)
    of_s("dq", mine.dq_block, dz @ k / r, dz, k, r)


def test_dk_block():
    q, k, v, dh, w, r, i, j = some_block(I=10)
    z, c, _ = z_c_d(q, k, w, r, i, j)
    dz = 2 * z * c.square() * (dh @ v.T)
    right = dz.T @ q / r
    of_s("dk", mine.dk_block, right, dz, q, r,
         (dz @ q / r, "queries and keys were swapped: a row of dz is a query, so transpose it"))


def test_dr_block():
    q, k, v, dh, w, r, i, j = some_block()
    z, c, _ = z_c_d(q, k, w, r, i, j)
    right, = gradient(lambda r: (ms.trim(q @ k.T, r) * c.square()) @ v, r, dh=dh)
    dz = 2 * z * c.square() * (dh @ v.T)
    expect(mine.dr_block(dz, z, r), right, "dr",
           [(-right, "the sign: a wider r accepts more, z grows with r"),
            (right * r, "1/r is missing: (1 - s)/r^2 = (1 - z)/r"),
            (right / r, "(1 - s)/r^2 is (1 - z)/r: 1 - z has one r in it already"),
            (right / dz.numel(), "the mean over the pairs: a gradient is their sum"),
            ((dz * z).sum() / r, "dz/dr is (1 - z)/r, not z/r")], tolerance=1e-6)


def test_dw_block():
    q, k, v, dh, w, r, i, j = some_block()
    z, c, d = z_c_d(q, k, w, r, i, j)
    alpha = z.square()
    right, = gradient(lambda w: (alpha * ms.softmask(-d, w)) @ v, w, dh=dh)
    slope = c * (dh @ v.T) * torch.sin(math.pi / 2 * (d / w)) * d * math.pi / w / w
    found = mine.dw_block(z, c, d, v, dh, w)
    expect(found, right, "dw",
           [(-right, "the sign: a wider window lets more through"),
            (right / 2, "the 2 of the square's derivative is missing"),
            ((alpha * c * slope).sum(), "one factor c is too many: dL/dc has z^2 c"),
            ((z * slope).sum(), "one factor z is missing: dL/dc has z^2 c"),
            (right * w, "theta = pi/(2 w), so dtheta/dw = -theta/w: a 1/w is missing"),
            (right * w * 2 / math.pi, "dtheta/dw = -theta/w: theta is missing")], tolerance=1e-6)
    infinite = mine.dw_block(z, torch.ones_like(z), d, v, dh, torch.tensor(INF).double())
    check(infinite == 0, f"dw is {infinite} for w = inf: it must be 0")


def by_autograd(q, k, v, w, r, dh, i0=0):
    """The gradients of ms.screen, for one tile and no batch."""
    def screen(q, k, v, w, r):
        batch = (x[None, None] for x in (q, k, v))
        return ms.screen(*batch, w[None], r[None], i0)[0, 0]

    return gradient(screen, q, k, v, w, r, dh=dh)


class Watch(TorchDispatchMode):
    """Counts the operations, and the numbers in the largest result."""
    largest = operations = 0

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        self.operations += 1
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.numel())
        return out


def which(off):
    """A likely cause, of the names of the gradients that are off."""
    if set(off) == {"dw", "dr"}:
        return "they come in the order dq, dk, dv, dw, dr"
    if len(off) == 1:
        return "add up with += over all blocks"
    return "a block is left out, or counts twice: see the first, and the last, which may be short"


def rows_of(found, right):
    """` in the rows a to b` of a matrix."""
    if found.shape != right.shape or found.ndim < 2:
        return ""
    rows = ((found - right).abs().amax(1) > 1e-6).nonzero().flatten()
    return f" in the rows {rows[0]} to {rows[-1]}" if len(rows) else ""


def test_gradients():
    cases = [(40, 40, 0, 9.0), (40, 40, 0, 32.0), (23, 61, 38, 17.0), (23, 61, 38, INF),
             (30, 20, 5, 3.5), (5, 40, 33, 24.5), (17, 17, 0, 9.0), (5, 45, 39, 24.5)]
    for T, S, i0, w in cases:
        q, k, v, dh, w, r, _, _ = some_block(w, I=T, J=S)
        if T == S:
            k[-1] = q[-1]                              # accepted, and alone in its block
        elif S == 45:
            k[15] = q[0]                               # at distance 24, the last of its block
        found, right = mine.gradients(q, k, v, w, r, dh, i0), by_autograd(q, k, v, w, r, dh, i0)
        at_0 = by_autograd(q, k, v, w, r, dh)
        case = f"of {T} queries and {S} keys, i0 = {i0}, w = {w}"
        off = {}
        for name, a, b, c in zip("qkvwr", found, right, at_0):
            try:
                expect(a, b, f"d{name} {case}",
                       [(c, "i0 does not act: query t is at position i0 + t")], tolerance=1e-6)
            except Wrong as e:
                off[f"d{name}"] = f"{e}{rows_of(a, b)}"
        if off:
            message = next(iter(off.values()))
            cause = f"off: {', '.join(off)}. If 3.1 to 3.7 pass, {which(off)}\n"
            raise Wrong(message if "\n" in message else cause + message)
    narrow, wide, longer = watched(10.0, 128), watched(INF, 128), watched(10.0, 256)
    check(wide.largest < 128 * 64, f"a tensor of {wide.largest} numbers was made for 128 queries "
          "and keys: go through the blocks, T x S must never exist")
    check(narrow.operations < 0.7 * wide.operations, f"a window of 10 takes {narrow.operations} "
          f"operations, an infinite one {wide.operations}: blocks outside the window are visited")
    check(longer.operations < 3 * narrow.operations, "blocks of later keys are visited: a window "
          f"of 10 takes {narrow.operations} operations for 128 tokens, {longer.operations} for 256")


def watched(w, T):
    """The Watch of all gradients of T queries and keys."""
    q, k, v, dh, w, r, _, _ = some_block(w, I=T, J=T)
    with Watch() as watch:
        mine.gradients(q, k, v, w, r, dh)
    return watch

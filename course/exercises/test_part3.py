"""Part 3: each formula against autograd in float64, then all of them block by block."""
import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import multiscreen as ms
from course.exercises.adapters import mine
from course.exercises.bounds import wrong_bounds
from course.exercises.checks import (
    Wrong,
    check,
    correlated,
    describe_difference,
    expect,
    gradient,
    near,
)

INF = math.inf


def some_block(w=9.0, r=0.3, I=12, J=10, first=8):  # noqa: E741
    """q, k, v, dh, w, r, i, j of a block: queries from position `first` on, keys from 2.

    Every fifth key points away from the queries.
    """
    q, k, v = (x[0, 0] for x in correlated(0, 1, 1, I, J))
    k[1::5] *= -1
    dh = torch.randn(I, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    w, r = torch.tensor(w, dtype=torch.float64), torch.tensor(r, dtype=torch.float64)
    return q, k, v, dh, w, r, first + torch.arange(I), 2 + torch.arange(J)


def call(name, **inputs):
    """What mine.`name` returns for copies of the inputs, which must stay as they are."""
    copies = {key: x.clone() for key, x in inputs.items()}
    out = getattr(mine, name)(*copies.values())
    for key, x in inputs.items():
        check(torch.equal(copies[key], x), f"{name} changes its input {key}")
    return out


def z_c_d(q, k, w, r, i, j):
    d = i[:, None] - j
    return ms.trim(q @ k.T, r).sqrt(), ms.softmask(-d, w).sqrt(), d


def test_pairs():
    for w in (9.0, 3.5, INF):
        q, k, _, _, w, r, i, j = some_block(w)
        out = call("pairs", q=q, k=k, w=w, r=r, i=i, j=j)
        check(isinstance(out, tuple) and len(out) == 3, "return z, c, d: three tensors")
        z, c, d = out
        s = q @ k.T
        z_right, c_right, d_right = z_c_d(q, k, w, r, i, j)
        inside, angle = c_right > 0, math.pi / 2 * (d_right / w)
        expect(d, d_right, "d", [
            (i[:, None] - torch.arange(len(j)), "j is given: key n of the block is at j[n]"),
            (torch.arange(len(i))[:, None] - j, "i is given: query n of the block is at i[n]"),
            (d_right.abs(), "d is negative for a later key: leave i - j as it is"),
            (-d_right, "d is i - j here, not j - i: positive in the past")])
        expect(z, z_right, f"z for w = {w:g}",
               [(c_right, "return z, c, d: z and c are swapped"),
                (z_right.square(), "z is Trim before its square: alpha_d = (z c)^2"),
                (1 - (1 - s) / r, "z is at least 0: the max of Trim is missing"),
                ((1 - (1 - s) * r).relu(), "1 - s must be divided by r, not multiplied by it"),
                ((1 - s / r).relu(), "Trim compares 1 - s with r, not s"),
                ((1 - (1 - s.abs()) / r).relu(), "|s| was taken: opposite vectors are not similar"),
                ((-s / r).relu(), "brackets: it is 1 - (1 - s)/r"),
                ((1 - (1 - s) / r**2).relu(), "divided by r twice"),
                ((1 - (1 - s) / r).clamp(max=0), "the smaller of z and 0: clamp(min=0), not max"),
                (z_right * inside, "the window belongs in c, not in z"),
                ((1 - (1 - s) / w).relu(), "w and r were swapped"),
                ((1 - (1 - s) / r).clamp(min=1), "the max is with 0"),
                ((s - r).relu(), "r is not a threshold for s: z = max(1 - (1 - s)/r, 0)"),
                (1 - (1 - s).relu() / r, "the max is around the whole: max(1 - (1 - s)/r, 0)")],
               tolerance=1e-6)
        expect(c.double(), c_right, f"c for w = {w:g}",
               [(c_right.square(), "c is the root of Softmask: cos(pi d/(2 w)), alpha_d = (z c)^2"),
                (c_right * (d_right != 0), "a query sees its own key: c is 1 at d = 0"),
                (torch.cos(2 * angle) * inside,
                 "the angle is halved in c: pi d/(2 w), since m = c^2"),
                (torch.cos(angle / math.pi) * inside, "pi is missing in the angle, pi d/(2 w)"),
                (torch.cos(angle), "c is 0 for a later key and from distance w on: the window is "
                 "missing"),
                (torch.cos(angle) * (d_right < w), "c is not 0 for a later key, d < 0: it sees the "
                 "future"),
                (torch.cos(angle) * (d_right.abs() < w), "c is not 0 for a later key, d < 0: it "
                 "sees the future"),
                (torch.cos(angle) * (d_right >= 0), "c is not 0 at distance w and beyond: the "
                 "cosine comes back"),
                (torch.cos(math.pi * d_right / 2 * w) * inside, "brackets: pi d/(2 w), not "
                 "pi d/2 w"),
                (torch.cos(angle * w / (w + 1)) * inside, "the window is w, not w + 1"),
                *((torch.cos(math.pi / 2 * (d_right / x)) * ((d_right >= 0) & (d_right < y)),
                   "w is a real number: round nothing") for x in (w.ceil(), w.floor())
                  for y in (w, x)),
                (c_right * (z_right > 0), "Trim belongs in z, not in c"),
                (torch.sin(angle) * inside, "c is the cosine, not the sine: 1 at d = 0"),
                (inside, "c falls from 1 to 0 as a cosine: cos(pi d/(2 w)) inside the window")],
               tolerance=1e-6)
        check((c[~inside] == 0).all(), "c must be exactly 0 at distance w and beyond, and for a "
              "later key: test d, since a cosine is only nearly 0")


def test_dv_block():
    q, k, v, dh, w, r, i, j = some_block()
    z, c, _ = z_c_d(q, k, w, r, i, j)
    right, = gradient(lambda v: (z * c).square() @ v, v, dh=dh)
    expect(call("dv_block", z=z, c=c, dh=dh), right, "dv",
           [((z * c).T @ dh, "alpha_d is (z c)^2: the square is missing"),
            ((z.square() * c).T @ dh, "c is squared too: alpha_d = (z c)^2"),
            ((z * c.square()).T @ dh, "z is squared too: alpha_d = (z c)^2"),
            (z.square().T @ dh, "the softmask is ignored: alpha_d = (z c)^2"),
            (2 * right, "h is linear in v: there is no 2"),
            (-right, "the sign: h grows with v"),
            (right / len(z), "the mean over a block: a gradient is a sum"),
            ((z + c).square().T @ dh, "z and c are multiplied, not added"),
            ((z * c).square().sum(0)[:, None] * dh.sum(0), "each query has its own dh: a matrix "
             "product, not a product of sums"),
            *((x.square().T @ dh, "alpha_d is (z c)^2: squared once too often")
              for x in (z * c.square(), z.square() * c, (z * c).square()))], tolerance=1e-6)


def test_dz_block():
    q, k, v, dh, w, r, i, j = some_block()
    z, c, _ = z_c_d(q, k, w, r, i, j)
    right, = gradient(lambda z: (z * c).square() @ v, z, dh=dh)
    expect(call("dz_block", z=z, c=c, v=v, dh=dh), right, "dz",
           [(right / 2, "the 2 of the square's derivative is missing"),
            (-right, "the sign: alpha_d grows with z"),
            (2 * z * c.square() * (dh @ v.T).sum(1, keepdim=True), "a pair has its own dh_i . v_j: "
             "sum nothing over the keys"),
            (right.abs(), "dh_i . v_j may be negative: take no |..|"),
            (2 * z * c.square() * dh.sum(1, keepdim=True) * v.sum(1), "dh_i . v_j is a sum of "
             "products, dh @ v.T, not a product of sums"),
            (right * z, "one factor z too many: (z^2)' = 2 z"),
            (2 * z * c * (dh @ v.T), "one factor c is missing: y = z c, and dy/dz = c"),
            (2 * z.square() * c * (dh @ v.T), "this is dL/dc: for dL/dz swap z and c"),
            (dh @ v.T, "this is dL/d(alpha_d): dL/dz = dL/d(alpha_d) times the slope of (z c)^2"),
            ((z * c).square() * (dh @ v.T), "this is alpha_d (dh . v): take the slope of (z c)^2"),
            (2 * z * c.square().square() * (dh @ v.T), "c^2 is squared: dz = 2 z c^2 (dh . v)"),
            (2 * z * (dh @ v.T), "both factors c are missing: alpha_d = (z c)^2"),
            (c.square() * (dh @ v.T), "z is missing: the slope of a square is twice its base"),
            (2 * c.square() * (dh @ v.T), "z is missing: the slope of a square is twice its base"),
            (2 * (z > 0) * c.square() * (dh @ v.T), "z is missing: the slope of a square is 2 z")],
           tolerance=1e-6)


def of_s(name, right, dz, x, r, *more):
    """The mistakes that dq and dk share. x: (name, keys or queries)"""
    expect(call(f"{name}_block", dz=dz, **{x[0]: x[1]}, r=r), right, name,
           [*more, (right * r, "1/r is missing: dz/ds = 1/r"),
            (right * r * r, "divide by r, dz/ds = 1/r: this multiplies"),
            (right / r, "divided by r twice"), (-right, "the sign: z grows with s"),
            (right * r.sqrt(), "dz/ds = 1/r, without a root"),
            (right * r / (1 - r), "dz/ds = 1/r: r is the width, not 1 - r"),
            (right * r * (1 - r), "dz/ds = 1/r: r is the width, not 1 - r"),
            (right * 2, "a 2 too many: dz has it already"),
            (right / 2, "a 1/2 too many: the 2 of dz stays"),
            (right / len(x[1]), "the mean over a block: a gradient is a sum")],
           tolerance=1e-6)


def test_dq_block():
    q, k, v, dh, w, r, i, j = some_block()
    z, c, _ = z_c_d(q, k, w, r, i, j)
    dz = 2 * z * c.square() * (dh @ v.T)
    of_s("dq", dz @ k / r, dz, ("k", k), r)


def test_dk_block():
    # As many queries as keys, so that the wrong product is defined.
    q, k, v, dh, w, r, i, j = some_block(I=10)
    z, c, _ = z_c_d(q, k, w, r, i, j)
    dz = 2 * z * c.square() * (dh @ v.T)
    of_s("dk", dz.T @ q / r, dz, ("q", q), r,
         (dz @ q / r, "queries and keys were swapped: a row of dz is a query, so transpose it"))


def test_dr_block():
    q, k, v, dh, w, r, i, j = some_block()
    z, c, _ = z_c_d(q, k, w, r, i, j)
    right, = gradient(lambda r: (ms.trim(q @ k.T, r) * c.square()) @ v, r, dh=dh)
    dz = 2 * z * c.square() * (dh @ v.T)
    found = call("dr_block", dz=dz, z=z, r=r)
    check(not torch.as_tensor(found).isnan().any(), "dr is NaN: z is 0 where Trim rejects, so "
          "divide nothing by it")
    expect(found, right, "dr",
           [(-right, "the sign: a wider r accepts more, z grows with r"),
            (right * r, "1/r is missing: (1 - s)/r^2 = (1 - z)/r"),
            (right * r * r, "divide by r: dz/dr = (1 - z)/r; this multiplies"),
            (right / r, "(1 - s)/r^2 is (1 - z)/r: 1 - z already contains one r"),
            (right * 2, "a 2 too many: dz has it already"),
            (right / 2, "a 1/2 too many: the 2 of dz stays"),
            ((dz * (1 - z) * z).sum() / r, "one factor z too many: dz has it already"),
            ((dz * (1 + z)).sum() / r, "(1 - s)/r is 1 - z, not 1 + z"),
            ((dz * (1 - z / r)).sum() / r, "(1 - s)/r is 1 - z: z is not divided by r"),
            (dz.sum() * (1 - z).sum() / r, "the sum of products: multiply pair by pair, then sum"),
            (right / dz.numel(), "the mean over the pairs: a gradient is their sum"),
            ((dz * z).sum() / r, "dz/dr is (1 - z)/r, not z/r"),
            (dz.sum() / r, "dz/dr is (1 - z)/r: 1 - z is missing"),
            ((dz * (1 - z.square())).sum() / r, "z is Trim before its square: do not square it"),
            ((1 - z).sum() / r, "this is the sum of dz/dr: multiply by dz first")], tolerance=1e-6)


def test_dw_block():
    q, k, v, dh, w, r, i, j = some_block()
    z, c, d = z_c_d(q, k, w, r, i, j)
    alpha, dy = z.square(), dh @ v.T
    right, = gradient(lambda w: (alpha * ms.softmask(-d, w)) @ v, w, dh=dh)
    theta = math.pi / 2 / w
    sine = torch.sin(theta * d) * d * theta / w
    expect(call("dw_block", z=z, c=c, d=d, v=v, dh=dh, w=w), right, "dw",
           [(-right, "the sign: a wider window lets more through"),
            (right / 2, "the 2 of the square's derivative is missing"),
            (right / d.numel(), "the mean over the pairs: a gradient is their sum"),
            ((2 * alpha * c * c * dy * sine).sum(), "one factor c too many: dL/dc has z^2 c"),
            ((2 * z * c * dy * sine).sum(), "one factor z is missing: dL/dc has z^2 c"),
            ((2 * alpha * dy * sine).sum(), "the factor c is missing: dL/dc = 2 z^2 c (dh . v)"),
            ((2 * z * c * c * dy * sine).sum(), "this uses dL/dz: dL/dc = 2 z^2 c (dh . v)"),
            ((2 * alpha * c * dy * c * d * theta / w).sum(), "the slope of cos is -sin, not cos"),
            ((2 * alpha * c * dy * sine / d.clamp(min=1)).sum(), "the factor d is missing: the "
             "slope of cos(theta d) with theta is -sin(theta d) d"),
            (right / w, "dtheta/dw = -theta/w: a 1/w too many"),
            (right * theta * w, "dtheta/dw = -theta/w, not -theta^2"),
            ((2 * alpha * c * dy * sine * d).sum(), "one factor d too many: the slope of "
             "cos(theta d) with theta is -sin(theta d) d"),
            ((2 * alpha * c * dy * torch.tan(theta * d) * d * theta / w).sum(), "the slope of cos "
             "is -sin, not tan: dL/dc = 2 z^2 c (dh . v) has its own c"),
            ((2 * alpha * c * sine).sum(), "dh . v is missing: dL/dc = 2 z^2 c (dh . v)"),
            ((2 * alpha * c * dy * torch.sin(d) * d * theta / w).sum(), "the sine is of theta d"),
            ((2 * alpha * c * dy * torch.sin(theta * w**2 * d) * d * theta * w).sum(), "brackets: "
             "theta is pi/(2 w), not pi/2 w"),
            ((alpha * dy * sine).sum(), "dL/dc = 2 z^2 c (dh . v): a factor 2 c is missing"),
            (right * w, "theta = pi/(2 w), so dtheta/dw = -theta/w: a 1/w is missing"),
            (right / theta, "dtheta/dw = -theta/w: theta is missing"),
            (right * w / theta, "dtheta/dw = -theta/w: this factor is missing"),
            ((4 * alpha * c * dy * torch.sin(2 * theta * d) * d * theta / w).sum(),
             "theta is pi/(2 w), not pi/w"),
            (right * 2, "there is a 2 too many")], tolerance=1e-6)
    infinite = call("dw_block", z=z, c=torch.ones_like(z), d=d, v=v, dh=dh,
                    w=torch.tensor(INF).double())
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


GRADIENTS = ("dq", "dk", "dv", "dw", "dr")

# T, S, i0, w, size: a last block of one query; no i0; keys before the window; another size.
CASES = [(33, 33, 0, 1.4, 16), (40, 31, 0, 32.0, 16), (23, 61, 38, 17.0, 16),
         (23, 61, 38, INF, 16), (30, 20, 5, 3.5, 16), (5, 40, 33, 24.5, 16), (26, 45, 11, 6.0, 7)]


def of_pairs(mask, q, k, v, w, r, dh, i0):
    """The gradients if only the pairs in mask (T, S) count."""
    def h(q, k, v, w, r):
        d = torch.arange(len(k)) - (i0 + torch.arange(len(q)))[:, None]
        return (ms.trim(q @ k.T, r) * ms.softmask(d, w) * mask) @ v

    return gradient(h, q, k, v, w, r, dh=dh)


def bounds_that_give(found, q, k, v, w, r, dh, i0, size):
    """The causes of wrong_bounds that give these gradients, in blocks that begin anywhere."""
    T, S = len(q), len(k)
    causes = []
    for cause in wrong_bounds(0, 0, 0, w, T, S, i0):
        masks = torch.zeros(4, T, S)
        for a in range(0, T, size):
            i, last = i0 + a, i0 + min(a + size, T) - 1
            first, end = wrong_bounds(i, last, i + size, w, T, S, i0)[cause]
            for n, mask in enumerate(masks):
                start = max(first, 0) if n % 2 else max(first, 0) // size * size
                stop = end if n < 2 else start - (start - end) // size * size
                mask[a : a + size, start : max(stop, 0)] = 1
        if any(all(near(x, y, 1e-6) for x, y in zip(found, of_pairs(m, q, k, v, w, r, dh, i0)))
               for m in masks):
            causes.append(cause)
    return causes[:3]


def test_gradients():
    for T, S, i0, w, size in CASES:
        q, k, v, dh, w, r, _, _ = some_block(w, I=T, J=S)
        inputs = q, k, v, w, r, dh
        copies = [x.clone() for x in inputs]
        found, right = mine.gradients(*copies, i0, size), by_autograd(*inputs, i0)
        for name, copy, x in zip("q k v w r dh".split(), copies, inputs):
            check(torch.equal(copy, x), f"gradients changes its input {name}")
        compare(found, right, inputs, (T, S, i0, w, size))
    narrow, wide, longer = watched(10.0, 128), watched(INF, 128), watched(10.0, 256)
    check(wide.largest < 128 * 64, f"a tensor of {wide.largest} numbers was made for 128 queries "
          "and keys: go block by block, since a tensor of T x S must never exist")
    check(narrow.operations < 0.7 * wide.operations, f"a window of 10 takes {narrow.operations} "
          f"operations, an infinite one {wide.operations}: blocks outside the window are visited")
    check(longer.operations < 3 * narrow.operations, "blocks of later keys are visited: a window "
          f"of 10 takes {narrow.operations} operations for 128 tokens, {longer.operations} for 256")


def compare(found, right, inputs, case):
    """Compare all five gradients with the right ones, and say why some are off."""
    T, S, i0, w, size = case
    check(len(found) == 5, "return five gradients: dq, dk, dv, dw, dr")
    found = [torch.as_tensor(x) for x in found]
    check(all(x.dtype == torch.float64 for x in found), "the inputs are float64, but these "
          f"gradients are {', '.join(str(x.dtype) for x in found)}")
    check(len({x.data_ptr() for x in found}) == 5, "two of the gradients are the same tensor: "
          "each needs zeros of its own")
    right = dict(zip(GRADIENTS, right))

    def names(x):
        return [name for name, y in right.items() if x.shape == y.shape and near(x, y, 1e-6)]

    order = [names(x) for x in found]
    if [[name] for name in GRADIENTS] == order:
        return
    check(sorted(order) != sorted([name] for name in GRADIENTS),
          "gradients come in the order dq, dk, dv, dw, dr, but these come in the order "
          f"{', '.join(sum(order, []))}")
    where = f"of {T} queries and {S} keys, i0 = {i0}, w = {w:g}, size = {size}"
    for x, (name, y) in zip(found, right.items()):
        check(x.shape == y.shape, f"{name} {where} has the shape {tuple(x.shape)}; it should be "
              f"{tuple(y.shape)}")
    off = [name for name, x in zip(GRADIENTS, found) if name not in names(x)]
    name = off[0]
    difference = describe_difference(found[GRADIENTS.index(name)], right[name], f"{name} {where}")
    at_0, (q, k, v, w, r, dh) = by_autograd(*inputs), inputs
    if i0 and all(near(x, y, 1e-6) for x, y in zip(found, at_0)):
        causes = ["i0 is ignored: query t is at position i0 + t"]
    elif near(found[2], by_autograd(q, k, v, r, w, dh, i0)[2], 1e-6):
        causes = ["w and r were swapped: pairs takes q, k, w, r, i, j"]
    elif len(off) == 1:
        causes = [f"only {name} is off: is each block added to it, with += and to the right rows, "
                  f"and are the inputs of {name}_block in the right order?"]
    elif "dv" not in off:
        causes = ["dv is right, so z and c are, too: does a block take the rows of v of its keys, "
                  "and the rows of dh of its queries?"]
    else:
        causes = bounds_that_give(found, *inputs, i0, size) or [
            "if 3.1 to 3.7 pass: are i and j the positions of this block, is each pair visited once"
            + (", is 16 used instead of size?" if size != 16 else "?")]
    raise Wrong("\n".join([*causes, f"off: {', '.join(off)}. {difference}"]))


def watched(w, T):
    """A Watch over `gradients` for T queries and T keys."""
    q, k, v, dh, w, r, _, _ = some_block(w, I=T, J=T)
    with Watch() as watch:
        mine.gradients(q, k, v, w, r, dh)
    return watch

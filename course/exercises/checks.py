"""Shared by the course's tests: comparisons that say what is probably wrong, and inputs."""
import torch
from torch.nn.functional import normalize


class Wrong(AssertionError):
    """A failure with a message for the student. conftest.py prints it without a traceback."""


def check(good, message):
    if not bool(good):
        raise Wrong(message)


def expect(found, right, what, mistakes=(), tolerance=1e-5, at=None):
    """Compare a value with the right one. mistakes: (a wrong value, its cause).

    If several causes give these numbers, the message names up to three. what: the value's name; the
    {} of "f at d = {}" becomes the entry of `at` where the error is largest. tolerance: relative to
    the largest right value, or absolute where all are below 1.
    """
    require_tensor(found, f"{what} is")
    dtypes = [x.dtype for x in (found, right) if torch.is_tensor(x)]
    found, right = as_tensor(found), as_tensor(right)
    one = " one number: is a sum missing?" if right.ndim == 0 else f" {tuple(right.shape)}"
    check(found.shape == right.shape,
          f"{what} has the shape {tuple(found.shape)}; it should be{one}")
    cut = len(dtypes) == 2 and torch.promote_types(*dtypes) != dtypes[0]
    if near(found, right, max(tolerance, 1e-5)) and cut:
        raise Wrong(f"{what} is {dtypes[0]}; it should be {dtypes[1]}: did .float(), or a new "
                    "tensor without dtype=, reduce its precision?")
    if near(found, right, tolerance):
        return
    wrong = [(as_tensor(x), cause) for x, cause in mistakes]
    causes = [cause for x, cause in wrong if x.shape == found.shape and near(found, x, tolerance)]
    if not causes and tolerance < 1e-6 and near(found, right, 1e-5):
        causes = ["nearly right: is something in float32 on the way? .float() makes it so, and "
                  "so does math.pi * d for integers d; math.pi * (d / w) has the dtype of w"]
    difference = describe_difference(found, right, what, at)
    raise Wrong("\n  or: ".join(list(dict.fromkeys(causes))[:3]) + "\n" * bool(causes) + difference)


def require_tensor(x, what):
    """Raise Wrong unless x is a tensor or a number. what: "trim returns" """
    check(x is not None, f"{what} None: is a return missing?")
    check(torch.is_tensor(x) or isinstance(x, (int, float)),
          f"{what} an object of the type {type(x).__name__}: it should be a tensor")


def describe_difference(found, right, what, names=None):
    """`what` is ..; it should be ..: where a tensor is off most, and a common factor if any."""
    off = torch.where(found == right, 0.0, (found - right).abs().nan_to_num(torch.inf))
    at = tuple(int(n) for n in torch.unravel_index(off.argmax(), off.shape))
    place = f"[{', '.join(map(str, at))}]" if found.numel() > 1 else ""
    if place and what.endswith(","):
        place = f" at {place},"
    if names is not None:
        what, place = what.format(int(names[at[0]])), ""
    a, b = found[at].item(), right[at].item()
    digits = next((n for n in (6, 9, 12) if f"{a:.{n}g}" != f"{b:.{n}g}"), 17)
    factor = (found * right).sum() / right.square().sum()
    scaled = found.numel() > 1 and near(found / factor, right, 1e-5) and f"{factor:.4g}" != "1"
    all_are = f": all are {factor:.4g} times what they should be" if scaled else ""
    return f"{what}{place} is {a:.{digits}g}; it should be {b:.{digits}g}{all_are}"


def as_tensor(x):
    return torch.as_tensor(x).detach().double()


def near(a, b, tolerance):
    """Do they agree? Infinities must be equal; NaN agrees with nothing."""
    finite = b[b.isfinite()]
    largest = max(finite.abs().max().item(), 1.0) if finite.numel() else 1.0
    return torch.allclose(a, b, rtol=0, atol=tolerance * largest)


def gradient(f, *inputs, dh=None):
    """The gradients of sum(f(inputs) dh) for all inputs; zeros where there is none."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out = f(*inputs)
    check(out.requires_grad, "no gradient comes back: was a tensor detached, or created anew?")
    dh = torch.ones_like(out) if dh is None else dh
    return torch.autograd.grad(out, inputs, dh, allow_unused=True, materialize_grads=True)


def expect_gradients(f, right, inputs, names, mistakes=(), tolerance=1e-5):
    """Compare the gradients of f with those of `right`, at ordinary points.

    mistakes: (a function with wrong gradients, its cause).
    """
    dh = torch.randn(right(*inputs).shape, generator=random(9)).to(inputs[0])
    wanted = gradient(right, *inputs, dh=dh)
    wrong = [(gradient(g, *inputs, dh=dh), cause) for g, cause in mistakes]
    for n, (name, found) in enumerate(zip(names.split(), gradient(f, *inputs, dh=dh))):
        zero = (torch.zeros_like(wanted[n]), f"no gradient arrives at {name}: is it detached, or "
                "turned into a number on the way?")
        expect(found, wanted[n], f"the gradient of {name}",
               [zero, *((gradients[n], cause) for gradients, cause in wrong)], tolerance)


def random(seed):
    return torch.Generator().manual_seed(seed)


def correlated(seed, B, H, T, S, K=16, V=8, dtype=torch.float64, rho=0.6):
    """Unit q, k, v around a direction of each tile: similarities spread around 0.7.

    Independent unit vectors in 16 dimensions almost never pass Trim: a test would compare zeros.
    """
    g = random(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    base = draw(B, H, 1, K)
    q = normalize(rho * base + (1 - rho) * draw(B, H, T, K), dim=-1)
    k = normalize(rho * base + (1 - rho) * draw(B, H, S, K), dim=-1)
    v = normalize(draw(B, H, S, V), dim=-1)
    return q.to(dtype), k.to(dtype), v.to(dtype)


@torch.no_grad()
def enliven(layer, seed=0):
    """Move parameters far from their initial values: w from 3.7 to inf, r from 0.62 to 0.88."""
    g = random(seed)
    E, H, K = layer.W_Q.shape
    layer.s_w.copy_(torch.linspace(3.0, 1.0, H))
    layer.s_w[0] = torch.inf
    layer.s_r.copy_(torch.linspace(0.5, 2.0, H))
    layer.s_O.uniform_(-1.0, 1.0, generator=g)
    layer.W_Q.copy_(torch.randn(E, H, K, generator=g))
    layer.W_K.copy_(layer.W_Q + 0.3 * torch.randn(E, H, K, generator=g))
    for W in (layer.W_V, layer.W_G, layer.W_O):
        W.copy_(0.2 * torch.randn(W.shape, generator=g))
    return layer

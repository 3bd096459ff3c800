"""What screens: the fastest function that can run here and agrees with the definition."""
import math
from functools import partial

import torch
import torch.fx.experimental._config
from torch.nn.functional import normalize

import multiscreen
from multiscreen import Config
from support.cli import UsageError

# What is compared: (queries, keys, i0, windows of the tiles).
NEARBY, FAR = (1.5, 17.0, 300.0, math.inf), (4950.0, 5100.0, 7000.0, math.inf)
CASES = [(331, 331, 0, NEARBY), (17, 401, 384, NEARBY), (17, 401, 5000, FAR)]


def get_screen(name, device, config=None, dtype=None):
    """(what screens, one line that says why, whether that is as expected). name: see --kernel.

    `auto` takes the first of the fused kernel (on a GPU) and `screen_windowed` that agrees with
    `multiscreen.screen` as it stands now, in value and in every gradient: to 1e-4 of the largest
    value in float32, to 1e-1 in `dtype`, that of the model's matrix products. If none agrees it
    takes the definition. Compared are up to 401 keys, and windows up to 7,000.

    Raises UsageError if the one that `name` asks for cannot run or does not agree.
    """
    definition, config = multiscreen.screen, config or Config()
    if name == "definition":
        return definition, "screening by multiscreen.screen, the definition", True
    exact = [with_gradients(definition, revealing_inputs(T, S, windows, config, device), i0)
             for T, S, i0, windows in CASES]
    if not all(x.isfinite().all() for case in exact for x in case):
        if name != "auto":
            raise UsageError(f"--kernel {name}: multiscreen.screen gives nan or inf, so nothing "
                             "can be compared with it")
        return definition, ("multiscreen.screen gives nan or inf, so nothing can be compared with "
                            "it: using it as it is"), False
    auto = ["triton", "windowed"] if device.type == "cuda" else ["windowed"]
    objections = []
    for kind in auto if name == "auto" else [name]:
        f, label, why = objection(kind, device, config, dtype, exact)
        if not why and objections:
            return f, f"{'; '.join(objections)}: using {label}", False
        if not why:
            return f, f"screening by {label}, which agrees with multiscreen.screen", True
        objections.append(why)
    if name != "auto":
        raise UsageError(f"--kernel {name}: {objections[0]}")
    return definition, f"{'; '.join(objections)}: using multiscreen.screen, the definition", False


def objection(kind, device, config, dtype, exact):
    """(the function of that kind, its name, why it must not screen here, or None).

    exact: the definition's values, case by case.
    """
    f, label = multiscreen.screen_windowed, "screen_windowed"
    if kind == "triton":
        # Here, because it takes a second and is of no use on a CPU.
        import screening_triton

        f, label = screening_triton.screen, "screening_triton.screen"
        f.keeps_to_window = True                       # as screen_windowed; see KeyCache
        reason = (screening_triton.available(device)
                  or screening_triton.unsupported_sizes(config.d_K, config.d_V))
        if reason:
            return f, label, reason
    limits = {torch.float32: 1e-4}
    if dtype not in (None, torch.float32):
        limits[dtype] = 1e-1
    for precision, limit in limits.items():
        for (T, S, i0, windows), wanted in zip(CASES, exact):
            inputs = revealing_inputs(T, S, windows, config, device)
            try:
                error = difference(with_gradients(f, inputs, i0, precision), wanted)
            except Exception as e:                     # whatever it is, this one cannot be used
                line = (str(e).splitlines() or [""])[0]
                return f, label, f"{label} fails here ({type(e).__name__}: {line})"
            if error > limit:
                return f, label, (f"multiscreen.screen and {label} differ by {error:.2g} of the "
                                  "largest value (a changed equation?)")
    return f, label, None


def revealing_inputs(T, S, windows, config, device):
    """q, k, v, w, r as `screen` takes them, chosen so that mistakes show.

    Queries and keys lie near one direction of their tile (others are nearly all rejected), some
    pairs have s = 1 and s = -1, r is from 0.03 to 1. A multiple of N_H tiles, at least 4.
    """
    H = config.N_H * -(-4 // config.N_H)
    g = torch.Generator().manual_seed(0)
    base = torch.randn(H, 1, config.d_K, generator=g)
    spread = torch.rand(2, H, S, 1, generator=g)
    x = base + spread * torch.randn(2, H, S, config.d_K, generator=g)
    q, k = normalize(x, dim=-1)[:, None]
    k[:, :, ::7], k[:, :, 3::11] = q[:, :, ::7], -q[:, :, 3::11]
    v = normalize(torch.randn(1, H, S, config.d_V, generator=g), dim=-1)
    w = torch.tensor([windows[n % len(windows)] for n in range(H)])
    r = torch.tensor([(1.0, 0.1, 0.5, 0.03, 0.2)[n % 5] for n in range(H)])
    return [x.to(device) for x in (q[:, :, S - T :], k, v, w, r)]


def with_gradients(screen, inputs, i0, dtype=torch.float32):
    """h and the gradients of q, k, v, w, r, in float32; v is given to `screen` in `dtype`."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    q, k, v, w, r = leaves
    h = screen(q, k, v.to(dtype), w, r, i0)
    dh = torch.randn(h.shape, generator=torch.Generator().manual_seed(1)).to(h)
    gradients = torch.autograd.grad(h, leaves, dh, allow_unused=True, materialize_grads=True)
    return [h.detach().float(), *gradients]


def difference(found, exact):
    """The largest error over the largest value: of a tile's own for h, dq, dk and dv."""
    worst = 0.0
    for a, b in zip(found, exact):
        axes = (0, 2, 3) if b.ndim == 4 else 0
        error = (a - b).abs().amax(axes) / b.abs().amax(axes).clamp_min(1e-30)
        worst = max(worst, error.max().nan_to_num(math.inf).item())
    return worst


def compile_layers(model):
    """torch.compile the layers of a model, and `screen` inside `screen_windowed`. In place."""
    # Windows change with every step: few graphs for all sizes (no new one where two sizes are
    # equal by chance), and an error instead of running eager without a word.
    torch.fx.experimental._config.use_duck_shape = False
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    for layer in model.layers:
        layer.compile(dynamic=True)
    if model.screen is multiscreen.screen_windowed:
        compiled = torch.compile(multiscreen.screen, dynamic=True)
        model.screen = partial(multiscreen.screen_windowed, screen=compiled)
        model.screen.keeps_to_window = True

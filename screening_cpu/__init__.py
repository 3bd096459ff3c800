"""Screening (Eq. 12) in C++, for a CPU: builds screen.cpp, and calls it from PyTorch.

train.py looks for this folder, and does without it if it is not there: it is no part of the model.
A query meets only the keys in its window that Trim keeps, forward and backward, so this is several
times as fast as the definition, and it takes O(T) memory. screen.cpp repeats Eqs. 8, 9, 11, 12; the
softmask depends on the distance alone, so its values come from multiscreen's `softmask` in a table,
through which the gradient flows on to w.

The C++ compiler of this machine, $CXX or c++, builds it when it is first needed, in a second or
two. The library is kept among torch's extensions, in your own cache, for all later commands.
"""
import ctypes
import hashlib
import math
import os
import platform
import shlex
import subprocess
import tempfile
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import _appdirs

import multiscreen
from multiscreen import KeyCache

# train.hash_of_equations() of the equations that this file repeats.
EQUATIONS = "6c9d17d98fe5"
SOURCE = Path(__file__).with_name("screen.cpp")
# They come after those of $CXX: what -ffast-math there would break is turned off again.
FLAGS = ["-fno-fast-math", "-std=c++17", "-O3", "-march=native", "-fno-math-errno",
         "-fno-trapping-math", "-fopenmp-simd", "-shared", "-fPIC"]
# Without this one, GCC works on two alive keys at once, five times as slowly.
FLAGS_OF_GCC = ["-fno-loop-unroll-and-jam"]


# ------------------------------------------------------------------------------ the library

@cache
def library(d_K, d_V):
    """screen.cpp for keys and values of these sizes, as ctypes loads it.

    Raises OSError if it cannot be built, kept or loaded here.
    """
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    command = [*compiler, *FLAGS, f"-DD_K={d_K}", f"-DD_V={d_V}"]
    # The macros that a compiler defines tell its version and what this processor can do.
    macros = output([*command, "-dM", "-E", "-x", "c++", os.devnull])
    if "__clang__" not in macros:
        command += FLAGS_OF_GCC
    key = hashlib.sha256(repr((command, macros, SOURCE.read_text("utf-8"))).encode())
    key = key.hexdigest()[:16]

    # Without OpenMP it runs on one thread. It has another name, so the next command tries again.
    try:
        return built([*command, "-fopenmp"], f"screen_{key}")
    except OSError:
        return built(command, f"one_thread_{key}")


def built(command, name):
    """The library of this name, which is built if there is none that is whole and loads."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or _appdirs.user_cache_dir("torch_extensions")
    folder = Path(root, "multiscreen")
    folder.mkdir(parents=True, exist_ok=True)
    # A library's name ends with its size: to load a file that was cut off can end the process.
    for path in folder.glob(f"{name}_*.so"):
        if path.stem == f"{name}_{path.stat().st_size}":
            with suppress(OSError):
                return ctypes.CDLL(str(path))

    # Another process may do the same at this moment: the file is there as a whole, or not at all.
    with tempfile.TemporaryDirectory(dir=folder, prefix="building_") as new:
        part = Path(new, "screen.so")
        output([*command, str(SOURCE), "-o", str(part)])
        path = folder / f"{name}_{part.stat().st_size}.so"
        os.replace(part, path)
    return ctypes.CDLL(str(path))


def output(command):
    """What a command prints. Raises OSError if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        raise OSError(f"{command[0]} fails with code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


# ----------------------------------------------------------------------------- from PyTorch

class Sizes(ctypes.Structure):
    """As in screen.cpp."""
    _fields_ = [(name, ctypes.c_int64) for name in ("B", "H", "T", "S", "i0", "distances",
                                                    "threads")]


class Tensor(ctypes.Structure):
    """As in screen.cpp: where the rows of a tensor (B, H, T, D) lie."""
    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in "bht")]

    def __init__(self, x):
        super().__init__(x.data_ptr(), *x.stride()[:3])


def pointer(x):
    return ctypes.c_void_p(x.data_ptr())


def inputs_of(q, k, v, m, r, reach, i0):
    """The first arguments of both functions of screen.cpp."""
    (B, H, T, _), S = q.shape, k.shape[2]
    sizes = Sizes(B, H, T, S, i0, m.shape[1], torch.get_num_threads())
    return sizes, pointer(reach), Tensor(q), Tensor(k), Tensor(v), pointer(m), pointer(r)


class Screen(torch.autograd.Function):
    """Eq. 12 and its gradients. m: (H, distances), the softmask; reach: (H,) integers."""

    @staticmethod
    def forward(ctx, q, k, v, m, r, reach, i0):
        q, k, v = (with_contiguous_rows(x) for x in (q, k, v))
        m, r = m.contiguous(), r.contiguous()
        ctx.save_for_backward(q, k, v, m, r, reach)
        ctx.i0 = i0
        h = zero_rows(q, v.shape[3])
        library(q.shape[3], v.shape[3]).forward(*inputs_of(q, k, v, m, r, reach, i0), Tensor(h))
        return h

    @staticmethod
    def backward(ctx, dh):
        if torch.is_grad_enabled():                    # create_graph=True
            raise NotImplementedError("this screen is differentiable once: for second "
                                      "derivatives use multiscreen.screen")
        q, k, v, m, r, reach = ctx.saved_tensors
        dh = with_contiguous_rows(dh)
        dq, dk, dv = (zero_rows(x, x.shape[3]) for x in (q, k, v))
        # Each sequence has its own, which are then added up.
        dm, dr = m.new_zeros(len(q), *m.shape), r.new_zeros(len(q), *r.shape)
        library(q.shape[3], v.shape[3]).backward(
            *inputs_of(q, k, v, m, r, reach, ctx.i0), Tensor(dh), Tensor(dq), Tensor(dk),
            Tensor(dv), pointer(dm), pointer(dr))
        return dq, dk, dv, dm.sum(0), dr.sum(0), None, None


def zero_rows(x, D):
    """Zeros (B, H, T, D) for x (B, H, T, any), with the layout of a layer's projections."""
    B, H, T, _ = x.shape
    return x.new_zeros(B, T, H, D).transpose(1, 2)


def with_contiguous_rows(x):
    """x, or a copy of it where its last dimension is not contiguous."""
    return x if x.stride(3) == 1 else x.contiguous()


def table_of(w, n):
    """(reach, softmask) for the first n distances, as screen.cpp takes them. w: (H,)."""
    reach = [math.ceil(min(n, x)) - 1 for x in w.tolist()]
    d = -torch.arange(max(reach, default=0) + 1, device="cpu")
    return (torch.tensor(reach, dtype=torch.int64, device="cpu"),
            multiscreen.softmask(d, w[:, None]))


@lru_cache(maxsize=64)
def kept_table_of(w, n, softmask):
    """table_of windows w, a tuple, which do not change while a model generates a text.

    softmask: multiscreen's, which you may have edited since.
    """
    return table_of(torch.tensor(w, dtype=torch.float32, device="cpu"), n)


def prepare(model):
    """Build the library for a model. Raises OSError or ValueError if it cannot run here."""
    if model.W_E.dtype != torch.float32 or model.dtype is not None:
        raise ValueError("it is for float32")
    library(model.config.d_K, model.config.d_V)


@torch.compiler.disable
def screen(q, k, v, w, r, i0=0):
    """`screen` (Eq. 12), in float32 on a CPU. What is not float32 goes to the definition.

    It is differentiable once.
    """
    if any(x.dtype != torch.float32 or not x.is_cpu for x in (q, k, v, w, r)):
        return multiscreen.screen(q, k, v, w, r, i0)
    # C++ trusts these sizes. As in the definition, tiles may share a window, a width, keys, values.
    (B, H, _, K), S = q.shape, k.shape[2]
    if k.shape[3] != K or v.shape[2] != S:
        raise ValueError(f"q, k, v have the shapes {tuple(q.shape)}, {tuple(k.shape)}, "
                         f"{tuple(v.shape)}; expected (B, H, T, K), (B, H, S, K), (B, H, S, V)")
    w, r, k, v = w.expand(H), r.expand(H), k.expand(B, H, S, K), v.expand(B, H, S, v.shape[3])
    # More distances than there are, up to a power of two: the next token has the same.
    farthest = max(k.shape[2], i0 + q.shape[2]) - 1
    n = 2 ** farthest.bit_length()
    if torch.is_grad_enabled():
        reach, m = table_of(w, n)
    else:
        reach, m = kept_table_of(tuple(w.tolist()), n, multiscreen.softmask)
    return Screen.apply(q, k, v, m, r, reach, i0)


class WindowCache(KeyCache):
    """A KeyCache without the keys that no window reaches, and with room for more tokens."""
    spare = 1023                                       # tokens it has room for, to save copies

    def __init__(self):
        super().__init__()
        self.n_kept = 0                                # the keys that it has, without spare room

    def append(self, k, v, w=None):
        """Add keys (B, H, T, K) and values (B, H, T, V). Returns all that are kept.

        w: the windows of the layer, (H,); None: keep all keys.
        """
        T = k.shape[2]
        self.end += T
        # With gradients there is no spare room: backward may need the tensors of earlier calls.
        room = 0 if torch.is_grad_enabled() else self.spare
        if self.k is None:
            self.k, self.v = k[:, :, :0], v[:, :, :0]
        if self.n_kept + T > self.k.shape[2] or room == 0:
            kept = self.n_kept
            if w is not None:
                kept = math.ceil(min(self.n_kept, w.max().item()))     # all, if a window is NaN
            old = slice(self.n_kept - kept, self.n_kept)
            self.k, self.v = (F.pad(x[:, :, old], (0, 0, 0, T + room)) for x in (self.k, self.v))
            self.n_kept = kept
        new = slice(self.n_kept, self.n_kept + T)
        self.k[:, :, new], self.v[:, :, new] = k, v
        self.n_kept += T
        return self.k[:, :, : self.n_kept], self.v[:, :, : self.n_kept]


screen.cache = WindowCache
screen.within_w = True


def keep_freed_memory():
    """Let glibc keep the memory of freed tensors for the next ones.

    Otherwise glibc returns it to the system after each step and requests it again; page faults
    then take about 8 % of a training step on a CPU. Without glibc this does nothing.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-1, 2**31 - 1)                         # M_TRIM_THRESHOLD, bytes: the largest
        mallopt(-3, 2**25)                             # M_MMAP_THRESHOLD, bytes: the largest


keep_freed_memory()

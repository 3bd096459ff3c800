"""Known mistakes in kernels: edits of solutions/part4_kernel.py, in files of their own.

As in mutants.py. Triton reads the source of a kernel, so each edit is written to a folder.
"""
import importlib.util
import tempfile
from pathlib import Path

from exercises.mutants import correct, mutant
from exercises.solutions import part4_kernel

SOURCE = Path(part4_kernel.__file__).read_text()
FOLDER = tempfile.TemporaryDirectory()


def edited(exercise, label, *edits):
    """That kernel of the solution after (old, new) edits, each in one place or more."""
    source = SOURCE
    for old, new in edits:
        assert old in source, old
        source = source.replace(old, new)
    path = Path(FOLDER.name) / f"{label}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(label, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, exercise)


LOAD = "tl.load(X + at, mask=(rows < end)[:, None], other=0.0)"
STORE = "tl.store(X + at, x, mask=(rows < end)[:, None])"
SIGHT = "tl.maximum(i - reach, 0)"

MISTAKES = [
    ("similarity_kernel", "always_the_first_block", "each block of queries is the first",
     ("q, k = load_rows(Q, t0,", "q, k = load_rows(Q, 0,")),
    ("similarity_kernel", "similarities_swapped", "queries and keys were swapped",
     ("load_rows(Q, t0, T, BI, K), load_rows(K_, j0, S, BJ, K)\n    s = tl.dot(q, tl.trans(k), "
      "input_precision=\"ieee\")\n    store",
      "load_rows(Q, j0, T, BJ, K), load_rows(K_, t0, S, BI, K)\n    s = tl.dot(k, tl.trans(q), "
      "input_precision=\"ieee\")\n    store")),
    ("relevance_kernel", "sees_the_future", "sees the future", ("(d <= 0) & (d > -w)", "d > -w")),
    ("relevance_kernel", "without_max", "the max of Trim is missing",
     ("tl.maximum(1 - (1 - s) / tl.load(R), 0.0)", "1 - (1 - s) / tl.load(R)")),
    ("relevance_kernel", "multiplied_by_r", "divided by r, not multiplied",
     ("(1 - s) / tl.load(R)", "(1 - s) * tl.load(R)")),
    ("relevance_kernel", "not_squared", "the square of Trim is missing",
     ("OUT, z * z * m", "OUT, z * tl.sqrt(m)")),
    ("relevance_kernel", "one_more", "a key at distance exactly w must get 0",
     ("    w = tl.load(W)\n", "    w = tl.load(W) + 1\n")),
    ("relevance_kernel", "relevance_from_0", "i0 does not act",
     ("i0 + t0 + tl.arange", "t0 + tl.arange")),
    ("bounds_kernel", "an_edge_missing", "a block at the window's edge is missing",
     (SIGHT, "tl.maximum(i - reach + BJ, 0)")),
    ("bounds_kernel", "an_edge_too_many", "blocks outside the window are visited",
     (SIGHT, "tl.maximum(i - reach - BJ, 0)")),
    ("bounds_kernel", "the_future_too", "blocks of the future",
     ("tl.minimum(S, i_last + 1)", "S")),
    ("bounds_kernel", "bounds_from_0", "i0 does not act",
     ("keys_in_sight(W, i0 + t0, i0 + tl.minimum(", "keys_in_sight(W, t0, tl.minimum(")),
    ("forward_kernel", "the_last_block_only", "only the last block counts", ("h += ", "h = ")),
    ("forward_kernel", "all_blocks", "blocks outside the window are visited",
     ("return lo, tl.where(first < end, end, lo)", "return 0, end")),
    ("forward_kernel", "loads_unmasked", "mask the load", (LOAD, "tl.load(X + at)")),
    ("forward_kernel", "stores_unmasked", "mask the store",
     (STORE, "tl.store(X + at, x)")),
    ("dq_kernel", "without_2", "the 2 of the square's derivative", ("dz = 2 * z", "dz = z")),
    ("dq_kernel", "without_r", "1/r is missing", ("dq / tl.load(R)", "dq")),
    ("dq_kernel", "dq_multiplied_by_r", "this multiplies", ("dq / tl.load(R)", "dq * tl.load(R)")),
]
for exercise, label, words, *edits in MISTAKES:
    mutant(exercise, words)(edited(exercise, label, *edits))

correct("forward_kernel")(edited(
    "forward_kernel", "in_the_other_order",
    ("for j0 in range(lo, hi, BJ):\n        k, v = load_rows(K_, j0",
     "for n in range(lo, hi, BJ):\n        j0 = lo + (hi - 1 - lo) // BJ * BJ - (n - lo)\n"
     "        k, v = load_rows(K_, j0")))

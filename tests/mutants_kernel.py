"""Known mistakes in kernels: edits of solutions/part4_kernel.py, in files of their own.

As in mutants.py. Triton reads the source of a kernel, so each edit is written to a folder.
"""
import importlib.util
import tempfile
from pathlib import Path

from exercises.solutions import part4_kernel
from tests.mutants import correct, mutant

SOURCE = Path(part4_kernel.__file__).read_text()
FOLDER = tempfile.TemporaryDirectory()


def edited_kernel(exercise, label, *edits):
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
    ("bounds_kernel", "without_the_last_key", "hi is one more than the position",
     ("tl.minimum(S, i_last + 1)", "tl.minimum(S, i_last)")),
    ("bounds_kernel", "rows_that_are_not_there", "blocks of the future",
     ("i0 + tl.minimum(t0 + BI, T) - 1", "i0 + t0 + BI - 1")),
    ("bounds_kernel", "keys_that_are_not_there", "past the last key",
     ("tl.minimum(S, i_last + 1)", "i_last + 1")),
    ("bounds_kernel", "where_nothing_is_seen", "nothing is seen, so lo = hi",
     ("tl.where(first < end, end, lo)", "tl.maximum(end, lo)")),
    ("bounds_kernel", "hi_and_lo", "were they swapped", ("OUT + 2 * n, lo", "OUT + 2 * n, hi"),
     ("OUT + 2 * n + 1, hi", "OUT + 2 * n + 1, lo")),
    ("bounds_kernel", "too_near", "they run in any order", ("OUT + 2 * n", "OUT + n")),
    ("forward_kernel", "rows_of_keys", "has V numbers, not K",
     ("load_rows(V_, j0, S, BJ, V)", "tl.load(V_ + (j0 + tl.arange(0, BJ))[:, None] * K + "
      "tl.arange(0, V)[None, :], mask=(j0 + tl.arange(0, BJ) < S)[:, None], other=0.0)")),
    ("forward_kernel", "without_softmask", "the future is seen",
     ("h += tl.dot(z * z * m", "h += tl.dot(z * z")),
    ("forward_kernel", "without_the_square", "the square of Trim is missing",
     ("h += tl.dot(z * z * m", "h += tl.dot(z * m")),
    ("forward_kernel", "keys_up_to_T", "keys from T on are left out",
     ("load_rows(V_, j0, S,", "load_rows(V_, j0, T,")),
    ("forward_kernel", "d_from_0", "i0 does not act",
     ("q, i = load_rows(Q, t0, T, BI, K), i0 + t0", "q, i = load_rows(Q, t0, T, BI, K), t0")),
    ("forward_kernel", "later_keys", "blocks of later keys are visited",
     ("tl.minimum(S, i_last + 1)", "S")),
    ("forward_kernel", "keys_before_the_window", "blocks outside the window are visited",
     ("lo, hi = keys_in_sight(W, i0 + t0, i0 + tl.minimum(", "lo, hi = keys_in_sight(W, t0, i0 + "
      "tl.minimum(")),
    ("forward_kernel", "the_last_block_only", "only the last block counts", ("h += ", "h = ")),
    ("forward_kernel", "all_blocks", "blocks outside the window are visited",
     ("return lo, tl.where(first < end, end, lo)", "return 0, end")),
    ("forward_kernel", "loads_unmasked", "mask the load", (LOAD, "tl.load(X + at)")),
    ("forward_kernel", "stores_unmasked", "mask the store",
     (STORE, "tl.store(X + at, x)")),
    ("forward_kernel", "clears_its_neighbour", "they run in any order",
     (STORE, "tl.store(X + at + N * D, x * 0.0, mask=(rows + N < end)[:, None])\n    " + STORE)),
    ("forward_kernel", "without_other", "other=0.0", (", other=0.0", "")),
    ("forward_kernel", "in_tf32", "rounds float32 to tf32", (', input_precision="ieee"', "")),
    ("forward_kernel", "hi_one_less", "hi is one more",
     ("tl.minimum(S, i_last + 1)", "tl.minimum(S, i_last)")),
    ("forward_kernel", "floor_of_w", "ceil(w) - 1 keys back", ("tl.ceil(", "tl.floor(")),
    ("similarity_kernel", "rows_of_a_block", "s of 16 queries and 16 keys[",
     ("rows[:, None] * D", "rows[:, None] * N")),
    ("dq_kernel", "without_2", "the 2 of the square's derivative", ("dz = 2 * z", "dz = z")),
    ("dq_kernel", "the_other_sign", "the sign", ("dz = 2 * z", "dz = -2 * z")),
    ("dq_kernel", "dq_of_the_last_block", "only the last block counts", ("dq += ", "dq = ")),
    ("dq_kernel", "z_twice", "one factor z is too many", ("dz = 2 * z", "dz = 2 * z * z")),
    ("dq_kernel", "m_twice", "m is c^2 already", ("dz = 2 * z * m", "dz = 2 * z * m * m")),
    ("dq_kernel", "one_c", "one factor c is missing",
     ("dz = 2 * z * m", "dz = 2 * z * tl.sqrt(m)")),
    ("dq_kernel", "dq_from_0", "i0 does not act",
     ("    i = i0 + t0 + tl.arange(0, BI)\n    lo", "    i = t0 + tl.arange(0, BI)\n    lo")),
    ("dq_kernel", "dq_of_all_blocks", "blocks outside the window are visited",
     ("return lo, tl.where(first < end, end, lo)", "return 0, end")),
    ("dq_kernel", "dq_hi_one_less", "hi is one more",
     ("tl.minimum(S, i_last + 1)", "tl.minimum(S, i_last)")),
    ("dq_kernel", "dq_floor_of_w", "ceil(w) - 1 keys back", ("tl.ceil(", "tl.floor(")),
    ("dq_kernel", "without_r", "1/r is missing", ("dq / tl.load(R)", "dq")),
    ("dq_kernel", "dq_multiplied_by_r", "this multiplies", ("dq / tl.load(R)", "dq * tl.load(R)")),
]
for exercise, label, words, *edits in MISTAKES:
    mutant(exercise, words)(edited_kernel(exercise, label, *edits))

correct("forward_kernel")(edited_kernel(
    "forward_kernel", "in_the_other_order",
    ("for j0 in range(lo, hi, BJ):\n        k, v = load_rows(K_, j0",
     "for n in range(lo, hi, BJ):\n        j0 = lo + (hi - 1 - lo) // BJ * BJ - (n - lo)\n"
     "        k, v = load_rows(K_, j0")))

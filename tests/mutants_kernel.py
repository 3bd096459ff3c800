"""Known mistakes in kernels, as in mutants.py: edits of solutions/part4_kernel.py.

Triton reads a kernel's source, so each edit gets its own file.
"""
import importlib.util
import tempfile
from pathlib import Path

from exercises.solutions import part4_kernel
from tests.mutants import correct, mutant

SOURCE = Path(part4_kernel.__file__).read_text()
FOLDER = tempfile.TemporaryDirectory()


def edited_kernel(exercise, label, *edits):
    """The solution's kernel with (old, new) edits, each replaced wherever it occurs."""
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
SIGHT_OF = "keys_in_sight(W, i0 + t0, i0 + tl.minimum(t0 + BI, T) - 1, S, BJ)"
CEIL = "tl.ceil(tl.load(W))"
IEEE = ", input_precision=\"ieee\""
SIGHT = "tl.maximum(i - reach, 0)"

MISTAKES = [
    ("similarity_kernel", "always_the_first_block", "each block of queries is the first",
     ("q, k = load_rows(Q, t0,", "q, k = load_rows(Q, 0,")),
    ("similarity_kernel", "similarities_swapped", "queries and keys were swapped",
     ("load_rows(Q, t0, T, BI, K), load_rows(K_, j0, S, BJ, K)\n    s = tl.dot(q, tl.trans(k), "
      "input_precision=\"ieee\")\n    store",
      "load_rows(Q, j0, T, BJ, K), load_rows(K_, t0, S, BI, K)\n    s = tl.dot(k, tl.trans(q), "
      "input_precision=\"ieee\")\n    store")),
    ("forward_kernel", "blocks_of_32", "do queries begin at program_id(0) * BI",
     ("tl.program_id(0) * BI", "tl.program_id(0) * 32")),
    ("relevance_kernel", "sees_the_future", "sees the future", ("(d <= 0) & (d > -w)", "d > -w")),
    ("relevance_kernel", "multiplied_by_r", "divided by r, not multiplied",
     ("(1 - s) / tl.load(R)", "(1 - s) * tl.load(R)")),
    ("similarity_kernel", "of_64", "starts at Q + n * K",
     ("(Q, t0, T, BI, K)", "(Q, t0, T, BI, 64)"), ("(K_, j0, S, BJ, K)", "(K_, j0, S, BJ, 64)")),
    ("forward_kernel", "values_of_128", "starts at V_ + n * V", ("BJ, V)", "BJ, 128)")),
    ("relevance_kernel", "not_squared", "this is z c: alpha_d is its square",
     ("OUT, z * z * m", "OUT, z * tl.sqrt(m)")),
    ("relevance_kernel", "relevance_from_0", "i0 is ignored",
     ("i0 + t0 + tl.arange", "t0 + tl.arange")),
    ("bounds_kernel", "an_edge_missing", "and visits no keys",
     (SIGHT, "tl.maximum(i - reach + BJ, 0)")),
    ("bounds_kernel", "an_edge_too_many", "and visits keys 0 to 15, 16 to 31, 32",
     (SIGHT, "tl.maximum(i - reach - BJ, 0)")),
    ("bounds_kernel", "the_future_too", "the end is S: blocks of later keys",
     ("tl.minimum(S, i_last + 1)", "S")),
    ("bounds_kernel", "bounds_from_0", "i0 is ignored",
     ("keys_in_sight(W, i0 + t0, i0 + tl.minimum(", "keys_in_sight(W, t0, tl.minimum(")),
    ("bounds_kernel", "without_the_last_key", "the end is one past",
     ("tl.minimum(S, i_last + 1)", "tl.minimum(S, i_last)")),
    ("bounds_kernel", "rows_that_are_not_there", "the last query of the last block is T - 1",
     ("i0 + tl.minimum(t0 + BI, T) - 1", "i0 + t0 + BI - 1")),
    ("bounds_kernel", "keys_that_are_not_there", "past the last key",
     ("tl.minimum(S, i_last + 1)", "i_last + 1")),
    ("bounds_kernel", "where_nothing_is_seen", "where nothing is seen, lo = hi",
     ("tl.where(first < end, end, lo)", "tl.maximum(end, lo)")),
    ("bounds_kernel", "hi_and_lo", "were they swapped", ("OUT + 2 * n, lo", "OUT + 2 * n, hi"),
     ("OUT + 2 * n + 1, hi", "OUT + 2 * n + 1, lo")),
    ("bounds_kernel", "too_near", "row n start at OUT + n * 2", ("OUT + 2 * n", "OUT + n")),
    ("forward_kernel", "rows_of_keys", "row n of V_ starts at V_ + n * V",
     ("load_rows(V_, j0, S, BJ, V)", "tl.load(V_ + (j0 + tl.arange(0, BJ))[:, None] * K + "
      "tl.arange(0, V)[None, :], mask=(j0 + tl.arange(0, BJ) < S)[:, None], other=0.0)")),
    ("forward_kernel", "without_softmask", "Softmask is missing",
     ("h += tl.dot(z * z * m", "h += tl.dot(z * z")),
    ("forward_kernel", "without_the_square", "the square of Trim is missing",
     ("h += tl.dot(z * z * m", "h += tl.dot(z * m")),
    ("forward_kernel", "keys_up_to_T", "mask the load, rows < S",
     ("load_rows(V_, j0, S,", "load_rows(V_, j0, T,")),
    ("forward_kernel", "keys_before_the_window", "i0 is ignored in the first key",
     ("lo, hi = keys_in_sight(W, i0 + t0, i0 + tl.minimum(", "lo, hi = keys_in_sight(W, t0, i0 + "
      "tl.minimum(")),
    ("forward_kernel", "the_last_block_only", "only the last block counts", ("h += ", "h = ")),
    ("forward_kernel", "all_blocks", "the first key is 0: blocks before the window",
     ("return lo, tl.where(first < end, end, lo)", "return 0, end")),
    ("forward_kernel", "loads_unmasked", "mask the load", (LOAD, "tl.load(X + at)")),
    ("forward_kernel", "stores_unmasked", "mask the store",
     (STORE, "tl.store(X + at, x)")),
    ("dq_kernel", "without_2", "the 2 of the square's derivative", ("dz = 2 * z", "dz = z")),
    ("dq_kernel", "without_r", "1/r is missing", ("dq / tl.load(R)", "dq")),
    ("similarity_kernel", "keys_of_BI", "keys at program_id(1) * BJ",
     ("tl.program_id(1) * BJ", "tl.program_id(1) * BI")),
    ("similarity_kernel", "as_many_keys_as_queries", "a load goes to row 21 of K_",
     ("load_rows(K_, j0, S,", "load_rows(K_, j0, T,")),
    ("similarity_kernel", "scaled", "not be divided by the root of d_K",
     (", s, t0, j0", ", s / 8.0, t0, j0")),
    ("forward_kernel", "stored_in_the_loop", "Is a block that sees no key stored",
     ("    store_rows(OUT, h, t0", "        store_rows(OUT, h, t0")),
    ("dq_kernel", "dh_of_the_first", "the first block's rows of dh",
     ("load_rows(DH, t0,", "load_rows(DH, 0,")),
    ("similarity_kernel", "rows_of_BI", "row n of Q starts at Q + n * K",
     ("rows[:, None] * D", "rows[:, None] * N")),
    ("similarity_kernel", "rows_of_T_in_OUT", "row n of OUT starts at OUT + n * S",
     ("X + t * S + j, x", "X + t * T + j, x")),
    ("similarity_kernel", "columns_unmasked", "mask the store, columns < S",
     ("mask=(t < T) & (j < S)", "mask=t < T")),
    ("similarity_kernel", "without_ieee", "needs input_precision", (IEEE, "")),
    ("relevance_kernel", "one_load_unmasked", "a load goes to row 47 of K_",
     ("load_rows(K_, j0, S, BJ, K)\n    s",
      "tl.load(K_ + (j0 + tl.arange(0, BJ))[:, None] * K + tl.arange(0, K)[None, :])\n    s")),
    ("bounds_kernel", "w_rounded_down", "w is rounded down", (CEIL, "tl.load(W)")),
    ("bounds_kernel", "inf_as_an_integer", "inf became an integer",
     ("tl.minimum(tl.ceil(tl.load(W)), 1073741824.0)", "tl.ceil(tl.load(W))")),
    ("bounds_kernel", "inf_as_1e6", "cut to a number that is too small",
     (", 1073741824.0)", ", 1e6)")),
    ("bounds_kernel", "lo_rounded_up", "lo is rounded up",
     ("first // BJ * BJ", "tl.cdiv(first, BJ) * BJ")),
    ("bounds_kernel", "one_after_the_last", "one key too many at the end",
     (SIGHT_OF, "keys_in_sight(W, i0 + t0, i0 + tl.minimum(t0 + BI, T), S, BJ)")),
    ("bounds_kernel", "bounds_of_the_first", "each program takes the first block",
     (SIGHT_OF, "keys_in_sight(W, i0, i0 + tl.minimum(BI, T) - 1, S, BJ)")),
    ("bounds_kernel", "blocks_of_BJ", "a block has BI queries", ("t0 = n * BI", "t0 = n * BJ")),
    ("relevance_kernel", "without_t0", "lack t0",
     ("i0 + t0 + tl.arange(0, BI), j0", "i0 + tl.arange(0, BI), j0")),
    ("forward_kernel", "atomics", "no atomics",
     (STORE, STORE.replace("tl.store", "tl.atomic_add"))),
    ("forward_kernel", "rounded_weights", "tl.dot of less than float32",
     ("tl.dot(z * z * m, v", "tl.dot((z * z * m).to(tl.float16), v.to(tl.float16)")),
    ("forward_kernel", "q_of_the_first", "rows of q of the first",
     ("q, i = load_rows(Q, t0, T, BI, K), i0", "q, i = load_rows(Q, 0, T, BI, K), i0")),
    ("dq_kernel", "dq_cut_at_T", "keys are cut at T", ("- 1, S, BJ)", "- 1, T, BJ)")),
    ("bounds_kernel", "cut_at_T", "keys are cut at T", ("- 1, S, BJ)", "- 1, T, BJ)")),
    ("forward_kernel", "from_the_last_query", "the first key is that of the block's last query",
     (SIGHT, "tl.maximum(i_last - reach, 0)")),
    ("forward_kernel", "without_other", "without other=0.0", (", other=0.0", "")),
    ("forward_kernel", "clears_the_rows_behind", "is stored by the programs",
     ("store_rows(OUT, h, t0, T, BI, V)", "store_rows(OUT, h, t0, T, BI, V)\n"
      "    store_rows(OUT, h * 0, t0 + BI, T, BI, V)")),
    ("forward_kernel", "first_program_zeroes", "has not stored itself",
     ("    h = tl.zeros([BI, V], tl.float32)\n", "    h = tl.zeros([BI, V], tl.float32)\n"
      "    if tl.program_id(0) == 0:\n        for n in range(0, T, BI):\n"
      "            store_rows(OUT, h, n, T, BI, V)\n"),
     ("store_rows(OUT, h, t0", "store_rows(OUT, h + load_rows(OUT, t0, T, BI, V), t0")),
]
for exercise, label, words, *edits in MISTAKES:
    mutant(exercise, words)(edited_kernel(exercise, label, *edits))

correct("forward_kernel")(edited_kernel(
    "forward_kernel", "in_the_other_order",
    ("for j0 in range(lo, hi, BJ):\n        k, v = load_rows(K_, j0",
     "for n in range(lo, hi, BJ):\n        j0 = lo + (hi - 1 - lo) // BJ * BJ - (n - lo)\n"
     "        k, v = load_rows(K_, j0")))

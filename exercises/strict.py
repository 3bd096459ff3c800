"""Triton's interpreter, as strict as a GPU. launch.py runs kernels in it; nothing to do here.

The interpreter runs programs one after the other, reads whatever lies behind a matrix, reads 0
where a mask is False and no `other` is given, and multiplies exactly. A GPU runs programs at the
same time, in any order, reads any number in both of these places, and cuts float32 to tf32 unless
told otherwise. Here the order is given, addresses are checked, and numbers without `other` are NaN.
"""
from collections import defaultdict
from itertools import product

import numpy as np
from triton.runtime.interpreter import InterpreterError, TensorHandle
from triton.runtime.interpreter import interpreter_builder as interpreter

from exercises.checks import Wrong, check


class Memory:
    """Stands between a kernel and its tensors, {name: (rows, columns)}; "OUT" is the result.

    sizes: {"K": 64, ..}, for messages. loaded: {(name, program): the rows that it loaded}; stored:
    the program that stored each place of OUT, or -1; bare: the name of a tensor that was loaded
    with a mask and without `other`.
    """

    def __init__(self, tensors, sizes):
        self.tensors = tensors
        self.names = {number: name for name, number in sizes.items()}
        self.loaded = defaultdict(set)
        self.stored = np.full(tensors["OUT"].shape, -1)
        self.bare = None

    def load(self, interpret, ptrs, mask, other, *options):
        name, rows, columns = self.places(ptrs.data, mask.data, "load")
        self.loaded[name, program()].update(rows.tolist())
        if name == "OUT":
            check((self.stored[rows, columns] == program()).all(), "a program loads a number of "
                  "OUT that it has not stored itself: others run at the same time")
        if other is None and not mask.data.all():
            self.bare = name
            other = TensorHandle(np.full(mask.data.shape, np.nan, np.float32),
                                 ptrs.get_element_ty())
        return interpret(ptrs, mask, other, *options)

    def store(self, interpret, ptrs, value, mask, *options):
        name, rows, columns = self.places(ptrs.data, mask.data, "store")
        check(name == "OUT", f"{name} is an input: store into OUT")
        twice = ~np.isin(self.stored[rows, columns], (-1, program()))
        if twice.any():
            row, column = rows[twice][0], columns[twice][0]
            raise Wrong(
                f"OUT[{row}, {column}] is stored by the programs {self.stored[row, column]} and "
                f"{program()}, which run at the same time. Each stores its own block and no more: "
                "does the block depend on program_id, are columns past the end masked?")
        self.stored[rows, columns] = program()
        return interpret(ptrs, value, mask, *options)

    def dot(self, interpret, a, b, c, precision, *options):
        check(precision.name != "TF32", "tl.dot needs input_precision=\"ieee\": without it a GPU "
              "cuts float32 to tf32, with three digits")
        return interpret(a, b, c, precision, *options)

    def integer(self, convert, x, *options):
        check(np.isfinite(x.data).all(), "inf became an integer: what comes out depends on the "
              "machine. Cut w to 2^30 first")
        return convert(x, *options)

    def places(self, addresses, mask, verb):
        """The tensor that addresses are in, and the rows and columns where the mask is True."""
        addresses = addresses.astype(np.int64)
        used = addresses[mask]
        name = min(self.tensors, key=lambda name: self.outside(name, addresses))
        x = self.tensors[name]
        (height, width), size = x.shape, x.element_size()

        # The distance in memory between the rows, and between the columns, of a block.
        steps = [np.diff(addresses, axis=axis) // size for axis in range(addresses.ndim)]
        if addresses.ndim == 2 and min(addresses.shape) > 1:
            found = sorted(abs(int(step.flat[0])) for step in steps)
            check(found == [1, width], f"wrong offsets in a {verb}: row n of {name} starts at "
                  f"{name} + n * {self.names.get(width, width)}. Of this block two rows are "
                  f"{self.names.get(found[1], found[1])} apart, two columns {found[0]}")

        rows, columns = np.divmod((used - x.data_ptr()) // size, width)
        wrong = rows[(rows < 0) | (rows >= height)]
        if len(wrong):
            raise Wrong(f"a {verb} goes to row {wrong[0]} of {name}, which has the rows 0 to "
                        f"{height - 1}: mask it")
        return name, rows, columns

    def outside(self, name, addresses):
        """How many bytes of the addresses' range lie outside a tensor."""
        x = self.tensors[name]
        start = x.data_ptr()
        return max(start - addresses.min(), addresses.max() - start - x.nbytes, 0)


def program():
    """The number of the program that runs, counted row by row in a grid of two axes."""
    x, y, _ = interpreter.grid_idx
    return x * interpreter.grid_dim[1] + y


def run(kernel, grid, tensors, sizes, constants, order):
    """Run the programs of a kernel in that order, a function of a list. Returns the Memory."""
    memory = Memory(tensors, sizes | constants)
    programs = iter(order(list(product(*map(range, grid), *[[0]] * (3 - len(grid))))))
    real = {name: getattr(interpreter, name) for name in
            ("create_masked_load", "create_masked_store", "create_dot", "create_fp_to_si",
             "set_grid_idx")}

    def replace(name, f):
        setattr(interpreter, name, lambda *inputs: f(real[name], *inputs))

    replace("create_masked_load", memory.load)
    replace("create_masked_store", memory.store)
    replace("create_dot", memory.dot)
    replace("create_fp_to_si", memory.integer)
    replace("set_grid_idx", lambda set_grid_idx, *_: set_grid_idx(*next(programs)))
    try:
        kernel[grid](*tensors.values(), *sizes.values(), **constants)
    except InterpreterError as error:
        raise reason(error) from error
    finally:
        for name in real:
            delattr(interpreter, name)
    return memory


def reason(error):
    """What an error of the interpreter comes from."""
    while isinstance(error, InterpreterError) and error.__cause__:
        error = error.__cause__
    return error

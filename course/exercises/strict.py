"""This file makes Triton's interpreter as strict as a GPU. You need not change anything here.

launch.py runs your kernels with it. Triton's own interpreter forgives mistakes that a GPU does not.
It runs the programs one after another, whereas a GPU runs them at the same time and in any order.
It reads whatever lies behind a matrix, and reads 0 where a mask is False and no `other` is given;
on a GPU either may be any number. And it multiplies exactly, whereas a GPU rounds float32 to tf32
unless it is told otherwise. Here the order of the programs can be chosen, every address and every
product is checked, and a masked load without `other` gives NaN.
"""
from collections import defaultdict
from itertools import product

import numpy as np
from triton.runtime.interpreter import InterpreterError, TensorHandle
from triton.runtime.interpreter import interpreter_builder as interpreter

from course.exercises.checks import Wrong, check


class Memory:
    """Checks and records what a kernel does with its tensors, {name: matrix}.

    "OUT" is the tensor that the kernel stores its result in. `sizes`, such as {"K": 64}, is for the
    messages, which then say K rather than 64. Three attributes record what happened:

    loaded: {(name, program): the rows that this program loaded from this tensor}
    stored: for each element of OUT the program that stored it, or -1
    bare:   the name of a tensor that was loaded with a mask but without `other=0.0`, or None
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
            check((self.stored[rows, columns] == program()).all(), "a program loads an element "
                  "of OUT that it has not stored itself: other programs run at the same time")
        if (other is None or other.data.any()) and not mask.data.all():
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
                f"{program()}, which run at the same time. Each must store only its own block: "
                "does the block depend on program_id, and does row n start at OUT + n * "
                f"{self.width_of('OUT')}?")
        self.stored[rows, columns] = program()
        return interpret(ptrs, value, mask, *options)

    def atomic(self, *inputs):
        raise Wrong("no atomics: OUT does not begin at 0, and another order gives another sum. Sum "
                    "inside the program, and store once")

    def dot(self, interpret, a, b, c, precision, *options):
        check(a.data.dtype == b.data.dtype == np.float32, "tl.dot of less than float32: keep the "
              "dtype that you loaded, since bfloat16 has two digits and float16 three")
        check(precision.name != "TF32", "tl.dot needs input_precision=\"ieee\": without it a GPU "
              "rounds float32 to tf32, which has three digits")
        return interpret(a, b, c, precision, *options)

    def integer(self, convert, x, *options):
        check(np.isfinite(x.data).all(), "inf became an integer: the result depends on the "
              "machine. Clamp w to 2^30 first")
        return convert(x, *options)

    def places(self, addresses, mask, verb):
        """The name of the tensor that the addresses point into, with their rows and columns.

        Places where the mask is False are left out. Raises Wrong for a row that does not exist.
        """
        addresses = addresses.astype(np.int64)
        name = min(self.tensors, key=lambda name: self.outside(name, addresses))
        x = self.tensors[name]
        rows, columns = np.divmod((addresses - x.data_ptr()) // x.element_size(), x.shape[1])
        if addresses.ndim == 2 and min(addresses.shape) > 1:
            self.check_block(addresses, rows, mask, name, verb)
        wrong = rows[mask & ((rows < 0) | (rows >= len(x)))]
        if len(wrong):
            raise Wrong(f"a {verb} goes to row {wrong[0]} of {name}, which has the rows 0 to "
                        f"{len(x) - 1}: mask the {verb}, rows < {self.names.get(len(x), len(x))}, "
                        "or correct its offsets")
        return name, rows[mask], columns[mask]

    def check_block(self, addresses, rows, mask, name, verb):
        """Check that a block of addresses, or its transpose, is a block of the matrix."""
        x, width = self.tensors[name], self.width_of(name)
        steps = [abs(np.diff(addresses, axis=axis).flat[0]) // x.element_size() for axis in (0, 1)]
        step = self.names.get(max(steps), max(steps))
        check(sorted(steps) == [1, x.shape[1]], f"wrong offsets in a {verb}: row n of {name} "
              f"starts at {name} + n * {width}. In this block rows are {step} apart, and "
              f"columns {min(steps)}")
        beginning = rows.take([0], axis=steps.index(1))
        check((rows == beginning)[mask].all(), f"a {verb} runs past the end of a row of {name} "
              f"into the next one: mask the {verb}, columns < {width}")

    def width_of(self, name):
        """The width of a matrix as messages give it, by its letter if it has one."""
        width = self.tensors[name].shape[1]
        return self.names.get(width, width)

    def outside(self, name, addresses):
        """By how many bytes the addresses miss a tensor and the unused rows behind it, or 0."""
        x = self.tensors[name]
        start = x.data_ptr()
        room = x.untyped_storage().nbytes()
        return max(start - addresses.min(), addresses.max() - start - room, 0)


def program():
    """The number of the program that is running, counted row by row in a grid of two axes."""
    x, y, _ = interpreter.grid_idx
    return x * interpreter.grid_dim[1] + y


def run(kernel, grid, tensors, sizes, constants, order):
    """Run all programs of a kernel, and return the Memory that recorded what they did.

    order: a function that takes the list of programs and returns it in the order to run them in.
    """
    memory = Memory(tensors, sizes | constants)
    programs = iter(order(list(product(*map(range, grid), *[[0]] * (3 - len(grid))))))
    real = {name: getattr(interpreter, name) for name in
            ("create_masked_load", "create_masked_store", "create_dot", "create_atomic_rmw",
             "create_fp_to_si", "set_grid_idx")}

    def replace(name, f):
        setattr(interpreter, name, lambda *inputs: f(real[name], *inputs))

    replace("create_masked_load", memory.load)
    replace("create_masked_store", memory.store)
    replace("create_dot", memory.dot)
    replace("create_atomic_rmw", memory.atomic)
    replace("create_fp_to_si", memory.integer)
    replace("set_grid_idx", lambda set_grid_idx, *_: set_grid_idx(*next(programs)))
    try:
        kernel[grid](*tensors.values(), *sizes.values(), **constants)
    except InterpreterError as error:
        raise reason(error) from None
    finally:
        for name in real:
            delattr(interpreter, name)
    return memory


def reason(error):
    """The exception in your kernel that made the interpreter raise this error."""
    while isinstance(error, InterpreterError) and error.__cause__:
        error = error.__cause__
    return error

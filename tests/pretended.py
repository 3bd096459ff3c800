"""A pretended GPU: CPU tensors claim to be on it, and what a real one refuses is an error.

Inside `with Pretended("cuda") as gpu` PyTorch accepts its name as a device. Numbers stay in the
CPU's memory; each storage is marked with the device it claims. These raise Refused: an operator,
backward's too, on tensors of different devices; NumPy reading a GPU tensor; a float64 tensor on
"mps". Triton's kernels run interpreted.
"""
from contextlib import ExitStack
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

try:
    from triton.runtime.interpreter import GridExecutor
except ImportError:                                    # macOS, Windows
    GridExecutor = None

CPU = torch.device("cpu")
FOR_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


class Refused(RuntimeError):
    """A real device would refuse this."""


class Generator(torch.Generator):
    """A CPU generator that claims to draw on a device."""

    def __new__(cls, device="cpu"):
        generator = super().__new__(cls, "cpu")
        generator.claimed = torch.device(device)
        return generator


class Move(torch.autograd.Function):
    """Copy to another device; the gradient goes back to the first."""

    @staticmethod
    def forward(ctx, x, gpu, device):
        ctx.gpu, ctx.back = gpu, gpu.device_of(x)
        return gpu.copy(x, device)

    @staticmethod
    def backward(ctx, dx):
        return ctx.gpu.copy(dx, ctx.back), None, None


def tensors_in(values):
    """The tensors in nested lists and tuples."""
    for x in values:
        if torch.is_tensor(x):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from tensors_in(x)


class Pretended:
    def __init__(self, kind):
        self.device, self.marked = torch.device(kind, 0), {}

    def __enter__(self):
        self.stack = ExitStack()
        stand_ins = {"torch.Generator": Generator,
                     "torch.cuda.set_device": lambda device: None,
                     "torch.cuda.is_bf16_supported": lambda including_emulation: True,
                     "torch.cuda.get_device_capability": lambda device: (9, 0)}
        if GridExecutor:
            stand_ins["triton.runtime.interpreter.GridExecutor.__call__"] = self.kernel()
        for name, stand_in in stand_ins.items():
            self.stack.enter_context(mock.patch(name, stand_in))
        self.stack.enter_context(Operators(self))
        self.stack.enter_context(Names(self))
        return self

    def __exit__(self, *error):
        self.stack.close()

    def named(self, device):
        """Whether a string or torch.device names this GPU."""
        return device is not None and torch.device(device).type == self.device.type

    def device_of(self, x):
        """Where a tensor claims to be."""
        with torch._C.DisableTorchFunction():
            here = x.untyped_storage()._cdata in self.marked
        return self.device if here else CPU

    def mark(self, x):
        """Make a tensor and its whole storage claim to be on the GPU."""
        with torch._C.DisableTorchFunction():
            storage = x.untyped_storage()
        self.marked[storage._cdata] = storage          # kept, so that no other gets its address
        if self.device.type == "mps" and x.dtype == torch.float64:
            raise Refused("a float64 tensor on an MPS device")
        return x

    def copy(self, x, device):
        """A copy on another device."""
        y = x.detach().clone()
        with torch._C.DisableTorchFunction():
            self.marked.pop(y.untyped_storage()._cdata, None)
        return self.mark(y) if device == self.device else y

    def kernel(self):
        """A function that runs a Triton kernel if all its tensors are on the GPU."""
        right = GridExecutor.__call__

        def run(kernel, *args, **kwargs):
            if any(self.device_of(x) == CPU for x in tensors_in(args)):
                raise Refused(f"{kernel.fn.__name__} of a tensor on the CPU")
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                return right(kernel, *args, **kwargs)
        return run


class Operators(TorchDispatchMode):
    """An operator's tensors must share a device, and its results land there."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        gpu, kwargs, name = self.gpu, kwargs or {}, f.overloadpacket.__name__
        inputs = [*tensors_in([args, [*kwargs.values()]])]
        devices = {gpu.device_of(x) for x in inputs} or {CPU}
        if (torch.Tag.pointwise in f.tags or "_foreach" in name) and len(devices) == 2:
            # A GPU tensor may be combined with a single number on the CPU.
            devices = {gpu.device_of(x) for x in inputs if x.ndim} or devices
        if f == torch.ops.aten.copy_.default:
            devices = {gpu.device_of(args[0])}
        if len(devices) == 2:
            shapes = ", ".join(f"{tuple(x.shape)} on {gpu.device_of(x)}" for x in inputs)
            raise Refused(f"{f} of several devices: {shapes}")
        if f.namespace == "multiscreen":               # our own operators call others
            with self, Names(gpu):
                found = f.redispatch(FOR_CPU, *args, **kwargs)
        else:
            found = f(*args, **kwargs)
        if devices == {gpu.device}:
            for x in tensors_in([found]):
                gpu.mark(x)
        return found


class Names(TorchFunctionMode):
    """Accept and report the GPU's name wherever a device is given or asked for."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, f, types, args=(), kwargs=None):
        gpu, kwargs, name = self.gpu, kwargs or {}, getattr(f, "__name__", "")
        if name == "__get__":
            return self.get(f, *args)
        if name == "pin_memory":
            return args[0]
        if name in ("to", "cpu"):
            return self.move(f, *args, **kwargs)
        there = torch.is_tensor(args[0]) and gpu.device_of(args[0]) != CPU if args else False
        if name == "numpy" and there:
            raise Refused("NumPy cannot read a tensor on a GPU")
        device = kwargs.get("device")
        generator = kwargs.get("generator")
        drawn = gpu.device if there or gpu.named(device) else CPU
        if generator is not None and gpu.named(generator.claimed) != (drawn != CPU):
            raise Refused(f"{name} on {drawn} with a generator on {generator.claimed}")
        if gpu.named(device):
            return gpu.mark(f(*args, **kwargs | {"device": CPU}))
        return f(*args, **kwargs)

    def get(self, f, x, *others):
        """An attribute of a tensor."""
        wanted = f.__self__.__name__
        if wanted == "device":
            return self.gpu.device_of(x)
        if wanted in ("is_cpu", "is_cuda", "is_mps"):
            return self.gpu.device_of(x).type == wanted[3:]
        return f(x, *others)

    def move(self, f, x, *args, **kwargs):
        """x.to(...), x.cpu()"""
        gpu, (device, dtype, *_) = self.gpu, torch._C._nn._parse_to(*args, **kwargs)
        if f.__name__ == "cpu":
            device = CPU
        elif args and torch.is_tensor(args[0]):
            device = gpu.device_of(args[0])
        if device is None or gpu.named(device) == (gpu.device_of(x) != CPU):
            return x if dtype is None else f(x, dtype)
        if torch.float64 in (x.dtype, dtype) and gpu.device.type == "mps":
            raise Refused("a float64 tensor goes to an MPS device, or comes from there")
        x = x if dtype is None else x.to(dtype)
        return Move.apply(x, gpu, gpu.device if gpu.named(device) else CPU)

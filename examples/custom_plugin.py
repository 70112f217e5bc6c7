"""A user's plugin: an operation, its CUDA kernel in engines, and a model that uses it.

    irc compile examples/custom_plugin.py --plugin examples/custom_plugin.py \
        --random-weights 1 --backend tensorrt-rtx -o build/capped
"""

import ctypes
import math

import numpy as np

import irc
from irc.backends.cuda.kernels import kernel, launcher
from irc.backends.tensorrt.lowering.table import CHOICES
from irc.backends.tensorrt.plugins import Field, PluginSpec, Tensor, attributes_of, register
from irc.frontends import Module
from irc.frontends import functional as F
from irc.frontends.layers import Linear
from irc.ir.dtypes import dtype_of, numpy_dtype, widened

KERNEL = r"""  // ELEMENT is f32, f16 or bf16, whose conversions irc puts before every kernel
extern "C" __global__ void softcap(const ELEMENT* x, ELEMENT* y, long long n, float cap)
{
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
        y[i] = ELEMENT::of(cap * tanhf((float)x[i] / cap));
}
"""


def check(fields):
    if fields["cap"] <= 0:
        raise irc.Error(f"SoftCap: cap is {fields['cap']}; it must be more than 0")


def meaning(fields, x):
    cap = np.float32(fields["cap"])
    return (cap * np.tanh(widened(x) / cap)).astype(numpy_dtype(dtype_of(x)))


def enqueue(fields, inputs, outputs):
    """What is known with the shapes is done here, once; what it returns runs in every step."""
    count = math.prod(inputs[0].shape)
    blocks, types = min(4096, max(1, -(-count // 256))), {"ELEMENT": inputs[0].dtype}
    run = launcher(kernel("softcap", KERNEL, types), blocks, 256)
    n, cap = ctypes.c_longlong(count), ctypes.c_float(fields["cap"])
    return lambda sources, targets, stream: run(stream, sources[0], targets[0], n, cap)


@irc.operation("soft_cap", sharding="... -> ...")
class SoftCap(irc.Op):
    """cap * tanh(x / cap), which keeps scores and logits within +-cap."""

    x: irc.Operand
    cap: float

    def infer(self):
        check({"cap": self.cap})
        return self.x.type.replicated

    def evaluate(self, x):
        return meaning({"cap": self.cap}, x)


register(
    PluginSpec(
        name="SoftCap",
        version="1",
        namespace="example",
        doc="y = cap * tanh(x / cap), computed in f32.",
        operation="soft_cap",
        fields=(Field("cap", "float", doc="the bound, more than 0"),),
        types={"T": ("f32", "f16", "bf16")},
        inputs=(Tensor("x", "T", "any shape"),),
        outputs=(Tensor("y", "T", "as x"),),
        shapes=lambda fields, x: (x,),
        enqueue=enqueue,
        check=check,
    )
)


@CHOICES.lower("soft_cap", choice="SoftCap", reason="one kernel", source=__file__)
def lower(e, op):
    return e.add("SoftCap", e.get(op.x), **attributes_of("SoftCap", {"cap": op.cap}, "example"))


class Capped(Module):
    def __init__(self, width, classes):
        self.classify = Linear(width, classes)

    def forward(self, x):
        return {"scores": F.soft_cap(self.classify(x), 30.0)}  # pyright: ignore


def build(width: int = 64, classes: int = 10):
    x = irc.Spec("f32", ("B", width))
    return irc.trace(Capped(width, classes), {"x": x}, {"B": (1, 8, 64)})

"""A plugin of one's own: irc compile ... --plugin examples/custom_plugin.py.

SoftCap: y = cap * tanh(scale * x / cap), which keeps attention scores and logits within +-cap. In a
network it is a node `SoftCap` with the string attributes plugin_version "1", plugin_namespace
"example", cap and scale.
"""

import ctypes
import math

import numpy as np

from irc.backends.cuda.kernels import kernel, launcher
from irc.backends.tensorrt.plugins import Field, PluginSpec, Tensor, register
from irc.dtypes import dtype_of, numpy_dtype, widened
from irc.errors import Error

# ELEMENT is f32, f16 or bf16, whose conversions irc puts before every kernel.
SOURCE = r"""
extern "C" __global__ void softcap(
    const ELEMENT* __restrict__ x, ELEMENT* __restrict__ y, long long n, float scale, float cap)
{
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
        y[i] = ELEMENT::of(cap * tanhf((float)x[i] * scale / cap));
}
"""
THREADS, MOST_BLOCKS = 256, 4096


def check(fields):
    if fields["cap"] <= 0:
        raise Error(f"SoftCap: cap is {fields['cap']}; it must be more than 0")


def shapes(fields, x):
    return (x,)


def meaning(fields, x):
    cap, scale = np.float32(fields["cap"]), np.float32(fields["scale"])
    return (cap * np.tanh(widened(x) * scale / cap)).astype(numpy_dtype(dtype_of(x)))


def enqueue(fields, inputs, outputs):
    """What is known with the shapes is done here, once; what it returns runs in every step."""
    (x,) = inputs
    count = math.prod(x.shape)
    blocks = min(MOST_BLOCKS, max(1, -(-count // THREADS)))
    run = launcher(kernel("softcap", SOURCE, {"ELEMENT": x.dtype}), blocks, THREADS)
    scalars = (
        ctypes.c_longlong(count),
        ctypes.c_float(fields["scale"]),
        ctypes.c_float(fields["cap"]),
    )

    def launch(sources, targets, workspace, stream):
        run(stream, sources[0], targets[0], *scalars)

    return launch


SOFTCAP = register(
    PluginSpec(
        name="SoftCap",
        version="1",
        namespace="example",
        doc="y = cap * tanh(scale * x / cap), computed in f32.",
        fields=(
            Field("cap", "float", doc="the bound, more than 0"),
            Field("scale", "float", 1.0, doc="what x is multiplied by before"),
        ),
        types={"T": ("f32", "f16", "bf16")},
        inputs=(Tensor("x", "T", "any shape"),),
        outputs=(Tensor("y", "T", "as x"),),
        shapes=shapes,
        meaning=meaning,
        enqueue=enqueue,
        check=check,
    )
)

"""The kernel that follows a fused all-reduce: adds the residual, then rms_norm of the total."""

from __future__ import annotations

from functools import cache

from irc.backends.cuda.driver import LaunchNorm
from irc.backends.cuda.execute.launch import Enqueue, Kernels
from irc.backends.cuda.plan import Argument, Kernel, Launch
from irc.errors import Error
from irc.ir.dtypes import numpy_dtype

FLOATS = ("f32", "f16", "bf16")

# One block per row. Each thread has its own packs of elements, so it may read what it wrote to
# `total` without a fence. Sums are in f32, in the same order in every run.
SOURCE = r"""
extern "C" __global__ void add_rms_norm(
    ELEMENT* __restrict__ total, const ELEMENT* __restrict__ residual,
    const GAIN* __restrict__ weight, ELEMENT* __restrict__ normed,
    int columns, float eps, float offset)
{
    typedef Pack<ELEMENT, PACK> Elements;
    typedef Pack<GAIN, PACK> Gains;
    const long long row = (long long)blockIdx.x * columns;
    Elements* sums = reinterpret_cast<Elements*>(total + row);
    const Elements* adds = reinterpret_cast<const Elements*>(residual + row);
    const Gains* gains = reinterpret_cast<const Gains*>(weight);
    Elements* out = reinterpret_cast<Elements*>(normed + row);
    const int packs = columns / PACK;

    float squares = 0.0f;
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        Elements sum = sums[i];
        const Elements add = adds[i];
        #pragma unroll
        for (int k = 0; k < PACK; ++k) {
            sum.item[k] = ELEMENT::of((float)sum.item[k] + (float)add.item[k]);
            const float x = (float)sum.item[k];
            squares += x * x;
        }
        sums[i] = sum;
    }

    __shared__ float parts[32];
    #pragma unroll
    for (int step = 16; step > 0; step >>= 1)
        squares += __shfl_xor_sync(0xffffffffu, squares, step);
    if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = squares;
    __syncthreads();
    float sum_of_squares = 0.0f;
    for (int warp = 0; warp < blockDim.x / 32; ++warp) sum_of_squares += parts[warp];
    const float scale = rsqrtf(sum_of_squares / (float)columns + eps);

    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        const Elements sum = sums[i];
        const Gains gain = gains[i];
        Elements done;
        #pragma unroll
        for (int k = 0; k < PACK; ++k)
            done.item[k] = ELEMENT::of((float)sum.item[k] * scale * ((float)gain.item[k] + offset));
        out[i] = done;
    }
}
"""


def pack_size(dtype: str, weight_dtype: str, columns: int) -> int:
    """The number of elements per access: 16 bytes of the wider type, halved until it divides."""
    widest = max(numpy_dtype(each).itemsize for each in (dtype, weight_dtype))
    size = 16 // widest
    while columns % size:
        size //= 2
    return size


def block_size(packs: int) -> int:
    """The number of threads of a block: a multiple of a warp, at most 1024."""
    return min(1024, max(32, -(-packs // 32) * 32))


def macros(dtype: str, weight_dtype: str, size: int) -> dict[str, str]:
    """The macros of the source, for packs of `size` elements."""
    return {"ELEMENT": dtype, "GAIN": weight_dtype, "PACK": str(size)}


def add_rms_norm(
    kernels: Kernels,
    dtype: str,
    weight_dtype: str,
    rows: int,
    columns: int,
    eps: float,
    offset: float = 0.0,
) -> LaunchNorm:
    """launch(total, residual, weight, normed, stream), for arrays [rows, columns] on this GPU.

    total += residual; normed = total / sqrt(mean(total²) + eps) * (weight + offset). `total` is
    rounded to the dtype before it is normalised. Any width and any addresses are allowed; accesses
    are of 16 bytes where both are multiples of it.
    """
    for each in (dtype, weight_dtype):
        if each not in FLOATS:
            raise Error(f"expected {', '.join(FLOATS)} for rms_norm on the GPU, found {each}")
    if not rows or not columns:
        return lambda *pointers: None
    widest = pack_size(dtype, weight_dtype, columns)
    numbers = columns, float(eps), float(offset)

    @cache
    def bound(*pointers: int) -> Enqueue:
        size = 1 if any(each % 16 for each in pointers) else widest
        kernel = Kernel("add_rms_norm", SOURCE, macros(dtype, weight_dtype, size))
        kernels.load([kernel])
        given = (*[Argument("")] * len(pointers), *numbers)
        launch = Launch(kernel.name, (rows, 1, 1), block_size(columns // size), given)
        return kernels.bind(launch, kernel, [*pointers, *numbers], early=False)

    return lambda total, residual, weight, normed, stream: bound(total, residual, weight, normed)(
        stream
    )

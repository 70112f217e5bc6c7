"""The host stand-in for a GPU: memory, canaries, and one launch."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from irc.backends.cuda.plan import Kernel
from irc.ir.types import TensorType
from tests.cuda.emulate import Memory, array_of, empty_memory, memory_of, run_kernel

F32 = TensorType("f32", (7,))


def run(body: str, x: Memory, type: TensorType = F32, grid: int = 1) -> Memory:
    """What a kernel writes, which has `x`, `y` and the number `n` of their elements."""
    arguments = f"const {type.dtype}* x, {type.dtype}* y, int n"
    kernel = Kernel("copy", f'extern "C" __global__ void copy({arguments}) {{ {body} }}')
    out = empty_memory(type, {})
    run_kernel(kernel, (grid, 1, 1), [x, out, int(type.shape[0])])
    return out


def test_elements_of_four_bits_lie_in_pairs() -> None:
    codes, type = np.arange(-4, 5).astype(ml_dtypes.int4), TensorType("i4", (9,))
    out = run("for (int i = 0; i < (n + 1) / 2; ++i) y[i] = x[i];", memory_of(codes), type)
    assert out.bytes.size == 5
    assert np.array_equal(array_of(out, type, {}), codes)


def test_every_block_runs() -> None:
    x = np.arange(7, dtype=np.float32)
    body = "store<f32>(y, blockIdx.x, load<f32>(x, n - 1 - blockIdx.x));"
    assert np.array_equal(array_of(run(body, memory_of(x), grid=7), F32, {}), x[::-1])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        *((f"store<f32>(y, {index}, 1.0f);", "argument 1") for index in (-1, 7, 8)),
        ("store<f32>(y, 0, load<f32>(x, n + 1));", "byte 32 of the 32 of argument 0"),
    ],
)
def test_an_access_beyond_the_memory_is_seen(body: str, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        run(body, memory_of(np.zeros(8, np.float32)))

"""The host stand-in for a GPU: memory, canaries, and one launch."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from irc.backends.cuda.plan import Kernel
from irc.ir.types import TensorType
from tests.cuda.emulate import array_of, empty_memory, memory_of, run_kernel

COPY = 'extern "C" __global__ void copy(const {0}* x, {0}* y, int n) {{ {1} }}'


def test_elements_of_four_bits_lie_in_pairs() -> None:
    codes = np.arange(-4, 5).astype(ml_dtypes.int4)
    body = "for (int i = 0; i < (n + 1) / 2; ++i) y[i] = x[i];"
    source = COPY.format("i4", body)
    type = TensorType("i4", (9,))
    out = empty_memory(type, {})
    run_kernel(Kernel("copy", source), (1, 1, 1), [memory_of(codes), out, 9])
    assert out.bytes.size == 5
    assert np.array_equal(array_of(out, type, {}), codes)


def test_every_block_runs() -> None:
    source = COPY.format("f32", "store<f32>(y, blockIdx.x, load<f32>(x, n - 1 - blockIdx.x));")
    x = np.arange(7, dtype=np.float32)
    type = TensorType("f32", (7,))
    out = empty_memory(type, {})
    run_kernel(Kernel("copy", source), (7, 1, 1), [memory_of(x), out, 7])
    assert np.array_equal(array_of(out, type, {}), x[::-1])


@pytest.mark.parametrize("place", [-1, 7])
def test_a_write_beyond_the_memory_is_seen(place: int) -> None:
    source = COPY.format("f32", f"store<f32>(y, {place}, 1.0f);")
    out = empty_memory(TensorType("f32", (7,)), {})
    with pytest.raises(AssertionError, match="beyond"):
        run_kernel(Kernel("copy", source), (1, 1, 1), [out, out, 7])

"""What benchmarks.decode_gpu runs and counts, on fake GPUs."""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
import pytest

from benchmarks.checkpoints import tensors
from benchmarks.decode_gpu_models import Case, Measured, compile_model, opened
from irc.ir.dtypes import dtype as dtype_called
from tests.cuda.fake_cuda import FakeCuda
from tests.fresh import fresh
from tests.tensorrt.fake_nccl import FakeNccl


@pytest.mark.parametrize("scheme", ["bf16", "w8a16"])
def test_a_step_and_its_bytes(scheme: str, tmp_path: Path) -> None:
    rows, context = (int(n) for n in fresh().integers(1, 9, 2))
    case = Case("tiny", scheme, rows, 1, context)
    artifact = compile_model("tiny", scheme, 1, case.sizes["C"], tmp_path)
    options = {"gpu": lambda rank: FakeCuda(FakeNccl(), rank), "fused": False}
    with opened(artifact, None, True, **options) as program:
        measured = Measured(program, case)
        measured.ms(1)
        steps = sorted(i for part in measured.parts() for i in part.steps)
        assert steps == list(range(len(measured.plan.steps)))
        assert measured.nbytes == _bytes(scheme, rows, context)
        (tokens,) = measured.results().values()
        assert tokens.shape == (rows, 1)
        assert np.all((tokens >= 0) & (tokens < 1000))
        measured.close()


def _bytes(scheme: str, rows: int, context: int) -> int:
    """Weights, of which linears in layers are quantized, and the caches up to the new token."""
    size = dtype_called("i8" if scheme == "w8a16" else "bf16").nbytes
    total = 0
    for name, shape in tensors("tiny").items():
        linear = len(shape) == 2 and "embed" not in name
        total += size(prod(shape)) if linear else 2 * prod(shape)
        if linear and scheme == "w8a16":
            total += 2 * shape[0]  # a scale per output
    heads, width, layers = 2, 16, 2
    return total + rows * layers * 2 * heads * width * (context + 1) * 2

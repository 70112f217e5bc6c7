"""i64 beyond 32 bits on ONNX Runtime, some of whose kernels look at the low half only."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from irc.backends.onnx import backend
from irc.backends.reference import evaluate
from irc.text import parse_module
from tests.fresh import fresh

BINARY = ("maximum %x, %y", "minimum %x, %y")
OTHER = (
    "clip %x {low=-2147483649, high=2147483650} : i64[B, 5]",
    "clip %x {low=4294967296} : i64[B, 5]",
    "reduce_max %x {dims=[1]} : i64[B]",
    "reduce_min %x {dims=[0, 1], keep} : i64[1, 1]",
    "reduce_max %x {dims=[-2]} : i64[5]",
)


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("line", [*(f"{op} : i64[B, 5]" for op in BINARY), *OTHER])
def test_the_high_half_counts(line: str, rows: int, tmp_path: Path) -> None:
    result = line.rpartition(" : ")[2]
    module = parse_module(
        f"module @m {{ func @f(%x: i64[B, 5], %y: i64[B, 5]) -> ({result}) {{ %r = {line} "
        "return %r } }"
    )
    rng = fresh(3)
    near = np.array([-(2**32), -(2**31), 0, 2**31, 2**32, 2**40, -(2**62)])
    drawn = [rng.choice(near, (rows, 5)) + rng.integers(-2, 3, (rows, 5)) for _ in "xy"]
    inputs = dict(zip("xy", drawn, strict=True))
    facts = backend.emit(module, tmp_path, {})
    found = backend.load(tmp_path, facts).run(inputs)
    np.testing.assert_array_equal(found["result0"], evaluate(module, inputs)["result0"])

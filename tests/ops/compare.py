"""Runs one operation on arrays, and compares results with a tolerance that fits their dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from irc.backends.reference import evaluate
from irc.ir.core import Function, Module
from irc.ir.declare import op_class
from irc.ir.dtypes import dtype_of, is_float
from irc.ir.types import TensorType
from irc.ops import Return
from tests.ops.example import Example, module_of

Array = np.ndarray[Any, Any]
EMPTY: Mapping[str, Array] = {}
# Relative to the largest number in the result. Narrow floats are computed in f32 and rounded once;
# those of 8 bits and fewer agree exactly.
CLOSE = {"f64": 1e-12, "f32": 4e-6, "f16": 1e-3, "bf16": 8e-3}


def run(
    example: Example,
    dtype: str,
    inputs: Mapping[str, Array],
    types: Sequence[TensorType] | None = None,
) -> list[Array]:
    """The results of the example's operation by the reference backend, on one rank."""
    return list(evaluate(module_of(example, dtype, types), inputs).values())


def apply(op: str, *plain: Array, named: Mapping[str, Array] = EMPTY, **attributes: Any) -> Array:
    """The first result of an operation on arrays; `named` holds optional operands by name."""
    arrays = [(f"x{i}", array) for i, array in enumerate(plain)] + list(named.items())
    function = Function("forward", [(n, TensorType(dtype_of(a), a.shape)) for n, a in arrays])
    optional = {name: function.arg(name) for name in named}
    made = op_class(op)(*function.args[: len(plain)], **optional, **attributes)
    function.append(made)
    function.append(Return(made.results))
    module = Module("m")
    module.add_function(function)
    return evaluate(module, dict(arrays))["result0"]


def assert_close(got: Array, want: Array, what: str, factor: float = 1.0) -> None:
    """Raise unless two arrays have one dtype, one shape and, nearly, the same numbers."""
    assert got.dtype == want.dtype, f"{what}: {got.dtype} against {want.dtype}"
    assert got.shape == want.shape, f"{what}: {got.shape} against {want.shape}"
    kind = dtype_of(want)
    if not is_float(kind):
        assert np.array_equal(got, want), f"{what}: {got} against {want}"
        return
    with np.errstate(invalid="ignore"):  # drawn bits may be signaling NaN
        a, b = got.astype(np.float64), want.astype(np.float64)
    finite = np.isfinite(b)
    assert np.array_equal(a[~finite], b[~finite], equal_nan=True), f"{what}: infinities or NaN"
    a, b = a[finite], b[finite]
    limit = CLOSE.get(kind, 0) * factor * float(np.max(np.abs(b), initial=1.0))
    worst = float(np.max(np.abs(a - b), initial=0.0))
    assert worst <= limit, f"{what}: off by {worst}, allowed is {limit}"

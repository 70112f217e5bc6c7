"""What TensorRT's flavour of ONNX says, read back into operations, is what the module means."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from irc.backends.reference import evaluate
from irc.core import Module
from irc.frontends.onnx import import_onnx
from tests.fresh import fresh
from tests.ops.example import inputs_of
from tests.ops.examples import EXAMPLES
from tests.tensorrt.emission import emitted
from tests.tensorrt.test_lowering import GLOBAL_VIEW, modules, reason

RNG = fresh(70)


@pytest.mark.parametrize("op", [op for op in EXAMPLES if op not in GLOBAL_VIEW])
def test_every_lowering_means_what_the_operation_does(op: str, tmp_path: Path) -> None:
    for example, dtype, module in modules(op):
        if example.local or reason(module) is not None:
            continue
        inputs = inputs_of(example, dtype, RNG)
        (tmp_path / "m.onnx").write_bytes(emitted(module).SerializeToString())
        found = evaluate(import_onnx(tmp_path / "m.onnx"), inputs, tmp_path)
        for name, wanted in evaluate(module, inputs).items():
            assert_near(found[name], wanted, f"{example} in {dtype}: {name}", narrow(module))


def narrow(module: Module) -> bool:
    """Whether anything is computed in f16 or bf16, in which another order of sums is seen."""
    kinds = {value.type.dtype for op in module.main for value in (*op.operands, *op.results)}
    return bool(kinds & {"f16", "bf16"})


def assert_near(found: np.ndarray, wanted: np.ndarray, what: str, narrow: bool) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape, what
    if wanted.dtype.kind in "iub":
        np.testing.assert_array_equal(found, wanted, what)
        return
    got, want = (each.astype(np.float64) for each in (found, wanted))
    scale = max(1.0, float(np.abs(want[np.isfinite(want)]).max(initial=0)))
    tolerance = 3e-2 if narrow else 2e-5
    np.testing.assert_allclose(got, want, tolerance, tolerance * scale, err_msg=what)

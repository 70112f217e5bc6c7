"""The table of dtypes against the libraries whose names and numbers it holds."""

import numpy as np
import onnx.defs
import pytest
from onnx.helper import tensor_dtype_to_np_dtype

from irc.ir.dtypes import DTYPES, DType, dtype_of, widened


@pytest.mark.parametrize("kind", DTYPES.values(), ids=DTYPES)
def test_a_row_is_that_of_onnx_and_numpy(kind: DType) -> None:
    assert tensor_dtype_to_np_dtype(kind.onnx) == kind.numpy
    (constraint,) = [
        c for c in onnx.defs.get_schema("Cast").type_constraints if c.type_param_str == "T1"
    ]
    assert f"tensor({kind.onnx_name})" in constraint.allowed_type_strs
    array = np.ones(3, kind.numpy)
    assert dtype_of(array) == kind.name
    assert dtype_of(widened(array)) == (kind.wider or kind.name)
    assert kind.nbytes(3) == -(-3 * kind.bits // 8)


def test_the_rows_are_those_of_safetensors() -> None:
    library = pytest.importorskip("safetensors.numpy", reason="the library is not installed")
    theirs = {name: np.dtype(kind) for name, kind in library._TYPES.items()}
    ours = {kind.safetensors: kind.numpy for kind in DTYPES.values() if kind.safetensors}
    assert ours.keys() - theirs.keys() <= {"BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4"}
    for name in ours.keys() & theirs.keys():
        assert ours[name] == theirs[name], name


@pytest.mark.parametrize(
    "column", ["onnx", "onnx_name", "safetensors", "tensorrt", "listing", "nccl"]
)
def test_no_name_stands_for_two_dtypes(column: str) -> None:
    values = [getattr(kind, column) for kind in DTYPES.values()]
    known = [value for value in values if value not in ("", None)]
    assert len(known) == len(set(known)) > 7

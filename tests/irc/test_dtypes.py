"""The table of dtypes against the libraries whose names and numbers it holds."""

import numpy as np
import onnx.defs
import pytest
from onnx.helper import tensor_dtype_to_np_dtype

from irc.ir.dtypes import DTYPES, DType, dtype_of, packed, unpacked, widened
from tests.fresh import fresh


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


@pytest.mark.parametrize("kind", ["i4", "u4", "f4e2m1"])
def test_numbers_of_four_bits_are_packed_like_onnx(kind: str) -> None:
    """The first of two in the low half of a byte."""
    codes = fresh(1).permutation(18) % 16
    numbers = codes - 16 * (codes > 7) if kind == "i4" else codes
    values = codes.astype(np.uint8).view(DTYPES[kind].numpy) if kind == "f4e2m1" else numbers
    array = values.astype(DTYPES[kind].numpy)
    for count in (18, 15, 1):
        pairs = zip(codes[:count:2], [*codes[1:count:2], 0], strict=False)
        assert packed(array[:count]).tobytes() == bytes(low + 16 * high for low, high in pairs)
    again = unpacked(packed(array).reshape(3, 3), kind)
    assert again.dtype == array.dtype and again.shape == (3, 6)
    np.testing.assert_array_equal(again.reshape(-1), array)

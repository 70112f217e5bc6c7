"""The dtypes for which ONNX Runtime has no kernel on CPU, by ONNX operator."""

from __future__ import annotations

# From the table of kernels of ONNX Runtime 1.31. Such operands are computed in i32 and converted
# back, which wraps around as the narrow type would.
_NO_SMALL = ("i16", "i8", "u8")
MISSING: dict[str, tuple[str, ...]] = {
    "Min": ("i16",),
    "Max": ("i16",),
    "Clip": ("i16",),
    "Where": ("i16", "bool"),
    "ReduceMax": ("i16",),
    "ReduceMin": ("i16",),
    "ArgMax": ("i16",),
    "Pad": ("i16",),
    "Neg": ("u8",),
    "MatMul": _NO_SMALL,
    "ReduceSum": _NO_SMALL,
    "ReduceProd": _NO_SMALL,
    "CumSum": _NO_SMALL,
}
WITHOUT_F64 = ("Erf", "Softplus", "Gelu")

"""The dtypes for which ONNX Runtime has no kernel on CPU, by ONNX operator."""

from __future__ import annotations

from irc.ir.dtypes import dtype

# From the table of kernels of ONNX Runtime 1.31. Such operands are computed in a signed type and
# converted back, which wraps around as their own type would.
_UNSIGNED = ("u16", "u32", "u64")
_NO_SMALL = ("i16", "i8", "u8", *_UNSIGNED)
MISSING: dict[str, tuple[str, ...]] = {
    "Min": ("i16", "u16"),
    "Max": ("i16", "u16"),
    "Clip": ("i16", "u16"),
    "Where": ("i16", "bool", "u16", "u64"),
    "ArgMax": ("i16", *_UNSIGNED),
    "TopK": _UNSIGNED,
    "Pad": ("i16", "u16"),
    "Neg": ("u8", *_UNSIGNED),
    "MatMul": ("i16", "i8", "u8", "u16"),
    "ReduceSum": _NO_SMALL,
    "ReduceProd": _NO_SMALL,
    "CumSum": _NO_SMALL,
}
WITHOUT_F64 = ("Erf", "Softplus", "Gelu")


def signed(name: str) -> str:
    """The type in which numbers of a dtype without a kernel are computed."""
    return "i64" if dtype(name).bits > 16 else "i32"

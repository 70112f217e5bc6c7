"""Examples of quantized tensors."""

from __future__ import annotations

from irc.ir.dims import symbol
from tests.ops.example import Arg, Bad, Example

B = symbol("B")
X = Arg((4, 6), "i8")
ONE = Arg((1, 1), low=0.1, high=2)


def _x(shape: tuple[int, ...], dtype: str) -> Arg:
    """Numbers of all sizes that the dtype has, but of few bits in floats."""
    low, high = {"i4": (-8, 8), "u4": (0, 16), "i8": (-128, 128), "u8": (0, 256)}[dtype]
    return Arg(shape, dtype, low, high)


def _scale(*shape: int) -> Arg:
    return Arg(shape, low=0.1, high=2)


def _zero(shape: tuple[int, ...], dtype: str) -> Arg:
    return Arg(shape, dtype, 1, 8, name="zero")


EXAMPLES = [
    Example(
        "dequantize",
        (_x((4, 6), "i8"), _scale(1, 1)),
        {},
        (
            Bad("takes i4, u4", (Arg((4, 6)), ONE)),
            Bad("takes scales of f32", (X, Arg((1, 1), "i32"))),
            Bad("scales [4, 4] do not divide [4, 6]", (X, Arg((4, 4)))),
            Bad("scales [6] do not divide [4, 6]", (X, Arg((6,)))),
            Bad("it must be integers", (X, ONE, Arg((1, 1), "i4", name="zero"))),
            Bad("in the shape of scale", (X, ONE, Arg((4, 1), "i8", name="zero"))),
            Bad(
                "it must be integers",
                (Arg((4, 6), "f8e4m3"), ONE, Arg((1, 1), "f8e4m3", name="zero")),
            ),
        ),
    ),
    Example("dequantize", (_x((12, 5), "i8"), _scale(12, 1))),
    Example("dequantize", (Arg((B, 24), "i8", -128, 128), _scale(1, 24)), sizes={"B": 12}),
    Example("dequantize", (_x((12, 48), "i4"), _scale(12, 12))),
    Example("dequantize", (_x((48, 7), "i4"), _scale(24, 7))),
    Example("dequantize", (_x((24, 12), "u4"), _scale(24, 1), _zero((24, 1), "u4"))),
    Example("dequantize", (_x((12, 24), "u8"), _scale(12, 12), _zero((12, 12), "u8"))),
    Example("dequantize", (_x((24, 24), "i8"), _scale(12, 12))),
    Example("dequantize", (Arg((12, 6), "f8e4m3"), _scale(12, 1))),
    Example("dequantize", (Arg((6, 12), "f8e5m2"), _scale(1, 1))),
    Example("dequantize", (_x((12,), "i8"), _scale(12))),
    Example("dequantize", (_x((0, 12), "i8"), _scale(0, 1))),
]

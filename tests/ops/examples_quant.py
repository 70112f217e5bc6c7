"""Examples of quantized tensors."""

from __future__ import annotations

from typing import Any

import numpy as np

from irc.ir.dims import Shape, symbol
from tests.ops.example import FLOATS, Arg, Bad, Example

B = symbol("B")
X = Arg((4, 6), "i8")
ONE = Arg((1, 1), low=0.1, high=2)
RANGES = {"i4": (-8, 8), "u4": (0, 16), "i8": (-128, 128), "u8": (0, 256)}


def _x(shape: tuple[int, ...], dtype: str) -> Arg:
    """Numbers of all sizes that the dtype has, but of few bits in floats."""
    return Arg(shape, dtype, *RANGES[dtype])


def _scale(*shape: int, dtype: str = "T") -> Arg:
    return Arg(shape, dtype, low=0.1, high=2)


def _zero(shape: tuple[int, ...], dtype: str) -> Arg:
    return Arg(shape, dtype, 1, 8, name="zero")


def _powers(random: np.random.Generator, shape: tuple[int, ...]) -> Any:
    return 2.0 ** random.integers(-4, 4, shape)


def _eighths(random: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Multiples of 1/8, which scales of powers of two leave far from halves between codes."""
    return random.integers(-100, 100, shape) / 8 + 1 / 16


def _quantize(x: Shape, *scale: int, zero: bool = False, dtype: str = "i8") -> Example:
    """Halves between codes never arise, since scales are powers of two."""
    args = [Arg(x, draw=_eighths), Arg(scale, draw=_powers)]
    args += [_zero(scale, dtype)] if zero else []
    return Example("quantize", tuple(args), {"dtype": dtype}, sizes={"B": 2} if B in x else {})


def _signs(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    return rng.choice([-2.0, 2.0], shape)


def _gains(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """One less than factors whose codes are far from halves, so few of them large that shards of a
    row often have none."""
    return rng.choice([0.0, -0.75, -2.0], shape, p=[0.15, 0.7, 0.15])


def _dynamic(x: Shape, dtypes: tuple[str, ...] = FLOATS, **attributes: Any) -> Example:
    sizes = {"B": 2} if B in x else {}
    args = [Arg(x, low=-900, high=900)]
    if attributes.get("scale") == "f8e4m3":
        args.append(Arg((1,) * len(x), "f32", 0.001, 0.01, name="tensor_scale"))
    return Example("dynamic_scale", tuple(args), attributes, dtypes=dtypes, sizes=sizes)


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
            Bad("scales of f8e4m3 need a dtype", (X, Arg((1, 1), "f8e4m3"))),
            Bad("dtype is one of", (X, ONE), {"dtype": "i8"}),
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
    Example("dequantize", (_x((2, 12, 8), "i8"), _scale(2, 12, 1)), {"dtype": "f16"}),
    Example(
        "dequantize",
        (Arg((12, 24), "f8e4m3"), Arg((12, 12), "f8e8m0", draw=_powers)),
        {"dtype": "bf16"},
    ),
    Example("dequantize", (Arg((12, 24), "f8e4m3"), _scale(1, 1)), {"dtype": "f32"}),
    Example(
        "dequantize", (Arg((12, 24), "f8e4m3"), _scale(12, 1, dtype="f8e4m3")), {"dtype": "f32"}
    ),
    _quantize((4, 6), 1, 1),
    _quantize((12, 24), 12, 1, zero=True, dtype="u8"),
    _quantize((B, 12, 24), 1, 1, 12, dtype="f8e4m3"),
    _quantize((24, 24), 12, 12, dtype="f8e5m2"),
    _quantize((12,), 12),
    _quantize((0, 12), 0, 1),
    Example(
        "quantize",
        (Arg((4, 6)), ONE),
        {"dtype": "i8"},
        (
            Bad("takes f32, f16", (X, ONE)),
            Bad("takes scales of f32", (Arg((4, 6)), Arg((1, 1), "i32"))),
            Bad("do not divide [4, 6]", (Arg((4, 6)), Arg((4, 4)))),
            Bad("dtype is one of", (Arg((4, 6)), ONE), {"dtype": "i32"}),
            Bad("must be integers", (Arg((4, 6)), ONE, Arg((1, 1), "u8", name="zero"))),
        ),
    ),
    _dynamic((4, 24)),
    _dynamic((B, 12, 24), dtype="i8"),
    _dynamic((B, 12, 24), dtype="f8e4m3", scale="bf16"),
    _dynamic((12, 48), dtype="f4e2m1", block=4),
    _dynamic((12, 96), dtype="f8e4m3", block=8, scale="f8e8m0"),
    _dynamic((12, 48), dtype="f4e2m1", block=4, scale="f8e4m3", dtypes=("f32",)),
    _dynamic((0, 24)),
    Example(
        "dynamic_scale",
        (Arg((4, 12), draw=lambda random, shape: np.zeros(shape)),),
        {"dtype": "f4e2m1", "block": 4, "scale": "f8e8m0"},
        (
            Bad("takes f32, f16", (X,)),
            Bad("blocks of 5 do not divide 12", (Arg((4, 12)),), {"block": 5}),
            Bad("need tensor_scale", (Arg((4, 12)),), {"scale": "f8e4m3"}),
            Bad("take no tensor_scale", (Arg((4, 12)), Arg((1, 1), name="tensor_scale"))),
            Bad(
                "not f32[1, 1]", (Arg((4, 12)), Arg((1,), name="tensor_scale")), {"scale": "f8e4m3"}
            ),
            Bad("dtype is one of", (Arg((4, 12)),), {"dtype": "u8"}),
        ),
    ),
    *(
        Example(
            "quantize_rows",
            (x, *norm),
            {"codes": "i8", "dtype": "f16"} | more,
            (
                Bad("takes f32, f16", (Arg((4, 12), "i32"),)),
                Bad("the 12 features", (Arg((4, 12)), Arg((5,), name="weight"))),
                Bad("codes is one of", (Arg((4, 12)),), {"codes": "u8"}),
            ),
            sizes={"B": 2} if B in x.shape else {},
        )
        for x, norm, more in (
            (Arg((B, 12, 24)), (), {"scale": "f8e8m0"}),
            (
                Arg((12, 24), draw=_signs),
                (Arg((24,), name="weight", draw=_gains),),
                {"eps": 0.1, "offset": 1.0},
            ),
        )
    ),
]

"""Examples of elementwise operations: arithmetic, functions, activations, logic."""

from __future__ import annotations

from typing import Any

import numpy as np

from irc.ir.dims import symbol
from tests.ops.example import FLOATS, Arg, Bad, Example

B = symbol("B")
NUMBERS = (*FLOATS, "i32")
MIXED = Bad("cast one of them", (Arg((4,)), Arg((4,), "i64")))
APART = Bad("do not broadcast", (Arg((4,)), Arg((3,))))
NO_BOOL = Bad("takes numbers", (Arg((4,), "bool"), Arg((4,), "bool")))
NO_INTEGERS = Bad("floating-point", (Arg((4,), "i32"), Arg((4,), "i32")))
WRONG_ATTRIBUTE = Bad("low of clip is 'up'", (Arg((4,)),), {"low": "up"})


def distinct(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Numbers of which neighbours differ, with both signs, zeros and equal pairs among them."""
    return rng.integers(-3, 4, shape)


def binary(op: str, *bad: Bad, dtypes: tuple[str, ...] = FLOATS, **drawn: Any) -> list[Example]:
    """A whole pair, broadcasting of either side, symbols, and scalars."""

    def arg(*shape: Any) -> Arg:
        return Arg(shape, **drawn)

    return [
        Example(op, (arg(12, 24), arg(12, 24)), bad=(MIXED, APART, *bad), dtypes=dtypes),
        Example(op, (arg(12, 1, 6), arg(8, 1)), dtypes=dtypes),
        Example(op, (arg(B, 24), arg(24)), dtypes=dtypes, sizes={"B": 6}),
        Example(op, (arg(), arg(7)), dtypes=dtypes),
        Example(op, (arg(), arg()), dtypes=dtypes),
    ]


def unary(op: str, *bad: Bad, dtypes: tuple[str, ...] = FLOATS, **drawn: Any) -> list[Example]:
    """A matrix with a symbol, and a scalar; `attributes` go to both."""
    attributes = drawn.pop("attributes", {})
    return [
        Example(op, (Arg((B, 8), **drawn),), attributes, bad, dtypes, sizes={"B": 12}),
        Example(op, (Arg((), **drawn),), attributes, dtypes=dtypes),
    ]


FLOAT_ONLY = Bad("floating-point", (Arg((4,), "i32"),))
NUMBER_ONLY = Bad("takes numbers", (Arg((4,), "bool"),))
BOOL_ONLY = Bad("takes bool", (Arg((4,)),))
ABOVE_ZERO: dict[str, Any] = {"low": 0.25, "high": 4.0}
AWAY_FROM_ZERO: dict[str, Any] = {
    "draw": lambda rng, shape: rng.uniform(1, 4, shape) * rng.choice([-1, 1], shape)
}


def _arithmetic() -> list[Example]:
    examples: list[Example] = []
    for op in ("add", "sub", "mul", "minimum", "maximum"):
        examples += binary(op, NO_BOOL, dtypes=NUMBERS, draw=distinct)
        examples += [Example(op, (Arg((12, 24)), Arg((24,))))]
    examples += binary("div", NO_INTEGERS, **AWAY_FROM_ZERO)
    examples += binary("pow", NO_INTEGERS, **ABOVE_ZERO)
    for op in ("floor_div", "mod"):
        for dtypes in (("f32",), ("i32", "i64")):
            examples += binary(op, NO_BOOL, dtypes=dtypes, draw=_odd)
    for op in ("neg", "abs", "sign"):
        examples += unary(op, NUMBER_ONLY, dtypes=NUMBERS, draw=distinct)
    return examples


def _odd(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    return 2 * rng.integers(-5, 5, shape) + 1


def _functions() -> list[Example]:
    examples: list[Example] = []
    for op in ("sqrt", "rsqrt", "reciprocal", "log"):
        examples += unary(op, FLOAT_ONLY, **ABOVE_ZERO)
    for op in ("exp", "sin", "cos", "erf", "round", "floor", "ceil"):
        examples += unary(op, FLOAT_ONLY, low=-4.0, high=4.0)
    examples += unary("round", draw=lambda rng, shape: rng.integers(-6, 6, shape) / 2)
    for op in ("sigmoid", "tanh", "relu", "softplus", "silu", "quick_gelu", "squared_relu", "gelu"):
        examples += unary(op, FLOAT_ONLY, low=-6.0, high=6.0)
    word = Bad("none, tanh", (Arg((4,)),), {"approximate": "exact"})
    examples += unary("gelu", word, attributes={"approximate": "tanh"})
    examples += _clip()
    return examples


def _clip() -> list[Example]:
    bad = (
        Bad("needs low", (Arg((4,)),)),
        Bad("above high", (Arg((4,)),), {"low": 2, "high": 1}),
        Bad("not an integer", (Arg((4,), "i32"),), {"low": 0.5}),
        NUMBER_ONLY,
        WRONG_ATTRIBUTE,
    )
    return [
        *unary("clip", *bad, attributes={"low": -0.5, "high": 1.0}),
        *unary("clip", attributes={"high": 0.0}),
        Example("clip", (Arg((12,), "i32", -9, 9),), {"low": -2, "high": 3}, dtypes=("f32",)),
    ]


def _logic() -> list[Example]:
    examples: list[Example] = []
    for op in ("eq", "ne", "lt", "le", "gt", "ge"):
        bad = () if op in ("eq", "ne") else (NO_BOOL,)
        examples += binary(op, *bad, dtypes=NUMBERS, draw=distinct)
    for op in ("eq", "ne"):
        examples.append(Example(op, (Arg((12,), "bool"), Arg((12,), "bool")), dtypes=("bool",)))
    for op in ("and", "or"):
        shapes = (((12, 24), (12, 24)), ((12, 1), (5,)), ((), ()))
        for a, b in shapes:
            args = (Arg(a, "bool"), Arg(b, "bool"))
            examples.append(Example(op, args, dtypes=("bool",)))
        bad = (
            Bad("takes bool", (Arg((4,)), Arg((4,), "bool"))),
            Bad("bool", (Arg((4,), "bool"), Arg((4,)))),
        )
        examples.append(
            Example(op, (Arg((7,), "bool"), Arg((), "bool")), bad=bad, dtypes=("bool",))
        )
    examples += unary("not", BOOL_ONLY, dtypes=("bool",))
    return examples


def _where() -> list[Example]:
    condition = Arg((4,), "bool")
    bad = (
        Bad("takes bool", (Arg((4,)), Arg((4,)), Arg((4,)))),
        Bad("cast one", (condition, Arg((4,)), Arg((4,), "i32"))),
        Bad("do not broadcast", (condition, Arg((4,)), Arg((3,)))),
    )
    return [
        Example("where", (Arg((12, 24), "bool"), Arg((12, 24)), Arg((12, 24))), bad=bad),
        Example("where", (Arg((12, 1), "bool"), Arg((24,)), Arg(())), dtypes=NUMBERS),
        Example("where", (Arg((), "bool"), Arg((B,)), Arg((B,))), sizes={"B": 12}),
    ]


def _cast() -> list[Example]:
    bad = (
        Bad("did you mean", (Arg((4,)),), {"dtype": "bf61"}),
        Bad("dtype of cast is 16", (Arg((4,)),), {"dtype": 16}),
    )
    return [
        *(
            Example("cast", (Arg((B, 8)),), {"dtype": to}, sizes={"B": 12})
            for to in (*FLOATS, "i32", "bool")
        ),
        *(
            Example("cast", (Arg((12,), "i32", -5, 5),), {"dtype": to}, dtypes=("f32",))
            for to in ("f32", "bf16", "i64", "i8", "u8", "bool")
        ),
        Example("cast", (Arg((12,), "bool"),), {"dtype": "f32"}, dtypes=("bool",)),
        Example("cast", (Arg(()),), {"dtype": "f32"}, bad),
    ]


def _bitcast() -> list[Example]:
    """Any bits, also those of NaN."""

    def bits(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
        return np.asarray(rng.integers(0, 2**32, shape, np.uint32)).view(np.float32)

    bad = (
        Bad("32 or of 64 bits, not f32 and i64", (Arg((4,)),), {"dtype": "i64"}),
        Bad("32 or of 64 bits, not f16 and i16", (Arg((4,), "f16"),), {"dtype": "i16"}),
    )
    whole = Arg((12,), draw=lambda rng, shape: rng.integers(-(2**31), 2**31, shape))
    return [
        Example(
            "bitcast", (Arg((B, 8), "f32", draw=bits),), {"dtype": "i32"}, bad, ("f32",), {"B": 12}
        ),
        Example("bitcast", (Arg(()),), {"dtype": "u64"}, dtypes=("f64",)),
        Example("bitcast", (whole,), {"dtype": "f32"}, dtypes=("i32", "u32")),
        Example("bitcast", (whole,), {"dtype": "f64"}, dtypes=("i64", "u64")),
    ]


EXAMPLES = [*_bitcast(), *_arithmetic(), *_functions(), *_logic(), *_where(), *_cast()]

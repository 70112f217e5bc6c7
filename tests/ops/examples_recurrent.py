"""Examples of convolutions and recurrences with a state, for the generic tests."""

from __future__ import annotations

from typing import Any

from irc.ir.dims import Shape, symbol
from tests.ops.example import Arg, Bad, Example

B, S = symbol("B"), symbol("S")
SIZES = {"B": 2, "S": 5}
LENGTHS = Arg((B,), "i32", low=0, high=6, name="lengths")


def _numbers(*shape: Any, low: float, high: float) -> Arg:
    return Arg(shape, low=low, high=high)


def _bad(message: str, args: tuple[Arg, ...], at: int, shape: Shape, dtype: str = "T") -> Bad:
    """The operands with that of position `at` replaced, and numbers for symbols."""
    sizes: dict[Any, Any] = {B: 2, S: 5}
    plain = [Arg(tuple(sizes.get(n, n) for n in arg.shape), arg.dtype) for arg in args]
    plain[at] = Arg(shape, dtype)
    return Bad(message, tuple(plain))


CONV = (Arg((B, S, 6)), Arg((6, 4)), Arg((B, 3, 6)))
BIAS = Arg((6,), name="bias")
CONVOLUTIONS = [
    Example("short_conv", (*CONV, BIAS, LENGTHS), sizes=SIZES),
    Example(
        "short_conv",
        CONV,
        sizes=SIZES,
        bad=(
            _bad("takes x [batch", CONV, 0, (2, 6)),
            _bad("expected [6, 2 or more]", CONV, 1, (6, 1)),
            _bad("expected [2, 3, 6]", CONV, 2, (2, 4, 6)),
            _bad("f32 and bf16", CONV, 2, (2, 3, 6), "bf16"),
            Bad("expected [6]", (*_bad("", CONV, 2, (2, 3, 6)).args, Arg((5,), name="bias"))),
            Bad(
                "expected [2]",
                (*_bad("", CONV, 2, (2, 3, 6)).args, Arg((3,), "i32", name="lengths")),
            ),
        ),
    ),
    Example("short_conv", (Arg((2, 1, 3)), Arg((3, 2)), Arg((2, 1, 3)))),
]


def _scan(groups: int, heads: int = 4) -> tuple[Arg, ...]:
    return (
        Arg((B, S, heads, 3)),
        _numbers(B, S, heads, low=0.0, high=2.0),
        _numbers(heads, low=-4.0, high=-0.1),
        Arg((B, S, groups, 2)),
        Arg((B, S, groups, 2)),
        Arg((B, heads, 3, 2), "f32"),
    )


SCAN = _scan(2)
D = (Arg((4,), name="d"), LENGTHS)
SCANS = [
    Example("selective_scan", (*SCAN[:-1], Arg((B, 4, 3, 2)), D[0]), {}, (), ("f32",), SIZES),
    Example("selective_scan", (*SCAN, *D), sizes=SIZES),
    Example("selective_scan", _scan(1), sizes=SIZES),
    Example("selective_scan", _scan(4), sizes={"B": 2, "S": 1}),
    Example(
        "selective_scan",
        SCAN,
        sizes=SIZES,
        bad=(
            _bad("takes x [batch", SCAN, 0, (2, 5, 12)),
            _bad("other tokens", SCAN, 1, (2, 4, 4)),
            _bad("expected [2, 5, 4]", SCAN, 1, (2, 5, 3)),
            _bad("expected [4]", SCAN, 2, (3,)),
            _bad("expected [2, 5, 3, 2]", SCAN, 3, (2, 5, 3, 2)),
            _bad("expected f32", SCAN, 5, (2, 4, 3, 2), "bf16"),
            _bad("expected [2, 4, 3, 2]", SCAN, 5, (2, 2, 3, 2), "f32"),
            _bad("cannot share 3 groups", _scan(3), 0, (2, 5, 4, 3)),
        ),
    ),
]


def _delta(key_heads: int, heads: int = 4, size: int = 3, width: int = 2) -> tuple[Arg, ...]:
    return (
        Arg((B, S, heads, width)),
        Arg((B, S, key_heads, size)),
        _numbers(B, S, key_heads, size, low=-0.57, high=0.57),  # norms of at most 1
        _numbers(B, S, heads, low=-3.0, high=0.0),
        _numbers(B, S, heads, low=0.0, high=1.0),
        Arg((B, heads, size, width), "f32"),
    )


DELTA = _delta(2)
DELTAS = [
    Example(
        "gated_delta",
        (*DELTA[:-1], Arg((B, 4, 3, 2))),
        {"longest": 64},
        dtypes=("f32",),
        sizes=SIZES,
    ),
    Example("gated_delta", (*DELTA, LENGTHS), {"longest": 64}, sizes=SIZES),
    Example("gated_delta", _delta(1), {"longest": 100}, sizes=SIZES),
    Example("gated_delta", _delta(4), {}, sizes={"B": 2, "S": 1}),
    Example(
        "gated_delta",
        DELTA,
        sizes={"B": 2, "S": 19},
        bad=(
            _bad("takes x [batch", DELTA, 0, (2, 5, 8)),
            _bad("other tokens", DELTA, 1, (2, 4, 2, 3)),
            _bad("expected [2, 5, 2, 2]", DELTA, 2, (2, 5, 2, 2)),
            _bad("expected [2, 5, 4]", DELTA, 3, (2, 5, 3)),
            _bad("expected f32", DELTA, 5, (2, 4, 3, 2), "bf16"),
            _bad("expected [2, 4, 3, 2]", DELTA, 5, (2, 2, 3, 2), "f32"),
            _bad("cannot share 3 groups", _delta(3), 0, (2, 5, 4, 2)),
            Bad("longest is 0", _bad("", DELTA, 0, (2, 5, 4, 2)).args, {"longest": 0}),
        ),
    ),
]

EXAMPLES = [*CONVOLUTIONS, *SCANS, *DELTAS]

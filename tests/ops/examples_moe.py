"""Examples of the mixture-of-experts operations for the generic test."""

from __future__ import annotations

from typing import Any

import numpy as np

from irc.ir.dims import symbol
from tests.ops.example import Arg, Bad, Example

B = symbol("B")
PARTS = 12  # a multiple of 2, 3 and 4 ranks
SIZES = {"B": 12}
INDICES = ("f32",)  # there is nothing else to vary


def _chosen(*shape: Any, dtype: str = "i32") -> Arg:
    """Random expert ids, some out of range."""
    return Arg(shape, dtype, -1, 7)


def _slots(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Distinct slots, as many as tokens; negative ones for the other pairs."""
    count = int(np.prod(shape))
    return (rng.permutation(count) - (count - shape[0])).reshape(shape)


def _slots_in_parts(rng: np.random.Generator, shape: tuple[int, ...]) -> Any:
    """Distinct slots, -1 among them, for the pairs of each part."""
    pairs = rng.random((PARTS, int(np.prod(shape)) // PARTS))
    return np.argsort(pairs, axis=1).reshape(shape) - 1


SLOTS = [
    Example(
        "moe_slots",
        (_chosen(B, 2),),
        {"experts": 6},
        (
            Bad("takes chosen [tokens, choices]", (Arg((6,), "i32"),), {"experts": 4}),
            Bad("indices in i32", (Arg((6, 2)),), {"experts": 4}),
            Bad("experts is 0", (_chosen(6, 2),), {"experts": 0}),
            Bad("parts is 0", (_chosen(6, 2),), {"experts": 4, "parts": 0}),
            Bad("cannot be negative", (_chosen(6, 2),), {"experts": 4, "capacity": -1}),
            Bad("into 4 equal parts; pad", (_chosen(6, 2),), {"experts": 4, "parts": 4}),
            Bad("into 2 equal parts; pad", (_chosen(B, 2),), {"experts": 4, "parts": 2}),
        ),
        INDICES,
        SIZES,
    ),
    Example(
        "moe_slots", (_chosen(12, 3, dtype="i64"),), {"experts": 5, "capacity": 2}, (), INDICES
    ),
    Example("moe_slots", (_chosen(24, 2),), {"experts": 3, "parts": PARTS}, (), INDICES),
    Example(
        "moe_slots",
        (_chosen(B * 2, 3),),
        {"experts": 4, "parts": 2, "capacity": B},
        (),
        INDICES,
        {"B": 5},
    ),
]

X, PAIR, FIRST = Arg((6, 8)), Arg((6, 2), "i32"), Arg((1,), "i32", name="first")
WIDE, LAST = _chosen(12, 3, dtype="i64"), Arg((), "i64", 0, 4, name="first")
DISPATCHES = [
    Example(
        "moe_dispatch",
        (Arg((B, 12)), _chosen(B, 2), Arg((B, 2), "i32", draw=_slots)),
        {"experts": 6},
        (
            Bad("not one row each", (Arg((5, 8)), PAIR, PAIR), {"experts": 4}),
            Bad("not one row each", (Arg((6,)), PAIR, PAIR), {"experts": 4}),
            Bad("slots is i32[6, 3]", (X, PAIR, Arg((6, 3), "i32")), {"experts": 4}),
            Bad("indices in i32", (X, PAIR, Arg((6, 2))), {"experts": 4}),
            Bad("floating-point", (Arg((6, 8), "i32"), PAIR, PAIR), {"experts": 4}),
            Bad("experts is -1", (X, PAIR, PAIR), {"experts": -1}),
            Bad("cannot be negative", (X, PAIR, PAIR), {"experts": 4, "capacity": -2}),
            Bad("4 equal parts", (X, PAIR, PAIR), {"experts": 4, "parts": 4}),
            Bad("number of one expert", (X, PAIR, PAIR, FIRST), {"experts": 4}),
        ),
        sizes=SIZES,
    ),
    Example(
        "moe_dispatch",
        (Arg((24, 12)), _chosen(24, 2), Arg((24, 2), "i32", draw=_slots_in_parts)),
        {"experts": 5, "parts": PARTS, "capacity": 3},
    ),
    Example(
        "moe_dispatch",
        (Arg((12, 5)), WIDE, Arg((12, 3), "i64", draw=_slots), Arg((), "i32", 0, 4, name="first")),
        {"experts": 3, "capacity": 17},
    ),
]

BUFFER = Arg((4, 6, 8))
COMBINES = [
    Example(
        "moe_combine",
        (Arg((12, B, 12)), _chosen(B, 2), Arg((B, 2), "i32", draw=_slots), Arg((B, 2))),
        {},
        (
            Bad("takes a buffer", (Arg((4, 8)), PAIR, PAIR, Arg((6, 2)))),
            Bad("weights is f32[6, 1]", (BUFFER, PAIR, PAIR, Arg((6, 1)))),
            Bad("slots is i32[5, 2]", (BUFFER, PAIR, Arg((5, 2), "i32"), Arg((6, 2)))),
            Bad("cast one", (BUFFER, PAIR, PAIR, Arg((6, 2), "bf16"))),
            Bad("floating-point", (Arg((4, 6, 8), "i32"), PAIR, PAIR, PAIR)),
            Bad("not 3 equal parts", (Arg((4, 8, 8)), PAIR, PAIR, Arg((6, 2))), {"parts": 3}),
            Bad("4 equal parts", (BUFFER, PAIR, PAIR, Arg((6, 2))), {"parts": 4}),
            Bad("number of one expert", (BUFFER, PAIR, PAIR, Arg((6, 2)), FIRST)),
        ),
        sizes=SIZES,
    ),
    Example(
        "moe_combine",
        (Arg((5, 36, 12)), _chosen(24, 2), Arg((24, 2), "i32", -1, 3), Arg((24, 2))),
        {"parts": PARTS},
    ),
    Example("moe_combine", (Arg((3, 9, 5)), WIDE, Arg((12, 3), "i64", -1, 9), Arg((12, 3)), LAST)),
]

ROUTE = (_chosen(B, 2), Arg((B, 2), "i32", draw=_slots), Arg((B, 2)))
UP, GATE, DOWN = Arg((12, 12, 5)), Arg((12, 12, 5), name="gate"), Arg((12, 12, 12))
FIXED, SMALL = (X, PAIR, PAIR, Arg((6, 2))), (Arg((4, 5, 8)), Arg((4, 8, 5)))
MIXTURES = [
    Example(
        "experts",
        (Arg((B, 5)), *ROUTE, UP, DOWN, GATE),
        {},
        (
            Bad("up [experts, features, inputs]", (*FIXED, Arg((5, 8)), SMALL[1])),
            Bad("down is f32[3, 8, 5], but up", (*FIXED, SMALL[0], Arg((3, 8, 5)))),
            Bad("gate is f32[4, 1, 8], but up", (*FIXED, *SMALL, Arg((4, 1, 8), name="gate"))),
            Bad("[4, 1, 5], found f32[4, 5]", (*FIXED, *SMALL, Arg((4, 5), name="up_bias"))),
            Bad("of experts with a gate", (*FIXED, *SMALL), {"offset": 1.0}),
            Bad("slots is i32[5, 2]", (X, PAIR, Arg((5, 2), "i32"), Arg((6, 2)), *SMALL)),
        ),
        sizes=SIZES,
    ),
    Example(
        "experts",
        (
            *(Arg((B, 5)), *ROUTE, UP, DOWN, GATE),
            *(Arg((12, 1, 12), name=f"{name}_bias") for name in ("gate", "up")),
        ),
        {"act": "quick_gelu", "limit": 0.8, "offset": 1.0},
        sizes=SIZES,
    ),
    Example(
        "experts",
        (
            *(Arg((24, 5)), _chosen(24, 2), Arg((24, 2), "i32", draw=_slots_in_parts)),
            *(Arg((24, 2)), Arg((3, 4, 5)), Arg((3, 7, 4)), LAST),
            Arg((3, 1, 7), name="down_bias"),
        ),
        {"act": "relu", "parts": PARTS, "capacity": 3},
    ),
]
EXAMPLES = [*SLOTS, *DISPATCHES, *COMBINES, *MIXTURES]

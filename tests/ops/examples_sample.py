"""Examples of `sample`: logits with numbers that are not finite, and settings of every kind."""

from __future__ import annotations

from typing import Any

import numpy as np

from irc.ir.dims import symbol
from tests.ops.example import Arg, Bad, Example

B = symbol("B")
CHOICES = {
    "temperature": [0, 1e-30, 0.3, 1, 2.5, np.inf, -1, np.nan],
    "top_k": [0, 1, 2, 5, 50, 1000, 1 << 30, -3],
    "top_p": [1, 0.95, 0.5, 1e-9, 0, -1, 2, np.nan],
    "min_p": [0, 0.05, 0.5, 1e-12, 1, 3, -1, np.nan],
}


def settings(rows: int, size: int, rng: np.random.Generator) -> list[Any]:
    """The operands of `rows` rows behind the logits, drawn from what they may be."""
    found = [rng.choice(each, rows) for each in CHOICES.values()]
    kinds = (np.float32, np.int32, np.float32, np.float32)
    seeds = rng.integers(-(2**63), 2**63 - 1, rows)
    positions = rng.integers(0, 2**31 - 1, rows, np.int32)
    return [*(x.astype(kind) for x, kind in zip(found, kinds, strict=True)), seeds, positions]


def sprinkled(logits: Any, rng: np.random.Generator) -> Any:
    """The logits, but for rows with equal ones, NaN and infinities."""
    for row in logits:
        how = rng.integers(0, 8)
        places = rng.integers(0, len(row), 3)
        if how < 4:
            row[places] = (np.nan, -np.inf, np.inf, row.max())[how]
        elif how == 4:
            row[:] = rng.choice([np.nan, -np.inf, 0.0])
    return logits


def _one_of(name: str) -> Arg:
    draw = lambda rng, shape: rng.choice(CHOICES[name], shape)  # noqa: E731
    return Arg((B,), "i32" if name == "top_k" else "f32", draw=draw)


def _operands(logits: Arg) -> tuple[Arg, ...]:
    seeds = Arg((B,), "i64", -(2**62), 2**62)
    return (logits, *map(_one_of, CHOICES), seeds, Arg((B,), "i32", 0, 2**31 - 1))


def _with(at: int, arg: Arg) -> tuple[Arg, ...]:
    args = _operands(Arg((B, 9)))
    return (*args[:at], arg, *args[at + 1 :])


EXAMPLES = [
    Example(
        "sample",
        _operands(Arg((B, 40), "T", -9, 9)),
        bad=(
            Bad("takes logits [rows, tokens]", _with(0, Arg((B,)))),
            Bad("floating-point", _with(0, Arg((B, 9), "i32"))),
            Bad("must be known and not 0", _with(0, Arg((B, 0)))),
            Bad("must be known and not 0", _with(0, Arg((B, symbol("V"))))),
            Bad("temperature is f32[B], a number for each row", _with(1, Arg((3,), "f32"))),
            Bad("top_k is i32[B]", _with(2, Arg((B,), "i64"))),
            Bad("seed is i64[B]", _with(5, Arg((B,), "i32"))),
            Bad("i32 or i64", _with(6, Arg((B,), "f32"))),
        ),
        sizes={"B": 6},
    ),
    Example("sample", _operands(Arg((B, 1000), "T", -9, 9)), sizes={"B": 12}),
]

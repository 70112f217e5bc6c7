"""Draws inputs without near ties, which rounding could decide differently on several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import pytest

from irc.ir.core import Module
from irc.ops import Argmax, Topk

Given = TypeVar("Given")
SURE = 1e-4  # relative to the largest number; sums in f32 differ by some millionths
DRAWS = 100


def settled(draw: Callable[[], Given], module: Module, run: Callable[[Given], object]) -> Given:
    """The result of `draw`, drawn again while evaluating the module on it by `run` nears a tie."""
    if not any(isinstance(op, (Argmax, Topk)) for op in module.ops()):
        return draw()
    for _ in range(DRAWS):
        given = draw()
        with _gaps() as found:
            run(given)
        if min(found, default=1) > SURE:
            return given
    raise AssertionError(f"every input drawn for {module.name} nears a tie")


@contextmanager
def _gaps() -> Iterator[list[float]]:
    """The smallest gap between ordered neighbours of every Topk and Argmax evaluated inside."""
    found: list[float] = []

    def watched(cls: type[Any], count: Callable[[Any], int]) -> Callable[..., Any]:
        evaluate = cls.evaluate

        def watching(op: Any, x: np.ndarray) -> Any:
            found.append(_gap(np.moveaxis(x, op.dim, -1), count(op)))
            return evaluate(op, x)

        return watching

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Topk, "evaluate", watched(Topk, lambda op: int(op.k)))
        patch.setattr(Argmax, "evaluate", watched(Argmax, lambda op: 1))
        yield found


def _gap(x: np.ndarray, count: int) -> float:
    """The gap between the `count` largest of a row and the next, relative to the largest."""
    falling = -np.sort(-x.astype(np.float64), axis=-1)[..., : count + 1]
    largest = float(np.max(np.abs(falling), initial=1e-30))
    return float(np.min(-np.diff(falling), initial=largest)) / largest

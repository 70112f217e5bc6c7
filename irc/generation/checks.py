"""Results by which a model says that its inputs were wrong or had no room."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, TypeAlias

import numpy as np

from ..backends.base import Program
from ..backends.fallback import FallbackProgram
from ..errors import Error
from ..results import OUTSIDE, OVERFLOW, UNKNOWN

Array: TypeAlias = np.ndarray[Any, Any]


def checked(
    program: Program, results: Mapping[str, Array], inputs: Container[str]
) -> dict[str, Array]:
    """The other results of a program with these inputs; an Error where one of these counts any.

    A FallbackProgram has looked ids without room up again, so that their count is a result.
    """
    recovers = isinstance(program, FallbackProgram)
    kept: dict[str, Array] = {}
    for name, array in results.items():
        source = name.removesuffix(OUTSIDE)
        if array.shape or array.dtype.kind != "i":
            kept[name] = array
        elif name != source and (source in inputs or source == UNKNOWN):
            _check_inside(source, int(array))
        elif name == OVERFLOW and not recovers:
            _check_room(int(array))
        else:
            kept[name] = array
    return kept


def _check_inside(name: str, count: int) -> None:
    if count:
        numbers = "number that is" if count == 1 else "numbers that are"
        raise Error(
            f"the input {name} has {count} {numbers} no row of the model's table, such as ids "
            "below 0 or beyond the vocabulary; correct them"
        )


def _check_room(count: int) -> None:
    if count:
        raise Error(
            f"{count} ids found no room on the way to their rows; compile with a larger capacity "
            "in rewrite-embeddings, or without one, which has room for all"
        )

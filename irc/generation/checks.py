"""Turns the error counts among the results of a program into Errors."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, TypeAlias

import numpy as np

from ..backends.base import Program
from ..backends.fallback import FallbackProgram
from ..errors import Error
from ..ir.result_names import OUT_OF_RANGE, OVERFLOW, UNKNOWN

Array: TypeAlias = np.ndarray[Any, Any]


def checked(
    program: Program, results: Mapping[str, Array], inputs: Container[str]
) -> dict[str, Array]:
    """The results without the error counts; an Error if a count is not zero.

    The counts are out-of-range indices of `inputs` and capacity overflow. A FallbackProgram has
    repeated overflowing lookups, so its overflow count is a result.
    """
    recovers = isinstance(program, FallbackProgram)
    kept: dict[str, Array] = {}
    for name, array in results.items():
        source = name.removesuffix(OUT_OF_RANGE)
        if array.shape or array.dtype.kind != "i":
            kept[name] = array
        elif name != source and (source in inputs or source == UNKNOWN):
            if array:
                origin = "several inputs" if source == UNKNOWN else f"the input {source}"
                raise Error(
                    f"indices from {origin} are out of range ({int(array)} of them): below 0, or "
                    "not less than the number of rows of the model's table, such as its "
                    "vocabulary; correct them"
                )
        elif name == OVERFLOW and not recovers:
            if array:
                raise Error(
                    f"capacity overflow: {int(array)} embedding lookups were dropped; compile with "
                    "a larger capacity in rewrite-embeddings, or without one, which drops none"
                )
        else:
            kept[name] = array
    return kept

"""Turns the error counts among the results of a program into Errors."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, TypeAlias

import numpy as np

from ..errors import Error
from ..ir.result_names import OUT_OF_RANGE, OVERFLOW, UNKNOWN

Array: TypeAlias = np.ndarray[Any, Any]


def checked(results: Mapping[str, Array], inputs: Container[str]) -> dict[str, Array]:
    """The results without the numbers about errors; an Error if one of them is not zero.

    They are the counts of out-of-range indices of `inputs`, and the capacity that lookups need.
    """
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
        elif name == OVERFLOW:
            if array:
                raise Error(
                    f"capacity overflow: the embedding lookups of this call need a capacity of "
                    f"{int(array)}; compile with capacity={int(array)} in rewrite-embeddings, or "
                    "without one, which is no limit"
                )
        else:
            kept[name] = array
    return kept

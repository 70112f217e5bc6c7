"""A file for the arrays of a script, which weights of a module refer to."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..errors import Error
from ..ir.core import Module
from ..ir.dtypes import dtype_of
from ..weights import Cast, FileRef, Ref
from ..weights.safetensors import holds, write_tensors

Array: TypeAlias = np.ndarray[Any, Any]
_NUMBERS = count()


class ArrayFile:
    """Arrays by key, written as one safetensors file."""

    def __init__(self, folder: Path, title: str) -> None:
        self.path = folder / f"{title}-{next(_NUMBERS)}.safetensors"
        self.arrays: dict[str, Array] = {}

    def add(self, key: str, array: Array) -> Ref:
        """The reference of an array, under a key of its own."""
        kind = dtype_of(array)
        if kind in ("i4", "u4"):  # bytes in the file, and four bits in the weight
            return self.add(key, array.astype(np.int8)).then(Cast(kind))
        if not holds(kind):
            raise Error(f"the array of {key} is {kind}, which a weight file cannot hold; pack it")
        assert key not in self.arrays, key
        self.arrays[key] = array
        return FileRef("arrays", key)

    def write(self, module: Module) -> None:
        """Write the file, if there are arrays, and declare it in the module."""
        if self.arrays:
            write_tensors(self.path, self.arrays)
            module.files["arrays"] = str(self.path)

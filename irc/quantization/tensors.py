"""Numpy arrays by name in a safetensors file: written completely or not at all, read one by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..artifact.atomic import whole_file
from ..errors import Error
from ..ir.dtypes import DTYPES, dtype_of, numpy_dtype
from ..weights.safetensors import lay_out, read_header

Array: TypeAlias = np.ndarray[Any, Any]


def write_tensors(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays of the dtypes that irc has, from 8 bits on."""
    header, placed = lay_out({key: (dtype_of(array), array.shape) for key, array in arrays.items()})
    with whole_file(path) as file:
        file.write(header)
        for key in placed:
            file.write(np.ascontiguousarray(arrays[key]).reshape(-1).view(np.uint8).data)


class Tensors(Mapping[str, Array]):
    """The tensors of a safetensors file by key; each is read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path, self.places = path, read_header(path)

    def __getitem__(self, key: str) -> Array:
        place = self.places[key]
        data = np.empty(place.nbytes, np.uint8)
        with self.path.open("rb") as file:
            file.seek(place.offset)
            count = file.readinto(data.data)
        if place.dtype not in DTYPES or count != place.nbytes:
            raise Error(f"{self.path}: the tensor {key!r} cannot be read; write the file again")
        return data.view(numpy_dtype(place.dtype)).reshape(place.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

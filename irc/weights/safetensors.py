"""Reads and writes the header of a safetensors file, which has the place of every tensor.

The format (https://github.com/huggingface/safetensors): eight bytes with the length N of the
header, N bytes of JSON, then the data. Offsets in the JSON count from the end of the header.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np

from ..artifact.atomic import whole_file
from ..errors import Error, did_you_mean
from ..files import open_file
from ..ir.dtypes import DTYPES, dtype_of, numpy_dtype
from ..ir.types import MOST_DIMS

LONGEST_HEADER = 100_000_000  # bytes; the limit of the format's own library
ALIGNMENT = 4096  # a page; the data of a written file begins at a multiple of it

# Name in the file -> (name in irc, bits). A file may have dtypes that irc lacks; using such a
# tensor is an Error.
_STORED: dict[str, tuple[str, int]] = {
    dtype.safetensors: (name, dtype.bits) for name, dtype in DTYPES.items() if dtype.safetensors
} | {"C64": ("c64", 64), "F6_E2M3": ("f6e2m3", 6), "F6_E3M2": ("f6e3m2", 6)}


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file: `offset` in bytes from the beginning of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Every tensor of a safetensors file by key, in the order of the header.

    An Error names the file, and the tensor: a missing, truncated or different file; offsets that
    overlap, leave gaps, lie outside the file, or differ from the shape.
    """
    name = os.fspath(path)
    try:
        with open_file(name) as file:
            size = os.fstat(file.fileno()).st_size
            text, begin = _header_bytes(file.read, size, name)
    except OSError as error:
        raise Error(f"cannot read the checkpoint {name}: {error.strerror or error}") from None
    entries = _parse(text, name)
    tensors = {key: _tensor(key, e, begin, size, name) for key, e in entries.items()}
    _check_layout(tensors, begin, size, name)
    return tensors


def lay_out(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, Tensor]]:
    """(the bytes before the data, the place of each tensor), for (dtype, shape) by key.

    The format allows no gaps, so tensors are aligned by their order: those whose size a larger
    power of two divides come first, and each offset is a multiple of that power, up to a page.
    """
    sizes = {key: prod(shape) * DTYPES[kind].bits // 8 for key, (kind, shape) in tensors.items()}
    order = sorted(tensors, key=lambda key: -_alignment(sizes[key]))
    entries: dict[str, Any] = {}
    end = 0
    for key in order:
        kind, shape = tensors[key]
        place = [end, end + sizes[key]]
        entries[key] = {
            "dtype": DTYPES[kind].safetensors,
            "shape": list(shape),
            "data_offsets": place,
        }
        end += sizes[key]
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    begin = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT
    text = text.ljust(begin - 8)
    placed = {
        key: Tensor(*tensors[key], begin + entry["data_offsets"][0], sizes[key])
        for key, entry in entries.items()
    }
    return len(text).to_bytes(8, "little") + text, placed


def holds(dtype: str) -> bool:
    """Whether a written file can have tensors of an irc dtype: whole bytes only."""
    return dtype in DTYPES and bool(DTYPES[dtype].safetensors) and DTYPES[dtype].bits >= 8


def _alignment(size: int) -> int:
    """The largest power of two that divides a size, at most a page."""
    return min(size & -size, ALIGNMENT) or ALIGNMENT


def _header_bytes(read: Any, size: int, name: str) -> tuple[bytes, int]:
    if size < 8:
        raise Error(
            f"{name} is not a safetensors file: it has {size} bytes, and a header has at least 8"
        )
    length = int.from_bytes(read(8), "little")
    if length > LONGEST_HEADER:
        raise Error(
            f"{name} is not a safetensors file: the first eight bytes are not a header length"
        )
    if 8 + length > size:
        raise Error(f"{name} is truncated: a header of {length} bytes in a file of {size}")
    return read(length), 8 + length


def _parse(text: bytes, name: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content: dict[str, Any] = {}
        for key, value in pairs:
            if key in content:
                raise Error(f"{name} has {key!r} twice in its header")
            key.encode()  # a ValueError for surrogates, which no text can hold
            content[key] = value
        return content

    try:
        header: object = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise Error(f"{name} is not a safetensors file: its header is not JSON ({error})") from None
    if not isinstance(header, dict):
        raise Error(f"{name} is not a safetensors file: its header is not a JSON object")
    entries = cast("dict[str, Any]", header)
    entries.pop("__metadata__", None)
    return entries


def _tensor(key: str, entry: Any, begin: int, size: int, name: str) -> Tensor:
    where = f"{name}: the tensor {key!r}"
    if not isinstance(entry, dict):
        raise Error(f"{where} has no dtype, shape and data_offsets")
    fields = cast("dict[str, Any]", entry)
    stored = fields.get("dtype")
    shape, offsets = _counts(fields.get("shape")), _counts(fields.get("data_offsets"))
    if not isinstance(stored, str) or stored not in _STORED:
        hint = did_you_mean(str(stored), _STORED)
        raise Error(f"{where} has the unknown dtype {stored!r}{hint}")
    if shape is None:
        raise Error(f"{where} has no valid shape: {fields.get('shape')!r}")
    if offsets is None or len(offsets) != 2:
        raise Error(f"{where} has no valid data_offsets: {fields.get('data_offsets')!r}")
    dtype, bits = _STORED[stored]
    first, last = offsets
    wanted = prod(shape) * bits
    if wanted % 8 or last - first != wanted // 8:
        raise Error(
            f"{where} is {stored}{list(shape)}, which takes {wanted // 8} bytes, "
            f"but its offsets {first} to {last} hold {last - first}"
        )
    if begin + last > size:
        raise Error(
            f"{where} ends at byte {begin + last}, but the file has {size}: "
            "it is truncated; write or download it again"
        )
    return Tensor(dtype, shape, begin + first, last - first)


def _counts(value: Any) -> tuple[int, ...] | None:
    """A list of at most 64 sizes as a tuple, None for anything else."""
    items = tuple(cast("list[Any]", value)) if isinstance(value, list) else None
    if items is None or len(items) > MOST_DIMS:
        return None
    return items if all(type(item) is int and 0 <= item < 1 << 63 for item in items) else None


def _check_layout(tensors: dict[str, Tensor], begin: int, size: int, name: str) -> None:
    """Raise an Error unless the tensors cover the data without gaps and overlaps."""
    at, before = begin, "the header"
    for key, tensor in sorted(tensors.items(), key=lambda t: (t[1].offset, t[1].nbytes)):
        if tensor.offset < at:
            raise Error(f"{name}: the tensor {key!r} overlaps {before}")
        if tensor.offset > at:
            raise Error(f"{name}: the bytes between {before} and the tensor {key!r} are unused")
        at, before = tensor.offset + tensor.nbytes, f"the tensor {key!r}"
    if at != size:
        raise Error(f"{name} has {size - at} bytes after {before} that belong to no tensor")


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

"""Batches of complete inputs of a model, from text or from arrays by name.

No batch is padded: rows of equal length run together, and padding in arrays is removed by their
`attention_mask`, or does not count where the model itself takes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..backends.base import Port, ports_of
from ..backends.reference.inputs import bind_inputs
from ..errors import Error
from ..generation.inputs import cache_capacity, check_ranges, complete, multiple_of, vocabulary
from ..generation.random_inputs import table_rows
from ..generation.tokenizer import Tokenizer
from ..ir.core import Module
from .npz import npz_batches
from .text import token_windows

Array: TypeAlias = np.ndarray[Any, Any]
Arrays: TypeAlias = dict[str, Array]

MASK, IDS, KINDS = "attention_mask", "input_ids", "token_type_ids"
_LENGTH, _WINDOWS, _ROWS = 512, 1, 8  # by default: tokens and rows of text, rows of arrays


@dataclass(frozen=True)
class Run:
    """Arrays for every argument, the sizes of symbols, and which tokens [B, S] count, if not all.

    `rows` is the number of tokens, or of rows of other models.
    """

    arrays: Arrays
    sizes: Mapping[str, int]
    mask: Array | None
    rows: int


@dataclass(frozen=True)
class Batch:
    """A batch of the data as runs of the model, its place in messages, and the fraction read."""

    runs: list[Run]
    place: str
    done: float


@dataclass(frozen=True)
class Data:
    """The files of a data set, and how they are cut: tokens of a window, rows of a batch."""

    place: Path
    files: tuple[Path, ...]
    kind: str
    length: int = 0
    rows: int = 0

    @classmethod
    def of(cls, place: str | os.PathLike[str]) -> Data:
        """The .txt or .npz files at a path: one, or those of a folder in the order of names."""
        path = Path(place)
        if not path.exists():
            raise Error(f"there is no {path}; data is a .txt or .npz file, or a folder of such")
        every = sorted(path.iterdir()) if path.is_dir() else [path]
        files = tuple(file for file in every if file.suffix in (".txt", ".npz"))
        kinds = {file.suffix for file in files}
        if not files:
            raise Error(f"{path} is no data: expected a .txt or .npz file, or a folder of such")
        if len(kinds) > 1:
            raise Error(f"{path} has both .txt and .npz files; keep one kind")
        return cls(path, files, kinds.pop())

    def resized(self, length: int, rows: int) -> Data:
        """With another length and rows; 0 leaves them to the model."""
        return replace(self, length=length, rows=rows)

    def fitted(self, module: Module, tokenizer: Path | None) -> Data:
        """With the length and rows that the model allows, where they are 0; an Error if none."""
        if self.kind == ".npz":
            if self.length:
                raise Error("the length is for text; the arrays of .npz files have their own")
            return replace(self, rows=self.rows or _ROWS)
        batch, tokens = _ids_port(module).shape
        if tokenizer is None:
            raise Error("text needs a tokenizer: calibrate a checkpoint folder, or give .npz files")
        ports = ports_of(module.main)
        longest = min(_most(module, tokens), cache_capacity(ports.states, module.dims) or _LENGTH)
        length = tokens if isinstance(tokens, int) else self.length or min(_LENGTH, longest)
        rows = batch if isinstance(batch, int) else self.rows or _WINDOWS
        return replace(self, length=length, rows=rows)

    def batches(self, module: Module, tokenizer: Path | None) -> Iterator[Batch]:
        """The batches in order; an Error about the first array that does not fit."""
        known = table_rows(module)
        if (size := vocabulary(ports_of(module.main))) is not None:
            known = {IDS: size} | known
        count = 0
        arrays = self._text(module, tokenizer) if self.kind == ".txt" else self._arrays(module)
        for count, (found, file, done) in enumerate(arrays, 1):
            place = f"{file}, batch {count}"
            try:
                _check_numbers(found, known)
                runs = [_run(module, *part) for part in _without_padding(module, found)]
            except Error as error:
                raise Error(f"{place}: {error.message}") from None
            yield Batch(runs, place, done)
        if not count:
            raise Error(f"{self.place} has no complete batch; give more data")

    def _arrays(self, module: Module) -> Iterator[tuple[Arrays, Path, float]]:
        ports = ports_of(module.main)
        shapes = {port.name: port.shape for port in (*ports.inputs, *ports.states)}
        if IDS in shapes:
            shapes.setdefault(MASK, shapes[IDS])
        for i, file in enumerate(self.files):
            for arrays, done in npz_batches(file, shapes, self.rows):
                yield arrays, file, (i + done) / len(self.files)

    def _text(self, module: Module, tokenizer: Path | None) -> Iterator[tuple[Arrays, Path, float]]:
        assert tokenizer is not None
        rows: list[list[int]] = []
        batch, tokens = _ids_port(module).shape
        names = {port.name for port in ports_of(module.main).inputs}
        windows = token_windows(self.files, Tokenizer(tokenizer), self.length)
        empty, done = True, 0.0
        for window, done in windows:
            empty = False
            if len(window) < self.length:
                break
            rows.append(window)
            if len(rows) == self.rows:
                yield _ids(rows, names), self.place, done
                rows = []
        else:
            window = []
        if empty:
            raise Error(f"{self.place} has no text; expected some sentences at least")
        if rows and not isinstance(batch, int):
            yield _ids(rows, names), self.place, done
        if _least(module, tokens) <= len(window) and not isinstance(batch, int):
            yield _ids([window], names), self.place, 1.0


def _ids(rows: list[list[int]], names: set[str]) -> Arrays:
    """The inputs of a model whose tokens these are."""
    ids = np.array(rows, np.int64)
    found = {IDS: ids, MASK: np.ones_like(ids), KINDS: np.zeros_like(ids)}
    return {name: array for name, array in found.items() if name == IDS or name in names}


def _ids_port(module: Module) -> Port:
    ports = ports_of(module.main).inputs
    found = next((port for port in ports if port.name == IDS and len(port.shape) == 2), None)
    if found is None:
        names = ", ".join(port.name for port in ports)
        raise Error(
            f"text needs a model with the input {IDS} [B, S], and this one has {names}; "
            "give .npz files with an array for each"
        )
    return found


def _most(module: Module, dim: Any) -> int:
    """The largest size of a dimension, by the range of its symbol."""
    found = multiple_of(dim)
    return module.dims[found[0]][2] * found[1] if found and found[0] in module.dims else 1 << 30


def _least(module: Module, dim: Any) -> int:
    """The least size of a dimension that text may have, which a number has not."""
    found = multiple_of(dim)
    if found is None:
        return 1 << 30
    return max(1, module.dims.get(found[0], (1, 1, 1))[0] * found[1])


def _check_numbers(arrays: Arrays, known: Mapping[str, int]) -> None:
    """An Error where an array is empty, has NaN, or an index of no row of its table."""
    for name, array in arrays.items():
        if not array.size:
            raise Error(f"{name} is empty")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise Error(f"{name} has NaN or infinity; remove such rows")
        size = known.get(name)
        if name == IDS and size is not None and array.dtype.kind in "iu":
            outside = array[(array < 0) | (array >= size)]
            if outside.size:
                raise Error(
                    f"{name} has the token {outside.flat[0]}, but the model has {size} tokens; "
                    "give token ids of its own tokenizer"
                )


def _without_padding(module: Module, arrays: Arrays) -> Iterator[tuple[Arrays, Array | None]]:
    """The arrays in parts without padding, or the mask of those whose model takes it."""
    mask = arrays.get(MASK)
    if mask is None:
        yield arrays, None
        return
    if mask.ndim != 2 or mask.shape != arrays.get(IDS, mask).shape:
        raise Error(f"{MASK} has the shape {list(mask.shape)}; expected that of {IDS}, [B, S]")
    counts = mask != 0
    if MASK in {port.name for port in ports_of(module.main).inputs}:
        yield arrays, None if counts.all() else counts
        return
    if others := arrays.keys() - {MASK, IDS}:
        raise Error(f"{MASK} goes with {IDS} alone, not with {', '.join(sorted(others))}")
    lengths = counts.sum(axis=1)
    if not counts.any():
        raise Error(f"{MASK} is 0 everywhere; expected 1 for the tokens that count")
    if (
        np.abs(np.diff(np.pad(counts, ((0, 0), (1, 1))).astype(int), axis=1)).sum(axis=1) > 2
    ).any():
        raise Error(f"{MASK} has tokens after padding; expected padding on one side only")
    for length in sorted({*lengths.tolist()} - {0}):
        chosen = lengths == length
        yield {IDS: arrays[IDS][chosen][counts[chosen]].reshape(-1, length)}, None


def _run(module: Module, arrays: Arrays, mask: Array | None) -> Run:
    ports = ports_of(module.main)
    full = complete(ports, arrays, cache_capacity(ports.states, module.dims))
    check_ranges(ports.inputs, full, module.dims)
    _, sizes = bind_inputs(module.main, full, {})
    first = next(iter(arrays.values())) if IDS not in arrays else arrays[IDS]
    rows = first.size if IDS in arrays else first.shape[0] if first.ndim else 1
    return Run(full, sizes, mask, int(mask.sum()) if mask is not None else rows)

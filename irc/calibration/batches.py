"""Batches of complete inputs of a model, from text or from arrays by name.

Nothing is padded: windows of text have one length, and where arrays have an `attention_mask` that
the model does not take, each row runs without its padding.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..backends.base import Ports, ports_of
from ..backends.reference.inputs import bind_inputs
from ..errors import Error
from ..generation.inputs import cache_range, check_ranges, complete, multiple_of, vocabulary
from ..generation.random_inputs import table_rows
from ..generation.tokenizer import TOKENIZER, Tokenizer
from ..ir.core import Module
from ..ir.dims import DimLike
from .npz import npz_batches
from .text import token_windows

Array: TypeAlias = np.ndarray[Any, Any]
Arrays: TypeAlias = dict[str, Array]

MASK, IDS, KINDS = "attention_mask", "input_ids", "token_type_ids"
_LENGTH, _ROWS = 512, 8  # tokens of a row of text, and rows of arrays, by default


@dataclass(frozen=True)
class Batch:
    """Arrays for every argument, the sizes of symbols, and which tokens [B, S] count, if not all.

    `rows` is the number of tokens that count, or of rows of other models. `place` is for messages,
    `done` the fraction of the data up to here.
    """

    arrays: Arrays
    sizes: Mapping[str, int]
    mask: Array | None
    rows: int
    place: str
    done: float


def data_files(place: str | os.PathLike[str]) -> list[Path]:
    """The .txt or .npz files at a path: one, or those of a folder in the order of names."""
    path = Path(place)
    if not path.exists():
        raise Error(f"there is no {path}; data is a .txt or .npz file, or a folder of such")
    every = sorted(path.iterdir()) if path.is_dir() else [path]
    files = [file for file in every if file.suffix in (".txt", ".npz")]
    if not files:
        raise Error(f"{path} is no data: expected a .txt or .npz file, or a folder of such")
    if len({file.suffix for file in files}) > 1:
        raise Error(f"{path} has both .txt and .npz files; keep one kind")
    return files


class Data:
    """Files as batches for a model. `length` tokens of text are a row; 0 is as many as it allows.

    `rows` are a batch; 0 is one of text, 8 of arrays.
    """

    def __init__(
        self, files: list[Path], module: Module, folder: Path | None, length: int, rows: int
    ) -> None:
        self.files, self.module, self.folder = files, module, folder
        self.ports: Ports = ports_of(module.main)
        self.slots = cache_range(self.ports.states, module.dims)
        self.tokens = vocabulary(self.ports) or table_rows(module).get(IDS)
        self.is_text = files[0].suffix == ".txt"
        self.length, self.rows = length, rows or _ROWS
        if length and not self.is_text:
            raise Error("the length is for text; the arrays of .npz files have their own")
        if self.is_text:
            self._fit(rows)

    def _fit(self, rows: int) -> None:
        """Choose the length and the rows of text; an Error where the model takes none."""
        shapes = {port.name: port.shape for port in self.ports.inputs}
        if len(shapes.get(IDS, ())) != 2:
            raise Error(
                f"text needs a model with the input {IDS} [B, S], and this one has "
                f"{', '.join(shapes)}; give .npz files with an array for each"
            )
        if self.folder is None or not (self.folder / TOKENIZER).is_file():
            raise Error("text needs a tokenizer: calibrate a checkpoint folder, or give .npz files")
        self.fewest, shortest = (self._bounds(dim)[0] for dim in shapes[IDS])
        longest = min(self._bounds(shapes[IDS][1])[1], self.slots[1] or _LENGTH)
        self.shortest, self.rows = shortest, rows or self.fewest
        self.length = self.length or max(shortest, min(_LENGTH, longest))

    def _bounds(self, dim: DimLike) -> tuple[int, int]:
        """The least and the largest size of a dimension."""
        if isinstance(dim, int):
            return dim, dim
        found = multiple_of(dim)
        low, _, high = self.module.dims.get(found[0], (1, 1, _LENGTH)) if found else (1, 1, 1)
        return (max(1, low) * found[1], high * found[1]) if found else (low, high)

    def batches(self) -> Iterator[Batch]:
        """The batches in order; an Error about the first array that does not fit."""
        count = 0
        for arrays, file, done in self._text() if self.is_text else self._arrays():
            count += 1
            place = f"{file}, batch {count}"
            try:
                self._check(arrays)
                for part, mask in self._without_padding(arrays):
                    yield self._batch(part, mask, place, done)
            except Error as error:
                raise Error(f"{place}: {error.message}") from None
        if not count:
            raise Error(f"{self.files[0]} has no complete batch; give more data")

    def _arrays(self) -> Iterator[tuple[Arrays, Path, float]]:
        shapes = {port.name: port.shape for port in (*self.ports.inputs, *self.ports.states)}
        shapes = {MASK: shapes.get(IDS, ()), **shapes}
        for i, file in enumerate(self.files):
            for arrays, done in npz_batches(file, shapes, self.rows):
                yield arrays, file, (i + done) / len(self.files)

    def _text(self) -> Iterator[tuple[Arrays, Path, float]]:
        assert self.folder is not None
        waiting: list[list[int]] = []
        empty = True
        for window, done in token_windows(self.files, Tokenizer(self.folder), self.length):
            empty = False
            short = len(window) < self.length
            if len(waiting) >= (self.fewest if short else self.rows):
                yield self._ids(waiting), self.files[0], done
                waiting = []
            waiting = [] if short else waiting
            if len(window) >= self.shortest:
                waiting.append(window)
        if empty:
            raise Error(f"{self.files[0]} has no text; expected some sentences at least")
        if len(waiting) >= self.fewest:
            yield self._ids(waiting), self.files[0], 1.0

    def _ids(self, rows: list[list[int]]) -> Arrays:
        """The inputs of a model whose tokens these are."""
        ids = np.array(rows, np.int64)
        found = {IDS: ids, MASK: np.ones_like(ids), KINDS: np.zeros_like(ids)}
        return {port.name: found[port.name] for port in self.ports.inputs if port.name in found}

    def _check(self, arrays: Arrays) -> None:
        """An Error where an array is empty or has NaN, or a token is none of the model's."""
        for name, array in arrays.items():
            if not array.size:
                raise Error(f"{name} is empty")
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise Error(f"{name} has NaN or infinity; remove such rows")
        ids, size = arrays.get(IDS), self.tokens
        if (
            ids is not None
            and size is not None
            and (outside := ids[(ids < 0) | (ids >= size)]).size
        ):
            raise Error(
                f"{IDS} has the token {outside.flat[0]}, but the model has {size} tokens; give "
                "token ids of its own tokenizer"
            )

    def _without_padding(self, arrays: Arrays) -> Iterator[tuple[Arrays, Array | None]]:
        """The rows without padding, or all with their mask where the model takes it."""
        mask = arrays.get(MASK)
        if mask is None:
            yield arrays, None
            return
        if mask.ndim != 2 or mask.shape != arrays.get(IDS, mask).shape:
            raise Error(f"{MASK} has the shape {list(mask.shape)}; expected that of {IDS}, [B, S]")
        counts = mask != 0
        if not counts.any():
            raise Error(f"{MASK} is 0 everywhere; expected 1 for the tokens that count")
        if any(port.name == MASK for port in self.ports.inputs):
            yield arrays, counts
            return
        if others := arrays.keys() - {MASK, IDS}:
            raise Error(f"{MASK} goes with {IDS} alone, not with {', '.join(sorted(others))}")
        for row, seen in zip(arrays[IDS], counts, strict=True):
            if seen.any():
                yield {IDS: row[None, seen]}, None

    def _batch(self, arrays: Arrays, mask: Array | None, place: str, done: float) -> Batch:
        full = complete(self.ports, arrays, self.slots)
        check_ranges(self.ports.inputs, full, self.module.dims)
        _, sizes = bind_inputs(self.module.main, full, {})
        first = arrays.get(IDS, next(iter(arrays.values())))
        rows = first.size if IDS in arrays else len(np.atleast_1d(first))
        return Batch(full, sizes, mask, rows if mask is None else int(mask.sum()), place, done)

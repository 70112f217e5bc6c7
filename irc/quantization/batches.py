"""Batches of complete inputs of a model, from text or from arrays by name.

Nothing is padded: windows of text have one length, and where arrays have an `attention_mask` that
the model does not take, each row runs without its padding.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..backends.base import Ports, ports_of
from ..backends.reference.inputs import bind_inputs
from ..errors import Error
from ..files import open_file
from ..generation.inputs import cache_range, check_ranges, complete, multiple_of, vocabulary
from ..generation.random_inputs import table_rows
from ..generation.tokenizer import TOKENIZER, Tokenizer
from ..ir.core import Module
from ..ir.dims import DimLike, Shape, linear
from ..npz import Arrays, Member, open_npz, read_whole

Array: TypeAlias = np.ndarray[Any, Any]

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
        raise Error(f"{path} is not data: expected a .txt or .npz file, or a folder of such")
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
        self.slots = cache_range(self.ports, module.dims)
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
        multiple = multiple_of(dim)
        low, _, high = self.module.dims.get(multiple[0], (1, 1, _LENGTH)) if multiple else (1, 1, 1)
        return (max(1, low) * multiple[1], high * multiple[1]) if multiple else (low, high)

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
        arrays = {IDS: ids, MASK: np.ones_like(ids), KINDS: np.zeros_like(ids)}
        return {port.name: arrays[port.name] for port in self.ports.inputs if port.name in arrays}

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


# -- arrays in .npz files, read row by row, so that no file is whole in memory


def npz_batches(
    path: Path, shapes: Mapping[str, Shape], rows: int
) -> Iterator[tuple[Arrays, float]]:
    """The batches of a file, and the fraction of it that has been read.

    `shapes` are those of the model's inputs. Arrays whose first dimension is the symbol of the
    first input, or a fixed number of rows, are cut into batches; the others are part of every
    batch. Arrays of different lengths are one batch.
    """
    with open_npz(path) as members:
        yield from _batches(path, members, shapes, rows)


def _batches(
    path: Path, members: Mapping[str, Member], shapes: Mapping[str, Shape], rows: int
) -> Iterator[tuple[Arrays, float]]:
    if not members or any(0 in member.shape for member in members.values()):
        raise Error(f"{path} has no arrays or an empty one; expected a row at least for each input")
    dims = {name: shapes[name][0] for name, m in members.items() if shapes.get(name) and m.shape}
    firsts = {name: ("", d, 0) if isinstance(d, int) else linear(d) for name, d in dims.items()}
    symbol = next((first[0] for first in firsts.values() if first is not None), None)
    cut = {n: f[1] for n, f in firsts.items() if f is not None and (f[0], f[2]) == (symbol, 0)}
    if symbol == "":  # the model has a fixed number of rows
        cut, rows = {n: size for n, size in cut.items() if members[n].shape[0] != size}, 1
    counts = {members[name].shape[0] // max(factor, 1) for name, factor in cut.items()}
    cut = cut if len(counts) == 1 else {}
    for member in (members[name] for name in cut):
        if member.is_fortran and len(member.shape) > 1:
            raise Error(f"{path} has an array in Fortran order; save numpy.ascontiguousarray of it")
    fixed = read_whole(path, [member for name, member in members.items() if name not in cut])
    count = counts.pop() if cut else 1
    for begin in range(0, count, rows):
        size = min(rows, count - begin)
        shapes_now = {n: (size * factor, *members[n].shape[1:]) for n, factor in cut.items()}
        arrays = {name: members[name].read(shape) for name, shape in shapes_now.items()}
        yield arrays | fixed, (begin + size) / count


# -- windows of tokens of text files, read piece by piece


_PIECE = 1 << 14  # characters that are tokenized together


def token_windows(
    files: Sequence[Path], tokenizer: Tokenizer, length: int
) -> Iterator[tuple[list[int], float]]:
    """Windows of `length` tokens, the last one shorter, and the fraction of the files read.

    Every window begins with the tokens that the tokenizer puts before a text.
    """
    begin = tokenizer.begin()
    room = length - len(begin)
    if room < 1:
        raise Error(f"the length {length} has no room for text after {len(begin)} special tokens")
    total = max(1, sum(path.stat().st_size for path in files))
    waiting: list[int] = []
    fraction = 0.0
    for text, done in _pieces(files):
        fraction = done / total
        waiting += tokenizer.encode(text, special=False)
        cut = len(waiting) - len(waiting) % room
        for at in range(0, cut, room):
            yield begin + waiting[at : at + room], fraction
        del waiting[:cut]
    if waiting:
        yield begin + waiting, 1.0


def _pieces(files: Sequence[Path]) -> Iterator[tuple[str, int]]:
    """The text in pieces that end before a space or newline, and the bytes read so far."""
    before = 0
    for path in files:
        rest = ""
        try:
            with open_file(path) as raw, TextIOWrapper(raw, "utf-8") as file:
                while piece := file.read(_PIECE):
                    text = rest + piece
                    cut = max(text.rfind(" "), text.rfind("\n"))
                    cut = cut if cut > 0 else len(text)
                    yield text[:cut], before + raw.tell()
                    rest = text[cut:]
        except OSError as error:
            raise Error(f"cannot read {path}: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise Error(f"{path} is not text in UTF-8 ({error.reason})") from None
        before += path.stat().st_size
        if rest:
            yield rest, before

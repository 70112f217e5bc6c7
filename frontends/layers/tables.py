"""Tables of keys and rows, and the files that SparseOperationKit and numpy keep them in.

| format | files of a table | contents |
|---|---|---|
| sok1 | `NAME_keys.file`, `NAME_values.file` | i64 keys; f32 rows |
| sok2 | `NAME-key`, `NAME-weight` | the same in the stated dtypes, behind a head of 296 bytes |
| numpy | `NAME_keys.npy`, `NAME_values.npy` | arrays [N] and [N, D] |

A head has the name (256 bytes, padded in front), 0 for keys or 1 for rows (4 bytes), the name of
an optimizer's state (32 bytes, blank here) and the number of a dtype (4 bytes); its numbers are
big-endian.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from ...errors import Error, did_you_mean

Array: TypeAlias = np.ndarray[Any, Any]
Format: TypeAlias = Literal["sok1", "sok2", "numpy"]
SUFFIXES: dict[Format, tuple[str, str]] = {
    "sok1": ("_keys.file", "_values.file"),
    "sok2": ("-key", "-weight"),
    "numpy": ("_keys.npy", "_values.npy"),
}
_DTYPES = ("i4", "i8", "u4", "u8", "f2", "f4", "f8")  # by SparseOperationKit 2's numbers
_NAME, _STATE, _HEAD = 256, 32, 296
_BLOCK = 1 << 16  # rows that are written at a time


@dataclass(frozen=True)
class Table:
    """Distinct keys i64 [N] and their rows [N, D]."""

    keys: Array
    rows: Array

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or self.keys.shape != self.rows.shape[:1]:
            raise Error(f"keys {self.keys.shape} and rows {self.rows.shape} are not a table")
        signed(self.keys, "the table")


def signed(keys: Array, what: object) -> Array:
    """Keys as i64; an Error where that would change some."""
    if keys.dtype.kind not in "iu":
        raise Error(f"{what} has keys of {keys.dtype}; expected integers of at most 64 bits")
    if keys.dtype == np.uint64 and len(keys) and int(keys.max()) >= 2**63:
        raise Error(f"{what} has keys of 2^63 and more; keys are signed integers of 64 bits")
    return keys.astype(np.int64)


def owners(keys: Array, gpu_num: int) -> Array:
    """The GPU that SparseOperationKit keeps each key on: key % gpu_num of keys without a sign."""
    return keys.astype(np.int64).view(np.uint64) % np.uint64(gpu_num)


def import_table(path: str | PathLike[str], name: str | None = None) -> Table:
    """The table of a folder with files of any format, or of one .npy file of rows.

    Rows are mapped, not read. Row i of a single .npy file is that of key i. `name` may be left out
    where the folder has one table. How many GPUs wrote a dump does not matter.
    """
    path = Path(path)
    if path.is_file():
        rows = _loaded(path)
        return Table(np.arange(len(rows), dtype=np.int64), rows)
    tables = dict(_tables(path))
    if name is None and len(tables) == 1:
        name = next(iter(tables))
    if name is None and tables:
        raise Error(f"{path} has several tables; name one of {', '.join(tables)}")
    if name not in tables:
        names = ", ".join(tables) or "none"
        hint = did_you_mean(name or "", tables)
        raise Error(f"{path} has no table {name or ''}{hint}; its tables: {names}")
    form = tables[name]
    first, second = (path / f"{name}{suffix}" for suffix in SUFFIXES[form])
    if form == "numpy":
        return Table(signed(_loaded(first), first), _loaded(second))
    dtypes = ("<i8", "<f4") if form == "sok1" else (_dtype(first, 0), _dtype(second, 1))
    head = 0 if form == "sok1" else _HEAD
    keys, rows = (_mapped(p, d, head) for p, d in zip((first, second), dtypes, strict=True))
    if not len(keys) or len(rows) % len(keys):
        raise Error(
            f"{first} has {len(keys)} keys, which do not divide the {len(rows)} numbers of "
            f"{second}; write both again"
        )
    return Table(signed(keys, first), rows.reshape(len(keys), -1))


def export_table(
    table: Table, folder: str | PathLike[str], name: str, form: Format = "sok1", gpu_num: int = 1
) -> None:
    """Write the files of a table, GPU after GPU as `gpu_num` of them would, each by its keys.

    Rows of other dtypes than SparseOperationKit has are written as f32.
    """
    if form not in SUFFIXES or gpu_num < 1:
        raise Error(
            f"expected a format of {', '.join(SUFFIXES)} and at least 1 GPU, found {form!r} and "
            f"{gpu_num}"
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    order = np.lexsort((table.keys, owners(table.keys, gpu_num)))
    first, second = (folder / f"{name}{suffix}" for suffix in SUFFIXES[form])
    keys, kind = table.keys[order].astype("<i8"), np.dtype("<f4")
    if form == "numpy" or (form == "sok2" and table.rows.dtype.str[1:] in _DTYPES):
        kind = table.rows.dtype
    if form == "numpy":
        np.save(first, keys)
        rows = np.lib.format.open_memmap(second, "w+", kind, table.rows.shape)
        for at in range(0, len(order), _BLOCK):
            rows[at : at + _BLOCK] = table.rows[order[at : at + _BLOCK]]
        rows.flush()
        return
    for path, what, dtype in ((first, 0, keys.dtype), (second, 1, kind)):
        with path.open("wb") as file:
            if form == "sok2":
                file.write(_head(name, what, dtype))
            for at in range(0, len(order), _BLOCK):
                part = table.rows[order[at : at + _BLOCK]] if what else keys[at : at + _BLOCK]
                part.astype(dtype).tofile(file)


def _tables(folder: Path) -> Iterator[tuple[str, Format]]:
    """(name, format) of every table in a folder."""
    if not folder.is_dir():
        raise Error(f"there is no folder or .npy file {folder}")
    for form, (keys, rows) in SUFFIXES.items():
        for path in sorted(folder.glob(f"*{keys}")):
            name = path.name.removesuffix(keys)
            if not (folder / f"{name}{rows}").is_file():
                raise Error(f"{path} has no file {name}{rows} beside it, which would hold the rows")
            yield name, form


def _loaded(path: Path) -> Array:
    """The array of a .npy file, mapped."""
    try:
        return np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise Error(f"{path} is not an array of numpy: {error}") from error


def _mapped(path: Path, dtype: str, head: int) -> Array:
    """The numbers of a file behind its head."""
    size = path.stat().st_size - head
    if size < 0 or size % np.dtype(dtype).itemsize:
        raise Error(f"{path} has {size} bytes behind its head, which is not an array of {dtype}")
    return np.memmap(path, dtype, "r", head) if size else np.zeros(0, dtype)


def _head(name: str, what: int, dtype: Any) -> bytes:
    number = _DTYPES.index(np.dtype(dtype).str[1:])
    state = b" " * _STATE
    return name.rjust(_NAME).encode() + what.to_bytes(4, "big") + state + number.to_bytes(4, "big")


def _dtype(path: Path, what: int) -> str:
    """The dtype of a file of SparseOperationKit 2; `what` it must hold is 0, keys, or 1, rows."""
    with path.open("rb") as file:
        head = file.read(_HEAD)
    kind, number = (int.from_bytes(head[at : at + 4], "big") for at in (_NAME, _HEAD - 4))
    if len(head) < _HEAD or kind != what or number >= len(_DTYPES):
        raise Error(f"{path} is not a {('key', 'weight')[what]} file of SparseOperationKit 2")
    return f"<{_DTYPES[number]}"

"""Arrays in .npz files: read as far as they are needed, in memory that is there, and written."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.lib import format as npy

from .artifact.atomic import whole_file
from .errors import Error
from .files import open_file

Arrays: TypeAlias = dict[str, np.ndarray[Any, Any]]

_CHUNK = 1 << 20  # bytes that are decompressed at a time


@dataclass
class Member:
    """An array of an archive, open at its first element."""

    name: str
    file: IO[bytes]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_fortran: bool
    path: Path

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        """The next elements."""
        array = np.empty(shape, self.dtype)
        rest = array.reshape(-1).view(np.uint8).data
        with _damage_named(self.path):
            while rest.nbytes:
                part = self.file.read(min(rest.nbytes, _CHUNK))
                if not part:
                    raise EOFError(f"{self.name} ends early")
                rest[: len(part)] = part
                rest = rest[len(part) :]
        return array

    def whole(self) -> np.ndarray[Any, Any]:
        """All elements."""
        if self.is_fortran:
            return self.read(self.shape[::-1]).transpose()
        return self.read(self.shape)


@contextmanager
def open_npz(path: Path) -> Generator[dict[str, Member]]:
    """The arrays of a file by name, not read yet; an Error where it holds anything else."""
    with ExitStack() as stack:
        with _damage_named(path):
            file = stack.enter_context(open_file(path))
            if file.read(len(npy.MAGIC_PREFIX)) == npy.MAGIC_PREFIX:
                what = "holds one array without a name, not an .npz archive"
                raise Error(f"{path} {what}; write it with numpy.savez")
            archive = stack.enter_context(zipfile.ZipFile(file))
            members = [
                _opened(stack.enter_context(archive.open(info)), info, path)
                for info in archive.infolist()
            ]
        yield {member.name: member for member in members}


def _opened(file: IO[bytes], info: zipfile.ZipInfo, path: Path) -> Member:
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, is_fortran, dtype = read(file)
    name = info.filename.removesuffix(".npy")
    if dtype.kind not in "fiub":
        raise Error(f"{path}: {name} is an array of {dtype}; expected numbers (bf16 as f32)")
    member = Member(name, file, shape, dtype, is_fortran, path)
    if not all(size >= 0 for size in shape) or member.nbytes > info.file_size:
        raise ValueError(f"{name} says that it has the shape {list(shape)}, and has less")
    return member


@contextmanager
def _damage_named(path: Path) -> Generator[None]:
    """Turn what zipfile and numpy raise for damaged, encrypted and foreign files into an Error."""
    try:
        yield
    except (Error, MemoryError):
        raise
    except OSError as error:
        raise Error(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:
        raise Error(
            f"{path} is not an .npz archive of plain arrays ({error}); write it with numpy.savez"
        ) from None


def read_whole(path: Path, members: Iterable[Member]) -> Arrays:
    """Arrays of a file; an Error before memory is used where they are larger than what is free."""
    members = list(members)
    needed, free = sum(member.nbytes for member in members), _free_memory()
    if needed > free:
        largest = max(members, key=lambda member: member.nbytes)
        raise Error(
            f"{path} holds arrays of {needed >> 20} MiB, and {free >> 20} MiB of memory are free; "
            f"the largest is {largest.name} {list(largest.shape)}"
        )
    return {member.name: member.whole() for member in members}


def _free_memory() -> int:
    """Bytes of memory that can be used without swapping; all where the system does not say."""
    with suppress(OSError, ValueError, KeyError), open("/proc/meminfo", encoding="ascii") as file:
        facts = dict(line.split(":") for line in file)
        return int(facts["MemAvailable"].removesuffix("kB\n")) << 10
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def read_npz(
    path: Path, check: Callable[[Mapping[str, Sequence[int]]], None] = lambda shapes: None
) -> Arrays:
    """All arrays of a file; `check` gets their shapes before they are read."""
    with open_npz(path) as members:
        check({name: member.shape for name, member in members.items()})
        return read_whole(path, members.values())


def write_npz(path: Path, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write a file, completely or not at all; arrays may have any name."""
    try:
        with whole_file(path) as file, zipfile.ZipFile(file, "w") as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    npy.write_array(member, np.asanyarray(array), allow_pickle=False)
    except OSError as error:
        raise Error(f"cannot write {path}: {error.strerror or error}") from error

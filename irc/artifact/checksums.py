"""Checksums of files: of all bytes, or of samples for gigabytes of weights."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from ..files import open_file
from ..weights.safetensors import LONGEST_HEADER

SAMPLED: Final = "sampled-sha256-v1"
_BLOCKS, _BLOCK = 64, 64 * 1024
_CHUNK = 4 * 1024 * 1024
_WHOLE = 64 * 1024 * 1024  # of files up to this size all bytes are covered


def sha256(path: Path, advance: Callable[[int], None] | None = None) -> str:
    """`sha256:...` over all bytes; `advance` gets the number of bytes of each block."""
    digest = hashlib.sha256()
    with open_file(path) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            if advance is not None:
                advance(len(chunk))
    return f"sha256:{digest.hexdigest()}"


def sampled(path: Path) -> str:
    """`sampled-sha256-v1:...`, in milliseconds at any size.

    It covers the size (8 bytes, little-endian), a safetensors file's header, and 64 blocks of
    64 KiB at even distances, the first and the last bytes included; of a file of at most 64 MiB it
    covers all bytes. See irc/decisions/0001-sampled-checksum-of-checkpoints.md.
    """
    digest = hashlib.sha256()
    size = path.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with open_file(path) as file:
        for offset, count in _ranges(path, file.fileno(), size):
            digest.update(os.pread(file.fileno(), count, offset))
    return f"{SAMPLED}:{digest.hexdigest()}"


def _ranges(path: Path, descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    if size <= _WHOLE:
        yield from ((begin, min(_CHUNK, size - begin)) for begin in range(0, size, _CHUNK))
        return
    if path.suffix == ".safetensors":
        length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
        yield 0, 8 + min(length, LONGEST_HEADER, size)
    for i in range(_BLOCKS):
        yield i * (size - _BLOCK) // (_BLOCKS - 1), _BLOCK

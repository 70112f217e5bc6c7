"""Facts of a cubin: an ELF file with the machine code of one kernel."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256

_REGISTERS, _FRAME = 0x2F, 0x11  # attributes of .nv.info: EIATTR_REGCOUNT, EIATTR_FRAME_SIZE
_WORDS = 4  # the format of an attribute with a size of its own
_RESERVED = 1024  # bytes in front of static shared memory, which belong to no kernel, from sm_90 on


@dataclass(frozen=True)
class Facts:
    """`registers` per thread; bytes of `shared` memory that are static and of the `stack` of a
    thread, on which registers are spilled; a hash of the machine `code`."""

    registers: int
    shared: int
    stack: int
    code: str


def facts_of(cubin: bytes, kernel: str) -> Facts:
    """The facts of one of a cubin's kernels."""
    sections = dict(_sections(cubin))
    words = dict(_attributes(sections[".nv.info"], _symbol(sections, kernel)))
    code = sha256(sections[f".text.{kernel}"]).hexdigest()[:16]
    shared = _shared_size(cubin, kernel)
    return Facts(words.get(_REGISTERS, 0), shared, words.get(_FRAME, 0), code)


def _headers(cubin: bytes) -> Iterator[tuple[str, int, int, int]]:
    """Name, type, offset and size of each section."""
    (table,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    rows = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * size) for i in range(count)]
    for name, kind, _, _, offset, nbytes, *_ in rows:
        yield _text(cubin, rows[names][4] + name), kind, offset, nbytes


def _sections(cubin: bytes) -> Iterator[tuple[str, bytes]]:
    for name, _, offset, nbytes in _headers(cubin):
        yield name, cubin[offset : offset + nbytes]


def _shared_size(cubin: bytes, kernel: str) -> int:
    """Bytes of static shared memory; their section has none in the file."""
    sizes = {name: nbytes for name, _, _, nbytes in _headers(cubin)}
    whole = sizes.get(f".nv.shared.{kernel}", 0)
    return max(0, whole - _RESERVED * (".nv.shared.reserved.0" in sizes))


def _symbol(sections: dict[str, bytes], kernel: str) -> int:
    """The number of the kernel's symbol."""
    names, symbols = sections[".strtab"], sections[".symtab"]
    for number, (name,) in enumerate(struct.iter_unpack("<I20x", symbols)):
        if _text(names, name) == kernel:
            return number
    raise ValueError(f"expected a kernel called {kernel}, found none of that name")


def _attributes(info: bytes, symbol: int) -> Iterator[tuple[int, int]]:
    """The attributes of .nv.info that are one word of one kernel."""
    at = 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form != _WORDS:
            continue
        if size == 8:
            owner, word = struct.unpack_from("<II", info, at)
            if owner == symbol:
                yield attribute, word
        at += size


def _text(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()

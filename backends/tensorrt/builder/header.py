"""Reads how an engine file begins, and says without a GPU whether it can be one of ours."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from irc.backends.tensorrt.builder.library import TRAITS
from irc.backends.tensorrt.target import Flavour
from irc.errors import Error

SIZE = 64  # bytes of the header of TensorRT-RTX 1.7
# Little-endian: magic, 4 zero bytes, layout, 4 zero bytes, size of the file, version, magic, mask.
_LAYOUT = struct.Struct("<4s4xI4xQ4B4sI")
_CAPABILITIES = {75: 1, 80: 2, 86: 4, 89: 8, 120: 16, 121: 32}


@dataclass(frozen=True)
class Header:
    """The version that built an engine, its size in bytes, and its compute capabilities."""

    version: tuple[int, ...]
    size: int
    capabilities: tuple[int, ...]


def read(path: Path, flavour: Flavour = "tensorrt-rtx") -> Header | None:
    """The header of an engine file; an Error where it is damaged or no engine of this library.

    None for full TensorRT, whose header says nothing that is documented: there only the library
    itself can tell, when it loads the engine.
    """
    magic = TRAITS[flavour].magic
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(SIZE)
    except OSError as error:
        raise Error(f"cannot read the engine {path}: {error.strerror}; compile again") from None
    name = TRAITS[flavour].name
    if not magic:
        if size < SIZE or start.startswith(TRAITS["tensorrt-rtx"].magic):
            raise Error(f"{path} is no engine of {name}; compile again")
        return None
    if not start.startswith(magic):
        raise Error(f"{path} is no engine of {name}: it begins with other bytes; compile again")
    if len(start) < SIZE:
        raise Error(f"{path} is damaged: it ends within its header; compile again")
    _, _, stated, *version, again, mask = _LAYOUT.unpack_from(start)
    if again != magic:
        raise Error(f"{path} is damaged: its header is not as {name} writes it; compile again")
    if stated != size:
        raise Error(
            f"{path} is damaged: it has {size} bytes and says that it has {stated}; compile again"
        )
    listed = tuple(chip for chip, bit in _CAPABILITIES.items() if mask & bit)
    return Header(tuple(version), size, listed)


def check(path: Path, version: str, flavour: Flavour = "tensorrt-rtx") -> Header | None:
    """The header of an engine that the library of this version can load; else an Error."""
    header = read(path, flavour)
    if header is None:
        return None
    built = ".".join(map(str, header.version))
    if built != version:
        raise Error(
            f"{path} was built by {TRAITS[flavour].name} {built}, and {version} is installed; "
            "engines belong to one version: compile again"
        )
    return header


def check_gpu(header: Header, path: Path, capability: int) -> None:
    """Raise unless an engine is built for a GPU of this compute capability (89 for sm_89)."""
    if capability in header.capabilities:
        return
    chips = ", ".join(f"sm_{each}" for each in header.capabilities)
    raise Error(
        f"{path} is built for {chips}, and this GPU is sm_{capability}; "
        f"compile again for sm_{capability}"
    )

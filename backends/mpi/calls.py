"""The calls that all ranks of a group come to, and the headers by which they see that they did."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from irc.backends.communicator import Exchange
from irc.collectives import OPERATIONS
from irc.errors import Error

Array: TypeAlias = np.ndarray[Any, Any]

HEADER = 512  # bytes: number of the call in its group, digest, text
_COMPARED = 24
_DIGEST = 16
_DIVIDING = ("reduce_scatter", "all_to_all", "scatter")


@dataclass(frozen=True)
class Call:
    """What one rank takes part in. `text` says it to people; its digest is what is compared."""

    text: str
    group: tuple[int, ...]
    others: tuple[int, ...]
    label: bytes  # digest and text

    @staticmethod
    def of(rank: int, group: tuple[int, ...], text: str) -> Call:
        """The call with this text."""
        others = tuple(each for each in group if each != rank)
        data = text.encode()
        digest = hashlib.blake2b(repr(group).encode() + data, digest_size=_DIGEST).digest()
        return Call(
            text, group, others, digest + data[: HEADER - _COMPARED].ljust(HEADER - _COMPARED)
        )

    def header(self, number: int) -> bytes:
        """The header of the call when it is the group's `number`th."""
        return struct.pack("<Q", number) + self.label


def same(one: bytes | bytearray, other: bytes) -> bool:
    """Whether two headers are of the same call."""
    return one[:_COMPARED] == other[:_COMPARED]


def number_of(header: bytes | bytearray) -> int:
    """The number of a call in its group."""
    return struct.unpack_from("<Q", header)[0]


def text_of(header: bytes | bytearray) -> str:
    """The text of a call."""
    return bytes(header[_COMPARED:]).decode(errors="ignore").rstrip()


@dataclass(frozen=True)
class ExchangeCall(Call):
    """A collective on operands of one dtype and shape, and what its results are then."""

    what: Exchange
    position: int
    shape: tuple[int, ...]
    result: tuple[int, ...]
    dtype: np.dtype[Any]

    @staticmethod
    def of_exchange(rank: int, what: Exchange, operand: Array) -> ExchangeCall:
        """An Error where a collective cannot be done on such an operand."""
        if what.operation not in OPERATIONS:
            raise Error(f"no collective is called {what.operation}; use {', '.join(OPERATIONS)}")
        if rank not in what.group:
            raise Error(f"rank {rank} is not in the group {what.group} of {what.place or 'a call'}")
        ways = len(what.group)
        if what.operation in _DIVIDING and operand.shape[0] % ways:
            raise Error(
                f"{what.operation} cuts dimension 0 of {list(operand.shape)} into {ways} equal "
                f"parts in {what.place or 'a call'}; pad it"
            )
        call = Call.of(rank, what.group, what.described(operand))
        return ExchangeCall(
            **vars(call),
            what=what,
            position=what.group.index(rank),
            shape=operand.shape,
            result=what.result_shape(operand.shape),
            dtype=operand.dtype,
        )

    def check(self, operand: Array, result: Array) -> None:
        """An Error where the memory for the result does not fit."""
        if result.shape != self.result or result.dtype != self.dtype:
            raise Error(
                f"{self.text} needs memory for {self.dtype}{list(self.result)}, "
                f"not {result.dtype}{list(result.shape)}"
            )
        if not (operand.flags.c_contiguous and result.flags.c_contiguous):
            raise Error(f"{self.text} needs contiguous arrays")

"""What processes send each other through the hub: a head in JSON, and the bytes of arrays.

Nothing that arrives is ever run or unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from irc.dtypes import numpy_dtype

Array: TypeAlias = np.ndarray[Any, Any]

# Kinds of letters. A rank begins with HELLO and ends with END; FAIL says why nobody can go on.
HELLO, DATA, BEAT, FAIL, END = "hello", "data", "beat", "fail", "end"
HUB = -1  # to the hub itself
_LENGTH = 4


@dataclass(frozen=True)
class Letter:
    """From a rank to a rank. `tag` says what it belongs to, `facts` what else there is to say."""

    kind: str
    source: int
    to: int = HUB
    tag: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    arrays: Mapping[str, Array] = field(default_factory=dict[str, Array])

    def encoded(self) -> bytes:
        """The letter as bytes."""
        forms = [(name, _kind(a), a.shape) for name, a in self.arrays.items()]
        head = [self.kind, self.source, self.to, self.tag, dict(self.facts), forms]
        text = json.dumps(head).encode()
        parts = [np.ascontiguousarray(array).tobytes() for array in self.arrays.values()]
        return len(text).to_bytes(_LENGTH, "little") + text + b"".join(parts)


def decoded(data: bytes) -> Letter:
    """The letter that `encoded` wrote."""
    kind, source, to, tag, facts, forms = _head(data)
    at = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    arrays: dict[str, Array] = {}
    for name, dtype, shape in forms:
        element = _dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        array = np.frombuffer(data, element, count, at).reshape(shape).copy()
        arrays[name] = array
        at += array.nbytes
    return Letter(kind, source, to, tag, facts, arrays)


def address_of(data: bytes) -> tuple[str, int]:
    """(kind, to) of an encoded letter, without its arrays."""
    kind, _, to, *_ = _head(data)
    return kind, to


def _head(data: bytes) -> list[Any]:
    return json.loads(data[_LENGTH : _LENGTH + int.from_bytes(data[:_LENGTH], "little")])


def _kind(array: Array) -> str:
    return array.dtype.str if array.dtype.type.__module__ == "numpy" else array.dtype.name


def _dtype(text: str) -> Any:
    try:
        return np.dtype(text)
    except TypeError:
        return numpy_dtype(_NARROW[text])


_NARROW = {
    "bfloat16": "bf16",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
    "int4": "i4",
}

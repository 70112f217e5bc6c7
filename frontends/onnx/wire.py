"""An ONNX file without the bytes of its tensors, found by walking protobuf's wire format.

Parsing a model of 2 GB copies all of it. Here the file is mapped, and every tensor's data of more
than a few bytes is replaced by its place, in the form that ONNX has for external
data: the location "" means the file itself. Numbers of fields are those of onnx.proto.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from irc.errors import Error

KEPT = 16  # bytes of data that stay inside
_DATA = (9, 4, 10)  # raw data, floats and doubles; packed numbers lie as raw data does

Kind: TypeAlias = str
# Message -> number of a field -> the message in it. Only what leads to tensors is followed.
_FIELDS: Mapping[Kind, Mapping[int, Kind]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph"},
}


def without_data(data: mmap.mmap | bytes, name: str) -> bytes:
    """The model with the places of its data instead; an Error where it is no protobuf."""
    return b"".join(_Walk(data, name).message(0, len(data), "model"))


class _Walk:
    """The bytes of a file that may be damaged."""

    def __init__(self, data: mmap.mmap | bytes, name: str) -> None:
        self.data, self.name = data, name

    def message(self, at: int, end: int, kind: Kind) -> list[bytes]:
        """A message between two bytes, in parts."""
        inner = _FIELDS.get(kind, {})
        found: list[bytes] = []
        places: list[bytes] = []  # at the end, where they replace what the tensor says
        kept = at  # where unchanged bytes begin
        for start, number, begin, stop in self._fields(at, end):
            if stop - begin <= KEPT:
                continue
            if number in inner:
                parts = self.message(begin, stop, inner[number])
            elif kind == "tensor" and number in _DATA:
                parts = None
            else:
                continue
            found.append(self.data[kept:start])
            found += [] if parts is None else _field(number, parts)
            places += _noted(begin, stop) if parts is None else []
            kept = stop
        return [*found, self.data[kept:end], *places]

    def _fields(self, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """(where the field starts, its number, begin and end of its content)."""
        while at < end:
            start = at
            tag, at = self._varint(at, end)
            wire = tag & 7
            if wire == 0:
                begin, (_, at) = at, self._varint(at, end)
            elif wire in (1, 5):
                begin, at = at, at + (8 if wire == 1 else 4)
            elif wire == 2:
                size, begin = self._varint(at, end)
                at = begin + size
            else:
                raise Error(f"{self.name} is not an ONNX model")
            if at > end:
                raise Error(
                    f"{self.name} is not an ONNX model, or it is truncated: "
                    f"at byte {start} it announces {at - end} bytes more than there are"
                )
            yield start, tag >> 3, begin if wire == 2 else at, at

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        value = shift = 0
        while at < end and shift < 70:
            byte = self.data[at]
            value |= (byte & 127) << shift
            at, shift = at + 1, shift + 7
            if byte < 128:
                return value, at
        raise Error(f"{self.name} is not an ONNX model, or it is truncated at byte {at}")


def _field(number: int, parts: list[bytes]) -> list[bytes]:
    """A field of bytes."""
    return [_number(number << 3 | 2), _number(sum(map(len, parts))), *parts]


def _number(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)


def _noted(begin: int, stop: int) -> list[bytes]:
    """The fields of a tensor that say at which bytes of the file itself its data is."""
    from onnx import TensorProto

    place = {"location": "", "offset": str(begin), "length": str(stop - begin)}
    tensor = TensorProto(data_location=TensorProto.EXTERNAL)
    for key, value in place.items():
        tensor.external_data.add(key=key, value=value)
    return [tensor.SerializeToString()]

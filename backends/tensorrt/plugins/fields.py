"""What a plugin node carries besides its tensors: typed fields, which travel as text.

ONNX parsers hand integers to plugins as 32 bits and tensors not at all, so every field is a string
in the node and in the engine, whatever its type: 64-bit integers in decimal, lists with commas,
bytes in base64.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from irc.errors import Error, did_you_mean

FieldType: TypeAlias = Literal["text", "int", "float", "bool", "ints", "bytes"]
Values: TypeAlias = Mapping[str, Any]


class Required:
    """The default of a field that must be given."""

    def __repr__(self) -> str:
        return "required"


REQUIRED = Required()


@dataclass(frozen=True)
class Field:
    """One field: its name, type, default, the texts it may be (any where empty), and what it is.

    In Python an `ints` is a tuple of int, a `bytes` is bytes; integers have 64 bits.
    """

    name: str
    type: FieldType = "text"
    default: Any = REQUIRED
    choices: tuple[str, ...] = ()
    doc: str = ""

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return isinstance(self.default, Required)

    def encode(self, value: Any) -> str:
        """The text of a value; an Error where it is none of this type."""
        try:
            return self._encode(value)
        except (TypeError, ValueError, OverflowError):
            raise Error(f"{self.name} is {_words(self.type)}, and {value!r} is none") from None

    def decode(self, text: str) -> Any:
        """The value of a text; an Error where it is none of this type."""
        if self.choices and text not in self.choices:
            raise Error(
                f"{self.name} is one of {', '.join(self.choices)}, and not {text!r}"
                + did_you_mean(text, self.choices)
            )
        try:
            value = self._decode(text)
            self._encode(value)
        except (ValueError, binascii.Error):
            raise Error(f"{self.name} is {_words(self.type)}, and {text!r} is none") from None
        return value

    def _encode(self, value: Any) -> str:
        match self.type:
            case "text":
                return _text(value)
            case "int":
                return str(_int64(value))
            case "float":
                return repr(float(value))
            case "bool":
                return str(_bit(value))
            case "ints":
                return ",".join(str(_int64(each)) for each in value)
            case "bytes":
                return base64.b64encode(bytes(value)).decode("ascii")

    def _decode(self, text: str) -> Any:
        match self.type:
            case "text":
                return text
            case "int":
                return int(text)
            case "float":
                return float(text)
            case "bool":
                return bool(_bit(int(text)))
            case "ints":
                return tuple(int(each) for each in text.split(",")) if text else ()
            case "bytes":
                return base64.b64decode(text, validate=True)


def decode(plugin: str, fields: Sequence[Field], texts: Mapping[str, str]) -> dict[str, Any]:
    """The values of all fields, defaults filled in; an Error names the plugin and the field."""
    known = {field.name: field for field in fields}
    for name in texts:
        if name not in known:
            raise Error(f"{plugin} has no field {name!r}{did_you_mean(name, known)}")
    values: dict[str, Any] = {}
    for field in fields:
        if field.name in texts:
            values[field.name] = _named(plugin, field.decode, texts[field.name])
        elif field.required:
            raise Error(f"{plugin} needs the field {field.name!r}: {field.doc}")
        else:
            values[field.name] = field.default
    return values


def encode(plugin: str, fields: Sequence[Field], values: Values) -> dict[str, str]:
    """The texts of all fields, in their order, defaults written out; the inverse of decode."""
    known = {field.name: field for field in fields}
    for name in values:
        if name not in known:
            raise Error(f"{plugin} has no field {name!r}{did_you_mean(name, known)}")
    texts = {
        field.name: _named(plugin, field.encode, values.get(field.name, field.default))
        for field in fields
        if field.name in values or not field.required
    }
    decode(plugin, fields, texts)
    return texts


def _named(plugin: str, function: Any, value: Any) -> Any:
    try:
        return function(value)
    except Error as error:
        raise Error(f"{plugin}: {error.message}") from None


def _text(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(value)
    return value


def _int64(value: Any) -> int:
    number = int(value)
    if number != value or not -(2**63) <= number < 2**63:
        raise ValueError(value)
    return number


def _bit(value: Any) -> int:
    if value not in (0, 1):
        raise ValueError(value)
    return int(value)


def _words(kind: FieldType) -> str:
    return {
        "text": "text",
        "int": "an integer of 64 bits",
        "float": "a number",
        "bool": "0 or 1",
        "ints": "a list of integers of 64 bits",
        "bytes": "bytes (base64 in text)",
    }[kind]

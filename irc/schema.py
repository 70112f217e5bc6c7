"""JSON against a schema, which is a type: a TypedDict or a dataclass, whose fields have types.

The package msgspec does it, and is imported here only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from .errors import Error

T = TypeVar("T")


def checked(value: object, schema: type[T], what: str) -> T:
    """A value of JSON with the types of `schema`; an Error about `what` names a wrong one."""
    from msgspec import ValidationError, convert

    try:
        return convert(value, schema)
    except ValidationError as error:
        raise Error(f"{what} is damaged: {error}; compile again") from None


def read_json(path: Path, schema: type[T]) -> T:
    """The JSON in a file with the types of `schema`; an Error where it is missing or differs."""
    try:
        return checked(parsed(path.read_bytes()), schema, str(path))
    except OSError as error:
        raise Error(f"cannot read {path}: {error.strerror or error}; compile again") from error
    except ValueError as error:
        raise Error(f"{path} is damaged: {error}; compile again") from None


def parsed(data: bytes) -> Any:
    """The value of JSON text; a ValueError where it is none, or a string is no Unicode text."""
    from msgspec import json

    try:
        return json.decode(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None

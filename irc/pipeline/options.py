"""Values of pass options: which types there are, how they are checked and how they are written."""

from __future__ import annotations

import math
import types
import typing
from typing import Any

from ..errors import Error
from ..strings import quote

_SCALARS: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
}


class Kind(typing.NamedTuple):
    """The type of an option: a scalar or a list of one, and whether `none` is allowed."""

    scalar: type
    sequence: type | None
    optional: bool

    def __str__(self) -> str:
        text = _SCALARS[self.scalar]
        if self.sequence is not None:
            text = f"a list such as [{', '.join(_EXAMPLES[self.scalar])}]"
        return f"{text} or none" if self.optional else text


_EXAMPLES: dict[Any, tuple[str, ...]] = {
    bool: ("true", "false"),
    int: ("1", "2"),
    float: ("0.5", "1"),
    str: ('"a"', '"b"'),
}


def kind_of(annotation: Any) -> Kind:
    """The kind an annotation stands for; an Error where options have no such type."""
    optional = False
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        rest = [a for a in typing.get_args(annotation) if a is not type(None)]
        optional = len(rest) < len(typing.get_args(annotation))
        annotation = rest[0] if len(rest) == 1 else annotation
    sequence = typing.get_origin(annotation)
    if sequence in (list, tuple):
        args = typing.get_args(annotation)
        if args[0] in _SCALARS and (sequence is list or args[1:] == (...,)):
            return Kind(args[0], sequence, optional)
    elif annotation in _SCALARS:
        return Kind(annotation, None, optional)
    raise Error(
        f"an option is bool, int, float, str, a list or tuple[..., ...] of one of them, or any of "
        f"these | None, not {annotation}"
    )


def convert(value: Any, kind: Kind) -> Any:
    """A literal as an option of this kind; an Error says what was wanted."""
    if value is None and kind.optional:
        return None
    if kind.sequence is not None:
        if isinstance(value, (list, tuple)):
            items = typing.cast("list[Any]", value)
            return kind.sequence(_scalar(item, kind.scalar, kind) for item in items)
    else:
        return _scalar(value, kind.scalar, kind)
    raise _wrong(value, kind)


def _scalar(value: Any, wanted: type, kind: Kind) -> Any:
    if type(value) is wanted:
        return value
    if wanted is float and type(value) is int:
        return float(value)
    raise _wrong(value, kind)


def _wrong(value: Any, kind: Kind) -> Error:
    return Error(f"{literal(value)} is not {kind}")


def literal(value: Any) -> str:
    """An option value as pipeline text."""
    if isinstance(value, str):
        return quote(value)
    if isinstance(value, float) and math.isinf(value):
        return "1e999" if value > 0 else "-1e999"  # reads back as infinity
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        items = typing.cast("list[Any]", value)
        return f"[{', '.join(map(literal, items))}]"
    return "none" if value is None else repr(value)

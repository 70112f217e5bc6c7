"""The types of pass options: checking of values, and their text."""

from __future__ import annotations

import typing
from typing import Any

from ..errors import Error
from ..ir.attributes import split_optional
from ..text.printer import literal

# scalar -> (one in words, the items of a list of it)
_SCALARS: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "true, false"),
    int: ("an integer", "1, 2"),
    float: ("a number", "0.5, 1"),
    str: ("a string", '"a", "b"'),
}


class Kind(typing.NamedTuple):
    """The type of an option: a scalar or a list of one, and whether `none` is allowed."""

    scalar: type
    sequence: type | None
    optional: bool

    def __str__(self) -> str:
        one, items = _SCALARS[self.scalar]
        text = one if self.sequence is None else f"a list such as [{items}]"
        return f"{text} or none" if self.optional else text


def kind_of(annotation: Any) -> Kind:
    """The kind of an annotation; an Error if it is no type of an option."""
    annotation, optional = split_optional(annotation)
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
    """A literal as an option of this kind; an Error names the expected kind."""
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

"""Settings from the command line: text converted by the annotation of a parameter."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal

from ..errors import Error, did_you_mean

_FLAGS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def convert(name: str, value: Any, parameter: inspect.Parameter, title: str) -> Any:
    """`value` converted for the parameter `name`, if it is text."""
    if not isinstance(value, str):
        return value
    try:
        return _converted(value, _kind(parameter))
    except _Unfit as unfit:
        raise Error(f"{title}: {name} is {unfit}, not {value!r}{unfit.hint}") from None


def _kind(parameter: inspect.Parameter) -> Any:
    """The annotation, else the type of the default, else text."""
    kind: Any = parameter.annotation
    if kind is not parameter.empty:
        return kind
    default: Any = parameter.default
    return str if default is parameter.empty or default is None else default.__class__


class _Unfit(Exception):
    """The text does not fit; the message names what is expected."""

    def __init__(self, wanted: str, hint: str = "") -> None:
        super().__init__(wanted)
        self.hint = hint


def _converted(text: str, kind: Any) -> Any:
    """The text as a value of an annotation."""
    if kind in _READERS:
        read, expected = _READERS[kind]
        try:
            return read(text)
        except (KeyError, ValueError):
            raise _Unfit(expected) from None
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _first_fit(text, args)
    if origin is Literal:
        return _choice(text, {str(value): value for value in args})
    if inspect.isclass(kind) and issubclass(kind, Enum):
        return _choice(text, dict(kind.__members__))
    if kind in (tuple, list) or origin in (tuple, list, Sequence):
        return _items(text, origin or kind, args)
    raise _Unfit(f"a {getattr(kind, '__name__', kind)}, which --set cannot write")


def _first_fit(text: str, kinds: Sequence[Any]) -> Any:
    """The first member of a union that fits; str is tried last."""
    if type(None) in kinds and text.lower() == "none":
        return None
    wanted: list[str] = []
    for kind in sorted((k for k in kinds if k is not type(None)), key=lambda k: k is str):
        try:
            return _converted(text, kind)
        except _Unfit as unfit:
            wanted.append(str(unfit))
    raise _Unfit(" or ".join([*wanted, *(["none"] if type(None) in kinds else [])]))


def _choice(text: str, choices: dict[str, Any]) -> Any:
    if text not in choices:
        raise _Unfit(f"one of {', '.join(choices)}", did_you_mean(text, choices))
    return choices[text]


def _items(text: str, kind: Any, args: tuple[Any, ...]) -> Any:
    """`1,2,3` as a tuple or list."""
    inner = [arg for arg in args if arg is not Ellipsis] or [str]
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if kind is tuple and args and Ellipsis not in args and len(parts) != len(inner):
        raise _Unfit(f"a list of {len(inner)} items, as in {','.join(['x'] * len(inner))}")
    kinds = inner if len(inner) == len(parts) else inner[:1] * len(parts)
    items = [_converted(part, k) for part, k in zip(parts, kinds, strict=True)]
    return items if kind is list else tuple(items)


# annotation -> (what converts a text, which raises KeyError or ValueError; what is expected)
_READERS: dict[Any, tuple[Callable[[str], Any], str]] = {
    bool: (lambda text: _FLAGS[text.lower()], "true or false"),
    int: (int, "a whole number"),
    float: (float, "a number"),
    str: (str, "text"),
    Path: (Path, "a path"),
    Any: (str, "text"),
    type(None): (str, "text"),
}

"""Attribute values: plain Python, checked against the annotation when an operation is built."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from ..errors import Error, did_you_mean
from .dims import LARGEST, Dim, DimLike

if TYPE_CHECKING:
    from .core import Op

Number = int | float | bool


def _wrong(value: Any, wanted: str, where: str) -> Error:
    return Error(f"{where} is {value!r}, but it must be {wanted}")


def _int(value: Any, where: str) -> int:
    if not isinstance(value, (bool, Dim)) and hasattr(value, "__index__"):
        value = int(value.__index__())
        if -LARGEST - 1 <= value <= LARGEST:
            return value
    raise _wrong(value, "an integer of 64 bits", where)


def _float(value: Any, where: str) -> float:
    if value is None or isinstance(value, (bool, str, tuple, list)):
        raise _wrong(value, "a number", where)
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise _wrong(value, "a number", where) from None


def _exactly(kind: type, wanted: str) -> Callable[[Any, str], Any]:
    def convert(value: Any, where: str) -> Any:
        if not isinstance(value, kind):
            raise _wrong(value, wanted, where)
        return kind(value)

    return convert


_str = _exactly(str, "a string")


def _dim(value: Any, where: str) -> DimLike:
    return value if isinstance(value, Dim) else _int(value, where)


def _number(value: Any, where: str) -> Number:
    if not isinstance(value, int):  # True is an int as well
        return _float(value, where)
    if not -LARGEST - 1 <= value <= 2 * LARGEST + 1:  # of i64 and u64
        raise _wrong(value, "a number; integers have 64 bits", where)
    return value


def _items(check: Callable[[Any, str], Any]) -> Callable[[Any, str], tuple[Any, ...]]:
    def convert(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, (tuple, list)):
            raise _wrong(value, "a list", where)
        items = typing.cast("list[Any]", value)
        return tuple([check(item, f"an item of {where}") for item in items])

    return convert


def _any(value: Any, where: str) -> Any:
    return value


CHECKERS: dict[str, Callable[[Any, str], Any]] = {
    "check_int": _int,
    "check_float": _float,
    "check_bool": _exactly(bool, "true or false"),
    "check_str": _str,
    "check_dim": _dim,
    "check_number": _number,
    "check_ints": _items(_int),
    "check_floats": _items(_float),
    "check_numbers": _items(_number),
    "check_strs": _items(_str),
    "check_dims": _items(_dim),
    "check_any": _any,
}

_SCALARS: dict[Any, str] = {int: "int", float: "float", bool: "bool", str: "str"}
_TUPLES: dict[Any, str] = {int: "ints", float: "floats", str: "strs"}


def split_optional(kind: Any) -> tuple[Any, bool]:
    """(the annotation without None, whether None was allowed)."""
    if typing.get_origin(kind) not in (typing.Union, types.UnionType):
        return kind, False
    args = [a for a in typing.get_args(kind) if a is not type(None)]
    optional = len(args) != len(typing.get_args(kind))
    rest = args[0] if len(args) == 1 else typing.Union[tuple(args)]  # noqa: UP007
    return rest, optional


def _checker(kind: Any) -> str:
    kind, _ = split_optional(kind)
    if kind in _SCALARS:
        return _SCALARS[kind]
    if typing.get_origin(kind) is Literal:
        return "str"
    if kind == DimLike:
        return "dim"
    if kind == Number:
        return "number"
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        if item == DimLike:
            return "dims"
        return _TUPLES.get(item, "numbers")
    return "any"


def checking_line(op: str, name: str, kind: Any) -> str:
    """The line of a generated constructor of `op` that checks and converts one attribute."""
    checker = _checker(kind)
    plain, optional = split_optional(kind)
    fast = plain if plain in _SCALARS else str if checker == "str" else None
    guard = [f"{name}.__class__ is not {fast.__name__}"] if fast else []
    guard += [f"{name} is not None"] if optional else []
    test = " and ".join(guard) or "True"
    where = repr(f"{name} of {op}")
    return f" if {test}: {name} = check_{checker}({name}, {where})"


def key_text(name: str, kind: Any) -> str:
    """Tuple items, as Python text, that tell the values of an attribute apart.

    1, 1.0 and True are equal in Python, but not where an attribute may be any of them.
    """
    match _checker(kind):
        case "number":
            return f"{name}, {name}.__class__, "
        case "numbers":
            return f"{name}, (*map(type, {name}),), "
        case _:
            return f"{name}, "


def choices(kind: Any) -> tuple[str, ...]:
    """The words a Literal attribute may be, empty for any other kind."""
    kind, _ = split_optional(kind)
    return typing.get_args(kind) if typing.get_origin(kind) is Literal else ()


def check_choices(op: Op) -> None:
    """Raise where a Literal attribute holds another word."""
    for name, kind in op.attribute_types.items():
        allowed = choices(kind)
        value = getattr(op, name)
        if allowed and value is not None and value not in allowed:
            raise Error(
                f"{op.opname}: {name} is one of {', '.join(allowed)}, not {value!r}"
                f"{did_you_mean(value, allowed)}",
                op,
            )


def kind_name(kind: Any) -> str:
    """How an attribute's type reads in documentation."""
    allowed = choices(kind)
    if allowed:
        return " | ".join(f'"{word}"' for word in allowed)
    plain, optional = split_optional(kind)
    checker = _checker(plain)
    plural = {"ints": "[int]", "floats": "[float]", "numbers": "[number]", "strs": "[str]"}
    text = plural.get(checker, "[dim]" if checker == "dims" else checker)
    return f"{text}?" if optional else text

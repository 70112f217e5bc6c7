"""Checks of the arguments of public functions: an Error says what to give.

For values whose wrong type would otherwise raise a TypeError somewhere inside.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from math import inf, isfinite
from numbers import Integral
from typing import cast

from .errors import Error

MOST_THREADS = 4 * (os.cpu_count() or 1)  # of one operation; more wait for each other, spinning
_LONGEST = 60  # characters of a value in a message


def check_kind(what: str, value: object, kinds: type | tuple[type, ...], wanted: str) -> None:
    """An Error unless `value` has one of the types; `wanted` completes "give ..."."""
    if not isinstance(value, kinds):
        raise Error(f"{what} is {_shown(value)}; give {wanted}")


def check_path(what: str, value: object) -> None:
    """An Error unless `value` names a file or folder."""
    check_kind(what, value, (str, os.PathLike), "a path, as text or as a pathlib.Path")
    if "\0" in str(value):
        raise Error(f"{what} is {str(value)!r}; give a path without NUL characters")


def check_count(what: str, value: object, least: int = 1, most: float = inf) -> None:
    """An Error unless `value` is a whole number from `least` to `most`."""
    if (
        isinstance(value, bool)
        or not isinstance(value, Integral)
        or not least <= int(value) <= most
    ):
        wanted = f"of at least {least}" if most == inf else f"from {least} to {most}"
        raise Error(f"{what} is {_shown(value)}; give a whole number {wanted}")


def check_number(
    what: str, value: float, least: float | None = None, most: float | None = None
) -> None:
    """An Error unless `value` is a finite number from `least` to `most`."""
    low, high = -inf if least is None else least, inf if most is None else most
    if isfinite(value) and low <= value <= high:
        return
    wanted = "a number" if isfinite(value) else "a finite number"
    if high < inf:
        wanted += f" from {low} to {high}"
    elif low > -inf:
        wanted += f" of at least {low}"
    raise Error(f"{what} is {value}; give {wanted}")


def whole_number_in(text: str, most: int = 2**63 - 1) -> int | None:
    """The number that a text of decimal digits states; None where it is another text, or larger.

    For texts of users: `int` takes other digits, signs and blanks, and refuses 5,000 digits.
    """
    digits = text.lstrip("0") or text[:1]
    if not (text.isascii() and text.isdecimal()) or len(digits) > len(str(most)):
        return None
    return number if (number := int(digits)) <= most else None


def with_comma(first: str, second: str) -> str:
    """One list of two lists of words."""
    return f"{first},{second}"


def check_arrays(value: object) -> None:
    """An Error unless `value` are inputs of a model: arrays by name."""
    wanted = 'a mapping from names to arrays, such as {"input_ids": ids}'
    check_kind("the inputs of the model", value, Mapping, wanted)
    for name in cast("Mapping[object, object]", value):
        check_kind("the name of an input", name, str, f"text: {wanted}")


def check_texts(what: str, value: object, example: str) -> None:
    """An Error unless `value` is a mapping from text to text."""
    wanted = f"a mapping from text to text, such as {example}"
    check_kind(what, value, Mapping, wanted)
    for pair in cast("Mapping[object, object]", value).items():
        for entry in pair:
            check_kind(f"an entry of {what}", entry, str, wanted)


def _shown(value: object) -> str:
    """A short value as Python writes it; the type of others."""
    if value is None or isinstance(value, (str, bytes, int, float)):
        text = repr(value)
        if len(text) <= _LONGEST:
            return text
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"

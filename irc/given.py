"""Checks of what a public function was given: where the kind is wrong, an Error says what to give.

For values whose wrong kind would otherwise show as a TypeError somewhere inside.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from numbers import Integral
from typing import cast

from .errors import Error

_LONGEST = 60  # characters of a value that is shown


def check_kind(what: str, given: object, kinds: type | tuple[type, ...], wanted: str) -> None:
    """An Error unless `given` is of one of the kinds; `wanted` follows on "give"."""
    if not isinstance(given, kinds):
        raise Error(f"{what} is {_shown(given)}; give {wanted}")


def check_path(what: str, given: object) -> None:
    """An Error unless `given` names a file or folder."""
    check_kind(what, given, (str, os.PathLike), "a path, as text or as a pathlib.Path")


def check_count(what: str, given: object, least: int = 1) -> None:
    """An Error unless `given` is a whole number of at least `least`."""
    if isinstance(given, bool) or not isinstance(given, Integral) or int(given) < least:
        raise Error(f"{what} is {_shown(given)}; give a whole number of at least {least}")


def check_arrays(given: object) -> None:
    """An Error unless `given` are inputs of a model: arrays by name."""
    wanted = 'a mapping from names to arrays, such as {"input_ids": ids}'
    check_kind("what the model is run on", given, Mapping, wanted)
    for name in cast("Mapping[object, object]", given):
        check_kind("the name of an input", name, str, f"text: {wanted}")


def check_texts(what: str, given: object, example: str) -> None:
    """An Error unless `given` is a mapping from text to text."""
    wanted = f"a mapping from text to text, such as {example}"
    check_kind(what, given, Mapping, wanted)
    for pair in cast("Mapping[object, object]", given).items():
        for each in pair:
            check_kind(f"a part of {what}", each, str, wanted)


def _shown(given: object) -> str:
    """A short value as it is written; of others the kind."""
    if given is None or isinstance(given, (str, bytes, int, float)):
        text = repr(given)
        if len(text) <= _LONGEST:
            return text
    name = type(given).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"

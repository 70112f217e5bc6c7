"""`read_object` and `read_list`: the object or the list in a JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from .errors import Error
from .files import open_file


def read_object(path: Path, what: str = "") -> dict[str, Any]:
    """The object in a file; an Error where there is none, about `what`, such as "the plan"."""
    value = _read(path, what)
    if not isinstance(value, dict):
        raise Error(f"{_shown(path, what)} holds no JSON object")
    return cast("dict[str, Any]", value)


def read_list(path: Path, what: str = "") -> list[Any]:
    """The list in a file; an Error where there is none, about `what`."""
    value = _read(path, what)
    if not isinstance(value, list):
        raise Error(f"{_shown(path, what)} holds no JSON list")
    return cast("list[Any]", value)


def _read(path: Path, what: str) -> object:
    shown = _shown(path, what)
    try:
        with open_file(path) as file:
            return json.loads(file.read())
    except OSError as error:
        raise Error(f"cannot read {shown}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise Error(f"{shown} is not JSON: {error}") from None


def _shown(path: Path, what: str) -> str:
    return f"{what} {path}".lstrip()

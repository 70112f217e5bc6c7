"""`read_object` and `read_list`: the object or the list in a JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from .errors import Error
from .files import open_file


def read_object(path: Path, what: str = "") -> dict[str, Any]:
    """The object in a file; an Error where there is none, about `what`, such as "the plan"."""
    return cast("dict[str, Any]", _read(path, what, dict, "object"))


def read_list(path: Path, what: str = "") -> list[Any]:
    """The list in a file; an Error where there is none, about `what`."""
    return cast("list[Any]", _read(path, what, list, "list"))


def _read(path: Path, what: str, kind: type, name: str) -> object:
    shown = f"{what} {path}".lstrip()
    try:
        with open_file(path) as file:
            value: object = json.loads(file.read())
    except OSError as error:
        raise Error(f"cannot read {shown}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise Error(f"{shown} is not JSON: {error}") from None
    if not isinstance(value, kind):
        raise Error(f"{shown} holds no JSON {name}")
    return value

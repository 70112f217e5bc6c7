"""Tables of mixed precision: JSON that maps globs on scopes to schemes, the first match first."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from irc.errors import Error
from irc.json_files import read_object
from irc.quantization.schemes import Scheme, scheme_called

_WHAT, _CACHES = "the table of schemes", "kv_cache_quant_algo"


@dataclass(frozen=True)
class Row:
    """The scheme of the sites that a glob matches; None leaves them as they are."""

    glob: str
    scheme: Scheme | None
    group: int = 0


def read_table(table: str) -> list[Row]:
    """The rows of a JSON file, or of JSON text that begins with a brace.

    A value is a scheme, null, or {"scheme": ..., "group": ...}. The file may also be TensorRT-LLM's
    quant_cfg.json, which has quant_algo and group_size under "quantized_layers".
    """
    return _rows(_read(table), _WHAT if _is_text(table) else table)


def read_caches(table: str) -> str:
    """The kind of caches that a table names as `kv_cache_quant_algo`; empty without."""
    kind = _read(table).get(_CACHES)
    return str(kind).lower() if kind is not None else ""


def _is_text(table: str) -> bool:
    return table.lstrip().startswith("{")


def _read(table: str) -> Mapping[str, Any]:
    if not _is_text(table):
        return read_object(Path(table), _WHAT)
    try:
        return json.loads(table)
    except (ValueError, RecursionError) as error:
        raise Error(f"{_WHAT} is not JSON: {error}") from None


def _rows(found: Mapping[str, Any], source: str) -> list[Row]:
    globs = {key: value for key, value in found.items() if key != _CACHES}
    rows = globs.get("quantized_layers", globs)
    if not isinstance(rows, dict) or not rows:
        raise Error(f'{source} has no rows; write some, such as {{"*.mlp.*": "w4a16", "*": null}}')
    return [_row(glob, value, source) for glob, value in cast("dict[str, Any]", rows).items()]


def _row(glob: str, value: Any, source: str) -> Row:
    group: Any = 0
    if isinstance(value, dict):
        entry = cast("dict[str, Any]", value)
        group = entry.get("group", entry.get("group_size", 0))
        value = entry.get("scheme", entry.get("quant_algo", ""))
    if not isinstance(value, str | None) or type(group) is not int or group < 0:
        raise Error(
            f'{source}: {glob!r} has {json.dumps(value)}; give a scheme, null, or {{"scheme": '
            '"w4a16", "group": 64}'
        )
    if value is None:
        return Row(glob, None)
    try:
        return Row(glob, scheme_called(value), group)
    except Error as error:
        raise Error(f"{source}: {glob!r}: {error.message}") from None

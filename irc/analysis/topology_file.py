"""Topology files: JSON; an Error names the first wrong field."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

from ..argument_checks import whole_number_in
from ..artifact.atomic import whole_file
from ..errors import Error, did_you_mean
from ..ir.dtypes import DTYPES
from ..json_files import read_object
from .topology import KINDS, Line, Protocol, Topology

FORMAT = 1
DEFAULT = "h200.json"
_POSITIVE = ("gb_s", "hbm_gb_s", "peak_tflops", "memory_bytes", "ranks_per_host")


def default_topology() -> Topology:
    """Eight H200 of one host: NVLink as measured, PCIe and Ethernet as modelled."""
    place = resources.files("irc.analysis").joinpath(DEFAULT)
    return from_json(json.loads(place.read_text(encoding="utf-8")), DEFAULT)


def read_topology(path: str | os.PathLike[str]) -> Topology:
    """The topology in a file; an Error names the wrong field."""
    place = Path(path)
    return from_json(read_object(place, "the topology"), str(place))


def write_topology(topology: Topology, path: str | os.PathLike[str]) -> None:
    """Write a file that `read_topology` reads, atomically."""
    try:
        with whole_file(Path(path)) as file:
            file.write(to_text(topology).encode())
    except OSError as error:
        raise Error(f"cannot write {path}: {error.strerror or error}") from error


def to_text(topology: Topology) -> str:
    """The JSON of a topology, a line of constants per line of text."""
    return _pretty(to_json(topology)) + "\n"


def to_json(value: Any) -> Any:
    """The document of a topology, or of a part of one; lines and protocols are lists."""
    if isinstance(value, (Line, Protocol)):
        return [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, tuple):
        return [to_json(item) for item in cast("tuple[Any, ...]", value)]
    if isinstance(value, Mapping):
        items = cast("Mapping[str | int, Any]", value).items()
        return {str(key): to_json(item) for key, item in items}
    if not is_dataclass(value):
        return value
    facts = {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    return {"format": FORMAT, **facts} if isinstance(value, Topology) else facts


def from_json(value: object, name: str) -> Topology:
    """The topology of a document; `name` is for messages."""
    document = dict(_mapping(value, name))
    version = document.pop("format", None)
    if version != FORMAT:
        raise Error(f"{name} has the format {version}, and this version of irc reads {FORMAT}")
    topology: Topology = _object(Topology, document, name)
    for field, link in (("within", topology.within), ("between", topology.between)):
        if link not in topology.links:
            hint = did_you_mean(link, topology.links)
            raise Error(f"{name}: {field} is {link!r}, but links has no such link{hint}")
    return topology


def _object(kind: Any, value: Any, path: str) -> Any:
    """A dataclass from an object with its fields."""
    left, types, taken = dict(_mapping(value, path)), get_type_hints(kind), dict[str, Any]()
    for field in fields(kind):
        if field.name in left:
            at = _inside(path, field.name)
            taken[field.name] = _value(types[field.name], left.pop(field.name), at, field.name)
        elif field.default is MISSING and field.default_factory is MISSING:
            hint = did_you_mean(field.name, left)
            raise Error(f"{_inside(path, field.name)} is missing{hint}")
    for key in left:
        raise Error(f"{_inside(path, key)} is not a field of a topology; leave it out")
    return kind(**taken)


def _inside(path: str, key: str) -> str:
    return f"{path}{'.' if ': ' in path else ': '}{key}"


def _value(kind: Any, value: Any, path: str, field: str) -> Any:
    """A value of an annotated type; `field` decides which numbers and keys are valid."""
    if kind in (Line, Protocol):
        return _constants(kind, value, path)
    if is_dataclass(kind):
        return _object(kind, value, path)
    if get_origin(kind) is tuple:
        item = get_args(kind)[0]
        return tuple(_value(item, v, f"{path}[{i}]", field) for i, v in _items(value, path))
    if get_origin(kind) is Mapping:
        _, item = get_args(kind)
        items = _mapping(value, path)
        if field == "peak_tflops" and not items:
            raise Error(f"{path} must name the rate of one dtype at least")
        keys = {key: _key(kind, key, _inside(path, key), field) for key in items}
        return {keys[k]: _value(item, v, _inside(path, k), field) for k, v in items.items()}
    if kind is str:
        if not isinstance(value, str):
            raise Error(f"{path} must be a text, not {_shown(value)}")
        return value
    return _number(kind, value, path, field)


def _key(kind: Any, key: str, path: str, field: str) -> str | int:
    if get_args(kind)[0] is int:
        if (ranks := whole_number_in(key) or 0) < 2:
            raise Error(f"{path} must be a number of ranks from 2 on")
        return ranks
    if field == "measured" and key not in KINDS:
        raise Error(f"{path} is not a collective{did_you_mean(key, KINDS)}")
    if field == "peak_tflops" and key not in DTYPES:
        raise Error(f"{path} is not a dtype{did_you_mean(key, DTYPES)}")
    return key


def _number(kind: Any, value: Any, path: str, field: str) -> float:
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        least = int(field in _POSITIVE)
        if not plain or not isinstance(value, int) or value < least:
            raise Error(f"{path} must be a whole number from {least} on, not {_shown(value)}")
        return value
    if not plain or not math.isfinite(value):
        raise Error(f"{path} must be a number, not {_shown(value)}")
    if value < 0 and field not in _POSITIVE:
        raise Error(f"{path} must not be negative, as {_shown(value)} is")
    if value <= 0 and field in _POSITIVE:
        raise Error(f"{path} must be above 0, not {_shown(value)}")
    return float(value)


def _constants(kind: Any, value: Any, path: str) -> Any:
    """A line or protocol from the list of its numbers."""
    names = [field.name for field in fields(kind)]
    numbers = _items(value, path)
    if len(numbers) != len(names):
        raise Error(f"{path} must be [{', '.join(names)}], not {_shown(value)}")
    return kind(*[_number(float, v, f"{path}[{i}]", names[i]) for i, v in numbers])


def _mapping(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Error(f"{path} must be a JSON object")
    return cast("dict[str, Any]", value)


def _items(value: Any, path: str) -> list[tuple[int, Any]]:
    if not isinstance(value, list) or not value:
        raise Error(f"{path} must be a list that is not empty, not {_shown(value)}")
    return list(enumerate(cast("list[Any]", value)))


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _pretty(value: Any, indent: str = "") -> str:
    """JSON with every list on one line."""
    if not isinstance(value, Mapping) or not value:
        return json.dumps(value, ensure_ascii=False)
    inner = f"{indent}  "
    items = cast("Mapping[str, Any]", value).items()
    lines = [f"{inner}{json.dumps(key)}: {_pretty(item, inner)}" for key, item in items]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"

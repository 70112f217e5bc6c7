"""Topology files: JSON that a person can edit; every wrong field is named in the Error."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, cast

from ..atomic import whole_file
from ..dtypes import DTYPES
from ..errors import Error, did_you_mean
from .topology import KINDS, Device, Line, Lines, Link, Protocol, Topology

FORMAT = 1
DEFAULT = "h200.json"
T = TypeVar("T")


def default_topology() -> Topology:
    """Eight H200 of one host: NVLink as measured, PCIe and Ethernet as modelled."""
    place = resources.files("irc.analysis").joinpath(DEFAULT)
    return from_json(json.loads(place.read_text(encoding="utf-8")), DEFAULT)


def read_topology(path: str | os.PathLike[str]) -> Topology:
    """The topology in a file; an Error names what is wrong with which field."""
    place = Path(path)
    try:
        found: object = json.loads(place.read_text(encoding="utf-8"))
    except OSError as error:
        raise Error(f"cannot read the topology {place}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise Error(f"the topology {place} is not JSON: {error}") from None
    return from_json(found, str(place))


def write_topology(topology: Topology, path: str | os.PathLike[str]) -> None:
    """Write a file that `read_topology` reads; it is there whole or not at all."""
    try:
        with whole_file(Path(path)) as file:
            file.write(to_text(topology).encode())
    except OSError as error:
        raise Error(f"cannot write {path}: {error.strerror or error}") from error


def to_text(topology: Topology) -> str:
    """The JSON of a topology, a line of constants per line of text."""
    return _pretty(to_json(topology)) + "\n"


def to_json(topology: Topology) -> dict[str, Any]:
    """What the file says."""
    device = topology.device
    return {
        "format": FORMAT,
        "name": topology.name,
        "ranks_per_host": topology.ranks_per_host,
        "within": topology.within,
        "between": topology.between,
        "device": {
            "name": device.name,
            "source": device.source,
            "memory_bytes": device.memory_bytes,
            "hbm_gb_s": device.hbm_gb_s,
            "peak_tflops": dict(device.peak_tflops),
            "kernel_us": device.kernel_us,
            "workspace_bytes": device.workspace_bytes,
            "communication_bytes": device.communication_bytes,
        },
        "links": {name: _link_json(link) for name, link in topology.links.items()},
    }


def _link_json(link: Link) -> dict[str, Any]:
    return {
        "source": link.source,
        "ring": [[p.base_us, p.hop_us, p.gb_s] for p in link.ring],
        "pairs": [[p.base_us, p.hop_us, p.gb_s] for p in link.pairs],
        "measured": {
            kind: {
                str(ways): [[line.alpha_us, line.gb_s] for line in lines]
                for ways, lines in sorted(by_ways.items())
            }
            for kind, by_ways in link.measured.items()
        },
    }


def from_json(value: object, name: str) -> Topology:
    """The topology that a document describes; `name` is what Errors call it."""
    fields = _Fields(value, name, "")
    version = fields.take("format", _whole(1))
    if version != FORMAT:
        raise Error(f"{name} has the format {version}, and this version of irc reads {FORMAT}")
    links = fields.inner("links")
    topology = Topology(
        name=fields.take("name", _text),
        device=_device(fields.inner("device")),
        links={key: _link(links.inner(key)) for key in links},
        within=fields.take("within", _text),
        between=fields.take("between", _text),
        ranks_per_host=fields.take("ranks_per_host", _whole(1)),
    )
    fields.finish()
    for field, link in (("within", topology.within), ("between", topology.between)):
        if link not in topology.links:
            hint = did_you_mean(link, topology.links)
            raise Error(f"{name}: {field} is {link!r}, but links has no such link{hint}")
    return topology


def _device(fields: _Fields) -> Device:
    peaks = fields.inner("peak_tflops")
    for key in peaks:
        if key not in DTYPES:
            raise Error(f"{peaks.path(key)} is no dtype{did_you_mean(key, DTYPES)}")
    if not list(peaks):
        raise Error(f"{fields.path('peak_tflops')} must name the rate of one dtype at least")
    device = Device(
        name=fields.take("name", _text),
        memory_bytes=fields.take("memory_bytes", _whole(1)),
        hbm_gb_s=fields.take("hbm_gb_s", _positive),
        peak_tflops={key: peaks.take(key, _positive) for key in peaks},
        kernel_us=fields.take("kernel_us", _not_negative),
        workspace_bytes=fields.take("workspace_bytes", _whole(0), 0),
        communication_bytes=fields.take("communication_bytes", _whole(0), 0),
        source=fields.take("source", _text, ""),
    )
    fields.finish()
    return device


def _link(fields: _Fields) -> Link:
    measured = fields.inner("measured")
    link = Link(
        ring=fields.take("ring", _protocols),
        pairs=fields.take("pairs", _protocols),
        measured={kind: _group_sizes(measured, kind) for kind in measured},
        source=fields.take("source", _text, ""),
    )
    fields.finish()
    return link


def _group_sizes(measured: _Fields, kind: str) -> dict[int, Lines]:
    if kind not in KINDS:
        raise Error(f"{measured.path(kind)} is no collective{did_you_mean(kind, KINDS)}")
    sizes = measured.inner(kind)
    for key in sizes:
        if not key.isdecimal() or int(key) < 2:
            raise Error(f"{sizes.path(key)} must be a number of ranks from 2 on")
    return {int(key): sizes.take(key, _lines) for key in sizes}


@dataclass
class _Fields:
    """One object of the document; `take` reads a field, `finish` refuses those nobody took."""

    value: Any
    name: str
    place: str

    def __post_init__(self) -> None:
        if not isinstance(self.value, dict):
            where = f": {self.place}" if self.place else ""
            raise Error(f"{self.name}{where} must be a JSON object")
        self.left = dict(cast("dict[str, Any]", self.value))

    def path(self, key: str) -> str:
        return f"{self.name}: {self.place}{'.' if self.place else ''}{key}"

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.value))

    def take(self, key: str, read: Callable[[Any, str], T], default: T | None = None) -> T:
        if key not in self.left:
            if default is None:
                raise Error(f"{self.path(key)} is missing{did_you_mean(key, self.left)}")
            return default
        return read(self.left.pop(key), self.path(key))

    def inner(self, key: str) -> _Fields:
        if key not in self.left:
            raise Error(f"{self.path(key)} is missing{did_you_mean(key, self.left)}")
        place = f"{self.place}.{key}" if self.place else key
        return _Fields(self.left.pop(key), self.name, place)

    def finish(self) -> None:
        for key in self.left:
            raise Error(f"{self.path(key)} is no field of a topology; leave it out")


def _text(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise Error(f"{path} must be a text, not {_shown(value)}")
    return value


def _number(value: Any, path: str) -> float:
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not plain or not math.isfinite(value):
        raise Error(f"{path} must be a number, not {_shown(value)}")
    return float(value)


def _positive(value: Any, path: str) -> float:
    if _number(value, path) <= 0:
        raise Error(f"{path} must be above 0, not {_shown(value)}")
    return float(value)


def _not_negative(value: Any, path: str) -> float:
    if _number(value, path) < 0:
        raise Error(f"{path} must not be negative, as {_shown(value)} is")
    return float(value)


def _whole(least: int) -> Callable[[Any, str], int]:
    def read(value: Any, path: str) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise Error(f"{path} must be a whole number from {least} on, not {_shown(value)}")
        return value

    return read


def _items(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise Error(f"{path} must be a list that is not empty, not {_shown(value)}")
    return cast("list[Any]", value)


def _constants(value: Any, path: str, names: tuple[str, ...]) -> list[float]:
    """The numbers of one line, the last a bandwidth, which is above 0."""
    found = _items(value, path)
    if len(found) != len(names):
        raise Error(f"{path} must be [{', '.join(names)}], not {_shown(value)}")
    readers = [_not_negative] * (len(names) - 1) + [_positive]
    return [
        read(item, f"{path}[{i}]")
        for i, (read, item) in enumerate(zip(readers, found, strict=True))
    ]


def _protocols(value: Any, path: str) -> tuple[Protocol, ...]:
    names = ("base_us", "hop_us", "gb_s")
    lines = enumerate(_items(value, path))
    return tuple(Protocol(*_constants(line, f"{path}[{i}]", names)) for i, line in lines)


def _lines(value: Any, path: str) -> Lines:
    names = ("alpha_us", "gb_s")
    lines = enumerate(_items(value, path))
    return tuple(Line(*_constants(line, f"{path}[{i}]", names)) for i, line in lines)


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

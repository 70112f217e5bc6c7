"""The constants of a machine: bandwidths, rates, and the time of collectives over its links.

A collective takes `alpha + traffic / beta`, where traffic is the bytes through the busiest rank.
Several such lines per collective and group size stand for the protocols of a library: the shortest
time counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from ..errors import Error, did_you_mean
from ..ops.collective_names import OPERATIONS

KINDS = (*OPERATIONS, "send")
_PAIRED = ("all_to_all", "gather", "scatter", "send")  # made of sends between two ranks, no ring


def sent(kind: str, group_size: int, size: int) -> float:
    """Bytes that one rank sends, the busiest one where they differ.

    `size` is the bytes of the global tensor: the larger of the local operand and result. Rings send
    what the table in Thakur et al., 2005, says; a rank of a broadcast forwards everything.
    """
    _check_kind(kind)
    if group_size <= 1:
        return 0.0
    share = (group_size - 1) / group_size * size
    if kind == "all_reduce":
        return 2 * share
    if kind in ("broadcast", "reduce", "send"):
        return float(size)
    return size / group_size if kind == "gather" else share


def traffic(kind: str, group_size: int, size: int) -> float:
    """Bytes through the busiest rank in one direction; the root of a gather receives."""
    return sent("scatter" if kind == "gather" else kind, group_size, size)


def steps(kind: str, group_size: int) -> int:
    """The number of consecutive messages, at least one."""
    _check_kind(kind)
    return max(1, {"all_reduce": 2 * (group_size - 1), "send": 1}.get(kind, group_size - 1))


@dataclass(frozen=True)
class Line:
    """`alpha_us` microseconds, and one more for every `gb_s` kilobytes (10^3) of traffic."""

    alpha_us: float
    gb_s: float

    def time(self, moved: float) -> float:
        """Microseconds for `moved` bytes."""
        return self.alpha_us + moved / self.gb_s / 1e3


@dataclass(frozen=True)
class Protocol:
    """The lines of every group size: `base_us` + steps * `hop_us`, at `gb_s`."""

    base_us: float
    hop_us: float
    gb_s: float

    def line(self, hops: int) -> Line:
        """The line of a collective of so many steps."""
        return Line(self.base_us + hops * self.hop_us, self.gb_s)


Lines: TypeAlias = tuple[Line, ...]
Measured: TypeAlias = Mapping[str, Mapping[int, Lines]]  # by kind, then by ranks of the group


@dataclass(frozen=True)
class Link:
    """One way to reach other ranks. `measured` goes before `ring` and `pairs`, which are models."""

    ring: tuple[Protocol, ...]
    pairs: tuple[Protocol, ...]
    measured: Measured = field(default_factory=dict[str, Mapping[int, Lines]])
    source: str = ""

    def lines(self, kind: str, group_size: int) -> Lines:
        """The lines of a collective in a group of `group_size`."""
        lines = self.measured.get(kind, {})
        if group_size in lines:
            return lines[group_size]
        if lines:
            return _nearest(kind, group_size, lines)
        protocols = self.pairs if kind in _PAIRED else self.ring
        return tuple(protocol.line(steps(kind, group_size)) for protocol in protocols)

    def time(self, kind: str, group_size: int, size: int) -> float:
        """Microseconds of a collective; `size` as in `sent`."""
        _check_kind(kind)
        if group_size <= 1:
            return 0.0
        moved = traffic(kind, group_size, size)
        return min(line.time(moved) for line in self.lines(kind, group_size))


@dataclass(frozen=True)
class Device:
    """One accelerator. `peak_tflops` is by dtype; `kernel_us` the start of a kernel.

    `workspace_bytes` is the workspace of libraries per rank; `communication_bytes` that of
    communication, on several ranks.
    """

    name: str
    memory_bytes: int
    hbm_gb_s: float
    peak_tflops: Mapping[str, float]
    kernel_us: float
    workspace_bytes: int = 0
    communication_bytes: int = 0
    source: str = ""

    def peak(self, dtype: str) -> float:
        """Operations per microsecond; those of the slowest dtype for one that is not listed."""
        peak = self.peak_tflops.get(dtype)
        return 1e6 * (min(self.peak_tflops.values()) if peak is None else peak)


@dataclass(frozen=True)
class Topology:
    """A device, the links between devices, and which of them a group of ranks uses.

    Ranks `i*ranks_per_host` to `(i+1)*ranks_per_host - 1` share a host and talk over the link
    `within`, all others over the link `between`.
    """

    name: str
    device: Device
    links: Mapping[str, Link]
    within: str
    between: str
    ranks_per_host: int

    def link(self, name: str) -> Link:
        """The link called `name`; an Error lists the known ones."""
        if name not in self.links:
            hint = did_you_mean(name, self.links)
            names = ", ".join(self.links)
            raise Error(f"the topology {self.name} has no link {name!r}{hint}; it has {names}")
        return self.links[name]

    def link_of(self, ranks: Iterable[int]) -> str:
        """The link between these ranks."""
        hosts = {rank // self.ranks_per_host for rank in ranks}
        return self.within if len(hosts) <= 1 else self.between

    def time(self, kind: str, group_size: int, size: int, link: str | None = None) -> float:
        """Microseconds of a collective over a link, `within` unless named; `size` as in `sent`."""
        return self.link(link or self.within).time(kind, group_size, size)

    def using(self, link: str) -> Topology:
        """This topology with another link between the ranks of a host."""
        self.link(link)
        return replace(self, within=link)

    def with_measured(self, link: str, measured: Measured, source: str) -> Topology:
        """This topology with constants of a link replaced, kind by kind and size by size.

        A link of a new name starts as the one within a host.
        """
        old = self.links.get(link) or replace(self.links[self.within], measured={})
        kinds = dict.fromkeys([*old.measured, *measured])
        merged = {k: {**old.measured.get(k, {}), **measured.get(k, {})} for k in kinds}
        new = replace(old, measured=merged, source=source)
        return replace(self, links={**self.links, link: new})


def _nearest(kind: str, group_size: int, lines: Mapping[int, Lines]) -> Lines:
    """The lines of a group size that was not measured, from the nearest that was.

    Each step more adds the latency that it adds to the smallest messages from the smallest group
    that was measured to the largest.
    """
    near = min(lines, key=lambda size: (abs(size - group_size), size))
    low, high = min(lines), max(lines)
    hops = steps(kind, high) - steps(kind, low)
    rise = max(0.0, _latency(lines[high]) - _latency(lines[low])) / hops if hops else 0.0
    more = rise * (steps(kind, group_size) - steps(kind, near))
    return tuple(Line(max(0.0, line.alpha_us + more), line.gb_s) for line in lines[near])


def _latency(lines: Lines) -> float:
    return min(line.alpha_us for line in lines)


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise Error(f"no collective called {kind!r}{did_you_mean(kind, KINDS)}")

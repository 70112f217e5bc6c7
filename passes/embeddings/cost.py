"""What a scheme costs one rank: microseconds and bytes sent at several batch sizes, and memory.

A lookup is some kernels, the bytes that they read and write, and collectives. Rows or parts of rows
that are shorter than a memory access cost a whole one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from irc.analysis.sizes import LocalSizes
from irc.analysis.topology import Topology, sent
from irc.core import Module
from irc.dtypes import dtype

from .schemes import scheme_name
from .sites import Layout, Site, Wanted
from .tables import Versions, rank_bytes

ACCESS = 64  # bytes that memory gives at once
UNKNOWN = (1, 64, 8192)  # tokens where the module gives a symbol no range
BITWISE = frozenset(["R", "CA", "CS", "CD", "KA", "KS", "KD"])  # schemes that add nothing up

Message: TypeAlias = tuple[str, int]  # a collective and the bytes of the whole tensor


@dataclass(frozen=True)
class Lookups:
    """One site at one batch size: `tokens` of one rank where the ids are split, else of all ranks;
    `part` of them where the result is scattered.

    In bytes `row` is a whole row, `width` a rank's part of its columns, `index` an id. `room` is
    what a queue of a cyclic scheme takes, 0 for as many rows as there may be; `checked` says that
    foreign rows are blanked afterwards, as there are no rows of zeros.
    """

    tokens: int
    part: int
    row: int
    width: int
    ways: int
    index: int
    room: int = 0
    checked: bool = False

    @property
    def columns_read(self) -> float:
        """Bytes that a part of a row costs to read."""
        return max(self.width, ACCESS) if self.width else 0

    @property
    def whole(self) -> int:
        """Bytes of the rows of all tokens."""
        return self.tokens * self.row


@dataclass(frozen=True)
class Load:
    """Kernels, bytes to and from memory, and messages."""

    kernels: int
    bytes: float
    messages: tuple[Message, ...] = ()


def _replicated(x: Lookups) -> Load:
    return Load(1, 2 * x.whole)


def _replicated_parts(x: Lookups) -> Load:
    return Load(1, 2 * x.part * x.row)


def _rows(x: Lookups, tokens: int, *messages: Message) -> Load:
    """Each rank reads its share and writes all; one more pass where foreign rows are blanked."""
    result = tokens * x.row
    moved = result / x.ways + result
    return Load(3, moved + 2 * result, messages) if x.checked else Load(2, moved, messages)


def _ra(x: Lookups) -> Load:
    return _rows(x, x.tokens, ("all_reduce", x.whole))


def _rs(x: Lookups) -> Load:
    return _rows(x, x.tokens, ("reduce_scatter", x.part * x.ways * x.row))


def _rsd(x: Lookups) -> Load:
    return _rows(x, x.tokens * x.ways, _ids(x), ("reduce_scatter", x.whole * x.ways))


def _ids(x: Lookups) -> Message:
    return "all_gather", x.tokens * x.ways * x.index


def _columns(x: Lookups, tokens: int, result: int, *messages: Message) -> Load:
    """Each rank reads and writes its columns of all rows; the merge reads and writes the result."""
    return Load(2, tokens * (x.columns_read + x.width) + 2 * result, messages)


def _ca(x: Lookups) -> Load:
    result = x.tokens * x.width * x.ways
    return _columns(x, x.tokens, result, ("all_gather", result))


def _cs(x: Lookups) -> Load:
    result = x.part * x.ways * x.width
    return _columns(x, x.tokens, result, ("all_to_all", result))


def _cd(x: Lookups) -> Load:
    result = x.tokens * x.ways * x.width
    return _columns(x, x.tokens * x.ways, result, _ids(x), ("all_to_all", result))


def _ka(x: Lookups) -> Load:
    rows = (x.room or x.tokens) * x.ways * x.row
    return Load(8, 2 * rows / x.ways + 2 * x.whole, (("all_gather", rows),))


def _ks(x: Lookups) -> Load:
    rows = (x.room or x.part) * x.ways * x.row
    return Load(8, 2 * rows + 2 * x.part * x.row, (("all_to_all", rows),))


def _kd(x: Lookups) -> Load:
    places = (x.room or x.tokens) * x.ways
    rows = places * x.row
    return Load(12, 2 * rows + 2 * x.whole, (("all_to_all", places * 4), ("all_to_all", rows)))


LOADS: Mapping[tuple[Layout, Wanted], Callable[[Lookups], Load]] = {
    ("whole", "all"): _replicated,
    ("whole", "scattered"): _replicated_parts,
    ("whole", "split"): _replicated,
    ("rows", "all"): _ra,
    ("rows", "scattered"): _rs,
    ("rows", "split"): _rsd,
    ("columns", "all"): _ca,
    ("columns", "scattered"): _cs,
    ("columns", "split"): _cd,
    ("cyclic", "all"): _ka,
    ("cyclic", "scattered"): _ks,
    ("cyclic", "split"): _kd,
}


@dataclass(frozen=True)
class Candidate:
    """A layout of one table for one site. `us` and `sent` are per batch size, `memory` in bytes
    per rank; `extra` of them are there for this layout only."""

    scheme: str
    layout: Layout
    us: tuple[float, ...]
    sent: tuple[float, ...]
    messages: int
    memory: int
    extra: int
    refused: str = ""

    def mean(self, weights: Sequence[float]) -> float:
        """Microseconds of a call, the batch sizes weighted."""
        return sum(w * us for w, us in zip(weights, self.us, strict=True)) / sum(weights)


@dataclass(frozen=True)
class Setting:
    """What the cost of a candidate depends on, but for the site."""

    module: Module
    topology: Topology
    link: str
    ways: int
    capacity: int
    sentinel: bool


def batch_sizes(site: Site, module: Module) -> tuple[int, ...]:
    """The fewest, typical and most tokens of a call that a rank looks up for itself, or all do."""
    return tuple(tokens for tokens, _ in _tokens(site, module))


def _tokens(site: Site, module: Module) -> list[tuple[int, int]]:
    """(tokens, those of a rank's part of the result) at three batch sizes."""
    type = site.ids.type
    ways = module.mesh.ways(site.axes)
    symbols = {name for dim in type.shape if not isinstance(dim, int) for name in dim.symbols()}
    if not symbols <= module.dims.keys():
        return [(n, -(-n // ways)) for n in UNKNOWN]
    found: list[tuple[int, int]] = []
    for i in range(3):
        given = {name: sizes[i] for name, sizes in module.dims.items()}
        shape = LocalSizes(module.mesh, given).shape(type)
        parts = (-(-n // ways) if at == site.dim else n for at, n in enumerate(shape))
        found.append((prod(shape), prod(parts)))
    return found


def candidate(
    site: Site, layout: Layout, table: Versions, tied: bool, setting: Setting
) -> Candidate:
    """The cost of a layout for one site; `tied` where the table is there for others anyway."""
    shape, pieces = table.shape, len(table.rows(layout))
    item = max(1, dtype(site.table.type.dtype).bits // 8)
    own = tied and layout == site.layout
    spare = (layout == "cyclic" or (setting.sentinel and layout != "whole")) and not own
    us, bytes_sent, count = list[float](), list[float](), 0
    for tokens, part in _tokens(site, setting.module):
        lookups = Lookups(
            tokens=tokens,
            part=part,
            row=shape[1] * item,
            width=-(-shape[1] // setting.ways) * item,
            ways=setting.ways,
            index=dtype(site.ids.type.dtype).bits // 8,
            room=setting.capacity,
            checked=layout == "rows" and not spare,
        )
        load = LOADS[layout, site.wanted](lookups)
        count = len(load.messages) * pieces
        us.append(pieces * _time(load, setting))
        bytes_sent.append(pieces * sum(sent(k, setting.ways, n) for k, n in load.messages))
    memory = rank_bytes(layout, shape, setting.ways, item, spare)
    name = scheme_name(layout, site.wanted)
    extra = 0 if own else memory
    return Candidate(name, layout, tuple(us), tuple(bytes_sent), count, memory, extra)


def _time(load: Load, setting: Setting) -> float:
    device = setting.topology.device
    total = load.kernels * device.kernel_us + load.bytes / device.hbm_gb_s / 1e3
    for kind, size in load.messages:
        total += setting.topology.time(kind, setting.ways, size, setting.link)
    return total

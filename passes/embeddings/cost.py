"""The cost of a scheme on one rank: microseconds and bytes sent at three batch sizes, and memory.

A lookup is some kernels, the bytes that they read and write, and collectives. Rows or shards of
rows that are shorter than a memory access cost a full one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

from irc.analysis.sizes import LocalSizes
from irc.analysis.topology import Topology, sent
from irc.ir.core import Module
from irc.ir.dtypes import dtype

from .schemes import Layout, Site, Wanted, scheme_name
from .tables import Versions, bytes_per_rank

ACCESS = 64  # bytes of one memory access
UNKNOWN = (1, 64, 8192)  # tokens where the module gives a symbol no range
BITWISE = frozenset(["R", "CA", "CS", "CD", "KA", "KS", "KD"])  # schemes that add nothing up

Message: TypeAlias = tuple[str, int]  # a collective and the bytes of the global tensor


@dataclass(frozen=True)
class Lookups:
    """One site at one batch size: `tokens` of one rank if the ids are sharded, else of all ranks.

    `part` of them are on a rank where the result is scattered. In bytes `row` is a complete row,
    `width` a rank's shard of its columns, `index` an id, `summed` what an all_reduce of rows sends
    (0: all rows). `capacity` is that of a cyclic scheme, 0 for no limit; `checked` says that
    foreign rows are zeroed afterwards, as there are no rows of zeros.
    """

    tokens: int
    part: int
    row: int
    width: int
    group_size: int
    index: int
    capacity: int = 0
    checked: bool = False
    summed: int = 0


@dataclass(frozen=True)
class Work:
    """Kernels, bytes to and from memory, and messages."""

    kernels: int
    bytes: float
    messages: tuple[Message, ...] = ()


def lookup_work(layout: Layout, wanted: Wanted, x: Lookups) -> Work:
    """The work of one lookup in a table of some layout."""
    scattered, sharded = wanted == "scattered", wanted == "sharded"
    mine = x.part if scattered else x.tokens  # rows that a rank ends with
    if layout == "replicated":
        return Work(1, 2 * mine * x.row)
    if layout == "cyclic":
        return _cyclic(wanted, x, mine)
    every = x.tokens * (x.group_size if sharded else 1)  # ids that each rank looks up
    ids = (("all_gather", every * x.index),) if sharded else ()
    if layout == "rows":
        # each rank reads its shard and writes all rows; one more pass zeroes foreign rows
        result, passes = every * x.row, 3 if x.checked else 1
        moved = result / x.group_size + passes * result
        end = ("all_reduce", x.summed or result)
        if wanted != "replicated":
            end = ("reduce_scatter", mine * x.group_size * x.row)
        return Work(3 if x.checked else 2, moved, (*ids, end))
    # each rank reads and writes its columns of all rows; the merge reads and writes the result
    result = mine * x.group_size * x.width
    read = max(x.width, ACCESS) if x.width else 0  # a shard of a row
    moved = every * (read + x.width) + 2 * result
    return Work(
        2, moved, (*ids, ("all_gather" if wanted == "replicated" else "all_to_all", result))
    )


def _cyclic(wanted: Wanted, x: Lookups, mine: int) -> Work:
    places = (x.capacity or mine) * x.group_size
    rows = places * x.row
    if wanted == "replicated":
        return Work(8, 2 * rows / x.group_size + 2 * mine * x.row, (("all_gather", rows),))
    ids = (("all_to_all", places * 4),) if wanted == "sharded" else ()
    return Work(12 if ids else 8, 2 * rows + 2 * mine * x.row, (*ids, ("all_to_all", rows)))


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
    rejection: str = ""

    def mean(self, weights: Sequence[float]) -> float:
        """Microseconds of a call, the batch sizes weighted."""
        return sum(w * us for w, us in zip(weights, self.us, strict=True)) / sum(weights)


@dataclass(frozen=True)
class CostContext:
    """What the cost of a candidate depends on, but for the site."""

    module: Module
    topology: Topology
    link: str
    group_size: int
    capacity: int
    sentinel: bool


def batch_sizes(site: Site, module: Module) -> tuple[int, ...]:
    """The fewest, typical and most tokens of a call that a rank looks up for itself, or all do."""
    return tuple(tokens for tokens, *_ in _tokens(site, module))


def _tokens(site: Site, module: Module) -> list[tuple[int, int, int]]:
    """(tokens, those of a rank's shard of the result, elements that the end adds up where it is
    behind other operations, else 0) at three batch sizes."""
    type = site.ids.type
    group_size = module.mesh.group_size(site.axes)
    symbols = {name for dim in type.shape if not isinstance(dim, int) for name in dim.symbols()}
    if not symbols <= module.dims.keys():
        return [(n, -(-n // group_size), 0) for n in UNKNOWN]
    batches: list[tuple[int, int, int]] = []
    for i in range(3):
        given = {name: sizes[i] for name, sizes in module.dims.items()}
        sizes = LocalSizes(module.mesh, given)
        shape = sizes.shape(type)
        parts = (-(-n // group_size) if at == site.dim else n for at, n in enumerate(shape))
        summed = prod(sizes.shape(site.chain[-1].result.type)) if site.chain else 0
        batches.append((prod(shape), prod(parts), summed))
    return batches


def candidate(
    site: Site, layout: Layout, table: Versions, tied: bool, context: CostContext
) -> Candidate:
    """The cost of a layout for one site; `tied` where the table is there for others anyway."""
    shape, pieces = table.shape, len(table.rows(layout))
    item = max(1, dtype(site.table.type.dtype).bits // 8)
    own = tied and layout == site.layout
    spare = (layout == "cyclic" or (context.sentinel and layout != "replicated")) and not own
    us, bytes_sent, count = list[float](), list[float](), 0
    for tokens, part, summed in _tokens(site, context.module):
        lookups = Lookups(
            tokens=tokens,
            part=part,
            row=shape[1] * item,
            width=-(-shape[1] // context.group_size) * item,
            group_size=context.group_size,
            index=dtype(site.ids.type.dtype).bits // 8,
            capacity=context.capacity,
            checked=layout == "rows" and not spare,
            summed=summed * item,
        )
        work = lookup_work(layout, site.wanted, lookups)
        count = len(work.messages) * pieces
        us.append(pieces * _time(work, context))
        bytes_sent.append(pieces * sum(sent(k, context.group_size, n) for k, n in work.messages))
    hot = table.hot_rows(layout)
    cold = (shape[0] - hot, shape[1])
    memory = bytes_per_rank(layout, cold, context.group_size, item, spare) + hot * shape[1] * item
    name = scheme_name(layout, site.wanted)
    extra = 0 if own else memory
    return Candidate(name, layout, tuple(us), tuple(bytes_sent), count, memory, extra)


def _time(work: Work, context: CostContext) -> float:
    device = context.topology.device
    total = work.kernels * device.kernel_us + work.bytes / device.hbm_gb_s / 1e3
    for kind, size in work.messages:
        total += context.topology.time(kind, context.group_size, size, context.link)
    return total

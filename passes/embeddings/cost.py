"""The cost of a scheme on one rank: microseconds and bytes sent at three batch sizes, and memory.

A lookup is some kernels, the bytes that they read and write, and collectives. Rows or shards of
rows that are shorter than a memory access cost a full one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from irc.analysis.communication import slowest_link
from irc.analysis.cost import PER_GB
from irc.analysis.sizes import LocalSizes
from irc.analysis.topology import Topology, sent
from irc.analysis.units import amount
from irc.ir.core import Module
from irc.ir.dtypes import dtype

from .schemes import LAYOUTS, SCHEMES, Layout, Scheme, Site
from .tables import Table

if TYPE_CHECKING:
    from . import RewriteEmbeddings

ACCESS = 64  # bytes of one memory access
UNKNOWN = (1, 64, 8192)  # tokens where the module gives a symbol no range
# Weights of the fewest, typical and most tokens: decoding calls the model once per token.
WEIGHTS = (0.9, 0.09, 0.01)
REQUESTED = "it was requested"  # the reason for a scheme that is not the cheapest
ORDER: tuple[Layout, ...] = ("replicated", "columns", "rows", "cyclic")  # of equal costs


class Batch(NamedTuple):
    """`tokens` that a rank looks up, or all do where the ids are replicated; those of a `shard` of
    them; and the elements `summed` behind other operations (0: the rows themselves)."""

    tokens: int
    shard: int
    summed: int


class Work(NamedTuple):
    """Kernels, bytes to and from memory, and collectives with the bytes of the global tensor."""

    kernels: int
    bytes: float
    messages: Sequence[tuple[str, int]] = ()


@dataclass(frozen=True)
class Candidate:
    """A scheme for one site. `us` and `sent` are per batch size, `memory` in bytes per rank, of
    which `extra` are there for this scheme only; `refusal` says why it is not allowed."""

    scheme: Scheme
    us: tuple[float, ...]
    sent: tuple[float, ...]
    messages: int
    memory: int
    extra: int
    refusal: str

    @property
    def mean(self) -> float:
        """Microseconds of a call, the batch sizes weighted."""
        return sum(w * us for w, us in zip(WEIGHTS, self.us, strict=True))

    def row(self, chosen: bool, requested: bool) -> str:
        """A line of the report: microseconds, bytes sent, memory."""
        times = "/".join(f"{us:.1f}" for us in self.us)
        data = "/".join(amount(n) for n in self.sent)
        shared = "" if self.extra else " (shared)"
        note = f"; {self.refusal}" if self.refusal else ""
        note += ", as asked" if chosen and requested and note else ""
        note += "; chosen" if chosen else ""
        held = f"{amount(self.memory)}{shared}"
        return f"  {self.scheme.name:<3} {times} us, sends {data}, holds {held}{note}"


def batches(site: Site, module: Module) -> list[Batch]:
    """The fewest, typical and most tokens of a call."""
    type = site.ids.type
    group_size = module.mesh.group_size(site.axes)
    symbols = {name for dim in type.shape if not isinstance(dim, int) for name in dim.symbols()}
    if not symbols <= module.dims.keys():
        return [Batch(n, -(-n // group_size), 0) for n in UNKNOWN]
    calls: list[Batch] = []
    for i in range(3):
        sizes = LocalSizes(module.mesh, {name: range[i] for name, range in module.dims.items()})
        shape = sizes.shape(type)
        shard = (-(-n // group_size) if at == site.dim else n for at, n in enumerate(shape))
        summed = prod(sizes.shape(site.chain[-1].result.type)) if site.chain else 0
        calls.append(Batch(prod(shape), prod(shard), summed))
    return calls


class CostModel:
    """The costs of the schemes of one table."""

    def __init__(self, table: Table, options: RewriteEmbeddings, topology: Topology) -> None:
        self.table, self.options, self.topology = table, options, topology
        self.link = slowest_link(table.module.mesh.groups(table.axes), topology)
        self.item = max(1, dtype(table.weight.type.dtype).bits // 8)

    def candidate(self, site: Site, layout: Layout) -> Candidate:
        """The cost of a layout for one site."""
        table, scheme, size = self.table, SCHEMES[layout, site.wanted], self.table.group_size
        is_present = table.tied and layout == table.layout
        zeros = layout == "cyclic" or (self.options.sentinel and layout != "replicated")
        zeros &= not is_present
        pieces = len(table.rows(layout))
        work = [self._work(site, scheme, batch, zeros) for batch in batches(site, table.module)]
        memory = table.elements_per_rank(layout, zeros) * self.item
        extra = 0 if is_present else memory
        return Candidate(
            scheme=scheme,
            us=tuple(pieces * self._time(step) for step in work),
            sent=tuple(pieces * sum(sent(k, size, n) for k, n in step.messages) for step in work),
            messages=pieces * len(work[0].messages),
            memory=memory,
            extra=extra,
            refusal=self._refusal(extra),
        )

    def _refusal(self, extra: int) -> str:
        """Why a scheme that takes so many bytes more is not allowed, or nothing."""
        if self.table.tied and extra and not self.options.copy:
            return "takes a second copy of a table with other uses"
        if self.options.memory is not None and extra > self.options.memory * 1e9:
            return f"takes more than {self.options.memory:g} GB"
        return ""

    def _work(self, site: Site, scheme: Scheme, batch: Batch, zeros: bool) -> Work:
        """The work of one lookup; without rows of `zeros` foreign rows are zeroed afterwards."""
        size, index = self.table.group_size, dtype(site.ids.type.dtype).bits // 8
        row = self.table.shape[1] * self.item
        width = -(-self.table.shape[1] // size) * self.item  # a shard of a row
        mine = batch.shard if site.wanted == "scattered" else batch.tokens  # rows of a rank
        if scheme.layout == "replicated":
            return Work(1, 2 * mine * row)
        if scheme.layout == "cyclic":
            places = (self.options.capacity or mine) * size
            ids = [(scheme.ids, places * 4)] if scheme.ids else []
            read = places * row // (size if scheme.rows == "all_gather" else 1)
            moved = 2 * read + 2 * mine * row
            return Work(12 if ids else 8, moved, [*ids, (scheme.rows, places * row)])
        every = batch.tokens * (size if scheme.ids else 1)  # ids that each rank looks up
        ids = [(scheme.ids, every * index)] if scheme.ids else []
        if scheme.layout == "columns":
            # each rank reads and writes its columns of all rows; the merge reads and writes rows
            result = mine * size * width
            read = max(width, ACCESS) if width else 0
            moved = every * (read + width) + 2 * result
            return Work(2, moved, [*ids, (scheme.rows, result)])
        # each rank reads its shard and writes all rows; one more pass zeroes foreign rows
        result = every * row
        moved = result / size + (1 if zeros else 3) * result
        if scheme.rows == "reduce_scatter":
            result = mine * size * row
        elif batch.summed:
            result = batch.summed * self.item
        return Work(2 if zeros else 3, moved, [*ids, (scheme.rows, result)])

    def _time(self, work: Work) -> float:
        device, size = self.topology.device, self.table.group_size
        total = work.kernels * device.kernel_us + work.bytes / device.hbm_gb_s / 1e3
        return total + sum(self.topology.time(k, size, n, self.link) for k, n in work.messages)


def cheapest(options: dict[Layout, list[Candidate]]) -> Layout | None:
    """The layout whose sites cost least together with the memory, None if no layout is allowed; of
    equal ones that with fewer collectives, then an exact one, then R, columns, rows, cyclic."""

    def key(layout: Layout) -> tuple[float, int, bool]:
        candidates = options[layout]
        time = sum(c.mean for c in candidates) + PER_GB * candidates[0].extra / 1e9
        is_exact = all(c.scheme.is_exact for c in candidates)
        return round(time, 3), sum(c.messages for c in candidates), not is_exact

    refused = {layout for layout in ORDER if any(c.refusal for c in options[layout])}
    allowed: list[Layout] = [layout for layout in ORDER if layout not in refused]
    return min(allowed, key=key, default=None)


def report(
    site: Site, table: Table, candidates: dict[Layout, Candidate], chosen: Layout, reason: str
) -> list[str]:
    """A sentence about the site, and a line per candidate."""
    tokens = "/".join(str(batch.tokens) for batch in batches(site, table.module))
    head = (
        f"@{table.weight.name}, {table.weight.type.replicated}, is looked up by "
        f"{candidates[chosen].scheme.name}: {reason}; {site.need}. Per call of {tokens} tokens:"
    )
    return [head, *(candidates[name].row(name == chosen, reason == REQUESTED) for name in LAYOUTS)]

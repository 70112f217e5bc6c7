"""Pages of a pool of KV caches, which the pass page-caches makes, and who has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ..backends.base import Ports, Program, Stream
from ..errors import Error
from ..ir.dims import Dim

Array: TypeAlias = np.ndarray[Any, Any]

PAGES = "pages"  # the input i32 [B, N] with the pages of each row, -1 for none


@dataclass(frozen=True)
class Layout:
    """The tokens of a page, the pages of a row at most, and the symbol of the pages of the pool."""

    size: int
    count: int
    symbol: str

    def pages(self, tokens: int) -> int:
        """How many pages hold so many tokens."""
        return -(-tokens // self.size)


def layout(ports: Ports) -> Layout | None:
    """How the caches of a program lie in pages; None where they do not."""
    table = next((port.shape for port in ports.inputs if port.name == PAGES), ())
    pools = [port.shape for port in ports.states if len(port.shape) == 4]
    if len(table) != 2 or not pools or len(pools) < len(ports.states):
        return None
    (pool, _, size, _), count = pools[0], table[1]
    if not isinstance(pool, Dim) or not isinstance(size, int) or not isinstance(count, int):
        return None
    return Layout(size, count, str(pool))


class PagePool:
    """The pages of a program, which rows take and give back; all share one stream, and so the
    plans and graphs of its device. A page may belong to several rows, until one writes into it."""

    def __init__(self, program: Program, tokens: int) -> None:
        pools = layout(program.ports)
        if pools is None:
            raise Error(
                "expected a program with pools of pages, found one with a cache per conversation; "
                "compile it with --page-caches"
            )
        self.layout = pools
        count = max(1, pools.pages(tokens))
        # the last page, which page -1 reads, stays zeros: backends multiply unseen values by 0
        self.sizes = {pools.symbol: count + 1}
        self.stream: Stream = program.open(self.sizes)
        self._users = np.zeros(count, np.int32)
        self._free = [*reversed(range(count))]

    @property
    def count(self) -> int:
        """How many pages there are."""
        return len(self._users)

    @property
    def free_tokens(self) -> int:
        """How many more tokens the free pages hold."""
        return len(self._free) * self.layout.size

    def take(self, count: int) -> list[int]:
        """So many pages of no other row, or an Error."""
        if count > len(self._free):
            raise Error(
                f"expected {count} free pages of {self.layout.size} tokens, found "
                f"{len(self._free)}: the pool has {self.count}, which hold "
                f"{self.count * self.layout.size} tokens; end a conversation, or open a "
                "pool for more tokens"
            )
        pages = [self._free.pop() for _ in range(count)]
        self._users[pages] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Let another row have these pages, too."""
        np.add.at(self._users, [page for page in pages if page >= 0], 1)

    def give(self, pages: Iterable[int]) -> None:
        """Take pages, but for -1, from a row; those of no other row become free."""
        for page in pages:
            if page >= 0:
                self._users[page] -= 1
                if not self._users[page]:
                    self._free.append(int(page))

    def write(self, row: Array, begin: int, end: int) -> list[tuple[int, int]]:
        """Give a row of pages room for its tokens `begin` to `end` - 1, which it writes.

        Returns (old, new) of a page of other rows too, in whose place there is a new one, which
        needs a copy of it. Nothing has changed where it raises an Error.
        """
        first, last = begin // self.layout.size, self.layout.pages(end)
        if end > self.layout.count * self.layout.size:
            raise Error(
                f"a sequence of this model has at most {self.layout.count * self.layout.size} "
                f"tokens, found one of {end}"
            )
        shared = [at for at in range(first, last) if row[at] >= 0 and self._users[row[at]] > 1]
        wanted = [at for at in range(first, last) if row[at] < 0] + shared
        pages = self.take(len(wanted)) if wanted else []
        new = dict(zip(wanted, pages, strict=True))
        copies = [(int(row[at]), new[at]) for at in shared]
        self.give(old for old, _ in copies)
        for at, page in new.items():
            row[at] = page
        return copies


class RowPages:
    """The pages of the rows of a batch: `table` i32 [rows, N]."""

    def __init__(self, pool: PagePool, rows: int) -> None:
        self.pool = pool
        self.table = np.full((rows, pool.layout.count), -1, np.int32)

    def write(self, first: int, past: Array, counts: Array) -> None:
        """Give rows `first`, `first + 1`, ... room for `counts` more tokens behind `past` ones."""
        copies: list[tuple[int, int]] = []
        try:
            for row, (begin, count) in enumerate(zip(past.tolist(), counts.tolist(), strict=True)):
                if count:
                    copies += self.pool.write(self.table[first + row], begin, begin + count)
        finally:  # also of the rows in front of one without room
            if copies:
                sources, targets = zip(*copies, strict=True)
                self.pool.stream.copy_rows(sources, targets)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Let row `targets[i]` have the pages of row `sources[i]`, which both share."""
        new = self.table[list(sources)]
        self.pool.share(new.reshape(-1).tolist())
        self.clear(targets)
        self.table[list(targets)] = new

    def clear(self, rows: Sequence[int], past: int = 0) -> None:
        """Give back the pages of rows behind their first `past` tokens."""
        first = self.pool.layout.pages(past)
        for row in rows:
            self.pool.give(self.table[row, first:].tolist())
            self.table[row, first:] = -1

    def zero(self, rows: Sequence[int]) -> None:
        """Fill the pages of rows with zeros."""
        pages = [int(page) for page in self.table[list(rows)].reshape(-1) if page >= 0]
        if pages:
            self.pool.stream.clear_rows(pages)

    def close(self) -> None:
        """Give back all pages."""
        self.clear(range(len(self.table)))

"""The heads of each rank, where those of a model do not divide.

Query heads that share a key-value head stay with it. Some key-value heads are replicated, each copy
with some of its query heads, and the rest is padded with heads of zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

Heads = tuple[int | None, ...]  # per new head, the old one that it copies, or None for zeros


@dataclass(frozen=True)
class Layout:
    """The new query and key-value heads, in order: equal numbers for each rank, groups together."""

    queries: Heads
    keys: Heads

    def reason(self, group_size: int) -> str:
        """The layout as a clause, for --explain."""
        copies = max(self.keys.count(head) for head in self.keys if head is not None)
        held = "no head is replicated"
        if copies > 1:
            held = f"key-value heads are held up to {copies} times"
        zeros = self.queries.count(None), self.keys.count(None)
        padded = f", {zeros[0]} query and {zeros[1]} key-value heads of zeros are added"
        return (
            f"{held}{padded if any(zeros) else ''}, so that a rank has "
            f"{len(self.queries) // group_size} and {len(self.keys) // group_size}"
        )


def head_layout(heads: int, kv_heads: int, group_size: int) -> Layout:
    """The layout with the fewest heads in which every rank gets equal numbers of both."""
    group = heads // kv_heads
    options = [_option(heads, kv_heads, group_size, copies) for copies in range(1, group + 1)]
    return min(options, key=lambda option: len(option.queries) + len(option.keys))


def _option(heads: int, kv_heads: int, group_size: int, copies: int) -> Layout:
    """Every key-value head up to `copies` times, each copy with its query heads."""
    group = heads // kv_heads
    share = -(-group // copies)
    keys: list[int | None] = []
    queries: list[int | None] = []
    for kv in range(kv_heads):
        for begin in range(0, group, share):
            mine = range(begin, min(begin + share, group))
            keys.append(kv)
            queries += [kv * group + i for i in mine] + [None] * (share - len(mine))
    missing = -len(keys) % group_size
    return Layout((*queries, *[None] * (missing * share)), (*keys, *[None] * missing))

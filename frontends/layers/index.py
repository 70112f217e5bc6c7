"""`FrozenIndex`: maps keys to their rows in a table whose keys are fixed at compile time.

The sorted keys are the leaves of a tree whose nodes hold the first keys of `branching` children. A
search reads one node per level and continues with the last child whose first key is <= the key.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...errors import Error
from ...source import here
from .. import functional as F
from ..module import Module, ModuleList, Parameter
from ..tensor import Tensor

RESERVED = 2**63 - 1  # pads the nodes; no key has this value
MOST = 2**31 - 1  # row numbers are i32


class Level(Module):
    """The nodes of one level of the tree: [nodes, branching] keys in ascending order."""

    def __init__(self, nodes: int, branching: int) -> None:
        self.keys = Parameter((nodes, branching), "i64")


class FrozenIndex(Module):
    """Keys to their positions in ascending order, -1 for an unknown key.

    `frozen_levels` makes the weights, `levels.0.keys` (the leaves), `levels.1.keys`, and so on.
    With `permuted` the weight `rows` [count] has a row for every position, so that rows may be in
    any order.
    """

    def __init__(self, count: int, branching: int = 16, permuted: bool = False) -> None:
        if branching < 2 or count < 1:
            raise Error("an index needs at least 1 key and a branching of at least 2", loc=here())
        sizes = _sizes(count, branching)
        if sizes[0] * branching > MOST:
            raise Error(
                f"expected at most {MOST} keys of an index, found {count}; number the rows by "
                "themselves (use_hashtable=False), or split the table",
                loc=here(),
            )
        self.levels = ModuleList([Level(nodes, branching) for nodes in sizes])
        self.branching = branching
        self.rows = Parameter((count,), "i32") if permuted else None

    def forward(self, keys: Tensor) -> Tensor:
        """keys i32|i64 [...] to i32 [...]."""
        keys = F.cast(keys, "i64") if keys.dtype != "i64" else keys
        # The padding is above every key, even RESERVED. Compared, because runtimes are known to
        # compute wrong minima of 64-bit integers.
        most = F.full(RESERVED - 1, dtype="i64")
        wanted = F.where(F.lt(keys, most), keys, most).unsqueeze(-1)
        zero = F.full(0, dtype="i32")
        node: Tensor | None = None
        for level in reversed(list(self.levels)):
            held = level.keys.reshape(-1) if node is None else F.gather(level.keys, node, dim=0)
            count = F.reduce_sum(F.cast(F.le(held, wanted), "i32"), dims=(-1,))
            # a key below all others is compared with the first key, which differs
            child = F.where(F.gt(count, zero), count - 1, zero)
            node = child if node is None else node * self.branching + child
        assert node is not None
        leaves = self.levels[0].keys.reshape(-1)
        present = F.eq(F.gather(leaves, node, dim=0), keys)
        if self.rows is not None:
            node = F.gather(self.rows, F.where(present, node, zero), dim=0)
        return F.where(present, node, F.full(-1, dtype="i32"))


def frozen_levels(
    keys: Sequence[int] | np.ndarray, branching: int = 16, capacity: int | None = None
) -> list[np.ndarray]:
    """The weights of a FrozenIndex of `keys` in any order, leaves first.

    `capacity` is the count of the index, by default the number of keys; it may be larger.
    """
    flat = np.asarray(keys, np.int64).reshape(-1)
    first = np.unique(flat)
    if len(first) != len(flat) or not len(flat) or first[-1] == RESERVED:
        raise Error(f"expected at least one key, all distinct and below {RESERVED}")
    capacity = len(first) if capacity is None else capacity
    if len(first) > capacity:
        raise Error(f"expected at most {capacity} keys, found {len(first)}; raise the capacity")
    levels: list[np.ndarray] = []
    for nodes in _sizes(capacity, branching):
        level = np.full((nodes, branching), RESERVED, np.int64)
        level.reshape(-1)[: len(first)] = first
        levels.append(level)
        first = level[:, 0]
    return levels


def _sizes(count: int, branching: int) -> list[int]:
    """The number of nodes of every level, leaves first."""
    sizes = [-(-count // branching)]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // branching))
    return sizes

"""A collective call: which collective, over which ranks, for which node of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from irc.errors import Error

Array: TypeAlias = np.ndarray[Any, Any]
_DIVIDING = ("reduce_scatter", "all_to_all", "scatter")


@dataclass(frozen=True)
class CollectiveCall:
    """One collective along dimension 0, as a `DistCollective` node of a model states it.

    `operation`: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather or
    scatter. `reduce_op`: sum, max, min, prod or none. `group`: the participating ranks, in the
    order of their shards. `root`: a position in the group. `place` names the node and the line of
    the user's script in error messages.
    """

    operation: str
    reduce_op: str
    group: tuple[int, ...]
    root: int = 0
    place: str = ""

    def result_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of one rank's result from that of its operand; an Error where it cannot be
        divided into equal shards."""
        group_size = len(self.group)
        if self.operation in _DIVIDING and shape[0] % group_size:
            raise Error(
                f"{self.operation} divides dimension 0 of {list(shape)} into {group_size} equal "
                f"shards in {self.place or 'a call'}; pad it"
            )
        if self.operation in ("all_gather", "gather"):
            return (shape[0] * group_size, *shape[1:])
        if self.operation in ("reduce_scatter", "scatter"):
            return (shape[0] // group_size, *shape[1:])
        return shape

    def description(self, operand: Array) -> str:
        """The call on such an operand, in words: equal on all ranks that make the same call."""
        shape = ", ".join(map(str, operand.shape))
        kind = self.operation
        kind += "" if self.reduce_op == "none" else f" ({self.reduce_op})"
        root = f" from {self.root}" if self.root > 0 else ""
        return f"{kind}{root} of {operand.dtype}[{shape}] in {self.place or 'a model'}"

"""Computes collectives along dimension 0 in numpy: each rank's share of the work.

Reductions add in the order of the group, so that results do not depend on which rank came first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from irc.backends.ranks.communicator import CollectiveCall
from irc.ops.collective import REDUCTIONS

Array: TypeAlias = np.ndarray[Any, Any]


def perform(
    call: CollectiveCall, position: int, operands: Sequence[Array], results: Sequence[Array]
) -> None:
    """Compute the share of the rank at `position` in the group; all shares make the collective.

    `operands` and `results` are those of all ranks of the group, in order. No two shares write the
    same bytes, so that they may run at the same time.
    """
    group_size, mine = len(operands), results[position]
    match call.operation:
        case "all_reduce" | "reduce":
            part = _share(position, operands[0].size, group_size)
            out = results[call.root].reshape(-1)[part]
            reduce_parts(call.reduce_op, [x.reshape(-1)[part] for x in operands], out)
            if call.operation == "reduce":
                _zero_elsewhere(call, position, mine)
                return
            for other in results:
                other.reshape(-1)[part] = out
        case "reduce_scatter":
            reduce_parts(call.reduce_op, [_shard(x, position, group_size) for x in operands], mine)
        case "all_gather":
            _join(operands, mine)
        case "gather":
            _zero_elsewhere(call, position, mine)
            if position == call.root:
                _join(operands, mine)
        case "broadcast":
            mine[...] = operands[call.root]
        case "scatter":
            mine[...] = _shard(operands[call.root], position, group_size)
        case "all_to_all":
            _join([_shard(x, position, group_size) for x in operands], mine)
        case _:
            raise ValueError(f"no collective is called {call.operation}")


def _share(position: int, size: int, group_size: int) -> slice:
    return slice(position * size // group_size, (position + 1) * size // group_size)


def _shard(array: Array, position: int, group_size: int) -> Array:
    size = array.shape[0] // group_size
    return array[position * size : (position + 1) * size]


def _join(parts: Sequence[Array], out: Array) -> None:
    np.concatenate(parts, out=out)


def _zero_elsewhere(call: CollectiveCall, position: int, mine: Array) -> None:
    if position != call.root:
        mine[...] = 0


def reduce_parts(reduce_op: str, parts: Sequence[Array], out: Array) -> None:
    """Combine the parts of all ranks in the order of the group, into `out`."""
    if len(parts) == 1:
        out[...] = parts[0]
        return
    combine = REDUCTIONS[reduce_op]
    with np.errstate(all="ignore"):  # infinity and NaN are results like any other
        combine(parts[0], parts[1], out=out)
        for part in parts[2:]:
            combine(out, part, out=out)

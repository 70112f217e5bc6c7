"""What collectives mean in numpy, along dimension 0: each rank's share of the work.

Reductions add in the order of the group, so that results do not depend on who came first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from irc.backends.communicator import Exchange
from irc.ops.collective import REDUCTIONS

Array: TypeAlias = np.ndarray[Any, Any]


def perform(
    what: Exchange, position: int, operands: Sequence[Array], results: Sequence[Array]
) -> None:
    """The share of the rank at `position` in the group; all shares together are the collective.

    `operands` and `results` are those of the whole group, in order. No two shares write the same
    bytes, so that they may run at the same time.
    """
    ways, mine = len(operands), results[position]
    match what.operation:
        case "all_reduce":
            part = _share(position, operands[0].size, ways)
            first = results[0].reshape(-1)[part]
            reduce_parts(what.reduce_op, [x.reshape(-1)[part] for x in operands], first)
            for other in results[1:]:
                other.reshape(-1)[part] = first
        case "reduce":
            part = _share(position, operands[0].size, ways)
            out = results[what.root].reshape(-1)[part]
            reduce_parts(what.reduce_op, [x.reshape(-1)[part] for x in operands], out)
            _zero_elsewhere(what, position, mine)
        case "reduce_scatter":
            reduce_parts(what.reduce_op, [_part(x, position, ways) for x in operands], mine)
        case "all_gather":
            _join(operands, mine)
        case "gather":
            _zero_elsewhere(what, position, mine)
            if position == what.root:
                _join(operands, mine)
        case "broadcast":
            mine[...] = operands[what.root]
        case "scatter":
            mine[...] = _part(operands[what.root], position, ways)
        case "all_to_all":
            _join([_part(x, position, ways) for x in operands], mine)
        case _:
            raise ValueError(f"no collective is called {what.operation}")


def _share(position: int, size: int, ways: int) -> slice:
    return slice(position * size // ways, (position + 1) * size // ways)


def _part(array: Array, position: int, ways: int) -> Array:
    size = array.shape[0] // ways
    return array[position * size : (position + 1) * size]


def _join(parts: Sequence[Array], out: Array) -> None:
    np.concatenate(parts, out=out)


def _zero_elsewhere(what: Exchange, position: int, mine: Array) -> None:
    if position != what.root:
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

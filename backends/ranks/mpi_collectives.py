"""Posts a collective call as one of MPI's own non-blocking collectives.

MPI adds and multiplies f32, f64, i32 and i64; f16 and bf16 as f32, narrower integers as i32. All
else is moved as bytes: the operands of other reductions (max and min, where NaN counts, and types
of four bits) to every rank, which reduces them in the order of the group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np

from irc.backends.ranks.combine import reduce_parts
from irc.backends.ranks.communicator import CollectiveCall
from irc.ops.collective_names import REDUCING

Array: TypeAlias = np.ndarray[Any, Any]


class Posted(NamedTuple):
    """A collective under way: `finish` writes the result once the request is done.

    `buffers`: memory that MPI reads and writes until then.
    """

    request: Any
    finish: Callable[[], None]
    buffers: tuple[Array, ...]


# The dtype in which MPI sums a dtype. (Open MPI's sums of 8 bits saturate.)
_SUMMED_IN = {
    np.dtype(kind): np.dtype(wide)
    for wide, kinds in {
        "f4": ("f4", np.float16, ml_dtypes.bfloat16),
        "f8": ("f8",),
        "i4": ("i4", "i2", "i1", "u1"),
        "i8": ("i8",),
    }.items()
    for kind in kinds
}


def post(mpi: Any, comm: Any, call: CollectiveCall, operand: Array, result: Array) -> Posted:
    """Start a collective on `comm`, whose ranks are those of the call's group in order."""
    if call.operation not in REDUCING:
        return _post_move(comm, call, operand, result)
    if operand.dtype in _SUMMED_IN and call.reduce_op in ("sum", "prod"):
        return _post_reduction(mpi, comm, call, operand, result)
    return _post_gathering_reduction(comm, call, operand, result)


def _post_reduction(
    mpi: Any, comm: Any, call: CollectiveCall, operand: Array, result: Array
) -> Posted:
    kind = _SUMMED_IN[operand.dtype]
    sent = operand.astype(kind, copy=False)
    received = result if kind == result.dtype else np.empty(result.shape, kind)
    op = mpi.SUM if call.reduce_op == "sum" else mpi.PROD
    unused = call.operation == "reduce" and comm.Get_rank() != call.root
    if call.operation == "all_reduce":
        request = comm.Iallreduce(sent, received, op)
    elif call.operation == "reduce_scatter":
        request = comm.Ireduce_scatter_block(sent, received, op)
    else:
        request = comm.Ireduce(sent, None if unused else received, op, call.root)

    def finish() -> None:
        if unused:
            result[...] = 0
        elif received is not result:
            with np.errstate(all="ignore"):
                np.copyto(result, received, casting="unsafe")

    return Posted(request, finish, (sent, received))


def _post_gathering_reduction(
    comm: Any, call: CollectiveCall, operand: Array, result: Array
) -> Posted:
    every = np.empty((len(call.group), *result.shape), result.dtype)
    move = comm.Ialltoall if call.operation == "reduce_scatter" else comm.Iallgather
    sent, received = as_bytes(operand), as_bytes(every)
    request = move(sent, received)

    def finish() -> None:
        if call.operation == "reduce" and comm.Get_rank() != call.root:
            result[...] = 0
        else:
            reduce_parts(call.reduce_op, [every[i] for i in range(len(every))], result)

    return Posted(request, finish, (sent, received))


def _post_move(comm: Any, call: CollectiveCall, operand: Array, result: Array) -> Posted:
    is_root = comm.Get_rank() == call.root
    sent, received = as_bytes(operand), as_bytes(result)
    match call.operation:
        case "all_gather":
            request = comm.Iallgather(sent, received)
        case "all_to_all":
            request = comm.Ialltoall(sent, received)
        case "gather":
            request = comm.Igather(sent, received if is_root else None, call.root)
        case "scatter":
            request = comm.Iscatter(sent if is_root else None, received, call.root)
        case _:  # broadcast
            if is_root:
                result[...] = operand
            request = comm.Ibcast(received, call.root)

    def finish() -> None:
        if call.operation == "gather" and not is_root:
            result[...] = 0

    return Posted(request, finish, (sent, received))


def as_bytes(array: Array) -> Array:
    """The bytes of a contiguous array, without a copy."""
    return array.reshape(-1).view(np.uint8)

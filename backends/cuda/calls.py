"""The NCCL call of each collective: its function and its arguments for a dtype and a size."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, TypeAlias

from irc.backends.cuda.runtime import unavailable
from irc.errors import Error
from irc.ir.dtypes import DTYPES
from irc.ir.dtypes import dtype as dtype_called
from irc.ops.collective_names import REDUCING, ROOTED

Library: TypeAlias = Any  # the module nccl.bindings.nccl, or a test's double of it

SUCCESS, IN_PROGRESS = 0, 7  # ncclResult_t
UINT8 = 1  # ncclDataType_t
_DTYPES = {each.name: each.nccl for each in DTYPES.values() if each.nccl is not None}
_REDUCE = {"sum": 0, "prod": 1, "max": 2, "min": 3}
# NCCL has no bool. On bytes that are 0 or 1, max means `or` and min means `and`.
_REDUCE_BOOL = {"sum": 2, "max": 2, "prod": 3, "min": 3}

# Operations that give ranks other than the root zeros, where NCCL writes nothing.
ZERO_ELSEWHERE = ("reduce", "gather")


def find_library() -> Library:
    """The bindings of nccl4py; an Error names the extra to install where NCCL is not available."""
    try:
        from nccl.bindings import nccl

        nccl.get_version()
    except (ImportError, RuntimeError, OSError) as error:
        raise unavailable("NCCL", error) from error
    return nccl


def call_of(
    library: Library,
    operation: str,
    dtype: str,
    elements: int,
    ranks: int,
    reduce_op: str = "none",
    root: int = -1,
) -> tuple[Any, tuple[int, ...]]:
    """(function, numbers), for function(source, target, *numbers, communicator, stream).

    `elements` is the size of one rank's operand. A dtype that NCCL lacks is sent as bytes, unless
    the operation reduces.
    """
    shard = elements // ranks
    calls = {
        "all_reduce": ("all_reduce", elements),
        "reduce_scatter": ("reduce_scatter", shard),
        "reduce": ("reduce", elements),
        "all_gather": ("all_gather", elements),
        "gather": ("gather", elements),
        "broadcast": ("broadcast", elements),
        "all_to_all": ("allto_all", shard),
        "scatter": ("scatter", shard),
    }
    if operation not in calls:
        raise Error(f"NCCL has no collective called {operation!r}")
    function, count = calls[operation]
    if operation in REDUCING:
        numbers = (count, *_reduced(dtype, reduce_op))
    elif dtype in _DTYPES:
        numbers = (count, _DTYPES[dtype])
    else:
        numbers = (count * dtype_called(dtype).numpy.itemsize, UINT8)
    return getattr(library, function), (*numbers, root) if operation in ROOTED else numbers


def _reduced(dtype: str, reduce_op: str) -> tuple[int, int]:
    if reduce_op not in _REDUCE:
        raise Error(f"expected the reduction sum, max, min or prod, found {reduce_op!r}")
    if dtype == "bool":
        return UINT8, _REDUCE_BOOL[reduce_op]
    if dtype not in _DTYPES:
        raise Error(f"NCCL cannot reduce {dtype}; cast it first, or gather it")
    return _DTYPES[dtype], _REDUCE[reduce_op]

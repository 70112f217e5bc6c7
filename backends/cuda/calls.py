"""The NCCL calls of collectives: which function, with which numbers, for which dtype.

Pointers and streams are integers, so that a call costs no more than NCCL itself does.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from irc.collectives import REDUCING, ROOTED
from irc.dtypes import dtype as dtype_called
from irc.errors import Error

# launch(source pointer, target pointer, stream)
Launch: TypeAlias = Callable[[int, int, int], None]
Library: TypeAlias = Any  # the module nccl.bindings.nccl, or what plays it

SUCCESS, IN_PROGRESS = 0, 7  # ncclResult_t
_UINT8 = 1
_DTYPES = {
    "i8": 0,
    "u8": 1,
    "i32": 2,
    "i64": 4,
    "f16": 6,
    "f32": 7,
    "f64": 8,
    "bf16": 9,
}
_REDUCE = {"sum": 0, "prod": 1, "max": 2, "min": 3}
# NCCL has no bool; in bytes that are 0 or 1 these mean the same.
_REDUCE_BOOL = {"sum": 2, "max": 2, "prod": 3, "min": 3}

# Operations after which ranks other than the root have zeros, which NCCL leaves as they were.
ZERO_ELSEWHERE = ("reduce", "gather")


def find_library() -> Library:
    """nccl4py's bindings; an Error names the extra where they or NCCL are missing."""
    try:
        from nccl.bindings import nccl

        nccl.get_version()
    except (ImportError, RuntimeError, OSError) as error:
        raise Error(
            f"NCCL is not to be had here ({str(error).splitlines()[0]}): "
            "pip install 'irc-compiler[cuda]'"
        ) from error
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

    `elements` is the size of one rank's operand. Without arithmetic the dtype does not matter, so
    those that NCCL lacks travel as bytes.
    """
    part = elements // ranks
    if operation not in REDUCING:
        kind, unit = _moved(dtype)
        counts = {
            "all_gather": ("all_gather", elements),
            "gather": ("gather", elements),
            "broadcast": ("broadcast", elements),
            "all_to_all": ("allto_all", part),
            "scatter": ("scatter", part),
        }
        if operation not in counts:
            raise Error(f"NCCL has no collective called {operation!r}")
        function, count = counts[operation]
        numbers = (count * unit, kind, *((root,) if operation in ROOTED else ()))
        return getattr(library, function), numbers
    kind, op = _reduced(dtype, reduce_op)
    match operation:
        case "all_reduce":
            return library.all_reduce, (elements, kind, op)
        case "reduce_scatter":
            return library.reduce_scatter, (part, kind, op)
        case _:
            return library.reduce, (elements, kind, op, root)


def _moved(dtype: str) -> tuple[int, int]:
    """(NCCL's number of the dtype, how many of them one element is)."""
    if dtype in _DTYPES:
        return _DTYPES[dtype], 1
    return _UINT8, dtype_called(dtype).numpy.itemsize


def _reduced(dtype: str, reduce_op: str) -> tuple[int, int]:
    if reduce_op not in _REDUCE:
        raise Error(f"a collective that reduces needs sum, max, min or prod, not {reduce_op!r}")
    if dtype == "bool":
        return _UINT8, _REDUCE_BOOL[reduce_op]
    if dtype not in _DTYPES:
        raise Error(f"NCCL cannot reduce {dtype}; cast it before, or gather it")
    return _DTYPES[dtype], _REDUCE[reduce_op]

"""Every collective on every group and dtype, compared with the meaning of irc's operations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from irc.backends.ranks.communicator import CollectiveCall, Communicator
from irc.ir.core import Function, Module
from irc.ir.declare import op_class
from irc.ir.dtypes import dtype_of
from irc.ir.mesh import Mesh
from irc.ir.types import TensorType
from irc.ops.collective import Collective
from irc.ops.collective_names import OPERATIONS, REDUCING, ROOTED

Array: TypeAlias = np.ndarray[Any, Any]

DTYPES = (np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int32, np.int64, np.int8)
DTYPES += (np.uint8, np.uint16, np.uint32, np.uint64, np.bool_, ml_dtypes.int4)
TOLERANCES = {"f64": 1e-14, "f32": 1e-6, "f16": 4e-3, "bf16": 3e-2}
_OPS = {"gather": "collective_gather", "scatter": "collective_scatter"}
# elements of dimension 0 per rank of the group, and the rest of the shape; the last is so large
# that it is reduced in parts, of several messages each
SHAPES: tuple[tuple[int, tuple[int, ...]], ...] = ((1, ()), (3, (5,)), (0, (2,)), (7, (301, 3)))


def groups_of(ranks: int) -> list[list[tuple[int, ...]]]:
    """Divisions of the ranks into groups: all, adjacent ones, others, other orders, single ones."""
    every = list(range(ranks))
    found = [[tuple(every)], [tuple(reversed(every))], [(rank,) for rank in every]]
    if ranks == 3:
        found += [[(0, 2), (1,)]]
    if ranks == 4:
        found += [[(0, 1), (2, 3)], [(0, 2), (1, 3)], [(3, 0), (2, 1)]]
    return found


def cases(ranks: int) -> Iterator[tuple[str, str, int, list[tuple[int, ...]]]]:
    """(operation, reduction, root, groups)."""
    for groups in groups_of(ranks):
        group_size = len(groups[0])
        for operation in OPERATIONS:
            reductions = ("sum", "max", "min", "prod") if operation in REDUCING else ("none",)
            uneven = len({len(group) for group in groups}) > 1
            for reduction in reductions:
                for root in {0, group_size - 1} if operation in ROOTED and not uneven else {0}:
                    yield operation, reduction, root, groups


def check_all(communicator: Communicator, seed: int, exact: bool = False) -> list[str]:
    """The wrong results of this rank; `exact`: sums and products are compared bit for bit."""
    rng = np.random.default_rng(seed)
    wrong: list[str] = []
    for operation, reduction, root, groups in cases(communicator.ranks):
        for dtype in DTYPES:
            length, rest = SHAPES[int(rng.integers(len(SHAPES)))]
            group = next(group for group in groups if communicator.rank in group)
            shape = (length * len(group), *rest)
            operands = drawn(rng, np.dtype(dtype), communicator.ranks, (length * 4, *rest))
            what = CollectiveCall(operation, reduction, group, root, "a test")
            problem = compared(communicator, what, [x[: shape[0]] for x in operands], exact)
            wrong += [f"{what} of {np.dtype(dtype)}{list(shape)}: {problem}"] if problem else []
    return wrong


def drawn(
    rng: np.random.Generator, dtype: np.dtype[Any], ranks: int, shape: tuple[int, ...]
) -> list[Array]:
    """One array per rank, the same numbers in every process; floats show the order of a sum."""
    if dtype_of(np.empty(0, dtype)) in ("f64", "f32", "f16", "bf16"):
        return [rng.standard_normal(shape).astype(dtype) for _ in range(ranks)]
    return [rng.integers(-7, 7, shape).astype(dtype) for _ in range(ranks)]


def compared(
    communicator: Communicator, what: CollectiveCall, operands: list[Array], exact: bool
) -> str:
    """What is wrong with a result; empty where it is right."""
    own = operands[communicator.rank].copy()
    result = np.full(what.result_shape(own.shape), 3).astype(own.dtype)
    communicator.collective(what, own, result)
    wanted = meant(what, [operands[rank] for rank in what.group])
    expected = wanted[what.group.index(communicator.rank)]
    if not np.array_equal(own, operands[communicator.rank]):
        return "the operand has changed"
    expected = np.asarray(expected).astype(own.dtype)
    if not equal(what, result, expected, exact):
        return f"{result.reshape(-1)[:4]} instead of {expected.reshape(-1)[:4]}"
    return ""


def equal(call: CollectiveCall, result: Array, expected: Array, exact: bool) -> bool:
    """Bit for bit, but for floats that MPI adds or multiplies in an order of its own."""
    kind = dtype_of(result)
    in_order = exact or call.reduce_op not in ("sum", "prod") or len(call.group) < 3
    if kind not in TOLERANCES or in_order:
        return result.tobytes() == expected.tobytes()
    wide, tolerance = np.float64, TOLERANCES[kind]
    return np.allclose(result.astype(wide), expected.astype(wide), tolerance, tolerance)


def meant(what: CollectiveCall, operands: list[Array]) -> list[Array]:
    """The results of a group by the meaning of the operation."""
    function = Function("forward", [("x", TensorType("f32", (len(operands),)))])
    attributes: dict[str, Any] = {"axis": "tp", "group_size": len(operands)}
    if what.operation in REDUCING:
        attributes["op"] = what.reduce_op
    if what.operation in ROOTED:
        attributes["root"] = what.root
    if what.operation in ("all_gather", "reduce_scatter", "gather", "scatter"):
        attributes["dim"] = 0
    if what.operation == "all_to_all":
        attributes |= {"split": 0, "concat": 0}
    op = op_class(_OPS.get(what.operation, what.operation))
    Module("m", Mesh((("tp", len(operands)),)), local=True).add_function(function)
    made = op(function.arg("x"), **attributes)
    assert isinstance(made, Collective)
    with np.errstate(all="ignore"):
        return made.combine(operands)

"""IrcCollective: every collective, and all-reduce + residual + rms_norm, through NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from irc import collectives
from irc.dtypes import dtype_of, numpy_dtype, widened
from irc.errors import Error
from irc.ops.collective import REDUCTIONS

from .. import nodes
from . import communicators
from .expressions import known
from .fields import Field, Values
from .spec import Array, Launch, PluginSpec, Shape, Tensor, TensorDesc, register

NAME = nodes.COLLECTIVE_PLUGIN
FUSED = "all_reduce_rms_norm"
OPERATIONS = (*collectives.OPERATIONS, FUSED)
REDUCING = (*collectives.REDUCING, FUSED)
ROOTED = collectives.ROOTED

_DOC = """
A collective among the ranks of a group, along dimension 0, through NCCL on the engine's stream.

`group` names the communicator that the process has registered (the mesh axes, as in `tp` or
`dp.tp`), so that one engine serves every rank. `ways` is the number of ranks in it. What ranks
other than the root get from reduce and gather is zero.

`all_reduce_rms_norm` takes x, residual and weight and gives (normed, total):
total = all_reduce(x) + residual; normed = rms_norm(total, weight), computed in f32 as
total / sqrt(mean(total²) + eps) * (weight + offset) over the last dimension.

Sums of bool are `or`, products `and`.
"""


def _inputs(values: Values) -> tuple[Tensor, ...]:
    x = Tensor("x", "T", "this rank's operand")
    if values["operation"] != FUSED:
        return (x,)
    return (
        Tensor("x", "F", "this rank's part of the sum, [..., N]"),
        Tensor("residual", "F", "as x; the same on every rank"),
        Tensor("weight", "W", "[N]"),
    )


def _outputs(values: Values) -> tuple[Tensor, ...]:
    if values["operation"] != FUSED:
        return (Tensor("y", "T", "this rank's result"),)
    return (
        Tensor("normed", "F", "as x"),
        Tensor("total", "F", "as x: the finished sum plus the residual"),
    )


def _check(values: Values) -> None:
    operation, reduce_op, ways = values["operation"], values["reduce_op"], values["ways"]
    if not values["group"]:
        raise Error(f"{NAME}: group is empty; it names mesh axes, such as tp or dp.tp")
    if ways < 1:
        raise Error(f"{NAME}: ways is {ways}; a group has at least one rank")
    if (reduce_op != "none") != (operation in REDUCING):
        needs = "sum, max, min or prod" if operation in REDUCING else "none"
        raise Error(f"{NAME}: reduce_op of {operation} is {needs}, not {reduce_op}")
    if operation == FUSED and reduce_op != "sum":
        raise Error(f"{NAME}: {FUSED} sums; reduce_op is {reduce_op}")
    root = values["root"]
    if operation in ROOTED and not 0 <= root < ways:
        raise Error(f"{NAME}: root of {operation} is a position from 0 to {ways - 1}, not {root}")
    if operation not in ROOTED and root != -1:
        raise Error(f"{NAME}: {operation} has no root, so root is -1, not {root}")


def _shapes(values: Values, x: Shape, *others: Shape) -> tuple[Shape, ...]:
    operation, ways = values["operation"], values["ways"]
    if operation == FUSED:
        return _fused_shapes(x, *others)
    if operation in ("all_reduce", "broadcast", "reduce"):
        return (x,)
    if not x:
        raise Error(f"{NAME}: {operation} works along dimension 0, and x has none")
    if operation in ("all_gather", "gather"):
        return ((x[0] * ways, *x[1:]),)
    first = known(x[0])
    if first is not None and first % ways:
        raise Error(f"{NAME}: {operation} cuts dimension 0, which is {first}, into {ways} parts")
    return (x,) if operation == "all_to_all" else ((x[0] // ways, *x[1:]),)


def _fused_shapes(x: Shape, residual: Shape, weight: Shape) -> tuple[Shape, ...]:
    if not x or len(residual) != len(x) or len(weight) != 1:
        raise Error(
            f"{NAME}: {FUSED} takes x [..., N], residual as x and weight [N], not tensors of "
            f"{len(x)}, {len(residual)} and {len(weight)} dimensions"
        )
    for a, b in [*zip(x, residual, strict=True), (x[-1], weight[0])]:
        sizes = known(a), known(b)
        if None not in sizes and sizes[0] != sizes[1]:
            raise Error(f"{NAME}: {FUSED}: sizes {sizes[0]} and {sizes[1]} are to be the same")
    return x, x


def _meaning(values: Values, x: list[Array], *others: list[Array]) -> list[tuple[Array, ...]]:
    if values["operation"] == FUSED:
        return _fused(values, x, *others)
    kind = numpy_dtype(dtype_of(x[0]))
    return [(each.astype(kind),) for each in _exchanged(values, x)]


def _exchanged(values: Values, x: list[Array]) -> list[Array]:
    operation, root, ways = values["operation"], values["root"], values["ways"]
    if len(x) != ways:
        raise Error(f"{NAME}: {len(x)} ranks were given for ways={ways}")
    match operation:
        case "all_reduce":
            return [_reduced(values, x)] * ways
        case "all_gather":
            return [np.concatenate(x)] * ways
        case "reduce_scatter":
            return np.split(_reduced(values, x), ways)
        case "all_to_all":
            parts = [np.split(each, ways) for each in x]
            return [np.concatenate(arrived) for arrived in zip(*parts, strict=True)]
        case "broadcast":
            return [x[root]] * ways
        case "scatter":
            return np.split(x[root], ways)
        case "reduce":
            whole = _reduced(values, x)
        case _:
            whole = np.concatenate(x)
    return [whole if rank == root else np.zeros_like(whole) for rank in range(ways)]


def _reduced(values: Values, x: list[Array]) -> Array:
    combine, total = REDUCTIONS[values["reduce_op"]], widened(x[0])
    for each in x[1:]:
        total = combine(total, widened(each))
    return total


def _fused(
    values: Values, x: list[Array], residual: list[Array], weight: list[Array]
) -> list[tuple[Array, ...]]:
    kind = numpy_dtype(dtype_of(x[0]))
    complete = widened(_reduced(values, x).astype(kind))
    done: list[tuple[Array, ...]] = []
    for add, gain in zip(residual, weight, strict=True):
        total = (complete + widened(add)).astype(kind)
        wide = widened(total)
        scale = np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + np.float32(values["eps"]))
        gain = widened(gain) + np.float32(values["offset"])
        done.append(((wide / scale * gain).astype(kind), total))
    return done


class _Bound:
    """What a launch needs of the communicator of the rank that calls, found again if it changed."""

    __slots__ = ("_bind", "_generation", "_group", "_launch", "_ways")

    def __init__(self, values: Values, bind: Any) -> None:
        self._group, self._ways, self._bind = values["group"], values["ways"], bind
        self._generation, self._launch = -1, None

    def launch(self) -> Any:
        if self._generation == communicators.generation():
            return self._launch
        found = communicators.here(self._group)
        if found.ranks != self._ways:
            raise Error(
                f"{NAME}: the engine wants {self._ways} ranks in the group {self._group!r}, and "
                f"its communicator has {found.ranks}; run it on the mesh of the compilation"
            )
        self._launch, self._generation = self._bind(found), communicators.generation()
        return self._launch


def _elements(desc: TensorDesc) -> int:
    count = 1
    for size in desc.shape:
        count *= size
    return count


def _enqueue(values: Values, inputs: Sequence[TensorDesc], outputs: Sequence[TensorDesc]) -> Launch:
    x = inputs[0]
    if values["operation"] == FUSED:
        return _enqueue_fused(values, x, inputs[2].dtype)
    operation, reduce_op, root = values["operation"], values["reduce_op"], values["root"]
    count = _elements(x)
    bound = _Bound(values, lambda group: group.bind(operation, x.dtype, count, reduce_op, root))

    def launch(sources: Any, targets: Any, workspace: int, stream: int) -> None:
        bound.launch()(sources[0], targets[0], stream)

    return launch


def _enqueue_fused(values: Values, x: TensorDesc, weight_dtype: str) -> Launch:
    count, columns = _elements(x), x.shape[-1]
    rows = count // columns if columns else 0
    eps, offset = values["eps"], values["offset"]

    def bind(group: communicators.Communicator) -> Any:
        return (
            group.bind("all_reduce", x.dtype, count, "sum"),
            group.bind_add_rms_norm(x.dtype, weight_dtype, rows, columns, eps, offset),
        )

    bound = _Bound(values, bind)

    def launch(sources: Any, targets: Any, workspace: int, stream: int) -> None:
        reduce, normalise = bound.launch()
        own, residual, weight = sources
        normed, total = targets
        reduce(own, total, stream)
        normalise(total, residual, weight, normed, stream)

    return launch


_FLOATS = ("f32", "f16", "bf16")

SPEC = register(
    PluginSpec(
        name=NAME,
        version=nodes.VERSION,
        doc=_DOC,
        fields=(
            Field("operation", choices=OPERATIONS, doc="which collective"),
            Field("group", doc="the mesh axes whose ranks take part, slowest first: tp, or dp.tp"),
            Field("ways", "int", doc="how many ranks the group has"),
            Field(
                "reduce_op",
                default="none",
                choices=("sum", "max", "min", "prod", "none"),
                doc="how operands are combined; none where they are not",
            ),
            Field("root", "int", -1, doc="a position in the group; -1 where there is none"),
            Field("eps", "float", 1e-6, doc=f"of {FUSED}"),
            Field("offset", "float", 0.0, doc=f"of {FUSED}: 1 where the weight is stored less one"),
        ),
        types={
            "T": ("f32", "f16", "bf16", "i32", "i64", "i8", "bool"),
            "F": _FLOATS,
            "W": _FLOATS,
        },
        inputs=_inputs,
        outputs=_outputs,
        shapes=_shapes,
        meaning=_meaning,
        enqueue=_enqueue,
        collective=True,
        check=_check,
    )
)

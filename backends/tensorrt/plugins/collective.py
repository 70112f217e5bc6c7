"""IrcCollective: every collective, and all-reduce + residual + rms_norm, through NCCL."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from irc.backends.cuda.group import Group
from irc.errors import Error
from irc.ops import collective_names as collectives

from .. import nodes
from . import communicators
from .spec import Field, Launch, PluginSpec, Shape, Tensor, TensorDesc, Values, known, register

NAME = nodes.COLLECTIVE_PLUGIN
FUSED = "all_reduce_rms_norm"
OPERATIONS = (*collectives.OPERATIONS, FUSED)
REDUCING = (*collectives.REDUCING, FUSED)
ROOTED = collectives.ROOTED
_FLOATS = ("f32", "f16", "bf16")

_DOC = """
A collective among the ranks of a group, along dimension 0, through NCCL on the engine's stream.

`group` names the communicator that the process has registered (the mesh axes, as in `tp` or
`dp.tp`), so that one engine serves every rank. `group_size` is the number of ranks in it. On ranks
other than the root, reduce and gather return zeros.

`all_reduce_rms_norm` takes x, residual and weight and returns (normed, total):
total = all_reduce(x) + residual; normed = rms_norm(total, weight), computed in f32 as
total / sqrt(mean(total²) + eps) * (weight + offset) over the last dimension.

Sums of bool are `or`, products `and`.
"""


def _inputs(values: Values) -> tuple[Tensor, ...]:
    if values["operation"] != FUSED:
        return (Tensor("x", "T", "this rank's operand"),)
    return (
        Tensor("x", "F", "this rank's summand, [..., N]"),
        Tensor("residual", "F", "as x; the same on every rank"),
        Tensor("weight", "W", "[N]"),
    )


def _outputs(values: Values) -> tuple[Tensor, ...]:
    if values["operation"] != FUSED:
        return (Tensor("y", "T", "this rank's result"),)
    return (Tensor("normed", "F", "as x"), Tensor("total", "F", "as x: the sum plus the residual"))


def _check(values: Values) -> None:
    operation, reduce_op, root = values["operation"], values["reduce_op"], values["root"]
    group_size = values["group_size"]
    if not values["group"]:
        raise Error(f"{NAME}: group is empty; it names mesh axes, such as tp or dp.tp")
    if group_size < 1:
        raise Error(f"{NAME}: group_size is {group_size}; a group has at least one rank")
    if (reduce_op != "none") != (operation in REDUCING):
        expected = "sum, max, min or prod" if operation in REDUCING else "none"
        raise Error(f"{NAME}: reduce_op of {operation} is {expected}, not {reduce_op}")
    if operation == FUSED and reduce_op != "sum":
        raise Error(f"{NAME}: {FUSED} sums; reduce_op is {reduce_op}")
    if operation in ROOTED and not 0 <= root < group_size:
        raise Error(
            f"{NAME}: root of {operation} is a position from 0 to {group_size - 1}, not {root}"
        )
    if operation not in ROOTED and root != -1:
        raise Error(f"{NAME}: {operation} has no root, so root is -1, not {root}")


def _shapes(values: Values, x: Shape, *others: Shape) -> tuple[Shape, ...]:
    operation, group_size = values["operation"], values["group_size"]
    if operation == FUSED:
        return _fused_shapes(x, *others)
    if operation in ("all_reduce", "broadcast", "reduce"):
        return (x,)
    if not x:
        raise Error(f"{NAME}: {operation} works along dimension 0, and x is a scalar")
    if operation in ("all_gather", "gather"):
        return ((x[0] * group_size, *x[1:]),)
    rows = known(x[0])
    if rows is not None and rows % group_size:
        raise Error(f"{NAME}: {operation} divides dimension 0, {rows}, into {group_size} parts")
    return (x,) if operation == "all_to_all" else ((x[0] // group_size, *x[1:]),)


def _fused_shapes(x: Shape, residual: Shape, weight: Shape) -> tuple[Shape, ...]:
    if not x or len(residual) != len(x) or len(weight) != 1:
        raise Error(
            f"{NAME}: {FUSED} takes x [..., N], residual as x and weight [N], not tensors of "
            f"{len(x)}, {len(residual)} and {len(weight)} dimensions"
        )
    for a, b in [*zip(x, residual, strict=True), (x[-1], weight[0])]:
        sizes = known(a), known(b)
        if None not in sizes and sizes[0] != sizes[1]:
            raise Error(f"{NAME}: {FUSED}: expected equal sizes, found {sizes[0]} and {sizes[1]}")
    return x, x


def _bound(values: Values, bind: Callable[[Group], Any]) -> Callable[[], Any]:
    """A function that returns `bind(communicator)`, once per communicator."""
    name, group_size = values["group"], values["group_size"]
    group, launch = None, None

    def current() -> Any:
        nonlocal group, launch
        found = communicators.here(name)
        if found is group:
            return launch
        if found.ranks != group_size:
            raise Error(
                f"{NAME}: the engine expects {group_size} ranks in the group {name!r}, and its "
                f"communicator has {found.ranks}; run it on the mesh of the compilation"
            )
        launch, group = bind(found), found
        return launch

    return current


def _enqueue(values: Values, inputs: Sequence[TensorDesc], outputs: Sequence[TensorDesc]) -> Launch:
    x = inputs[0]
    if values["operation"] == FUSED:
        return _enqueue_fused(values, x, inputs[2].dtype)
    call = (values["operation"], x.dtype, math.prod(x.shape), values["reduce_op"], values["root"])
    bound = _bound(values, lambda group: group.bind(*call))

    def launch(sources: Any, targets: Any, stream: int) -> None:
        bound()(sources[0], targets[0], stream)

    return launch


def _enqueue_fused(values: Values, x: TensorDesc, weight_dtype: str) -> Launch:
    count, columns = math.prod(x.shape), x.shape[-1]
    rows = count // columns if columns else 0
    norm = (x.dtype, weight_dtype, rows, columns, values["eps"], values["offset"])

    def bind(group: Group) -> Any:
        reduce = group.bind("all_reduce", x.dtype, count, "sum")
        return reduce, group.driver.add_rms_norm(*norm)

    bound = _bound(values, bind)

    def launch(sources: Any, targets: Any, stream: int) -> None:
        reduce, normalize = bound()
        (own, residual, weight), (normed, total) = sources, targets
        reduce(own, normed, stream)
        normalize(normed, residual, weight, normed, total, stream)

    return launch


SPEC = register(
    PluginSpec(
        name=NAME,
        version=nodes.VERSION,
        doc=_DOC,
        fields=(
            Field("operation", choices=OPERATIONS, doc="which collective"),
            Field("group", doc="the mesh axes whose ranks take part, slowest first: tp, or dp.tp"),
            Field("group_size", "int", doc="the number of ranks in the group"),
            Field(
                "reduce_op",
                default="none",
                choices=("sum", "max", "min", "prod", "none"),
                doc="how operands are combined; none where they are not",
            ),
            Field("root", "int", -1, doc="a position in the group; -1 where there is none"),
            Field("eps", "float", 1e-6, doc=f"of {FUSED}"),
            Field("offset", "float", 0.0, doc=f"of {FUSED}: 1 where the weight is stored minus 1"),
        ),
        types={"T": (*_FLOATS, "i32", "i64", "i8", "bool"), "F": _FLOATS, "W": _FLOATS},
        inputs=_inputs,
        outputs=_outputs,
        shapes=_shapes,
        enqueue=_enqueue,
        check=_check,
    )
)

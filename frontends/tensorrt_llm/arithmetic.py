"""Operations by the rules of the ONNX reader, operands in one dtype, operators of Tensor."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, cast

import numpy as np

from ...errors import Error
from ...ir.core import Op
from ...ir.dims import Dim, DimLike
from ...ir.dtypes import DTYPES, is_float
from ...ops import FloorDiv, Iota, Ne
from ...source import here
from ..onnx.entry import Entry, Node
from ..onnx.fold import folded
from ..onnx.readings import TABLE
from ..tensor import Tensor as Inner
from ..tensor import kind_name, located
from .api import border
from .context import current_network
from .module import Parameter
from .tensor import (
    Operand,
    Tensor,
    add_methods,
    shape_of,
    tensor_of_sizes,
    type_of,
    widened,
    wrap,
    wrap_entry,
)

_OPSET = 24
_TENSORS = (Tensor, Parameter, Inner)
_inside: ContextVar[bool] = ContextVar("irc_trt_llm_inside", default=False)
_NUMBERS = (bool, int, float, np.generic, Dim)


def nodes(kind: str, *operands: Operand, count: int, **attributes: Any) -> list[Tensor]:
    """The results of an operator of ONNX, by the rule that reads its nodes."""
    builder = current_network().builder
    inputs = [None if x is None else entry_of(x) for x in operands]
    node = Node(kind, "", "", 0, _OPSET, inputs, ["result"] * count, attributes)
    made: Any = folded(node) or located(TABLE["", kind].rule, builder, node)
    results: Any = made.results if isinstance(made, Op) else made
    several: list[Any] = [*results] if isinstance(results, (list, tuple)) else [results]
    entries = [each if isinstance(each, Entry) else builder.entry(each) for each in several]
    return [Tensor.of(entry) for entry in entries[:count]]


def node(kind: str | type[Op], *operands: Operand, **attributes: Any) -> Tensor:
    """The result of an operator of ONNX, or of an operation of irc, that has one result."""
    if isinstance(kind, str):
        return nodes(kind, *operands, count=1, **attributes)[0]
    entries = [entry_of(x) for x in operands]
    known = folded(Node(kind.__name__, "", "", 0, _OPSET, [*entries], ["result"]))
    if known is not None:
        return Tensor.of(known)
    call = current_network().builder.op
    return Tensor.of(located(lambda: call(kind, *entries, **attributes)))


def entry_of(x: Operand) -> Entry:
    """A tensor, a number, or a list of sizes as an operand."""
    if isinstance(x, (list, tuple)):
        return tensor_of_sizes(shape_of(x), "i64").entry
    operand = tensor(x)
    if operand.network is not current_network():
        raise Error(
            f"{operand!r} belongs to another network; build each network from inputs of its own",
            loc=here(),
        )
    return widened(operand.entry)


def tensor(x: Any, dtype: str | None = None) -> Tensor:
    """A Tensor of a tensor, a parameter, or a number; a number is bool, i32, f32, or of `dtype`."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, Inner):
        return wrap(x)
    if isinstance(x, Parameter):
        return x.value
    if isinstance(x, Dim):
        return tensor_of_sizes(x, dtype or "i32")
    number = _number(x)
    if number is None:
        raise Error(f"expected a tensor or a number, found {kind_name(x)}", loc=here())
    own = "bool" if isinstance(number, bool) else "i32" if isinstance(number, int) else "f32"
    kind = dtype or own
    held = float(number) if is_float(kind) else number if kind == "bool" else int(number)
    return Tensor.of(Entry(kind, (), content=np.array(held, object)))


def _number(x: Any) -> bool | int | float | None:
    """A number of Python, of one of Python or numpy; None for anything else."""
    number = cast("Any", x).item() if isinstance(x, np.generic) else x
    return number if isinstance(number, (bool, int, float)) else None


def data(x: Any) -> Inner:
    """irc's tensor of a tensor, a parameter, or a number."""
    return wrap_entry(entry_of(x))


@border
def with_inner_tensors(
    function: Callable[..., Any], bound: tuple[Any, ...], given: dict[str, Any]
) -> Any:
    """The results of a function that takes and returns tensors of irc, for a script's tensors.

    Within such a function others are called with irc's tensors, and return them.
    """
    outermost = not _inside.get()
    token = _inside.set(True)
    try:
        results = function(*bound, **{name: unwrapped(value) for name, value in given.items()})
    finally:
        _inside.reset(token)
    return wrapped(results) if outermost else results


def unwrapped(value: Any) -> Any:
    """irc's tensors in place of those of a script, also in a list or tuple."""
    if isinstance(value, (Tensor, Parameter)):
        return tensor(value).inner
    if isinstance(value, (list, tuple)):
        several: list[Any] = [unwrapped(each) for each in cast("list[Any]", value)]
        return several if isinstance(value, list) else tuple(several)
    return value


def wrapped(value: Any) -> Any:
    """A script's tensors in place of irc's, also in a list or tuple."""
    if isinstance(value, Inner):
        return wrap(value)
    if isinstance(value, (list, tuple)):
        several: list[Any] = [wrapped(each) for each in cast("list[Any]", value)]
        return several if isinstance(value, list) else tuple(several)
    return value


def matched(*operands: Any) -> tuple[Tensor, ...]:
    """The operands as tensors: a number takes the dtype of the tensors, and i32 becomes i64 where
    another tensor is i64."""
    kinds = [type_of(x).dtype for x in operands if isinstance(x, _TENSORS)]
    first = _computed(kinds[0]) if kinds else None
    tensors = [tensor(x, _fitting(x, first)) for x in operands]
    if "i64" in [x.entry.dtype for x in tensors]:
        return tuple(retyped(x, "i64") if x.entry.dtype == "i32" else x for x in tensors)
    return tuple(tensors)


def _computed(kind: str) -> str:
    """The dtype that computes operands of a dtype: in a block of `precision` a wider one."""
    scope = current_network().precision
    narrow = scope is not None and is_float(kind) and DTYPES[kind].bits < DTYPES[scope.dtype].bits
    return scope.dtype if scope is not None and narrow else kind


def _fitting(x: Any, kind: str | None) -> str | None:
    """The dtype that a number takes beside tensors of `kind`; None if `kind` cannot hold it."""
    number = _number(x)
    if kind is None or number is None:
        return kind if isinstance(x, Dim) else None
    if kind == "bool" and number not in (0, 1):
        return None
    if kind == "i32" and isinstance(number, int) and not -(1 << 31) <= number < 1 << 31:
        return "i64"
    fits = is_float(kind) or not isinstance(number, float) or number.is_integer()
    return kind if fits else None


def retyped(x: Tensor, dtype: str) -> Tensor:
    """x converted to `dtype`; known sizes stay known in integers."""
    if x.entry.dtype == dtype:
        return x
    return node("Cast", x, to=DTYPES[dtype].onnx)


def at(dim: int, x: Tensor) -> int:
    """A dimension of x, counted from the front."""
    return located(_at, dim, x.rank())


def _at(dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise Error(f"expected a dimension from {-ndim} to {ndim - 1}, found {dim}")
    return dim % ndim


def size_of(x: Tensor, dim: int) -> DimLike:
    """A size, with its symbols."""
    return x.entry.shape[at(dim, x)]


def count_up_to(size: DimLike, dtype: str) -> Tensor:
    """The numbers from 0 to size - 1."""
    builder = current_network().builder
    return Tensor.of(builder.entry(builder.value(Iota(size=size, dtype=dtype))))


# What operations of two tensors are: operators of ONNX, or operations of irc where these differ.
_BINARY: dict[str, str | type[Op]] = {
    "add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div", "pow": "Pow", "mod": "Mod",
    "floor_div": FloorDiv, "maximum": "Max", "minimum": "Min", "eq": "Equal", "ne": Ne,
    "lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual",
    "and": "And", "or": "Or", "matmul": "MatMul",
}  # fmt: skip


def binary(op: str, left: Operand, right: Operand) -> Tensor:
    """`left op right` by irc's name of the operation, elementwise with broadcasting.

    A number takes the dtype of the tensor; of i32 and i64 the result is i64. Of integers, `div`
    truncates towards zero. Known elements are computed, and appended only when they are used.
    """
    x, y = matched(left, right)
    if op != "matmul":
        current_network().agree(x, y)
    return node(_BINARY[op], x, y)


def _compared(op: str) -> Callable[[Tensor, object], Any]:
    """The operator `==` or `!=`, elementwise with operands alone."""

    def compare(x: Tensor, y: object) -> Any:
        is_operand = isinstance(y, (*_TENSORS, *_NUMBERS))
        return binary(op, x, y) if is_operand else NotImplemented

    return compare


def _negated(x: Tensor) -> Tensor:
    return binary("sub", 0, x)


def _operator(op: str, swapped: bool = False) -> Callable[[Tensor, Any], Tensor]:
    return lambda x, y: binary(op, y, x) if swapped else binary(op, x, y)


for _name, _op in {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_div",
    "mod": "mod", "pow": "pow", "and": "and", "or": "or", "matmul": "matmul",
}.items():  # fmt: skip
    swapped = _operator(_op, swapped=True)
    add_methods(**{f"__{_name}__": _operator(_op), f"__r{_name}__": swapped})
add_methods(**{f"__{_op}__": _operator(_op) for _op in ("lt", "le", "gt", "ge")})
add_methods(__eq__=_compared("eq"), __ne__=_compared("ne"), __neg__=_negated)

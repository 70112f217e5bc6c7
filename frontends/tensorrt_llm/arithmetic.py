"""Operations by the rules of the ONNX reader, operands in one dtype, operators of Tensor."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any, cast

import numpy as np

from ...ir.core import Op
from ...ir.dims import Dim, DimLike
from ...ir.dtypes import DTYPES, is_float
from ...ops import FloorDiv, Iota, Ne
from ..onnx.builder import ImportedValue, Node
from ..onnx.fold import folded
from ..onnx.rules import computed, results_of
from ..tensor import Tensor as Inner
from ..tensor import kind_name, located
from .api import border
from .context import current_network
from .dtypes import dim_resolve_negative
from .errors import ScriptError
from .module import Parameter
from .tensor import Operand, Tensor, shape_of, tensor_of_sizes, type_of, wrap

_OPSET = 24
_TENSORS = (Tensor, Parameter, Inner)
_inside: ContextVar[bool] = ContextVar("irc_trt_llm_inside", default=False)
_NUMBERS = (bool, int, float, np.generic, Dim)


def nodes(
    kind: str | type[Op], *operands: Operand, outputs: int, **attributes: Any
) -> list[Tensor]:
    """The results of an operator of ONNX, by the rule that reads its nodes, or of one of irc."""
    builder = current_network().builder
    inputs = [None if x is None else entry_of(x) for x in operands]
    if isinstance(kind, str):
        node = Node(kind, "", "", 0, _OPSET, inputs, ["result"] * outputs, attributes)
        results = located(computed, builder, node)
    else:
        node = Node(kind.__name__, "", "", 0, _OPSET, inputs, ["result"])
        append = partial(results_of, lambda b, node: b.op(kind, *node.present(), **attributes))
        known = folded(node, append)
        results = [known] if known is not None else located(append, builder, node)
    return [Tensor.of(result) for result in results[:outputs] if result is not None]


def node(kind: str | type[Op], *operands: Operand, **attributes: Any) -> Tensor:
    """The result of an operator that has one result."""
    return nodes(kind, *operands, outputs=1, **attributes)[0]


def entry_of(x: Operand) -> ImportedValue:
    """A tensor, a number, or a list of sizes as an operand."""
    if isinstance(x, (list, tuple)):
        return tensor_of_sizes(shape_of(x), "i64").entry
    operand = tensor(x)
    if operand.network is not current_network():
        raise ScriptError(
            f"{operand!r} belongs to another network; build each network from inputs of its own"
        )
    return operand.entry


def tensor(x: Any, dtype: str | None = None) -> Tensor:
    """A Tensor of a tensor, a parameter, or a number; a number is bool, i32, f32, or of `dtype`."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, (Inner, Parameter)):
        return wrap(x) if isinstance(x, Inner) else x.value
    if isinstance(x, Dim):
        return tensor_of_sizes(x, dtype or "i32")
    number = _number(x)
    if number is None:
        raise ScriptError(f"expected a tensor or a number, found {kind_name(x)}")
    own = "bool" if isinstance(number, bool) else "i32" if isinstance(number, int) else "f32"
    kind = dtype or own
    held = float(number) if is_float(kind) else number if kind == "bool" else int(number)
    return Tensor.of(ImportedValue(kind, (), content=np.array(held, object)))


def _number(x: Any) -> bool | int | float | None:
    """A number of Python, of one of Python or numpy; None for anything else."""
    number = cast("Any", x).item() if isinstance(x, np.generic) else x
    return number if isinstance(number, (bool, int, float)) else None


def data(x: Any) -> Inner:
    """irc's tensor of a tensor, a parameter, or a number."""
    return Tensor.of(entry_of(x)).inner


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


border.append(with_inner_tensors)


def unwrapped(value: Any) -> Any:
    """irc's tensors in place of those of a script, also in a list or tuple."""
    return _each(lambda x: tensor(x).inner if isinstance(x, (Tensor, Parameter)) else x, value)


def wrapped(value: Any) -> Any:
    """A script's tensors in place of irc's, also in a list or tuple."""
    return _each(lambda x: wrap(x) if isinstance(x, Inner) else x, value)


def _each(convert: Callable[[Any], Any], value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        return convert(value)
    several: list[Any] = [_each(convert, part) for part in cast("list[Any]", value)]
    return several if isinstance(value, list) else tuple(several)


def matched(*operands: Any) -> tuple[Tensor, ...]:
    """The operands as tensors: a number takes the dtype of the tensors, and i32 becomes i64 where
    another tensor is i64."""
    kinds = [type_of(x).dtype for x in operands if isinstance(x, _TENSORS)]
    tensors = [tensor(x, _fitting(x, kinds[0]) if kinds else None) for x in operands]
    if "i64" in [x.entry.dtype for x in tensors]:
        return tuple(retyped(x, "i64") if x.entry.dtype == "i32" else x for x in tensors)
    return tuple(tensors)


def _fitting(x: Any, kind: str) -> str | None:
    """The dtype that a number takes beside tensors of `kind`; None if `kind` cannot hold it."""
    number = _number(x)
    if number is None:
        return kind if isinstance(x, Dim) else None
    if kind == "bool" and number not in (0, 1):
        return None
    if kind == "i32" and isinstance(number, int) and not -(1 << 31) <= number < 1 << 31:
        return "i64"
    fits = is_float(kind) or not isinstance(number, float) or number.is_integer()
    return kind if fits else None


def retyped(x: Tensor, dtype: str) -> Tensor:
    """x converted to `dtype`; known sizes stay known in integers."""
    return x if x.entry.dtype == dtype else node("Cast", x, to=DTYPES[dtype].onnx)


def at(dim: int, x: Tensor) -> int:
    """A dimension of x, counted from the front."""
    return dim_resolve_negative(dim, x.rank())[0]


def size_of(x: Tensor, dim: int) -> DimLike:
    """A size, with its symbols."""
    return x.entry.shape[at(dim, x)]


def count_up_to(size: DimLike, dtype: str) -> Tensor:
    """The numbers from 0 to size - 1."""
    builder = current_network().builder
    return Tensor.of(builder.imported(builder.value(Iota(size=size, dtype=dtype))))


def binary(kind: str | type[Op], left: Operand, right: Operand) -> Tensor:
    """An operator of two tensors, elementwise with broadcasting.

    A number takes the dtype of the tensor; of i32 and i64 the result is i64. Of integers, "Div"
    truncates towards zero. Known elements are computed, and appended only when they are used.
    """
    x, y = matched(left, right)
    current_network().agree(x, y)
    return node(kind, x, y)


def _operator(kind: str | type[Op], swapped: bool = False) -> Callable[[Tensor, Any], Tensor]:
    return lambda x, y: binary(kind, y, x) if swapped else binary(kind, x, y)


def _comparison(kind: str | type[Op]) -> Callable[[Tensor, object], Any]:
    """The operator `==` or `!=`, elementwise with operands alone."""
    operands = *_TENSORS, *_NUMBERS
    return lambda x, y: binary(kind, x, y) if isinstance(y, operands) else NotImplemented


def _negative(x: Tensor) -> Tensor:
    return binary("Sub", 0, x)


_OPERATORS: dict[str, str | type[Op]] = {
    "add": "Add", "sub": "Sub", "mul": "Mul", "truediv": "Div", "floordiv": FloorDiv, "mod": "Mod",
    "pow": "Pow", "and": "And", "or": "Or",
}  # fmt: skip
_COMPARISONS = {"lt": "Less", "le": "LessOrEqual", "gt": "Greater", "ge": "GreaterOrEqual"}
for _name, _kind in (_OPERATORS | _COMPARISONS).items():
    setattr(Tensor, f"__{_name}__", _operator(_kind))
for _name, _kind in _OPERATORS.items():
    setattr(Tensor, f"__r{_name}__", _operator(_kind, swapped=True))
for _name, _function in (("eq", _comparison("Equal")), ("ne", _comparison(Ne)), ("neg", _negative)):
    setattr(Tensor, f"__{_name}__", _function)

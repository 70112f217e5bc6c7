"""Elements that are known while reading: shapes, and what is computed from them and from constants.

The rule of a node whose inputs are known runs beside the function, and its operations are evaluated
on arrays of objects: numbers, sizes with symbols, true and false. What needs a run of the model
gives None, and the node becomes operations.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np

from irc import ops
from irc.errors import Error
from irc.frontends.onnx.builder import Builder, Content, ImportedValue, Node, numbers, sizes
from irc.ir.core import Op, Value
from irc.ir.dims import Dim, DimLike, exact_divide, product
from irc.ir.dtypes import is_float, numpy_dtype, widened
from irc.ir.types import TensorType
from irc.ops.reduce import Reduction
from irc.rewrite.constants import evaluated

MOST = 4096  # elements; more are left to operations
# The standard operators that compute shapes; all others stay operations, also those of constants.
_SHAPES = """Add And Cast CastLike Concat ConstantOfShape Div Equal Expand Flatten Gather Greater
GreaterOrEqual Identity Less LessOrEqual Max Min Mod Mul Neg Not Pow Range ReduceMax ReduceMin
ReduceProd ReduceSum Reshape Slice Sqrt Squeeze Sub Unsqueeze Where"""
FOLDED = frozenset(_SHAPES.split())


def content_of(value: ImportedValue | None) -> Content | None:
    """The elements of a value, if they are known; small tensors of the file are read for it."""
    if value is None:
        return None
    if value.content is None and value.data is not None and value.data.count <= MOST:
        array = value.data.read()
        value.content = None if array is None else numbers(array)
    return value.content


def scalar(value: ImportedValue | None) -> Any:
    """The number that a value is, or that all its elements are; None for anything else."""
    content = content_of(value)
    if content is None or not content.size:
        return None
    items = content.reshape(-1).tolist()
    return items[0] if all(item == items[0] for item in items) else None


def folded(
    node: Node, run: Callable[[Builder, Node], Sequence[ImportedValue | None]]
) -> ImportedValue | None:
    """The result that `run` gives for a node whose inputs are known; None where it needs data."""
    needed = node.inputs[:1] if node.kind == "CastLike" else node.inputs
    if not needed or not all(x is not None and _is_foldable(x) for x in needed):
        return None
    apart = Builder(*cast("Any", (None, None, None)))  # whose operations are forgotten
    operands = [
        replace(x, value=Value(TensorType(x.dtype, x.shape), None, 0), data=None)
        for x in node.present()
    ]
    contents = {x.value: x.content for x in operands}
    try:
        (result,) = run(apart, replace(node, inputs=cast("Any", operands)))
        if node.kind == "Div" and _has_symbols(*contents.values()):  # whatever the signs
            quotients = _map(_quotient, *(c for c in contents.values() if c is not None))
            return _as_result(operands[0], quotients)
        for op in apart.ops:
            contents[op.result] = _evaluated(op, [contents[value] for value in op.operands])
    except (Error, OverflowError):  # an error is raised again by the rule, a number wraps around
        return None
    assert result is not None
    return _as_result(result, contents.get(result.value, result.content))


def _as_result(like: ImportedValue, content: Content | None) -> ImportedValue | None:
    return None if content is None else ImportedValue(like.dtype, content.shape, content=content)


def _is_foldable(value: ImportedValue) -> bool:
    """Whether the elements are known or integers, and no weights."""
    data = value.data
    is_small = data is not None and (data.inline is not None or not is_float(data.dtype))
    return (value.content is not None or is_small) and content_of(value) is not None


def _has_symbols(*contents: Content | None) -> bool:
    return any(
        isinstance(n, Dim) for content in contents if content is not None for n in content.flat
    )


def _evaluated(op: Op, operands: list[Content | None]) -> Content | None:
    """The elements of the result of an operation; None where one depends on symbols or data."""
    contents = [content for content in operands if content is not None]
    shape, dtype = op.result.type.shape, op.result.type.dtype
    size = product(shape)
    if len(contents) != len(operands) or isinstance(size, Dim) or size > MOST:
        return None
    if not _has_symbols(*contents):
        kinds = [numpy_dtype(value.type.dtype) for value in op.operands]
        arrays = [
            widened(np.array(content.tolist(), kind)).reshape(content.shape)
            for content, kind in zip(contents, kinds, strict=True)
        ]
        with np.errstate(all="ignore"):
            return numbers(evaluated(op, arrays))
    if is_float(dtype):
        return None
    if isinstance(op, ops.Cast):
        return contents[0] if dtype != "bool" else _map(operator.ne, contents[0], sizes(0))
    if isinstance(op, Reduction):
        total = _ELEMENTS[type(op)](*contents[0].flat) if op.x.type.ndim == 1 else None
        return None if total is None else np.full(shape, total, object)
    call = _ELEMENTS.get(type(op))
    if call is not None:
        return _map(call, *contents)
    if isinstance(op, ops.Gather):
        at = None if _has_symbols(contents[1]) else contents[1].astype(np.int64)
        return None if at is None else np.asarray(op.evaluate(contents[0], at), object)
    return op.evaluate(*contents) if op.moves_data else None


def below(x: DimLike, y: DimLike) -> bool | None:
    """Whether x < y whatever the symbols, which are no less than 0; None where that differs."""
    distance = y - x
    if not isinstance(distance, Dim):
        return distance > 0
    terms = dict(distance.terms)
    constant = terms.pop((), 0)
    if constant > 0 and all(n >= 0 for n in terms.values()):
        return True
    if constant <= 0 and all(n <= 0 for n in terms.values()):
        return False
    return None


def _equal(x: Any, y: Any) -> bool | None:
    return True if y - x == 0 else False if below(x, y) or below(y, x) else None


def _at_most(x: Any, y: Any) -> bool | None:
    return below(x, y + 1)


def _chosen(condition: bool, x: Any, y: Any) -> Any:
    return x if condition else y


def _swapped(compare: Callable[[Any, Any], bool | None]) -> Callable[[Any, Any], bool | None]:
    return lambda x, y: compare(y, x)


def _quotient(x: DimLike, y: DimLike) -> DimLike | None:
    """x / y rounded towards zero, of sizes with symbols only where it is exact."""
    if isinstance(x, Dim) or isinstance(y, Dim) or not y:
        return exact_divide(x, y)
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def _floor(x: DimLike, y: DimLike) -> DimLike | None:
    is_symbolic = isinstance(x, Dim) or isinstance(y, Dim) or not y
    return exact_divide(x, y) if is_symbolic else x // y


def _remainder(x: DimLike, y: DimLike) -> DimLike | None:
    if isinstance(x, Dim) or isinstance(y, Dim) or not y:
        return 0 if exact_divide(x, y) is not None else None
    return x % y


def _first(before: Callable[[Any, Any], bool | None], *items: Any) -> Any:
    """The item that is known to be before all others."""
    return next((x for x in items if all(x is y or before(x, y) for y in items)), None)


# Functions of elements of which some have symbols; None where the result depends on these.
_ELEMENTS: dict[type[Op], Callable[..., Any]] = {
    ops.Add: operator.add,
    ops.Sub: operator.sub,
    ops.Mul: operator.mul,
    ops.Neg: operator.neg,
    ops.FloorDiv: _floor,
    ops.Mod: _remainder,
    ops.Minimum: partial(_first, _at_most),
    ops.Maximum: partial(_first, _swapped(_at_most)),
    ops.Eq: _equal,
    ops.Lt: below,
    ops.Le: _at_most,
    ops.Gt: _swapped(below),
    ops.Ge: _swapped(_at_most),
    ops.Where: _chosen,
    ops.ReduceSum: lambda *items: sum(items),
    ops.ReduceProd: lambda *items: product(items),
    ops.ReduceMin: partial(_first, _at_most),
    ops.ReduceMax: partial(_first, _swapped(_at_most)),
}


def _map(call: Callable[..., Any], *contents: Content) -> Content | None:
    """A function of elements, with broadcasting; None where one has no result."""
    arrays = np.broadcast_arrays(*contents)
    items = [call(*items) for items in zip(*(array.flat for array in arrays), strict=True)]
    is_known = all(n is not None and (isinstance(n, Dim) or abs(n) < 1 << 63) for n in items)
    return sizes(*items).reshape(arrays[0].shape) if is_known else None

"""Elements that are known while reading: shapes, and what is computed from them and from constants.

All functions work on small arrays of objects: numbers, sizes with symbols, true and false. What
needs a run of the model gives None, and the node becomes an operation.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial, reduce
from typing import Any, TypeAlias

import numpy as np

from irc.frontends.onnx.builder import numbers
from irc.frontends.onnx.entry import Content, Entry, Node, sizes
from irc.frontends.onnx.tensors import DTYPES
from irc.ir.dims import Dim, DimLike, exact_divide, product
from irc.ir.dtypes import dtype as dtype_called
from irc.ir.dtypes import numpy_dtype

MOST = 4096  # elements; more are left to operations
Fold: TypeAlias = Callable[[Node, list[Content]], Content | None]
_FOLDS: dict[str, Fold] = {}


def content_of(entry: Entry | None) -> Content | None:
    """The elements of a value, if they are known; small tensors of the file are read for it."""
    if entry is None:
        return None
    if entry.content is None and entry.data is not None and entry.data.count <= MOST:
        array = entry.data.read()
        entry.content = None if array is None else numbers(array)
    return entry.content


def folded(node: Node) -> Entry | None:
    """The result of a node all of whose inputs are known; None where it needs an operation."""
    if node.kind in ("Shape", "Size"):
        return _shape(node)
    fold = _FOLDS.get(node.kind)
    if fold is None or node.domain or len(node.outputs) != 1:
        return None
    given = [entry for entry in node.inputs if entry is not None]
    needed = given[:1] if node.kind == "CastLike" else given
    if len(given) != len(node.inputs) or not all(map(_foldable, needed)):
        return None
    contents = [content_of(entry) for entry in needed]
    known = [content for content in contents if content is not None]
    if len(known) != len(contents) or any(content.size > MOST for content in known):
        return None
    found = fold(node, known)
    if found is None or found.size > MOST or not all(map(_held, found.flat)):
        return None
    kind = _dtype(node, given)
    if dtype_called(kind).is_float and any(isinstance(item, Dim) for item in found.flat):
        return None
    return Entry(kind, found.shape, content=_as(found, kind))


def _foldable(entry: Entry) -> bool:
    """Whether the elements are known or integers, and no weights."""
    if entry.content is not None:
        return True
    data = entry.data
    return data is not None and (data.inline is not None or not dtype_called(data.dtype).is_float)


def _dtype(node: Node, given: list[Entry]) -> str:
    if node.kind in ("Cast", "CastLike"):
        return _target(node) or "f32"
    if node.kind in ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Not", "And"):
        return "bool"
    if node.kind == "ConstantOfShape":
        value = node.attributes.get("value")
        return value.dtype if value is not None else "f32"
    return given[1 if node.kind == "Where" else 0].dtype


def _held(item: Any) -> bool:
    """Whether an integer fits into 64 bits; an operation wraps larger ones around."""
    return not isinstance(item, int) or -(1 << 63) <= item < 1 << 63


def _as(found: Content, kind: str) -> Content:
    """Numbers as the dtype holds them: rounded, wrapped."""
    if any(isinstance(item, Dim) for item in found.flat):
        return found
    with np.errstate(all="ignore"):
        return numbers(np.array(found.tolist()).astype(numpy_dtype(kind)).reshape(found.shape))


def _shape(node: Node) -> Entry:
    shape = node.input(0).shape
    if node.kind == "Size":
        return Entry("i64", (), content=np.array(product(shape), object))
    begin, end = node.integer("start", 0), node.integer("end", len(shape))
    begin, end = (n + len(shape) if n < 0 else n for n in (begin, end))
    part = shape[max(begin, 0) : max(end, 0)]
    return Entry("i64", (len(part),), content=sizes(*part))


def folds(*kinds: str) -> Callable[[Fold], Fold]:
    """Register how nodes of these kinds with known inputs give known elements."""

    def keep(fold: Fold) -> Fold:
        _FOLDS.update(dict.fromkeys(kinds, fold))
        return fold

    return keep


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
    if not isinstance(x, Dim) and not isinstance(y, Dim):
        return x == y
    return True if y - x == 0 else False if below(x, y) or below(y, x) else None


def _less(x: Any, y: Any) -> bool | None:
    return x < y if isinstance(x, float) else below(x, y)


def _more(x: Any, y: Any) -> bool | None:
    return _less(y, x)


def _at_most(x: Any, y: Any) -> bool | None:
    return x <= y if isinstance(x, float) else below(x, y + 1)


def _at_least(x: Any, y: Any) -> bool | None:
    return _at_most(y, x)


def _root(x: Any) -> Any:
    return None if isinstance(x, Dim) or x < 0 else math.sqrt(x)


def _chosen(condition: bool, x: Any, y: Any) -> Any:
    return x if condition else y


def _quotient(x: Any, y: Any) -> Any:
    if isinstance(x, Dim) or isinstance(y, Dim):
        return exact_divide(x, y)
    if isinstance(x, float):
        return x / y if y else None
    return None if not y else abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


def _floor(x: Any, y: Any) -> Any:
    if isinstance(x, Dim) or isinstance(y, Dim):
        return exact_divide(x, y)
    return x // y if y else None


def _remainder(x: Any, y: Any) -> Any:
    if isinstance(x, Dim) or isinstance(y, Dim):
        return 0 if exact_divide(x, y) is not None else None
    return x % y if y else None


def _power(x: Any, y: Any) -> Any:
    if isinstance(x, Dim) or isinstance(y, Dim):
        return None
    return x**y if x > 0 and abs(y * math.log2(x)) < 64 else None  # larger ones are operations


def _first(before: Callable[[Any, Any], bool | None], *items: Any) -> Any:
    """The item that is known to be before all others."""
    return next((x for x in items if all(x is y or before(x, y) for y in items)), None)


# Functions of elements, which give None where the result depends on symbols.
_ELEMENTS: dict[str, Callable[..., Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": _quotient,
    "FloorDiv": _floor,  # of irc
    "Mod": _remainder,
    "Neg": operator.neg,
    "Sqrt": _root,
    "Pow": _power,
    "Min": partial(_first, _at_most),
    "Max": partial(_first, _at_least),
    "Equal": _equal,
    "Less": _less,
    "LessOrEqual": _at_most,
    "Greater": _more,
    "GreaterOrEqual": _at_least,
    "And": min,
    "Not": operator.not_,
    "Where": _chosen,
}


@folds(*_ELEMENTS)
def _elements(node: Node, c: list[Content]) -> Content | None:
    return None if node.integer("fmod", 0) else _map(_ELEMENTS[node.kind], *c)


def _map(call: Callable[..., Any], *contents: Content) -> Content | None:
    """A function of elements, with broadcasting; None where one has no result."""
    try:
        arrays = np.broadcast_arrays(*contents)
    except ValueError:
        return None
    found = [call(*items) for items in zip(*(array.flat for array in arrays), strict=True)]
    return None if any(item is None for item in found) else sizes(*found).reshape(arrays[0].shape)


@folds("Identity")
def _identity(node: Node, c: list[Content]) -> Content | None:
    return c[0]


def _target(node: Node) -> str | None:
    """The dtype that a node casts to."""
    return node.input(1).dtype if node.kind == "CastLike" else DTYPES.get(node.integer("to", 1))


@folds("Cast", "CastLike")
def _cast(node: Node, c: list[Content]) -> Content | None:
    target = _target(node)
    if target is None or target.startswith("f8"):
        return None
    if dtype_called(target).is_integer and dtype_called(node.input(0).dtype).is_float:
        return _map(_truncated, c[0])
    return c[0] if target != "bool" else _map(operator.ne, c[0], np.array(0, object))


def _truncated(x: float) -> int | None:
    return int(x) if math.isfinite(x) else None


@folds("Concat", "Gather", "Slice", "Expand", "Range", "ConstantOfShape")
def _moved(node: Node, c: list[Content]) -> Content | None:
    """Elements in other places; None where these are no integers, or do not fit."""
    data = {"Concat": len(c), "Range": 0, "ConstantOfShape": 0}.get(node.kind, 1)
    if not all(type(n) is int for each in c[data:] for n in each.flat):
        return None
    try:
        return _placed(node, c)
    except (ValueError, LookupError, OverflowError):
        return None


def _placed(node: Node, c: list[Content]) -> Content | None:
    match node.kind:
        case "Concat":
            return np.concatenate(c, node.integer("axis", 0))
        case "Gather":
            return np.asarray(c[0].take(c[1].astype(np.int64), node.integer("axis", 0)), object)
        case "Expand":
            return np.broadcast_to(c[0], np.broadcast_shapes(c[0].shape, tuple(c[1].flat)))
        case "ConstantOfShape":
            value = node.attributes.get("value")
            number = np.zeros(1) if value is None else value.read()
            return None if number is None else np.broadcast_to(numbers(number), tuple(c[0].flat))
        case "Range":
            many = range(*(each.item() for each in c))
            return sizes(*many) if len(many) <= MOST else None
        case _:
            return _sliced(*c)


def _sliced(
    x: Content,
    starts: Content,
    ends: Content,
    axes: Content | None = None,
    steps: Content | None = None,
) -> Content:
    places = [slice(None)] * x.ndim
    axes = np.arange(starts.size) if axes is None else axes
    steps = np.ones(starts.size, np.int64) if steps is None else steps
    for axis, *span in zip(axes.flat, starts.flat, ends.flat, steps.flat, strict=True):
        places[axis] = slice(*span)
    return np.asarray(x[tuple(places)], object)


_REDUCTIONS = {"ReduceProd": "Mul", "ReduceSum": "Add", "ReduceMax": "Max", "ReduceMin": "Min"}


@folds(*_REDUCTIONS)
def _reduce(node: Node, c: list[Content]) -> Content | None:
    if c[0].ndim != 1 or not c[0].size:
        return None
    axes = node.ints("axes") or list(c[1].flat if len(c) > 1 else ())
    if node.integer("noop_with_empty_axes", 0) and not axes:
        return c[0]
    call, items = _ELEMENTS[_REDUCTIONS[node.kind]], c[0].tolist()
    total = call(*items) if node.kind in ("ReduceMax", "ReduceMin") else reduce(call, items)
    if total is None:
        return None
    found = np.array(total, object)
    return found.reshape(1) if node.integer("keepdims", 1) else found

"""Elements that are known while reading: shapes, and what is computed from them and from constants.

Everything here works on small arrays of objects: numbers, sizes with symbols, true and false. What
cannot be told without running the model gives None, and the node becomes an operation.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from itertools import zip_longest
from typing import Any, TypeAlias

import numpy as np

from irc.dims import Dim, DimLike, exact_divide
from irc.dtypes import dtype as dtype_called
from irc.dtypes import numpy_dtype
from irc.frontends.onnx.builder import numbers
from irc.frontends.onnx.entry import Content, Entry, Node, sizes
from irc.frontends.onnx.tensors import DTYPES

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
    """The result of a node all of whose inputs are known; None where it is not for here."""
    if node.kind in ("Shape", "Size"):
        return _shape(node)
    fold = _FOLDS.get(node.kind)
    if fold is None or node.domain or len(node.outputs) != 1:
        return None
    given = [entry for entry in node.inputs if entry is not None]
    if len(given) != len(node.inputs) or not all(map(_foldable, given)):
        return None
    contents = [content_of(entry) for entry in given]
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
    """Whether the elements are no weights."""
    if entry.content is not None:
        return True
    data = entry.data
    return data is not None and (data.inline is not None or not dtype_called(data.dtype).is_float)


def _dtype(node: Node, given: list[Entry]) -> str:
    if node.kind == "Cast":
        return DTYPES.get(node.integer("to", 1), "f32")
    if node.kind in ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Not", "And"):
        return "bool"
    if node.kind == "ConstantOfShape":
        value = node.attributes.get("value")
        return value.dtype if value is not None else "f32"
    return given[1 if node.kind == "Where" else 0].dtype


def _held(item: Any) -> bool:
    """Whether it is no integer beyond those of 64 bits; they wrap around in an operation."""
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
        total: DimLike = 1
        for size in shape:
            total = total * size
        return Entry("i64", (), content=np.array(total, object))
    begin, end = node.integer("start", 0), node.integer("end", len(shape))
    begin, end = (n + len(shape) if n < 0 else n for n in (begin, end))
    part = shape[max(begin, 0) : max(end, 0)]
    return Entry("i64", (len(part),), content=sizes(*part))


def _fold(*kinds: str) -> Callable[[Fold], Fold]:
    def keep(fold: Fold) -> Fold:
        _FOLDS.update(dict.fromkeys(kinds, fold))
        return fold

    return keep


def _broadcast(*contents: Content) -> bool:
    """Whether shapes agree from behind, but for ones."""
    sizes = [content.shape[::-1] for content in contents]
    return all(len({*column} - {1}) < 2 for column in zip_longest(*sizes, fillvalue=1))


def _map(call: Callable[[Any, Any], Any], x: Content, y: Content) -> Content | None:
    """A function of two numbers that may know no answer, with broadcasting."""
    if not _broadcast(x, y):
        return None
    left, right = np.broadcast_arrays(x, y)
    found = np.empty(left.shape, object)
    for place in np.ndindex(left.shape):
        item = call(left[place], right[place])
        if item is None:
            return None
        found[place] = item
    return found


def _each(call: Callable[[Any], Any], x: Content) -> Content | None:
    """A function of one number that may know no answer."""
    return _map(lambda item, _: call(item), x, x)


def _plain(call: Callable[[Any, Any], Any]) -> Fold:
    return lambda node, c: _map(call, c[0], c[1])


for _kind, _call in (("Add", operator.add), ("Sub", operator.sub), ("Mul", operator.mul)):
    _fold(_kind)(_plain(_call))


@_fold("Div")
def _divide(node: Node, c: list[Content]) -> Content | None:
    whole = dtype_called(node.input(0).dtype).is_integer

    def divide(x: Any, y: Any) -> Any:
        if isinstance(x, Dim) or isinstance(y, Dim):
            return exact_divide(x, y)
        if not whole:
            return x / y if y else None
        return None if not y else abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)

    return _map(divide, c[0], c[1])


@_fold("Mod")
def _mod(node: Node, c: list[Content]) -> Content | None:
    def rest(x: Any, y: Any) -> Any:
        if isinstance(x, Dim) or isinstance(y, Dim):
            return 0 if exact_divide(x, y) is not None else None
        return x % y if y else None

    return None if node.integer("fmod", 0) else _map(rest, c[0], c[1])


@_fold("Min", "Max")
def _extreme(node: Node, c: list[Content]) -> Content | None:
    least = node.kind == "Min"

    def choose(x: Any, y: Any) -> Any:
        smaller = below(x, y + 1) if not isinstance(x, float) else x <= y
        return None if smaller is None else x if smaller == least else y

    found: Content | None = c[0]
    for other in c[1:]:
        found = None if found is None else _map(choose, found, other)
    return found


def below(x: DimLike, y: DimLike) -> bool | None:
    """Whether x < y whatever the symbols, which are no less than 0; None where that differs."""
    gap = y - x
    if not isinstance(gap, Dim):
        return gap > 0
    terms = dict(gap.terms)
    constant = terms.pop((), 0)
    if constant > 0 and all(n >= 0 for n in terms.values()):
        return True
    if constant <= 0 and all(n <= 0 for n in terms.values()):
        return False
    return None


def equal(x: DimLike, y: DimLike) -> bool | None:
    """Whether x = y whatever the symbols; None where that differs."""
    gap = y - x
    if not isinstance(gap, Dim):
        return gap == 0
    return False if below(x, y) or below(y, x) else None


@_fold("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
def _compare(node: Node, c: list[Content]) -> Content | None:
    def compare(x: Any, y: Any) -> bool | None:
        match node.kind:
            case "Equal":
                symbolic = isinstance(x, Dim) or isinstance(y, Dim)
                return equal(x, y) if symbolic else x == y
            case "Less" | "Greater":
                x, y = (y, x) if node.kind == "Greater" else (x, y)
                return below(x, y) if not isinstance(x, float) else x < y
            case _:
                x, y = (y, x) if node.kind == "GreaterOrEqual" else (x, y)
                return below(x, y + 1) if not isinstance(x, float) else x <= y

    return _map(compare, c[0], c[1])


@_fold("Where")
def _where(node: Node, c: list[Content]) -> Content | None:
    if not _broadcast(*c):
        return None
    return np.asarray(np.where(c[0].astype(np.bool_), c[1], c[2]), object)


@_fold("Not")
def _not(node: Node, c: list[Content]) -> Content | None:
    return _each(lambda x: not x, c[0])


@_fold("And")
def _and(node: Node, c: list[Content]) -> Content | None:
    return _map(lambda x, y: bool(x and y), *c)


@_fold("Neg")
def _negative(node: Node, c: list[Content]) -> Content | None:
    return _each(operator.neg, c[0])


@_fold("Sqrt")
def _root(node: Node, c: list[Content]) -> Content | None:
    return _each(lambda x: None if isinstance(x, Dim) or x < 0 else math.sqrt(x), c[0])


@_fold("Pow")
def _power(node: Node, c: list[Content]) -> Content | None:
    def power(x: Any, y: Any) -> Any:
        small = x > 0 and abs(y * math.log2(x)) < 64  # of what is larger an operation is made
        return x**y if small else None

    known = all(not isinstance(item, Dim) for content in c for item in content.flat)
    return _map(power, c[0], c[1]) if known else None


@_fold("Identity")
def _identity(node: Node, c: list[Content]) -> Content | None:
    return c[0]


@_fold("Cast")
def _cast(node: Node, c: list[Content]) -> Content | None:
    target = DTYPES.get(node.integer("to", 1))
    if target is None or target.startswith("f8"):
        return None
    if dtype_called(target).is_integer and dtype_called(node.input(0).dtype).is_float:
        return _each(lambda x: int(x) if math.isfinite(x) else None, c[0])
    return _each(lambda x: x if isinstance(x, Dim) or target != "bool" else x != 0, c[0])


@_fold("Gather")
def _gather(node: Node, c: list[Content]) -> Content | None:
    x, indices = c
    axis = node.integer("axis", 0)
    if not x.ndim or not -x.ndim <= axis < x.ndim:
        return None
    size = x.shape[axis]
    if any(isinstance(i, Dim) or not -size <= i < size for i in indices.flat):
        return None
    return np.asarray(np.take(x, indices.astype(np.int64), axis), object)


@_fold("Concat")
def _concat(node: Node, c: list[Content]) -> Content | None:
    axis, rank = node.integer("axis", 0), c[0].ndim
    if not -rank <= axis < rank:
        return None
    if any(each.ndim != rank for each in c):
        return None
    axis %= rank
    rest = {(*each.shape[:axis], *each.shape[axis + 1 :]) for each in c}
    return np.concatenate(c, axis) if len(rest) == 1 else None


@_fold("Reshape", "Squeeze", "Unsqueeze", "Flatten")
def _reshape(node: Node, c: list[Content]) -> Content | None:
    from irc.frontends.onnx.reshaping import new_shape

    shape = [n for n in new_shape(node) if isinstance(n, int)]
    fits = min(shape, default=0) >= 0 and math.prod(shape) == c[0].size
    return c[0].reshape(shape) if fits else None


@_fold("Slice")
def _slice(node: Node, c: list[Content]) -> Content | None:
    if any(each.ndim != 1 for each in c[1:]):
        return None
    x, (starts, ends) = c[0], c[1:3]
    axes = c[3] if len(c) > 3 else np.arange(len(starts))
    steps = c[4] if len(c) > 4 else np.ones(len(starts), np.int64)
    if len({len(starts), len(ends), len(axes), len(steps)}) > 1 or 0 in steps:
        return None
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if (
            any(isinstance(n, Dim) for n in (start, end, axis, step))
            or not -x.ndim <= axis < x.ndim
        ):
            return None
        cut = [slice(None)] * x.ndim
        cut[int(axis)] = slice(_end(start, int(step)), _end(end, int(step)), int(step))
        x = x[tuple(cut)]
    return x


def _end(place: int, step: int) -> int | None:
    """An end of a slice as Python has it: before the first element there is None."""
    return None if step < 0 and place <= np.iinfo(np.int64).min + 1 else int(place)


@_fold("Expand", "ConstantOfShape")
def _filled(node: Node, c: list[Content]) -> Content | None:
    sizes_ = c[-1].tolist()
    if c[-1].ndim != 1 or not all(isinstance(n, int) and n >= 0 for n in sizes_):
        return None
    if math.prod(sizes_) > MOST:
        return None
    if node.kind == "Expand":
        wide = np.empty(sizes_, object)
        return np.broadcast_arrays(c[0], wide)[0] if _broadcast(c[0], wide) else None
    value = node.attributes.get("value")
    array = None if value is None else value.read()
    if array is not None and array.size != 1:
        return None
    item = 0.0 if array is None else numbers(array).item()
    found = np.empty(sizes_, object)
    found[...] = item
    return found


@_fold("Range")
def _range(node: Node, c: list[Content]) -> Content | None:
    if any(content.size != 1 for content in c):
        return None
    start, stop, step = (content.item() for content in c)
    if not all(type(n) is int for n in (start, stop, step)) or not step:
        return None
    many = range(start, stop, step)
    return sizes(*many) if len(many) <= MOST else None


@_fold("ReduceProd", "ReduceSum", "ReduceMax", "ReduceMin")
def _reduce(node: Node, c: list[Content]) -> Content | None:
    if c[0].ndim != 1 or not c[0].size:
        return None
    call: Any = {"ReduceProd": operator.mul, "ReduceSum": operator.add}.get(node.kind)
    items = c[0].tolist()
    if call is None:
        if any(isinstance(item, Dim) for item in items):
            return None
        call = max if node.kind == "ReduceMax" else min
    total = items[0]
    for item in items[1:]:
        total = call(total, item)
    found = np.array(total, object)
    return found.reshape(1) if node.integer("keepdims", 1) else found

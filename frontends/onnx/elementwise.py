"""Arithmetic, functions, comparison, logic, selection and conversion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from irc import ops
from irc.core import Op, Value
from irc.dtypes import dtype as dtype_called
from irc.errors import Error
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.entry import Entry, Node
from irc.frontends.onnx.fold import content_of
from irc.frontends.onnx.reshaping import made_by as source
from irc.frontends.onnx.rules import Made, reads
from irc.frontends.onnx.tensors import DTYPES

_SAME: dict[str, type[Op]] = {
    "Neg": ops.Neg,
    "Abs": ops.Abs,
    "Sign": ops.Sign,
    "Sqrt": ops.Sqrt,
    "Exp": ops.Exp,
    "Log": ops.Log,
    "Sin": ops.Sin,
    "Cos": ops.Cos,
    "Round": ops.Round,
    "Floor": ops.Floor,
    "Ceil": ops.Ceil,
    "Sigmoid": ops.Sigmoid,
    "Tanh": ops.Tanh,
    "Relu": ops.Relu,
    "Softplus": ops.Softplus,
    "Erf": ops.Erf,
    "Equal": ops.Eq,
    "Less": ops.Lt,
    "LessOrEqual": ops.Le,
    "Greater": ops.Gt,
    "GreaterOrEqual": ops.Ge,
    "And": ops.And,
    "Or": ops.Or,
}
_LARGEST = {"f8e4m3": 448.0, "f8e5m2": 57344.0}  # what saturating casts stop at
_FOLDING: dict[str, type[Op]] = {
    "Min": ops.Minimum,
    "Max": ops.Maximum,
    "Sum": ops.Add,
    "Mean": ops.Add,
}


def apply(b: Builder, make: Callable[..., Any], *entries: Entry) -> Entry:
    """An elementwise operation on operands that agree in dtype."""
    values, result = b.together(entries)
    return result(b.value(make(*values)))


def mapped(b: Builder, make: Callable[[Value], Op], x: Entry) -> Entry:
    """An elementwise operation on one operand."""
    (value,), result = b.together([x])
    return result(b.value(make(value)))


def scalar(entry: Entry | None) -> Any:
    """The number that a value is, or that all its elements are; None for anything else."""
    content = content_of(entry)
    if content is None or not content.size:
        return None
    items = content.reshape(-1).tolist()
    return items[0] if all(item == items[0] for item in items) else None


@reads(*_SAME)
def plain(b: Builder, node: Node) -> Made:
    given = [node.input(i) for i in range(len(node.inputs))]
    return apply(b, _SAME[node.kind], *given)


@reads("Add", "Sub", "Mul", "Div")
def arithmetic(b: Builder, node: Node) -> Made:
    x, y = node.input(0), node.input(1)
    if node.own and node.opname == "group_norm":
        found = _affine(b, node, x, y)
        if found is not None:
            return found
    if node.kind == "Mul":
        found = _activation(b, x, y, node) or _activation(b, y, x, node)
        if found is not None:
            return found
    if node.kind == "Div":
        return _divide(b, node)
    kinds = {"Add": ops.Add, "Sub": ops.Sub, "Mul": ops.Mul}
    return apply(b, kinds[node.kind], x, y)


def _affine(b: Builder, node: Node, x: Entry, y: Entry) -> Entry | None:
    """The weight or bias that our own emission puts behind a normalisation of groups."""
    norm = x.base.owner if x.base is not None else None
    channels = (*x.shape[1:2], *[1] * (x.rank - 2))
    if not isinstance(norm, ops.GroupNorm) or y.shape != channels or norm.bias is not None:
        return None
    if x.base is None or x.base.type.shape != x.shape or (node.kind == "Mul" and norm.weight):
        return None
    vector = b.viewed(b.based(y), channels[:1])
    scale, bias = norm.weight, None
    if node.kind == "Mul":
        scale = b.get(vector)
    elif node.kind == "Add":
        bias = b.get(vector)
    else:
        return None
    return b.entry(
        b.value(ops.GroupNorm(norm.x, groups=norm.groups, weight=scale, bias=bias, eps=norm.eps))
    )


def _activation(b: Builder, x: Entry, y: Entry, node: Node) -> Entry | None:
    """x * sigmoid(x), and x * sigmoid(1.702 x)."""
    sigmoid = source(y, "Sigmoid")
    if sigmoid is None or (node.own and node.opname == "mul"):
        return None
    inner = sigmoid.input(0)
    if inner is x:
        return apply(b, ops.Silu, x)
    return None


def _divide(b: Builder, node: Node) -> Made:
    x, y = node.input(0), node.input(1)
    if dtype_called(x.dtype).is_float:
        return apply(b, ops.Div, x, y)
    whole = _dividend(x, y)
    if whole is not None:
        return apply(b, ops.FloorDiv, whole, y)
    if dtype_called(x.dtype).kind == "uint":
        return apply(b, ops.FloorDiv, x, y)
    # ONNX rounds towards zero, floor_div down
    size = apply(b, ops.FloorDiv, apply(b, ops.Abs, x), apply(b, ops.Abs, y))
    return apply(b, ops.Mul, size, apply(b, ops.Mul, apply(b, ops.Sign, x), apply(b, ops.Sign, y)))


def _dividend(entry: Entry, y: Entry) -> Entry | None:
    """x, of a value that is x less its remainder by y."""
    rest = source(entry, "Sub")
    parts = _remainder(rest.input(1)) if rest is not None else None
    if rest is None or parts is None or parts[0] is not rest.input(0) or parts[1] is not y:
        return None
    return rest.input(0)


def _remainder(entry: Entry) -> tuple[Entry, Entry] | None:
    """(x, y), of a value that is the remainder of x by y with the sign of y.

    Of floats it is Where(Sign(rest) * Sign(y) < 0, rest + y, rest), rest = fmod(x, y).
    """
    mod = source(entry, "Mod")
    if mod is not None:
        return None if mod.integer("fmod", 0) else (mod.input(0), mod.input(1))
    where = source(entry, "Where")
    return _float_remainder(where) if where is not None else None


def _float_remainder(where: Node) -> tuple[Entry, Entry] | None:
    rest = where.input(2)
    mod, total, less = (
        source(rest, "Mod"),
        source(where.input(1), "Add"),
        source(where.input(0), "Less"),
    )
    signs = source(less.input(0), "Mul") if less is not None else None
    if mod is None or total is None or less is None or signs is None:
        return None
    x, y = mod.input(0), mod.input(1)
    both = [source(signs.input(i), "Sign") for i in (0, 1)]
    found = [sign.input(0) if sign is not None else None for sign in both]
    fits = found == [rest, y] and [total.input(0), total.input(1)] == [rest, y]
    return (x, y) if fits and scalar(less.input(1)) == 0 and mod.integer("fmod", 0) else None


def _quotient(where: Node) -> tuple[Entry, Entry] | None:
    """(x, y), of Where(y == 0, x / y, Round((x - remainder) / y))."""
    equal, by_zero = source(where.input(0), "Equal"), source(where.input(1), "Div")
    rounded = source(where.input(2), "Round")
    divide = source(rounded.input(0), "Div") if rounded is not None else None
    if equal is None or by_zero is None or divide is None or scalar(equal.input(1)) != 0:
        return None
    x, y = by_zero.input(0), by_zero.input(1)
    fits = equal.input(0) is y and divide.input(1) is y and _dividend(divide.input(0), y) is x
    return (x, y) if fits else None


@reads("Not")
def negation(b: Builder, node: Node) -> Made:
    equal = source(node.input(0), "Equal")
    if equal is not None and not (node.own and node.opname == "not"):
        return apply(b, ops.Ne, equal.input(0), equal.input(1))
    return apply(b, ops.Not, node.input(0))


@reads("IsNaN")
def is_nan(b: Builder, node: Node) -> Made:
    return apply(b, ops.Ne, node.input(0), node.input(0))


def _drops(node: Node) -> str | None:
    return "it drops at random (training_mode)" if node.has(2) else None


@reads("Dropout", known="seed", refuses=_drops)
def dropout(b: Builder, node: Node) -> Made:
    return [node.input(0), None][: len(node.outputs)]


@reads("Reciprocal")
def reciprocal(b: Builder, node: Node) -> Made:
    root = source(node.input(0), "Sqrt")
    if root is not None and not (node.own and node.opname == "reciprocal"):
        return apply(b, ops.Rsqrt, root.input(0))
    return apply(b, ops.Reciprocal, node.input(0))


@reads("Min", "Max", "Sum", "Mean")
def fold(b: Builder, node: Node) -> Made:
    found, count = node.input(0), len(node.inputs)
    for i in range(1, count):
        found = apply(b, _FOLDING.get(node.kind, ops.Add), found, node.input(i))
    if node.kind == "Mean" and count > 1:
        return apply(b, ops.Div, found, b.entry(b.number(count, found.dtype)))
    return found


@reads("Xor")
def exclusive(b: Builder, node: Node) -> Made:
    x, y = node.input(0), node.input(1)
    if {x.dtype, y.dtype} != {"bool"}:
        raise Error(f"Xor of {x.dtype} and {y.dtype}, which are not bool")
    return apply(b, ops.Ne, x, y)


@reads("Pow")
def power(b: Builder, node: Node) -> Made:
    x, y = node.input(0), node.input(1)
    if not dtype_called(x.dtype).is_float:
        raise Error(f"Pow of {x.dtype} has no operation in irc; cast to f32")
    exponent = scalar(y)
    if not node.own and exponent == 2 and y.rank <= x.rank:
        return apply(b, ops.Mul, x, x)
    if not node.own and exponent == 0.5 and y.rank <= x.rank:
        return apply(b, ops.Sqrt, x)
    if y.dtype != x.dtype:
        y = converted(b, y, x.dtype)
    return apply(b, ops.Pow, x, y)


@reads("Mod", known="fmod")
def mod(b: Builder, node: Node) -> Made:
    x, y = node.input(0), node.input(1)
    if not node.integer("fmod", 0):
        return apply(b, ops.Mod, x, y)
    # fmod has the sign of the dividend: sign(x) * (|x| mod |y|)
    size = apply(b, ops.Mod, apply(b, ops.Abs, x), apply(b, ops.Abs, y))
    return apply(b, ops.Mul, apply(b, ops.Sign, x), size)


@reads("Clip", known="min max")
def clip(b: Builder, node: Node) -> Made:
    x, kind = node.input(0), node.input(0).dtype
    bounds: list[Any] = []
    for i, name in ((1, "min"), (2, "max")):
        given = node.optional(i)
        inside = node.real(name, 0.0) if name in node.attributes else None
        found = scalar(given) if given is not None else inside
        if given is not None and found is None:
            return _clipped(b, node)
        bounds.append(None if found is None else _bound(found, kind))
    low, high = bounds
    if low is None and high is None:
        return x
    return mapped(b, lambda v: ops.Clip(v, low=low, high=high), x)


def _clipped(b: Builder, node: Node) -> Entry:
    """Between bounds that are computed."""
    found = node.input(0)
    for i, cls in ((1, ops.Maximum), (2, ops.Minimum)):
        bound = node.optional(i)
        found = found if bound is None else apply(b, cls, found, bound)
    return found


def _bound(number: Any, kind: str) -> Any:
    return float(number) if dtype_called(kind).is_float else int(number)


@reads("Where")
def where(b: Builder, node: Node) -> Made:
    condition, x, y = (node.input(i) for i in range(3))
    order = source(condition, "Less") or source(condition, "Greater")
    compared = [order.input(0), order.input(1)] if order is not None else []
    whole = dtype_called(x.dtype).is_integer
    if order is not None and compared == [x, y] and whole and node.own and node.opname != "where":
        # how our own emission compares i64
        return apply(b, ops.Minimum if order.kind == "Less" else ops.Maximum, x, y)
    for cls, parts in ((ops.Mod, _float_remainder(node)), (ops.FloorDiv, _quotient(node))):
        if parts is not None and node.opname != "where":
            return apply(b, cls, *parts)
    from irc.frontends.onnx.lookup import guarded_rows

    return guarded_rows(b, node) or apply(b, ops.Where, condition, x, y)


@reads("Cast", known="to saturate round_mode")
def cast(b: Builder, node: Node) -> Made:
    x, target = node.input(0), DTYPES.get(node.integer("to", 1))
    if target is None:
        raise Error("Cast to a dtype that irc has not")
    literal = node.own and node.final and node.opname == "cast"
    if x.dtype == target and not literal:
        return x
    if x.was is not None and x.was.dtype == target and not literal:
        return x.was
    if x.data is not None and x.data.inline is None and not literal and wider(x.dtype, target):
        data = x.data
        return Entry(target, x.shape, make=lambda: b.tensor(data, target), was=x)
    counts = source(x, "Range") if node.own and node.opname == "iota" else None
    if counts is not None and [scalar(counts.input(i)) for i in (0, 2)] == [0, 1]:
        return b.value(ops.Iota(size=x.shape[0], dtype=target))
    if target in _LARGEST and node.integer("saturate", 1) and dtype_called(x.dtype).is_float:
        top = _LARGEST[target]
        clipped = mapped(b, lambda v: ops.Clip(v, low=-top, high=top), x)
        return converted(b, clipped, target)
    if literal:
        return mapped(b, lambda v: ops.Cast(v, dtype=target), x)
    found = Entry(target, x.shape, make=lambda: b.get(converted(b, x, target)), was=x)
    if wider(x.dtype, target):
        return found
    return converted(b, x, target)


def converted(b: Builder, x: Entry, target: str) -> Entry:
    """A value as another dtype."""
    if x.dtype == target:
        return x
    return mapped(b, lambda v: ops.Cast(v, dtype=target), x)


def wider(source: str, target: str) -> bool:
    """Whether a cast keeps every value, so that casting back gives the same."""
    import numpy as np

    from irc.dtypes import numpy_dtype

    return np.can_cast(numpy_dtype(source), numpy_dtype(target), "safe")

"""Matrix products and normalisation."""

from __future__ import annotations

from irc import ops
from irc.core import Value
from irc.dims import Dim, Shape, product
from irc.errors import Error
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.elementwise import apply, converted, scalar
from irc.frontends.onnx.entry import Entry, Node
from irc.frontends.onnx.reshaping import made_by as source
from irc.frontends.onnx.rules import MICROSOFT, Made, reads


@reads("Gemm", known="alpha beta transA transB")
def gemm(b: Builder, node: Node) -> Made:
    x, weight, bias = node.input(0), node.input(1), node.optional(2)
    alpha, beta = node.real("alpha", 1.0), node.real("beta", 1.0)
    turned = node.integer("transB", 0)
    if node.integer("transA", 0):
        x = b.entry(b.value(ops.Transpose(b.get(x), order=(1, 0))))
    fused = bias is not None and bias.shape == weight.shape[:1] and beta == 1 and alpha == 1
    value, result = b.rows(x)
    if turned:
        vector = b.get(bias) if fused and bias is not None else None
        found = result(b.value(ops.Linear(value, b.get(weight), bias=vector)))
        if fused:
            return found
    else:
        found = result(b.value(ops.Matmul(value, b.get(weight))))
    found = _scaled(b, found, alpha)
    return found if bias is None or not beta else apply(b, ops.Add, found, _scaled(b, bias, beta))


def _scaled(b: Builder, x: Entry, factor: float) -> Entry:
    return x if factor == 1 else apply(b, ops.Mul, x, b.entry(b.number(factor, x.dtype)))


@reads("MatMul")
def matmul(b: Builder, node: Node) -> Made:
    x, y = node.input(0), node.input(1)
    turned = source(y, "Transpose")
    if turned is not None and not node.own and turned.ints("perm") == [1, 0]:
        value, result = b.rows(x)
        return result(b.value(ops.Linear(value, b.get(turned.input(0)))))
    if x.rank > 1 and y.rank > 1:
        value, result = b.rows(x) if y.rank == 2 else (b.get(x), b.entry)
        return result(b.value(ops.Matmul(value, b.get(y))))
    left, right = b.get(x), b.get(y)
    gone = [i for i, entry in ((-2, x), (-1, y)) if entry.rank == 1]
    left = b.value(ops.Unsqueeze(left, dims=(0,))) if x.rank == 1 else left
    right = b.value(ops.Unsqueeze(right, dims=(1,))) if y.rank == 1 else right
    return b.value(ops.Squeeze(b.value(ops.Matmul(left, right)), dims=tuple(gone)))


@reads("FusedMatMul", domain=MICROSOFT, known="alpha transA transB")
def fused_matmul(b: Builder, node: Node) -> Made:
    values: list[Value] = []
    for i, flag in ((0, "transA"), (1, "transB")):
        value = b.get(node.input(i))
        if node.integer(flag, 0):
            rank = value.type.rank
            order = (*range(rank - 2), rank - 1, rank - 2)
            value = b.value(ops.Transpose(value, order=order))
        values.append(value)
    found = b.entry(b.value(ops.Matmul(*values)))
    return _scaled(b, found, node.real("alpha", 1.0))


def _joined(b: Builder, node: Node, x: Entry) -> tuple[Entry, Shape]:
    """(x with the dimensions that are normalised joined into its last, these dimensions)."""
    axis = node.integer("axis", -1)
    if not -x.rank <= axis < x.rank:
        raise Error(f"{node.kind} along axis {axis} of {x.rank} dimensions")
    inner = x.shape[axis:]
    if len(inner) == 1:
        return x, inner
    return b.viewed(b.based(x), (*x.shape[:axis], product(inner))), inner


def _vector(b: Builder, entry: Entry, inner: Shape) -> Value | None:
    """A scale or bias as a vector over joined dimensions."""
    width = product(inner)
    number = scalar(entry)
    if entry.shape != inner and number is not None and not isinstance(width, Dim):
        return b.value(ops.Full(value=number, shape=(width,), dtype=entry.dtype))
    wide = (1,) * (len(inner) - entry.rank) + entry.shape
    if len(wide) != len(inner) or any(a not in (1, n) for a, n in zip(wide, inner, strict=True)):
        return None
    value = b.get(entry)
    if entry.shape != inner:
        value = b.value(ops.Expand(value, shape=inner))
    return value if len(inner) == 1 else b.value(ops.Reshape(value, shape=(width,)))


def _parted(b: Builder, found: Entry, shape: Shape) -> Entry:
    """The result in the shape of the operand."""
    return found if found.shape == shape else b.viewed(b.based(found), shape)


@reads("RMSNormalization", known="axis epsilon stash_type")
def rms_normalization(b: Builder, node: Node) -> Made:
    return _rms(b, node, node.input(0), node.input(1))


@reads("SimplifiedLayerNormalization", known="axis epsilon stash_type")
@reads("SimplifiedLayerNormalization", domain=MICROSOFT, known="axis epsilon stash_type")
def simplified(b: Builder, node: Node) -> Made:
    return [_rms(b, node, node.input(0), node.input(1)), *[None] * (len(node.outputs) - 1)]


def _rms(b: Builder, node: Node, x: Entry, scale: Entry) -> Entry:
    scale, offset = _without_offset(node, scale)
    flat, inner = _joined(b, node, x)
    value, result = b.rows(flat)
    weight = _vector(b, scale, inner)
    if weight is None:
        raise Error(f"{node.kind} whose scale does not fit the dimensions that are normalised")
    eps = _epsilon(node)
    found = result(b.value(ops.RmsNorm(value, weight, eps=eps, offset=offset)))
    return _parted(b, found, x.shape)


def _epsilon(node: Node) -> float:
    """What is added to the mean square; nodes that add first have another default (schema of
    ONNX Runtime 1.31)."""
    return node.real("epsilon", 1e-12 if node.kind.startswith("Skip") else 1e-5)


def _without_offset(node: Node, scale: Entry) -> tuple[Entry, float]:
    """(the weight, what is added to it in the graph)."""
    add = source(scale, "Add")
    if add is None or not node.own:
        return scale, 0.0
    number = scalar(add.input(1))
    return (scale, 0.0) if number is None else (add.input(0), float(number))


@reads("SkipSimplifiedLayerNormalization", domain=MICROSOFT, known="epsilon")
def skip_simplified(b: Builder, node: Node) -> Made:
    total = apply(b, ops.Add, node.input(0), node.input(1))
    if node.has(3):
        total = apply(b, ops.Add, total, node.input(3))
    found = _rms(b, node, total, node.input(2))
    return [found, None, None, total][: len(node.outputs)]


@reads("SkipLayerNormalization", domain=MICROSOFT, known="epsilon")
def skip_layer_normalization(b: Builder, node: Node) -> Made:
    total = apply(b, ops.Add, node.input(0), node.input(1))
    if node.has(4):
        total = apply(b, ops.Add, total, node.input(4))
    found = _layer(b, node, total, node.input(2), node.optional(3))
    return [found, None, None, total][: len(node.outputs)]


@reads("LayerNormalization", known="axis epsilon stash_type")
def layer_normalization(b: Builder, node: Node) -> Made:
    found = _layer(b, node, node.input(0), node.input(1), node.optional(2))
    return [found, *[None] * (len(node.outputs) - 1)]


def _layer(b: Builder, node: Node, x: Entry, scale: Entry, bias: Entry | None) -> Entry:
    flat, inner = _joined(b, node, x)
    value, result = b.rows(flat)
    ones = scale.node is not None and scale.node.kind == "ConstantOfShape" and scalar_of(scale) == 1
    weight = None if ones else _vector(b, scale, inner)
    vector = None if bias is None else _vector(b, bias, inner)
    if (weight is None and not ones) or (vector is None and bias is not None):
        raise Error(f"{node.kind} whose scale or bias does not fit the normalised dimensions")
    eps = _epsilon(node)
    found = result(b.value(ops.LayerNorm(value, weight=weight, bias=vector, eps=eps)))
    return _parted(b, found, x.shape)


def scalar_of(entry: Entry) -> float | None:
    """The number that a ConstantOfShape fills with, or that a constant repeats."""
    found = scalar(entry)
    if found is None and entry.value is not None and isinstance(entry.value.owner, ops.Full):
        return float(entry.value.owner.value)
    return None if found is None else float(found)


@reads("InstanceNormalization", known="epsilon")
def instance_normalization(b: Builder, node: Node) -> Made:
    x, eps = node.shaped(0, 2), node.real("epsilon", 1e-5)
    channels = x.shape[1]
    if isinstance(channels, Dim):
        raise Error("InstanceNormalization of a symbolic number of channels")
    plain = [scalar_of(node.input(i)) for i in (1, 2)] == [1, 0]
    base = x.base
    if plain and base is not None and base.type.rank > 1 and base.type.shape[0] == x.shape[0]:
        # how our own emission normalises groups of channels
        return b.viewed(b.value(ops.GroupNorm(base, groups=channels, eps=eps)), x.shape)
    scale, bias = (b.get(node.input(i)) for i in (1, 2))
    return b.value(ops.GroupNorm(b.get(x), groups=channels, weight=scale, bias=bias, eps=eps))


@reads("GroupNormalization", known="epsilon num_groups stash_type")
def group_normalization(b: Builder, node: Node) -> Made:
    x = node.input(0)
    groups, eps = node.integer("num_groups", 1), node.real("epsilon", 1e-5)
    if node.opset < 21:
        raise Error("GroupNormalization before opset 21 has a scale per group; export it anew")
    scale, bias = (b.get(node.input(i)) for i in (1, 2))
    return b.value(ops.GroupNorm(b.get(x), groups=groups, weight=scale, bias=bias, eps=eps))


def _trains(node: Node) -> str | None:
    if node.integer("training_mode", 0) or len([name for name in node.outputs if name]) > 1:
        return "it computes the statistics of a batch (training)"
    return None


@reads("BatchNormalization", known="epsilon momentum training_mode", refuses=_trains)
def batch_normalization(b: Builder, node: Node) -> Made:
    """x * factor + shift for each channel, in f32 (f64 of f64) and rounded once."""
    x, wide = node.shaped(0, 2), "f64" if node.input(0).dtype == "f64" else "f32"
    scale, bias, mean, variance = (converted(b, node.shaped(i, 1, 1), wide) for i in range(1, 5))
    eps = b.entry(b.number(node.real("epsilon", 1e-5), wide))
    factor = apply(b, ops.Mul, scale, apply(b, ops.Rsqrt, apply(b, ops.Add, variance, eps)))
    shift = apply(b, ops.Sub, bias, apply(b, ops.Mul, mean, factor))
    column = (x.shape[1], *(1,) * (x.rank - 2))
    if factor.shape != column[:1] or shift.shape != column[:1]:
        raise Error(f"BatchNormalization of {x.shape[1]} channels has other parameters")
    factor, shift = (b.viewed(b.get(each), column) for each in (factor, shift))
    found = apply(b, ops.Add, apply(b, ops.Mul, converted(b, x, wide), factor), shift)
    return converted(b, found, x.dtype)


@reads("Softmax", "LogSoftmax", known="axis")
def softmax(b: Builder, node: Node) -> Made:
    cls = ops.Softmax if node.kind == "Softmax" else ops.LogSoftmax
    x, axis = node.input(0), node.integer("axis", -1)
    if axis in (-1, x.rank - 1):
        value, result = b.rows(x)
        return result(b.value(cls(value, dim=axis if value.type.rank == x.rank else -1)))
    return b.value(cls(b.get(x), dim=axis))

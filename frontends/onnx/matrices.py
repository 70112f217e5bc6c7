"""Matrix products and normalisation."""

from __future__ import annotations

from irc import ops
from irc.core import Value
from irc.dims import Dim, DimLike
from irc.errors import Error
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.elementwise import apply, scalar
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


def _last(node: Node, x: Entry) -> bool:
    """Whether the node works along the last dimension only."""
    axis = node.integer("axis", -1)
    return axis in (-1, x.rank - 1)


def _vector(b: Builder, entry: Entry, width: DimLike) -> Value | None:
    """A scale or bias as a vector over the last dimension."""
    if entry.shape == (width,):
        return b.get(entry)
    number = scalar(entry)
    if number is None or isinstance(width, Dim):
        return None
    return b.value(ops.Full(value=number, shape=(width,), dtype=entry.dtype))


@reads("RMSNormalization", known="axis epsilon stash_type")
def rms_normalization(b: Builder, node: Node) -> Made:
    return _rms(b, node, node.input(0), node.input(1))


@reads("SimplifiedLayerNormalization", known="axis epsilon stash_type")
@reads("SimplifiedLayerNormalization", domain=MICROSOFT, known="axis epsilon stash_type")
def simplified(b: Builder, node: Node) -> Made:
    return [_rms(b, node, node.input(0), node.input(1)), *[None] * (len(node.outputs) - 1)]


def _rms(b: Builder, node: Node, x: Entry, scale: Entry) -> Entry:
    if not _last(node, x):
        raise Error(f"{node.kind} over more than the last dimension")
    scale, offset = _without_offset(node, scale)
    value, result = b.rows(x)
    weight = _vector(b, scale, x.shape[-1])
    if weight is None:
        raise Error(f"{node.kind} whose scale is no vector over the last dimension")
    eps = _epsilon(node)
    return result(b.value(ops.RmsNorm(value, weight, eps=eps, offset=offset)))


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
    if not _last(node, x):
        raise Error(f"{node.kind} over more than the last dimension")
    value, result = b.rows(x)
    ones = scale.node is not None and scale.node.kind == "ConstantOfShape" and scalar_of(scale) == 1
    width = x.shape[-1]
    weight = None if ones else _vector(b, scale, width)
    vector = None if bias is None else _vector(b, bias, width)
    if (weight is None and not ones) or (vector is None and bias is not None):
        raise Error(f"{node.kind} whose scale or bias is no vector over the last dimension")
    eps = _epsilon(node)
    return result(b.value(ops.LayerNorm(value, weight=weight, bias=vector, eps=eps)))


def scalar_of(entry: Entry) -> float | None:
    """The number that a ConstantOfShape fills with, or that a constant repeats."""
    found = scalar(entry)
    if found is None and entry.value is not None and isinstance(entry.value.owner, ops.Full):
        return float(entry.value.owner.value)
    return None if found is None else float(found)


@reads("InstanceNormalization", known="epsilon")
def instance_normalization(b: Builder, node: Node) -> Made:
    x, eps = node.input(0), node.real("epsilon", 1e-5)
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


@reads("Softmax", "LogSoftmax", known="axis")
def softmax(b: Builder, node: Node) -> Made:
    cls = ops.Softmax if node.kind == "Softmax" else ops.LogSoftmax
    x, axis = node.input(0), node.integer("axis", -1)
    if axis in (-1, x.rank - 1):
        value, result = b.rows(x)
        return result(b.value(cls(value, dim=axis if value.type.rank == x.rank else -1)))
    return b.value(cls(b.get(x), dim=axis))

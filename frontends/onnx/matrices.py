"""Matrix products and normalisation."""

from __future__ import annotations

from irc import ops
from irc.errors import Error
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.elementwise import scalar
from irc.frontends.onnx.entry import Entry, Node
from irc.frontends.onnx.rules import MICROSOFT, Made, made_by, reads
from irc.ir.core import Op, Value
from irc.ir.dims import Dim, Shape, product
from irc.ir.dtypes import is_float


@reads("Gemm", known="alpha beta transA transB")
def gemm(b: Builder, node: Node) -> Made:
    """alpha * x @ y + beta * bias, as one Linear where it is that."""
    x, weight, bias = node.shaped(0, 2, 2), node.shaped(1, 2, 2), node.optional(2)
    alpha, beta = node.real("alpha", 1.0), node.real("beta", 1.0)
    if not is_float(x.dtype) and {alpha, beta} - {0.0, 1.0}:
        raise Error(f"Gemm of {x.dtype} with a factor that is no integer")
    if node.integer("transA", 0):
        x = b.op(ops.Transpose, x, order=(1, 0))
    turned = bool(node.integer("transB", 0))
    if turned and is_float(x.dtype):
        if bias is not None and bias.shape == weight.shape[:1] and alpha == beta == 1:
            return b.op(ops.Linear, x, weight, bias=b.get(bias))
        found = b.op(ops.Linear, x, weight)
    else:
        found = b.op(ops.Matmul, x, b.op(ops.Transpose, weight, order=(1, 0)) if turned else weight)
    found = _scaled(b, found, alpha)
    return found if bias is None or not beta else b.op(ops.Add, found, _scaled(b, bias, beta))


def _scaled(b: Builder, x: Entry, factor: float) -> Entry:
    return x if factor == 1 else b.op(ops.Mul, x, factor)


@reads("MatMul")
def matmul(b: Builder, node: Node) -> Made:
    """Matmul, also with vectors, and Linear where y is a transposed matrix."""
    x, y = node.shaped(0, 1), node.shaped(1, 1)
    turned = made_by(y, "Transpose")
    if turned is not None and turned.ints("perm") == [1, 0] and is_float(x.dtype) and x.ndim > 1:
        return b.op(ops.Linear, x, turned.input(0))
    if x.ndim > 1 and y.ndim > 1:
        return b.op(ops.Matmul, x, y)
    gone = [i for i, entry in ((-2, x), (-1, y)) if entry.ndim == 1]
    left = b.op(ops.Unsqueeze, x, dims=(0,)) if x.ndim == 1 else x
    right = b.op(ops.Unsqueeze, y, dims=(1,)) if y.ndim == 1 else y
    return b.op(ops.Squeeze, b.op(ops.Matmul, left, right), dims=tuple(gone))


@reads("FusedMatMul", domain=MICROSOFT, known="alpha transA transB")
def fused_matmul(b: Builder, node: Node) -> Made:
    """alpha * x @ y, each of them transposed where its attribute says so."""
    values: list[Value] = []
    for i, flag in ((0, "transA"), (1, "transB")):
        value = b.get(node.shaped(i, 2))
        if node.integer(flag, 0):
            ndim = value.type.ndim
            value = b.transposed(value, (*range(ndim - 2), ndim - 1, ndim - 2))
        values.append(value)
    return _scaled(b, b.op(ops.Matmul, *values), node.real("alpha", 1.0))


def _vector(b: Builder, node: Node, entry: Entry, inner: Shape) -> Value:
    """A scale or bias as a vector over the joined dimensions."""
    width, number = product(inner), scalar(entry)
    if entry.shape != inner and number is not None and not isinstance(width, Dim):
        return b.value(ops.Full(value=number, shape=(width,), dtype=entry.dtype))
    wide = (1,) * (len(inner) - entry.ndim) + entry.shape
    if len(wide) != len(inner) or any(a not in (1, n) for a, n in zip(wide, inner, strict=True)):
        raise Error(
            f"{node.kind} has a scale or bias of shape {list(entry.shape)}, which does not fit the "
            f"normalised dimensions {list(inner)}"
        )
    value = b.get(entry)
    if entry.shape != inner:
        value = b.value(ops.Expand(value, shape=inner))
    return b.reshaped(value, (width,))


_NORM = "axis epsilon stash_type"


@reads("RMSNormalization", known=_NORM)
@reads("SimplifiedLayerNormalization", known=_NORM)
@reads("SimplifiedLayerNormalization", domain=MICROSOFT, known=_NORM)
def rms_normalization(b: Builder, node: Node) -> Made:
    """RmsNorm; the statistics that ONNX Runtime's operator may return as well are not computed."""
    found = _normalised(b, node, node.input(0), node.input(1))
    return [found, *[None] * (len(node.outputs) - 1)]


@reads(
    "SkipSimplifiedLayerNormalization", "SkipLayerNormalization", domain=MICROSOFT, known="epsilon"
)
def skip_normalization(b: Builder, node: Node) -> Made:
    """The norm of the sum of the first two inputs and of an optional bias, and that sum."""
    layer = node.kind == "SkipLayerNormalization"
    total = b.op(ops.Add, node.input(0), node.input(1))
    if node.has(3 + layer):
        total = b.op(ops.Add, total, node.input(3 + layer))
    shift = node.optional(3) if layer else None
    found = _normalised(b, node, total, node.input(2), shift, layer)
    return [found, None, None, total][: len(node.outputs)]


def _normalised(
    b: Builder, node: Node, x: Entry, scale: Entry, bias: Entry | None = None, layer: bool = False
) -> Entry:
    """LayerNorm or RmsNorm over all dimensions from `axis` on."""
    axis = node.axis(x.ndim, -1)
    inner = x.shape[axis:]
    flat = b.reshaped(b.get(x), (*x.shape[:axis], product(inner)))
    weight = _vector(b, node, scale, inner)
    if layer:
        shift = None if bias is None else _vector(b, node, bias, inner)
        op: Op = ops.LayerNorm(flat, weight=weight, bias=shift, eps=_epsilon(node))
    else:
        op = ops.RmsNorm(flat, weight, eps=_epsilon(node))
    return b.entry(b.reshaped(b.value(op), x.shape))


def _epsilon(node: Node) -> float:
    """What is added to the mean square; nodes that add first have another default (schema of
    ONNX Runtime 1.31)."""
    return node.real("epsilon", 1e-12 if node.kind.startswith("Skip") else 1e-5)


@reads("LayerNormalization", known=_NORM)
def layer_normalization(b: Builder, node: Node) -> Made:
    x = node.input(0)
    found = [_normalised(b, node, x, node.input(1), node.optional(2), layer=True)]
    if node.wants(1) or node.wants(2):
        dims = tuple(range(node.axis(x.ndim, -1), x.ndim))
        wide = b.cast(x, "f64" if x.dtype == "f64" else "f32")
        mean = b.op(ops.ReduceMean, wide, dims=dims, keep=True)
        centered = b.op(ops.Sub, wide, mean)
        variance = b.op(ops.ReduceMean, b.op(ops.Mul, centered, centered), dims=dims, keep=True)
        found += [mean, b.op(ops.Rsqrt, b.op(ops.Add, variance, _epsilon(node)))]
    return found


@reads("InstanceNormalization", known="epsilon")
@reads("GroupNormalization", known="epsilon num_groups stash_type")
def group_normalization(b: Builder, node: Node) -> Made:
    """GroupNorm, whose groups are single channels for InstanceNormalization."""
    x, each = node.shaped(0, 2), node.kind == "InstanceNormalization"
    if not each and node.opset < 21:
        raise Error("GroupNormalization before opset 21 has a scale per group; export it anew")
    groups = x.shape[1] if each else node.integer("num_groups", 1)
    if isinstance(groups, Dim):
        raise Error("InstanceNormalization of a symbolic number of channels")
    scale, bias = (b.get(node.input(i)) for i in (1, 2))
    eps = node.real("epsilon", 1e-5)
    return b.value(ops.GroupNorm(b.get(x), groups=groups, weight=scale, bias=bias, eps=eps))


def _trains(node: Node) -> str | None:
    if node.integer("training_mode", 0) or len([name for name in node.outputs if name]) > 1:
        return "it computes the statistics of a batch (training)"
    return None


@reads("BatchNormalization", known="epsilon momentum training_mode", refuses=_trains)
def batch_normalization(b: Builder, node: Node) -> Made:
    """x * factor + shift for each channel, in f32 (f64 of f64) and rounded once."""
    x, wide = node.shaped(0, 2), "f64" if node.input(0).dtype == "f64" else "f32"
    scale, bias, mean, variance = (b.cast(node.shaped(i, 1, 1), wide) for i in range(1, 5))
    root = b.op(ops.Rsqrt, b.op(ops.Add, variance, node.real("epsilon", 1e-5)))
    factor = b.op(ops.Mul, scale, root)
    shift = b.op(ops.Sub, bias, b.op(ops.Mul, mean, factor))
    column = (x.shape[1], *(1,) * (x.ndim - 2))
    if factor.shape != column[:1] or shift.shape != column[:1]:
        raise Error(f"BatchNormalization of {x.shape[1]} channels has other parameters")
    factor, shift = (b.entry(b.reshaped(b.get(each), column)) for each in (factor, shift))
    found = b.op(ops.Add, b.op(ops.Mul, b.cast(x, wide), factor), shift)
    return b.cast(found, x.dtype)

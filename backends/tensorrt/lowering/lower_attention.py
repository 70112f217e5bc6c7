"""Rope and attention for TensorRT.

TRT_Attention scales nothing, so that q comes scaled. `lower_right` aligns the last query with the
last valid key, which `key_value_lengths` counts: causal attention over a cache is just that.
"""

from __future__ import annotations

from dataclasses import dataclass

from irc import ops
from irc.backends.onnx.emitter import Flat, Lowered
from irc.backends.onnx.lower_attention import by_head, cos_sin, fixed_heads, rotated
from irc.backends.tensorrt.lowering.emitter import TensorRTEmitter
from irc.backends.tensorrt.lowering.table import CHOICES
from irc.backends.tensorrt.nodes import ATTENTION
from irc.core import Op, Value
from irc.dims import Dim, DimLike, Shape, exact_divide, product

# Head sizes of the fused kernels, and of those under a mask of bools.
FUSED, MASKED = range(12, 257, 4), range(16, 257, 8)
FEWEST = 4  # query heads of the kernel for one query, where there may be one row only


@CHOICES.lower(
    ops.Rope,
    choice="RotaryEmbedding",
    reason="cos and sin, computed in f32, are cast to the dtype of x, which must be theirs",
    source="onnx/onnx-tensorrt 5ab48c5c, RotaryEmbedding",
    unless=fixed_heads,
)
def rope(e: TensorRTEmitter, op: ops.Rope) -> Lowered:
    kind = e.dtype(op.x)
    cos, sin = (e.cast(each, kind) if kind != "f32" else each for each in cos_sin(e, op))
    return rotated(e, op, cos, sin)


def fixed_groups(op: Op) -> str | None:
    """Refuses a number of heads that is not known."""
    assert isinstance(op, ops.Attention)
    if isinstance(op.key_heads, Dim) or isinstance(op.q.type.shape[2], Dim):
        return "has a symbolic number of heads"
    return None


@dataclass(frozen=True)
class _Sizes:
    """The sizes of one attention: rows, queries, keys, heads, key heads, widths of keys, values."""

    batch: DimLike
    tokens: DimLike
    keys: DimLike
    heads: int
    key_heads: int
    width: int
    value_width: DimLike

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.heads // self.key_heads


def _sizes(op: ops.Attention) -> _Sizes:
    batch, tokens, features = op.q.type.shape
    heads, key_heads = exact_divide(features, op.head_dim), op.key_heads
    assert isinstance(heads, int) and isinstance(key_heads, int)
    keys = op.k.type.shape[2 if op.cached else 1]
    out = exact_divide(op.result.type.shape[2], heads)
    assert out is not None
    return _Sizes(batch, tokens, keys, heads, key_heads, op.head_dim, out)


@CHOICES.lower(
    ops.Attention,
    choice="TRT_Attention",
    reason="ONNX Attention drops nonpad_kv_seqlen and aligns causal masks to the first key; a "
    "softcap or values of another width become products and a softmax",
    source="parsed networks and layer dumps of TensorRT-RTX 1.7.1.116; TRT_custom_ops.md",
    unless=fixed_groups,
)
def attention(e: TensorRTEmitter, op: ops.Attention) -> Lowered:
    sizes = _sizes(op)
    q = by_head(e, op.q, sizes.heads, sizes.width)
    scale = e.number(op.score_scale, op.q.type.dtype)
    q = e.add("Mul", q, scale)
    k, v = _keys(e, op.k, op, sizes.width), _keys(e, op.v, op, sizes.value_width)
    if op.softcap or sizes.value_width != sizes.width:
        out = _spelled(e, op, sizes, q, k, v)
    else:
        out = _fused(e, op, sizes, q, k, v)
    out = e.add("Transpose", out, perm=[0, 2, 1, 3])
    batch, tokens, features = op.result.type.shape
    return Flat(e.reshape(out, (product((batch, tokens)), features)))


def _keys(e: TensorRTEmitter, x: Value, op: ops.Attention, width: DimLike) -> str:
    return e.get(x) if op.cached else by_head(e, x, op.key_heads, width)


def _fused(e: TensorRTEmitter, op: ops.Attention, sizes: _Sizes, q: str, k: str, v: str) -> str:
    """One node; a mask where causality and lengths do not say all."""
    needs_mask = op.mask is not None or op.bias is not None or bool(op.window)
    needs_mask = needs_mask or (op.causal and op.lengths is not None)
    widths = MASKED if needs_mask and op.bias is None else FUSED
    fused = op.q.type.dtype != "f32" and sizes.width in widths and sizes.heads >= FEWEST
    attributes: dict[str, int | str] = {} if fused else {"TRT_decomposable": 1}
    if needs_mask:
        out = e.add(ATTENTION, q, k, v, _scores(e, op, sizes), **attributes)
        return _seeing(e, op, sizes, out)
    attributes["causal_kind"] = "lower_right" if op.causal else "none"
    return e.add(ATTENTION, q, k, v, "", "", _valid(e, op, sizes), **attributes)


def _seeing(e: TensorRTEmitter, op: ops.Attention, sizes: _Sizes, out: str) -> str:
    """`out`, or 0 for a query that sees no key, of which the node would make anything."""
    if op.mask is None and op.lengths is None:
        return out
    kind = op.q.type.dtype
    some = e.add("ReduceMax", e.cast(_mask(e, op, sizes), kind), e.ints(-1), keepdims=1)
    zero = e.number(0, kind)
    return e.add("Where", e.add("Greater", some, zero), out, zero)


def _valid(e: TensorRTEmitter, op: ops.Attention, sizes: _Sizes) -> str:
    """key_value_lengths i32[B], or "" where every key counts."""
    if not op.causal:
        return "" if op.lengths is None else _i32(e, op.lengths)
    if op.past is None:
        return ""
    past = op.past

    def make() -> str:
        return e.add("Add", _i32(e, past), e.cast(e.dim(sizes.tokens), "i32"))

    return e.cached(("valid", e.root(past), sizes.tokens), make)


def _i32(e: TensorRTEmitter, value: Value) -> str:
    return e.get(value) if value.type.dtype == "i32" else e.cast(e.get(value), "i32")


def _scores(e: TensorRTEmitter, op: ops.Attention, sizes: _Sizes) -> str:
    """What is added to the scores, or which of them count: [B|1, H|1, S, T] in full S and T."""
    mask = _mask(e, op, sizes)
    kind = op.q.type.dtype
    found = mask
    if op.bias is not None:
        bias = e.get(op.bias)
        found = e.cast(bias, kind) if op.bias.type.dtype != kind else bias
        found = e.add("Where", mask, found, e.number(_lowest(kind), kind)) if mask else found
    return e.add("Expand", found, e.sizes((1, 1, sizes.tokens, sizes.keys)))


def _lowest(kind: str) -> float:
    """A number whose exponential is 0 and that stays finite when scores are added."""
    return {"f16": -3e4, "bf16": -1e38, "f32": -1e38}[kind]


def _mask(e: TensorRTEmitter, op: ops.Attention, sizes: _Sizes) -> str:
    """Which keys a query sees, bool [B|1, H|1, S|1, T]; "" where it sees all."""
    parts = ["" if op.mask is None else e.get(op.mask), _near(e, op, sizes), _filled(e, op, sizes)]
    mask = ""
    for part in parts:
        mask = e.add("And", mask, part) if mask and part else mask or part
    return mask


def _near(e: TensorRTEmitter, op: ops.Attention, sizes: _Sizes) -> str:
    """The keys that causality and the window leave: bool [B|1, 1, S, T]."""
    if not op.window and not op.causal:
        return ""
    past = None if op.past is None else e.root(op.past)

    def make() -> str:
        first = e.dim(sizes.keys - sizes.tokens) if op.past is None else e.cast64(op.past)
        first = e.add("Reshape", first, e.ints(-1, 1, 1, 1))
        query = e.add("Add", first, e.add("Reshape", e.iota(sizes.tokens), e.ints(1, 1, -1, 1)))
        key = e.add("Reshape", e.iota(sizes.keys), e.ints(1, 1, 1, -1))
        found = e.add("LessOrEqual", key, query) if op.causal else ""
        if not op.window:
            return found
        near = e.add("Greater", key, e.add("Sub", query, e.number(op.window, "i64")))
        return e.add("And", found, near) if found else near

    return e.cached(("near", past, op.causal, op.window, sizes.tokens, sizes.keys), make)


def _filled(e: TensorRTEmitter, op: ops.Attention, sizes: _Sizes) -> str:
    """The keys that are no padding: bool [B, 1, 1, T]."""
    if op.lengths is None:
        return ""
    lengths = op.lengths

    def make() -> str:
        ends = e.add("Reshape", e.cast64(lengths), e.ints(-1, 1, 1, 1))
        return e.add("Less", e.add("Reshape", e.iota(sizes.keys), e.ints(1, 1, 1, -1)), ends)

    return e.cached(("filled", e.root(lengths), sizes.keys), make)


def _spelled(e: TensorRTEmitter, op: ops.Attention, sizes: _Sizes, q: str, k: str, v: str) -> str:
    """The same by products and a softmax in f32: [B, H, S, Dv]. Key heads are broadcast."""
    kind = op.q.type.dtype
    grouped: Shape = (sizes.batch, sizes.key_heads, sizes.groups)
    q = e.reshape(q, (*grouped, sizes.tokens, sizes.width))
    k, v = (e.add("Unsqueeze", each, e.ints(2)) for each in (k, v))
    scores = e.add("MatMul", q, e.add("Transpose", k, perm=[0, 1, 2, 4, 3]))
    scores = e.cast(scores, "f32") if kind != "f32" else scores
    if op.softcap:
        cap = e.number(op.softcap, "f32")
        scores = e.add("Mul", e.add("Tanh", e.add("Div", scores, cap)), cap)
    scores = e.reshape(scores, (sizes.batch, sizes.heads, sizes.tokens, sizes.keys))
    if op.bias is not None:
        bias, narrow = e.get(op.bias), op.bias.type.dtype != "f32"
        scores = e.add("Add", scores, e.cast(bias, "f32") if narrow else bias)
    mask = _mask(e, op, sizes)
    scores = e.add("Where", mask, scores, e.number(_lowest("f32"), "f32")) if mask else scores
    weights = e.add("Softmax", scores, axis=-1)
    if mask:  # a query that sees no key gives 0
        weights = e.add("Where", mask, weights, e.number(0, "f32"))
    weights = e.cast(weights, kind) if kind != "f32" else weights
    weights = e.reshape(weights, (*grouped, sizes.tokens, sizes.keys))
    out = e.add("MatMul", weights, v)
    return e.reshape(out, (sizes.batch, sizes.heads, sizes.tokens, sizes.value_width))

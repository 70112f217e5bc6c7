"""Rope, attention and KV caches for TensorRT.

TRT_Attention does not scale, so q is scaled first. Its `lower_right` aligns the last query with the
last valid key, which `key_value_lengths` counts: that is causal attention over a cache.
"""

from __future__ import annotations

from irc import ops
from irc.backends.onnx.emitter import Lowered
from irc.backends.onnx.lower_attention import (
    LOWEST,
    by_head,
    cos_sin,
    fixed_heads,
    in_parts,
    joined_heads,
    paged_update,
    rotated,
    score_sizes,
    symbolic_heads,
    visible_keys,
)
from irc.backends.tensorrt.lowering.emitter import TensorRTEmitter
from irc.backends.tensorrt.lowering.table import CHOICES
from irc.backends.tensorrt.nodes import ATTENTION, CACHE_UPDATE
from irc.ir.core import Value
from irc.ir.dims import Dim, DimLike, exact_divide
from irc.ops.fused_attention import cache_writes

_ALIGNED, _WIDEST = 8, 256  # what the head sizes of fused kernels are a multiple of; the largest


@CHOICES.lower(
    ops.Rope,
    choice="RotaryEmbedding",
    reason="cos and sin, computed in f32, are cast to the dtype of x, which must be theirs",
    source="onnx/onnx-tensorrt 5ab48c5c, RotaryEmbedding",
    unless=fixed_heads,
)
def rope(e: TensorRTEmitter, op: ops.Rope) -> Lowered:
    """`x` rotated by the angles of its positions."""
    kind = e.dtype(op.x)
    cos, sin = (e.cast(x, kind) if kind != "f32" else x for x in cos_sin(e, op))
    return rotated(e, op, cos, sin)


@CHOICES.lower(
    ops.Attention,
    choice="TRT_Attention",
    reason="ONNX Attention drops nonpad_kv_seqlen and aligns causal masks to the first key; a "
    "softcap, sinks or values of another width become products and a softmax",
    source="parsed networks and layer dumps of TensorRT-RTX 1.7.1.116; TRT_custom_ops.md",
    unless=symbolic_heads,
)
def attention(e: TensorRTEmitter, op: ops.Attention) -> Lowered:
    """The weighted sums of values as a matrix [B * S, H * Dv]."""
    heads = score_sizes(op)[1]
    width = exact_divide(op.result.type.shape[2], heads)
    assert width is not None
    q = by_head(e, op.q, heads, op.head_dim)
    q = e.add("Mul", q, e.number(op.score_scale, op.q.type.dtype))
    k, v = _keys(e, op.k, op, op.head_dim), _keys(e, op.v, op, width)
    is_own = not op.softcap and op.sinks is None and width == op.head_dim and _is_taken(op)
    if is_own and not e.avoids(ATTENTION):
        return joined_heads(e, op, _fused(e, op, q, k, v))
    return joined_heads(e, op, in_parts(e, op, q, k, v, width))


def _keys(e: TensorRTEmitter, x: Value, op: ops.Attention, width: DimLike) -> str:
    return e.get(x) if op.cached else by_head(e, x, op.key_heads, width)


def _is_taken(op: ops.Attention) -> bool:
    """Whether TensorRT finds kernels for the head size, fused ones or its own products: where
    fused kernels would have to pad heads, the builder fails on caches and masks."""
    if op.q.type.dtype == "f32" or op.head_dim % _ALIGNED == 0:
        return True
    pads = _ALIGNED < op.head_dim <= _WIDEST
    return not pads or not (op.cached or op.lengths or _needs_mask(op))


def _needs_mask(op: ops.Attention) -> bool:
    """Whether causality and lengths are not enough."""
    is_masked = op.mask is not None or op.bias is not None or bool(op.window)
    return is_masked or (op.causal and op.lengths is not None)


def _fused(e: TensorRTEmitter, op: ops.Attention, q: str, k: str, v: str) -> str:
    """One node, with a mask unless causality and lengths are enough: [B, H, S, Dv]."""
    attributes: dict[str, int | str] = {"TRT_decomposable": 1}  # where no fused kernel takes it
    if _needs_mask(op):
        out = e.add(ATTENTION, q, k, v, _scores(e, op), **attributes)
        return _without_keys(e, op, out)
    attributes["causal_kind"] = "lower_right" if op.causal else "none"
    return e.add(ATTENTION, q, k, v, "", "", _valid(e, op), **attributes)


def _without_keys(e: TensorRTEmitter, op: ops.Attention, out: str) -> str:
    """`out` with 0 for queries that see no key, whose result the node leaves undefined."""
    if op.mask is None and op.lengths is None:
        return out
    kind = op.q.type.dtype
    some = e.add("ReduceMax", e.cast(visible_keys(e, op, op.causal), kind), e.ints(-1), keepdims=1)
    zero = e.number(0, kind)
    return e.add("Where", e.add("Greater", some, zero), out, zero)


def _valid(e: TensorRTEmitter, op: ops.Attention) -> str:
    """key_value_lengths i32[B], or "" if every key is valid."""
    if not op.causal:
        return "" if op.lengths is None else e.converted(op.lengths, "i32")
    if op.past is None:
        return ""
    past, tokens = op.past, op.q.type.shape[1]

    def make() -> str:
        return e.add("Add", e.converted(past, "i32"), e.cast(e.dim(tokens), "i32"))

    return e.cached(("valid", e.root(past), tokens), make)


def _scores(e: TensorRTEmitter, op: ops.Attention) -> str:
    """What is added to the scores, or a mask of them: [B|1, H|1, S, T] with S and T expanded."""
    mask = scores = visible_keys(e, op, op.causal)
    kind, sizes = op.q.type.dtype, score_sizes(op)[2:]
    if op.bias is not None:
        scores = e.converted(op.bias, kind)
        scores = e.add("Where", mask, scores, e.number(LOWEST[kind], kind)) if mask else scores
    shapes = [x.type.shape[2:] for x in (op.mask, op.bias) if x is not None]
    if op.causal or op.window or sizes in shapes:
        return scores  # an Expand to the shape it has would cost kernels in every layer
    return e.cached(("scores", scores), lambda: e.add("Expand", scores, e.sizes((1, 1, *sizes))))


@CHOICES.lower(
    ops.CacheUpdate,
    choice="ScatterElements",
    reason="TensorRT 11.1 and 11.2 wrote wrong tokens into native caches on sm_121",
    source="https://github.com/NVIDIA/TensorRT-Model-Connect/issues/955",
    flavour="tensorrt",
    since=(11, 1),
    before=(11, 3),
    architectures=(121,),
)
def copied_cache(e: TensorRTEmitter, op: ops.CacheUpdate) -> Lowered:
    """A copy of the cache with the new tokens, by ScatterElements."""
    if op.pages is not None:
        return paged_update(e, op, op.pages)
    batch, heads, _, width = op.cache.type.shape
    tokens = op.new.type.shape[1]
    new = by_head(e, op.new, heads, width)
    first = e.add("Reshape", e.cast64(op.past), e.ints(-1, 1, 1, 1))
    places = e.add("Add", first, e.add("Reshape", e.iota(tokens), e.ints(1, 1, -1, 1)))
    places = e.add("Expand", places, e.sizes((batch, heads, tokens, width)))
    return e.add("ScatterElements", e.get(op.cache), places, new, axis=2)


@CHOICES.lower(
    ops.CacheUpdate,
    choice="TensorScatter",
    reason="in place where the cache is an input that a result overwrites and its capacity is "
    "fixed; else a copy by ScatterElements",
    source="NvInfer.h, IKVCacheUpdateLayer; parser of TensorRT-RTX 1.7.1.116",
)
def cache_update(e: TensorRTEmitter, op: ops.CacheUpdate) -> Lowered:
    """The cache with the new tokens, in place if possible."""
    if op.pages is not None or e.avoids(CACHE_UPDATE) or not _is_in_place(e, op):
        return copied_cache(e, op)
    _, heads, _, width = op.cache.type.shape
    e.in_place.add(str(e.root(op.cache).name))
    new = by_head(e, op.new, heads, width)
    past = e.get(op.past) if op.past.type.dtype in ("i32", "i64") else e.cast64(op.past)
    return e.add(CACHE_UPDATE, e.get(op.cache), new, past, axis=-2)


def _is_in_place(e: TensorRTEmitter, op: ops.CacheUpdate) -> bool:
    """Whether TensorRT can overwrite the cache: see the choice above."""
    function, cache = e.function, e.root(op.cache)
    if cache.owner is not function or isinstance(cache.type.shape[2], Dim):
        return False
    if cache.type.dtype not in ("f32", "f16", "bf16"):
        return False
    aliased = {function.returned[i]: argument for i, argument in function.aliases().items()}
    updates = sum(w.cache is cache for user in cache.users for w in cache_writes(user))
    return aliased.get(e.outermost(op.result)) == cache.index and updates == 1

"""Attention of ONNX and of TensorRT, RotaryEmbedding, and TensorScatter as cache_update."""

from __future__ import annotations

import math

from irc import ops
from irc.errors import Error
from irc.frontends.onnx.builder import Builder, ImportedValue, Node, shortest
from irc.frontends.onnx.fold import content_of
from irc.frontends.onnx.rules import MICROSOFT, Results, imports, only
from irc.ir.dims import DimLike, Shape, exact_divide

_KNOWN = "scale softcap is_causal q_num_heads kv_num_heads qk_matmul_output_mode softmax_precision"


def tokens(b: Builder, x: ImportedValue) -> ImportedValue:
    """[B, H, S, D] as [B, S, H*D]; three dimensions stay as they are."""
    if x.ndim == 3:
        return x
    batch, heads, count, width = x.shape
    return b.reshaped(b.transposed(x, (0, 2, 1, 3)), (batch, count, heads * width))


def by_heads(b: Builder, x: ImportedValue, shape: Shape) -> ImportedValue:
    """[B, S, H*D] in the shape [B, H, S, D]; three dimensions stay as they are."""
    if len(shape) == 3:
        return x
    batch, heads, count, width = shape
    return b.transposed(b.reshaped(x, (batch, count, heads, width)), (0, 2, 1, 3))


def _refuses(node: Node) -> str | None:
    return "qk_matmul_output is not computed" if node.wants(3) else None


@imports("Attention", attributes=_KNOWN, refuses=_refuses)
def attention(b: Builder, node: Node) -> Results:
    """`nonpad_kv_seqlen` n: row b sees n[b] keys, and causal queries end at key n[b] - 1."""
    q, k, v = (node.shaped(i, 3, 4) for i in range(3))
    heads, key_heads = _heads(node, q, "q_num_heads"), _heads(node, k, "kv_num_heads")
    before: DimLike = 0
    present: list[ImportedValue] = []
    if node.has(4) or node.wants(1):
        before = node.shaped(4, 4, 4).shape[2] if node.has(4) else 0
        present = [_appended(b, node, i, new, key_heads) for i, new in ((4, k), (5, v))]
        k, v = present
    causal, valid = bool(node.integer("is_causal", 0)), node.optional(6)
    result = _attention(
        b,
        (q, k, v),
        heads,
        mask=node.optional(3),
        lengths=None if causal else valid,
        ends=valid if causal else None,
        before=before if causal else None,
        scale=node.real("scale", 0.0) if "scale" in node.attributes else None,
        softcap=node.real("softcap", 0.0),
    )
    return [result, *present]


def _appended(
    b: Builder, node: Node, index: int, new: ImportedValue, heads: DimLike
) -> ImportedValue:
    """Keys or values by heads, [B, H, T, D], behind those of earlier calls."""
    if new.ndim == 3:
        width = exact_divide(new.shape[2], heads)
        if width is None:
            raise Error(f"Attention of {new.shape[2]} features among {heads} heads")
        new = by_heads(b, new, (new.shape[0], heads, new.shape[1], width))
    return b.op(ops.Concat, [node.input(index), new], dim=2) if node.has(index) else new


def _heads(node: Node, x: ImportedValue, name: str) -> DimLike:
    heads = x.shape[1] if x.ndim == 4 else node.integer(name, 0)
    if x.ndim == 3 and heads == 0:
        raise Error(f"Attention over {x.ndim} dimensions without {name}")
    return heads


def _attention(
    b: Builder,
    operands: tuple[ImportedValue, ImportedValue, ImportedValue],
    heads: DimLike,
    *,
    mask: ImportedValue | None,
    lengths: ImportedValue | None,
    ends: ImportedValue | None,
    before: DimLike | None,
    scale: float | None,
    softcap: float = 0.0,
) -> ImportedValue:
    """The result in the layout of the queries.

    Where queries are causal, the last of row b sees the keys below ends[b], or the first one those
    up to number `before`. Row b sees lengths[b] keys; `mask` are bools, or numbers to be added.
    """
    q, k, v = operands
    queries, keys = q.shape[-2], k.shape[-2]
    width = q.shape[3] if q.ndim == 4 else exact_divide(q.shape[2], heads)
    if not isinstance(width, int) or width < 1:
        raise Error(f"Attention over heads of {width} features; expected a number of at least 1")
    bias, mask = (mask, None) if mask is not None and mask.dtype != "bool" else (None, mask)
    past, causal = None, ends is not None
    if ends is not None:
        content = content_of(ends)
        if content is None or any(n != keys for n in content.flat):
            past = ends - queries
    elif before is not None:
        causal = queries + before == keys
        if not causal:
            query = b.op(ops.Unsqueeze, b.op(ops.Iota, size=queries), dims=(1,))
            seen = b.op(ops.Iota, size=keys) <= (query if before == 0 else query + before)
            mask = seen if mask is None else seen & mask
    if not k.ndim == v.ndim == 4:
        k, v = tokens(b, k), tokens(b, v)
    result = b.op(
        ops.Attention,
        tokens(b, q),
        k,
        v,
        bias=bias and _fitted(b, keys, bias),
        mask=mask and _fitted(b, keys, mask),
        past=past,
        lengths=lengths,
        causal=causal,
        head_dim=width,
        scale=None if scale == shortest(1 / math.sqrt(width)) else scale,
        softcap=softcap,
    )
    if q.ndim == 3:
        return result
    features = exact_divide(result.shape[2], heads)
    assert features is not None
    return by_heads(b, result, (q.shape[0], heads, q.shape[2], features))


def _fitted(b: Builder, keys: DimLike, mask: ImportedValue) -> ImportedValue:
    """A mask as [B|1, H|1, S|1, T]; keys beyond it are hidden."""
    if not 0 < mask.ndim <= 4:
        raise Error(f"Attention with a mask of {mask.ndim} dimensions")
    mask = b.reshaped(mask, (*[1] * (4 - mask.ndim), *mask.shape))
    short = mask.shape[3]
    if short == 1 and keys != 1:
        return b.op(ops.Expand, mask, shape=(*mask.shape[:3], keys))
    if isinstance(short, int) and isinstance(keys, int) and short < keys:
        fill = False if mask.dtype == "bool" else -math.inf
        after = (0, 0, 0, keys - short)
        return b.op(ops.Pad, mask, before=(0, 0, 0, 0), after=after, value=fill)
    if short != keys:
        raise Error(f"Attention over {keys} keys with a mask of {short}")
    return mask


_OF_TENSORRT = "query_form kv_form causal_kind TRT_decomposable TRT_normalization_op nb_rank"


@imports("TRT_Attention", domain="trt", attributes=_OF_TENSORRT)
@imports("TRT_Attention", attributes=_OF_TENSORRT)
def of_tensorrt(b: Builder, node: Node) -> Results:
    """No scale of its own; causal attention may be aligned with the last key."""
    usual = {"query_form": "padded_bhnd", "kv_form": "padded_bhnd"}
    for name, value in {**usual, "TRT_normalization_op": "softmax"}.items():
        if node.text(name, value) != value:
            raise Error(f"TRT_Attention with {name}={node.text(name)}; expected {value}")
    if node.has(4):
        raise Error("TRT_Attention with query_lengths")
    q, k, v = (node.shaped(i, 4, 4) for i in range(3))
    kind, lengths, ends = node.text("causal_kind", "none"), node.optional(5), None
    before: DimLike | None = None if kind == "none" else 0
    if kind == "lower_right":
        before, ends, lengths = k.shape[2] - q.shape[2], lengths, None
    return _attention(
        b,
        (q, k, v),
        q.shape[1],
        mask=node.optional(3),
        lengths=lengths,
        ends=ends,
        before=before,
        scale=1.0,
    )


@imports("TensorScatter", attributes="axis mode", refuses=only("mode", "linear"))
def tensor_scatter(b: Builder, node: Node) -> Results:
    """New keys or values [B, H, S, D] written into a cache [B, H, C, D] from a position on."""
    cache, new = node.input(0), node.shaped(1, 4, 4)
    if cache.ndim != 4 or node.integer("axis", -2) not in (-2, 2):
        raise Error("TensorScatter other than along the positions of a cache [B, H, C, D]")
    past = node.optional(2) or b.op(ops.Full, value=0, shape=(cache.shape[0],), dtype="i32")
    return b.op(ops.CacheUpdate, cache, tokens(b, new), past)


_ROTARY = "interleaved num_heads rotary_embedding_dim"


@imports("RotaryEmbedding", attributes=_ROTARY)
def rotary_embedding(b: Builder, node: Node) -> Results:
    """Pairs of elements, rotated by tables of cos and sin."""
    return _rotated(b, node, node.input(1), node.input(2), node.optional(3))


@imports("RotaryEmbedding", domain=MICROSOFT, attributes=f"{_ROTARY} scale is_packed_batching")
def of_microsoft(b: Builder, node: Node) -> Results:
    """The operands are in another order, and one position may be meant for all rows."""
    positions = node.input(1)
    if positions.ndim != 2 or node.real("scale", 1.0) != 1:
        raise Error("RotaryEmbedding of com.microsoft with one position for all rows, or a scale")
    if node.integer("is_packed_batching", 0):
        raise Error("RotaryEmbedding of com.microsoft with rows packed into one")
    return _rotated(b, node, node.input(2), node.input(3), positions)


def _rotated(
    b: Builder, node: Node, cos: ImportedValue, sin: ImportedValue, positions: ImportedValue | None
) -> Results:
    """x [B, S, H*D] or [B, H, S, D], of whose heads the first features are rotated."""
    x = node.shaped(0, 3, 4)
    heads: DimLike = x.shape[1] if x.ndim == 4 else node.integer("num_heads", 0)
    width = x.shape[3] if x.ndim == 4 else exact_divide(x.shape[2], heads) if heads else None
    if not isinstance(width, int):
        raise Error("RotaryEmbedding needs num_heads where its input has three dimensions")
    turned = node.integer("rotary_embedding_dim", 0) or width
    if not 0 < turned <= width or turned % 2:
        raise Error(f"RotaryEmbedding cannot rotate {turned} of {width} features")
    flat = tokens(b, x)
    batch, count, _ = flat.shape
    parts = [b.reshaped(flat, (batch, count, heads, width))]
    cos, sin = (_table(b, table, positions, x.dtype) for table in (cos, sin))
    if turned != width:
        parts = b.results(ops.Split, parts[0], dim=3, sizes=(turned, width - turned))
    # element i is rotated together with element i + turned/2, or 2i with 2i + 1
    axis, pairs = (4, (turned // 2, 2)) if node.integer("interleaved", 0) else (3, (2, turned // 2))
    apart = b.reshaped(parts[0], (batch, count, heads, *pairs))
    points = b.results(ops.Split, apart, dim=axis, sizes=(1, 1))
    first, second = (b.op(ops.Squeeze, point, dims=(axis,)) for point in points)
    real = first * cos - second * sin
    imaginary = first * sin + second * cos
    rotated = [b.op(ops.Unsqueeze, part, dims=(axis,)) for part in (real, imaginary)]
    parts[0] = b.reshaped(b.op(ops.Concat, rotated, dim=axis), parts[0].shape)
    joined = parts[0] if len(parts) == 1 else b.op(ops.Concat, parts, dim=3)
    return by_heads(b, b.reshaped(joined, flat.shape), x.shape)


def _table(
    b: Builder, table: ImportedValue, positions: ImportedValue | None, dtype: str
) -> ImportedValue:
    """cos or sin of every token as [B, S, 1, pairs], in the dtype of x."""
    if positions is not None:
        table = b.op(ops.Gather, table, positions, dim=0)
    return b.cast(b.op(ops.Unsqueeze, table, dims=(2,)), dtype)

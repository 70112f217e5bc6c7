"""Attention of ONNX and of TensorRT, RotaryEmbedding, and TensorScatter as cache_update."""

from __future__ import annotations

import math
from typing import Any

from irc import ops
from irc.errors import Error
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.entry import Entry, Node, shortest
from irc.frontends.onnx.fold import content_of
from irc.frontends.onnx.rules import MICROSOFT, Made, only, reads
from irc.ir.core import Value
from irc.ir.dims import DimLike, Shape, exact_divide

_KNOWN = "scale softcap is_causal q_num_heads kv_num_heads qk_matmul_output_mode softmax_precision"


def tokens(b: Builder, entry: Entry) -> Value:
    """[B, H, S, D] as [B, S, H*D]; three dimensions stay as they are."""
    if entry.ndim == 3:
        return b.get(entry)
    batch, heads, count, width = entry.shape
    turned = b.transposed(b.get(entry), (0, 2, 1, 3))
    return b.reshaped(turned, (batch, count, heads * width))


def by_heads(b: Builder, value: Value, shape: Shape) -> Value:
    """[B, S, H*D] in the shape [B, H, S, D]; three dimensions stay as they are."""
    if len(shape) == 3:
        return value
    batch, heads, count, width = shape
    return b.transposed(b.reshaped(value, (batch, count, heads, width)), (0, 2, 1, 3))


def _refuses(node: Node) -> str | None:
    return "qk_matmul_output is not computed" if node.wants(3) else None


@reads("Attention", known=_KNOWN, refuses=_refuses)
def attention(b: Builder, node: Node) -> Made:
    """`nonpad_kv_seqlen` n: row b sees n[b] keys, and causal queries end at key n[b] - 1."""
    q, k, v = (node.shaped(i, 3, 4) for i in range(3))
    heads = _heads(node, q, "q_num_heads")
    key_heads = _heads(node, k, "kv_num_heads")
    before: DimLike = 0
    present: list[Entry] = []
    if node.has(4) or node.wants(1):
        before = node.shaped(4, 4, 4).shape[2] if node.has(4) else 0
        present = [_appended(b, node, i, each, key_heads) for i, each in ((4, k), (5, v))]
        k, v = present
    scale = node.real("scale", 0.0) if "scale" in node.attributes else None
    causal, valid = bool(node.integer("is_causal", 0)), node.optional(6)
    found = _attention(
        b,
        (q, k, v),
        heads,
        mask=node.optional(3),
        lengths=None if causal else valid,
        ends=valid if causal else None,
        before=before if causal else None,
        scale=scale,
        softcap=node.real("softcap", 0.0),
    )
    return [found, *present][: len(node.outputs)]


def _appended(b: Builder, node: Node, index: int, new: Entry, heads: DimLike) -> Entry:
    """Keys or values by heads, [B, H, T, D], behind those of earlier calls."""
    if new.ndim == 3:
        width = exact_divide(new.shape[2], heads)
        if width is None:
            raise Error(f"Attention of {new.shape[2]} features among {heads} heads")
        shape = (new.shape[0], heads, new.shape[1], width)
        new = b.entry(by_heads(b, b.get(new), shape))
    if not node.has(index):
        return new
    return b.entry(b.value(ops.Concat([b.get(node.input(index)), b.get(new)], dim=2)))


def _heads(node: Node, x: Entry, name: str) -> DimLike:
    heads = x.shape[1] if x.ndim == 4 else node.integer(name, 0)
    if x.ndim == 3 and heads == 0:
        raise Error(f"Attention over {x.ndim} dimensions without {name}")
    return heads


def _width(q: Entry, heads: DimLike) -> int:
    """The number of features of a head."""
    width = q.shape[3] if q.ndim == 4 else exact_divide(q.shape[2], heads)
    if not isinstance(width, int):
        raise Error(f"Attention over heads of {width} features, which is no number")
    return width


def _attention(
    b: Builder,
    operands: tuple[Entry, Entry, Entry],
    heads: DimLike,
    *,
    mask: Entry | None,
    lengths: Entry | None,
    ends: Entry | None,
    before: DimLike | None,
    scale: float | None,
    softcap: float = 0.0,
) -> Entry:
    """The result in the layout of the queries.

    Where queries are causal, the last of row b sees the keys below ends[b], or the first one those
    up to number `before`. Row b sees lengths[b] keys; `mask` are bools, or numbers to be added.
    """
    q, k, v = operands
    queries, keys, width = q.shape[-2], k.shape[-2], _width(q, heads)
    bias, mask = (mask, None) if mask is not None and mask.dtype != "bool" else (None, mask)
    past, causal = None, ends is not None
    if ends is not None:
        content = content_of(ends)
        if content is None or any(n != keys for n in content.flat):
            past = b.op(ops.Sub, ends, b.number(queries, ends.dtype))
    elif before is not None:
        causal = queries + before == keys
        if not causal:
            seen = _upper_left(b, queries, keys, before)
            mask = seen if mask is None else b.op(ops.And, seen, mask)
    read = Builder.get if k.ndim == v.ndim == 4 else tokens
    found = b.value(
        ops.Attention(
            tokens(b, q),
            read(b, k),
            read(b, v),
            bias=bias and _fitted(b, keys, bias),
            mask=mask and _fitted(b, keys, mask),
            past=past and b.get(past),
            lengths=lengths and b.get(lengths),
            causal=causal,
            head_dim=width,
            scale=None if scale == shortest(1 / math.sqrt(width)) else scale,
            softcap=softcap,
        )
    )
    if q.ndim == 3:
        return b.entry(found)
    features = exact_divide(found.type.shape[2], heads)
    assert features is not None
    return b.entry(by_heads(b, found, (q.shape[0], heads, q.shape[2], features)))


def _upper_left(b: Builder, queries: DimLike, keys: DimLike, before: DimLike) -> Entry:
    """key <= query + before, as a mask."""
    query = b.value(ops.Unsqueeze(b.value(ops.Iota(size=queries)), dims=(1,)))
    if before != 0:
        query = b.value(ops.Add(query, b.number(before, "i32")))
    return b.entry(b.value(ops.Le(b.value(ops.Iota(size=keys)), query)))


def _fitted(b: Builder, keys: DimLike, entry: Entry) -> Value:
    """A mask as [B|1, H|1, S|1, T]; keys beyond it are hidden."""
    if not 0 < entry.ndim <= 4:
        raise Error(f"Attention with a mask of {entry.ndim} dimensions")
    value = b.reshaped(b.get(entry), (*[1] * (4 - entry.ndim), *entry.shape))
    short = value.type.shape[3]
    if short == 1 and keys != 1:
        return b.value(ops.Expand(value, shape=(*value.type.shape[:3], keys)))
    if isinstance(short, int) and isinstance(keys, int) and short < keys:
        fill: Any = False if entry.dtype == "bool" else -math.inf
        after = (0, 0, 0, keys - short)
        return b.value(ops.Pad(value, before=(0, 0, 0, 0), after=after, value=fill))
    if short != keys:
        raise Error(f"Attention over {keys} keys with a mask of {short}")
    return value


_OF_TENSORRT = "query_form kv_form causal_kind TRT_decomposable TRT_normalization_op nb_rank"


@reads("TRT_Attention", domain="trt", known=_OF_TENSORRT)
@reads("TRT_Attention", known=_OF_TENSORRT)
def of_tensorrt(b: Builder, node: Node) -> Made:
    """No scale of its own; causal attention may be aligned with the last key."""
    usual = "padded_bhnd", "padded_bhnd", "softmax"
    for name, value in zip(("query_form", "kv_form", "TRT_normalization_op"), usual, strict=True):
        if node.text(name, value) != value:
            raise Error(f"TRT_Attention with {name}={node.text(name, '')}; expected {value}")
    if node.has(4):
        raise Error("TRT_Attention with query_lengths")
    q, k, v = (node.shaped(i, 4, 4) for i in range(3))
    kind, lengths, ends = node.text("causal_kind", "none"), node.optional(5), None
    before: DimLike | None = None if kind == "none" else 0
    if kind == "lower_right":
        before, ends, lengths = k.shape[2] - q.shape[2], lengths, None
    see: dict[str, Any] = {"lengths": lengths, "ends": ends, "before": before}
    return _attention(b, (q, k, v), q.shape[1], mask=node.optional(3), scale=1.0, **see)


@reads("TensorScatter", known="axis mode", refuses=only("mode", "linear"))
def tensor_scatter(b: Builder, node: Node) -> Made:
    """New keys or values [B, H, S, D] written into a cache [B, H, C, D] from a position on."""
    cache, new = node.input(0), node.shaped(1, 4, 4)
    if cache.ndim != 4 or node.integer("axis", -2) not in (-2, 2):
        raise Error("TensorScatter other than along the positions of a cache [B, H, C, D]")
    if node.has(2):
        past = b.get(node.input(2))
    else:
        past = b.value(ops.Full(value=0, shape=(cache.shape[0],), dtype="i32"))
    return b.value(ops.CacheUpdate(b.get(cache), tokens(b, new), past))


_ROTARY = "interleaved num_heads rotary_embedding_dim"


@reads("RotaryEmbedding", known=_ROTARY)
def rotary_embedding(b: Builder, node: Node) -> Made:
    """Pairs of elements, rotated by tables of cos and sin."""
    return _rotated(b, node, node.input(1), node.input(2), node.optional(3))


@reads("RotaryEmbedding", domain=MICROSOFT, known=f"{_ROTARY} scale is_packed_batching")
def of_microsoft(b: Builder, node: Node) -> Made:
    """The operands are in another order, and one position may be meant for all rows."""
    position = node.input(1)
    if position.ndim != 2 or node.real("scale", 1.0) != 1:
        raise Error("RotaryEmbedding of com.microsoft with one position for all rows, or a scale")
    if node.integer("is_packed_batching", 0):
        raise Error("RotaryEmbedding of com.microsoft with rows packed into one")
    return _rotated(b, node, node.input(2), node.input(3), position)


def _rotated(b: Builder, node: Node, cos: Entry, sin: Entry, positions: Entry | None) -> Made:
    """x [B, S, H*D] or [B, H, S, D], of whose heads the first features are rotated."""
    x = node.shaped(0, 3, 4)
    heads: DimLike = x.shape[1] if x.ndim == 4 else node.integer("num_heads", 0)
    width = x.shape[3] if x.ndim == 4 else exact_divide(x.shape[2], heads) if heads else None
    if not isinstance(width, int):
        raise Error("RotaryEmbedding needs num_heads where its input has three dimensions")
    turned = node.integer("rotary_embedding_dim", 0) or width
    if not 0 < turned <= width or turned % 2:
        raise Error(f"RotaryEmbedding cannot rotate {turned} of {width} features")
    value = tokens(b, x)
    batch, count, _ = value.type.shape
    parts = [b.reshaped(value, (batch, count, heads, width))]
    tables = [_table(b, table, positions, value.type.dtype) for table in (cos, sin)]
    if turned != width:
        parts = list(b.add(ops.Split(parts[0], dim=3, sizes=(turned, width - turned))).results)
    # element i is rotated together with element i + turned/2, or 2i with 2i + 1
    axis, pairs = (4, (turned // 2, 2)) if node.integer("interleaved", 0) else (3, (2, turned // 2))
    split = b.reshaped(parts[0], (batch, count, heads, *pairs))
    points = b.add(ops.Split(split, dim=axis, sizes=(1, 1))).results
    first, second = (b.value(ops.Squeeze(point, dims=(axis,))) for point in points)
    rotated = [
        b.value(ops.Unsqueeze(each, dims=(axis,))) for each in _turned(b, first, second, *tables)
    ]
    parts[0] = b.reshaped(b.value(ops.Concat(rotated, dim=axis)), parts[0].type.shape)
    found = parts[0] if len(parts) == 1 else b.value(ops.Concat(parts, dim=3))
    return by_heads(b, b.reshaped(found, value.type.shape), x.shape)


def _turned(b: Builder, first: Value, second: Value, cos: Value, sin: Value) -> list[Value]:
    """Both coordinates of points that are rotated by angles."""
    real = ops.Sub(b.value(ops.Mul(first, cos)), b.value(ops.Mul(second, sin)))
    imaginary = ops.Add(b.value(ops.Mul(first, sin)), b.value(ops.Mul(second, cos)))
    return [b.value(real), b.value(imaginary)]


def _table(b: Builder, entry: Entry, positions: Entry | None, dtype: str) -> Value:
    """cos or sin of every token as [B, S, 1, pairs], in the dtype of x."""
    table = b.get(entry)
    if positions is not None:
        table = b.value(ops.Gather(table, b.get(positions), dim=0))
    return b.get(b.cast(b.entry(b.value(ops.Unsqueeze(table, dims=(2,)))), dtype))

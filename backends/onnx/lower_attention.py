"""Rope, attention and the key-value cache as ONNX nodes.

Attention-24 with `nonpad_kv_seqlen` n lets row b see its first n[b] keys, and under `is_causal`
aligns its last query with key n[b] - 1: measured on ONNX Runtime 1.31 for one query and many. So
causal attention with `past` needs no mask: n = past + S.

ONNX Runtime runs GroupQueryAttention in its place where that means the same
(`onnxruntime/grouped.py`).
"""

from __future__ import annotations

import numpy as np

from irc import ops
from irc.backends.onnx.emitter import TABLE, Emitter, Flat, Lowered
from irc.backends.onnx.lower_elementwise import needs_f32
from irc.ir.core import Op, Value
from irc.ir.dims import Dim, DimLike, Shape, exact_divide, product
from irc.ops.rope import inverse_frequencies

LOWEST = {"f16": -3e4, "bf16": -1e38, "f32": -1e38}  # exp of it is 0; finite with scores added


def fixed_heads(op: Op) -> str | None:
    """Refuses what ONNX's RotaryEmbedding cannot express."""
    if isinstance(op.operands[0].type.shape[2], Dim):
        return "has a symbolic number of heads"
    return needs_f32(op)


@TABLE.lower(ops.Rope, unless=fixed_heads)
def rope(e: Emitter, op: ops.Rope) -> Lowered:
    """RotaryEmbedding over cos and sin of the angles."""
    return rotated(e, op, *cos_sin(e, op))


def rotated(e: Emitter, op: ops.Rope, cos: str, sin: str) -> str:
    """x turned by angles in its own dtype."""
    heads = exact_divide(op.x.type.shape[2], op.head_dim)
    assert isinstance(heads, int)
    return e.add(
        "RotaryEmbedding",
        e.get(op.x),
        cos,
        sin,
        num_heads=heads,
        interleaved=int(op.interleaved),
        rotary_embedding_dim=op.turned if op.turned != op.head_dim else 0,
    )


def cos_sin(e: Emitter, op: ops.Rope) -> tuple[str, str]:
    """cos and sin of every angle, [B, S, pairs]; all layers share them."""
    attributes = [v for k, v in op.attributes.items() if k != "interleaved"]
    return e.cached(("rope", e.root(op.positions), *attributes), lambda: _cos_sin(e, op))


def _cos_sin(e: Emitter, op: ops.Rope) -> tuple[str, str]:
    positions = e.get(op.positions)
    column = e.add("Unsqueeze", e.cast(positions, "f32"), e.ints(-1))
    frequencies, factor = _frequencies(e, op, positions)
    angles = e.add("Mul", column, frequencies)
    turns = e.add("Cos", angles), e.add("Sin", angles)
    if factor == 1:
        return turns
    scale = e.number(factor, "f32")
    return e.add("Mul", turns[0], scale), e.add("Mul", turns[1], scale)


def _frequencies(e: Emitter, op: ops.Rope, positions: str) -> tuple[str, float]:
    if not op.by_length:
        fixed, factor = inverse_frequencies(op)
        return e.graph.constant(np.asarray(fixed, np.float32)), factor
    one = _f32(e, 1)
    length = e.add("Add", e.cast(e.add("ReduceMax", positions, keepdims=0), "f32"), one)
    limit = e.number(op.original_positions, "f32")
    if op.kind == "longrope":
        short, factor = inverse_frequencies(op, 1)
        long, _ = inverse_frequencies(op, op.original_positions + 1)
        choices = [e.graph.constant(np.asarray(f, np.float32)) for f in (long, short)]
        return e.add("Where", e.add("Greater", length, limit), *choices), factor
    stretch = e.add("Mul", e.add("Max", length, limit), _f32(e, op.factor / op.original_positions))
    stretch = e.add("Sub", stretch, _f32(e, op.factor - 1))
    theta = e.add(
        "Mul", e.add("Pow", stretch, _f32(e, op.turned / (op.turned - 2))), _f32(e, op.theta)
    )
    powers = np.arange(0, op.turned, 2).astype(np.float32) / np.float32(op.turned)
    return e.add("Div", one, e.add("Pow", theta, e.graph.constant(powers))), 1.0


def _f32(e: Emitter, value: float) -> str:
    return e.number(value, "f32")


def symbolic_heads(op: Op) -> str | None:
    """Refuses attention whose heads cannot be counted now."""
    assert isinstance(op, ops.Attention)
    if isinstance(op.key_heads, Dim) or isinstance(op.q.type.shape[2], Dim):
        return "has a symbolic number of heads"
    return None


def fixed_groups(op: Op) -> str | None:
    """Refuses what Attention-24 cannot express."""
    return symbolic_heads(op) or needs_f32(op)


@TABLE.lower(ops.Attention, unless=fixed_groups)
def attention(e: Emitter, op: ops.Attention) -> Lowered:
    """Attention; over a cache with Transpose before it, and Transpose and Reshape after it."""
    heads = exact_divide(op.q.type.shape[2], op.head_dim)
    assert isinstance(heads, int) and isinstance(op.key_heads, int)
    attributes: dict[str, int | float] = {"scale": op.score_scale}
    if op.softcap:
        attributes["softcap"] = op.softcap
    if op.causal:
        attributes["is_causal"] = 1
    if op.sinks is not None:
        return _with_sinks(e, op, heads)
    valid = _valid_keys(e, op)
    scores = _scores(e, op)
    if not op.cached:
        attributes |= {"q_num_heads": heads, "kv_num_heads": op.key_heads}
        operands = [e.get(op.q), e.get(op.k), e.get(op.v), scores, "", "", valid]
        return e.add("Attention", *operands, **attributes)
    q = by_head(e, op.q, heads, op.head_dim)
    out = e.add("Attention", q, e.get(op.k), e.get(op.v), scores, "", "", valid, **attributes)
    return joined_heads(e, op, out)


def _with_sinks(e: Emitter, op: ops.Attention, heads: int) -> Flat:
    """Products and a softmax, since the operator has no sinks."""
    assert isinstance(op.key_heads, int)
    width = exact_divide(op.result.type.shape[2], heads)
    q = e.add("Mul", by_head(e, op.q, heads, op.head_dim), e.number(op.score_scale, "f32"))
    sizes = zip((op.k, op.v), (op.head_dim, width), strict=True)
    k, v = (e.get(x) if op.cached else by_head(e, x, op.key_heads, n or 0) for x, n in sizes)
    return joined_heads(e, op, in_parts(e, op, q, k, v, width or 0))


def score_sizes(op: ops.Attention) -> tuple[DimLike, int, DimLike, DimLike]:
    """The shape [B, H, S, T] of the scores."""
    batch, tokens, features = op.q.type.shape
    heads = exact_divide(features, op.head_dim)
    assert isinstance(heads, int)
    return batch, heads, tokens, _keys(op)


def in_parts(e: Emitter, op: ops.Attention, q: str, k: str, v: str, width: DimLike) -> str:
    """Products and a softmax in f32, of scaled queries and broadcast key heads: [B, H, S, Dv]."""
    kind = e.dtype(op.q)
    batch, heads, tokens, keys = score_sizes(op)
    assert isinstance(op.key_heads, int)
    grouped: Shape = (batch, op.key_heads, heads // op.key_heads)
    q = e.reshape(q, (*grouped, tokens, op.head_dim))
    k, v = (e.add("Unsqueeze", x, e.ints(2)) for x in (k, v))
    scores = e.add("MatMul", q, e.add("Transpose", k, perm=[0, 1, 2, 4, 3]))
    scores = e.cast(scores, "f32") if kind != "f32" else scores
    if op.softcap:
        cap = e.number(op.softcap, "f32")
        scores = e.add("Mul", e.add("Tanh", e.add("Div", scores, cap)), cap)
    scores = e.reshape(scores, (batch, heads, tokens, keys))
    if op.bias is not None:
        scores = e.add("Add", scores, _as_f32(e, op.bias))
    mask = visible_keys(e, op, op.causal)
    scores = e.add("Where", mask, scores, e.number(LOWEST["f32"], "f32")) if mask else scores
    weights = _softmax(e, op, scores)
    if mask:  # a query that sees no key gives 0
        weights = e.add("Where", mask, weights, e.number(0, "f32"))
    weights = e.cast(weights, kind) if kind != "f32" else weights
    weights = e.reshape(weights, (*grouped, tokens, keys))
    out = e.add("MatMul", weights, v)
    return e.reshape(out, (batch, heads, tokens, width))


def _softmax(e: Emitter, op: ops.Attention, scores: str) -> str:
    """Softmax of the scores, and of the sinks as one key more that gets no weight."""
    if op.sinks is None:
        return e.add("Softmax", scores, axis=-1)
    sinks = e.add("Reshape", _as_f32(e, op.sinks), e.ints(1, -1, 1, 1))
    top = e.add("Max", e.add("ReduceMax", scores, e.ints(-1), keepdims=1), sinks)
    weights = e.add("Exp", e.add("Sub", scores, top))
    total = e.add("ReduceSum", weights, e.ints(-1), keepdims=1)
    return e.add("Div", weights, e.add("Add", total, e.add("Exp", e.add("Sub", sinks, top))))


def _as_f32(e: Emitter, value: Value) -> str:
    return e.get(value) if e.dtype(value) == "f32" else e.cast(e.get(value), "f32")


def by_head(e: Emitter, x: Value, heads: DimLike, width: DimLike) -> str:
    """[B, S, H*D] as [B, H, S, D]."""
    batch, tokens, _ = x.type.shape
    name = e.flat(x) if e.is_flat(x) else e.get(x)
    split = e.reshape(name, (batch, tokens, heads, width))
    return e.add("Transpose", split, perm=[0, 2, 1, 3])


def joined_heads(e: Emitter, op: ops.Attention, out: str) -> Flat:
    """[B, H, S, D] as the matrix [B * S, H * D]."""
    out = e.add("Transpose", out, perm=[0, 2, 1, 3])
    batch, tokens, features = op.result.type.shape
    return Flat(e.reshape(out, (product((batch, tokens)), features)))


def _keys(op: ops.Attention) -> DimLike:
    return op.k.type.shape[2 if op.cached else 1]


def _valid_keys(e: Emitter, op: ops.Attention) -> str:
    """The operand nonpad_kv_seqlen, or "" where the row sees all keys and is aligned anyway."""
    batch, tokens, _ = op.q.type.shape
    if not op.causal:
        return "" if op.lengths is None else e.cast64(op.lengths)
    if op.past is not None:
        past = op.past
        key = ("valid", e.root(past), tokens)
        return e.cached(key, lambda: e.add("Add", e.cast64(past), e.dim(tokens)))
    keys = _keys(op)
    if tokens == keys:
        return ""
    key = ("valid", batch, keys)
    return e.cached(key, lambda: e.add("Expand", e.dim(keys), e.sizes((batch,))))


def _scores(e: Emitter, op: ops.Attention) -> str:
    """The operand attn_mask: what the other operands and attributes do not express."""
    # under causality nonpad_kv_seqlen is past + S, so that lengths are part of the mask
    mask = visible_keys(e, op, causal=False, padded=op.causal)
    if op.bias is not None:
        hidden = e.number(-np.inf, "f32")
        bias = e.cached(("bias", e.root(op.bias)), lambda: _above_lowest(e, op.bias))
        mask = e.add("Where", mask, bias, hidden) if mask else bias
    tokens = op.q.type.shape[1]
    given = [v.type.shape[2] for v in (op.mask, op.bias) if v is not None]
    if not mask or op.window or tokens in given:
        return mask
    # the operator broadcasts every dimension but that of the queries
    return e.add("Expand", mask, e.sizes((1, 1, tokens, 1)))


def _above_lowest(e: Emitter, bias: Value | None) -> str:
    """The bias with the next number for the lowest one: of a row that is whole the lowest, ONNX
    Runtime 1.32 gives 0 instead of the mean of the values."""
    assert bias is not None
    lowest = np.finfo(np.float32).min
    numbers = (lowest, np.nextafter(lowest, np.float32(0)))
    least, above = (e.number(float(n), "f32") for n in numbers)
    name = e.get(bias)
    return e.add("Where", e.add("Equal", name, least), above, name)


def visible_keys(e: Emitter, op: ops.Attention, causal: bool, padded: bool = True) -> str:
    """The keys that a query sees by mask and window, and by causality and lengths where `causal`
    and `padded`: bool [B|1, H|1, S|1, T], "" if all."""
    mask = "" if op.mask is None else e.get(op.mask)
    for part in (near_keys(e, op, causal), unpadded_keys(e, op) if padded else ""):
        mask = e.add("And", mask, part) if mask and part else mask or part
    return mask


def near_keys(e: Emitter, op: ops.Attention, causal: bool) -> str:
    """The keys that a query sees within the window, and by causality where `causal`: bool
    [B|1, 1, S, T], or ""."""
    if not op.window and not causal:
        return ""
    tokens, keys = op.q.type.shape[1], _keys(op)
    past = None if op.past is None else e.root(op.past)

    def make() -> str:
        first = e.dim(keys - tokens) if op.past is None else e.cast64(op.past)
        first = e.add("Reshape", first, e.ints(-1, 1, 1, 1))
        query = e.add("Add", first, e.add("Reshape", e.iota(tokens), e.ints(1, 1, -1, 1)))
        key = e.add("Reshape", e.iota(keys), e.ints(1, 1, 1, -1))
        seen = e.add("LessOrEqual", key, query) if causal else ""
        if not op.window:
            return seen
        near = e.add("Greater", key, e.add("Sub", query, e.number(op.window, "i64")))
        return e.add("And", seen, near) if seen else near

    return e.cached(("near", past, causal, op.window, tokens, keys), make)


def unpadded_keys(e: Emitter, op: ops.Attention) -> str:
    """The keys that are not padding: bool [B, 1, 1, T], or ""."""
    if op.lengths is None:
        return ""
    lengths, keys = op.lengths, _keys(op)

    def make() -> str:
        ends = e.add("Reshape", e.cast64(lengths), e.ints(-1, 1, 1, 1))
        return e.add("Less", e.add("Reshape", e.iota(keys), e.ints(1, 1, 1, -1)), ends)

    return e.cached(("lengths", e.root(lengths), keys), make)


@TABLE.lower(ops.CacheUpdate)
def cache_update(e: Emitter, op: ops.CacheUpdate) -> Lowered:
    """TensorScatter, in place where input and output are bound to the same memory."""
    if op.pages is not None:
        return paged_update(e, op, op.pages)
    _, heads, _, width = op.cache.type.shape
    new = by_head(e, op.new, heads, width)
    return e.add("TensorScatter", e.get(op.cache), new, e.cast64(op.past), axis=2)


def paged_update(e: Emitter, op: ops.CacheUpdate, pages: Value) -> str:
    """ScatterND into the rows of a copy of the pool; those of page -1 go to a page behind it."""
    count, heads, size, width = op.cache.type.shape
    features, length = heads * width, e.sizes((size,))
    first = e.add("Reshape", e.cast64(op.past), e.ints(-1, 1))
    tokens = e.add("Reshape", e.iota(op.new.type.shape[1]), e.ints(1, -1))
    position = e.add("Add", first, tokens)
    page = e.add("GatherElements", e.cast64(pages), e.add("Div", position, length), axis=1)
    place = e.add("Add", e.add("Mul", page, length), e.add("Mod", position, length))
    pool = e.add("Transpose", e.get(op.cache), perm=[0, 2, 1, 3])
    rows = e.reshape(pool, (count * size, features))
    behind = e.add("Slice", rows, e.ints(0), length, e.ints(0))
    rows = e.add("Concat", rows, behind, axis=0)
    rows = e.add("ScatterND", rows, e.add("Unsqueeze", place, e.ints(-1)), e.get(op.new))
    rows = e.add("Slice", rows, e.ints(0), e.sizes((count * size,)), e.ints(0))
    return e.add("Transpose", e.reshape(rows, (count, size, heads, width)), perm=[0, 2, 1, 3])

"""Attention: the operator of ONNX, TensorRT's own, and how our emission says what they cannot."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from irc import ops
from irc.core import Op, Value
from irc.dims import Dim, DimLike, exact_divide
from irc.dtypes import numpy_dtype
from irc.errors import Error
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.caches import per_row, tokens
from irc.frontends.onnx.elementwise import scalar
from irc.frontends.onnx.entry import Entry, Node, shortest
from irc.frontends.onnx.fold import content_of
from irc.frontends.onnx.reshaping import by_heads
from irc.frontends.onnx.reshaping import made_by as source
from irc.frontends.onnx.rules import Made, reads

_KNOWN = "scale softcap is_causal q_num_heads kv_num_heads qk_matmul_output_mode softmax_precision"


@dataclass
class Scores:
    """What an attention says about which keys are seen, while it is read."""

    queries: DimLike
    keys: DimLike
    batch: DimLike
    past: Entry | None = None
    lengths: Entry | None = None
    mask: Entry | None = None
    bias: Entry | None = None
    window: int = 0
    rest: list[Entry] = field(default_factory=list[Entry])


def _refuses(node: Node) -> str | None:
    if len(node.inputs) > 4 and any(entry is not None for entry in node.inputs[4:6]):
        return "past_key and past_value (inputs 4, 5) have no operation; use TensorScatter"
    if len([name for name in node.outputs if name]) > 1:
        return "present_key, present_value and qk_matmul_output are not computed"
    return None


@reads("Attention", known=_KNOWN, refuses=_refuses)
def attention(b: Builder, node: Node) -> Made:
    q, k, v = (node.input(i) for i in range(3))
    heads = _heads(node, q, "q_num_heads")
    _heads(node, k, "kv_num_heads")
    q_tokens, width = _tokens(b, q, heads)
    keys = k.shape[2] if k.rank == 4 else k.shape[1]
    scores = Scores(q_tokens.type.shape[1], keys, q.shape[0])
    causal = bool(node.integer("is_causal", 0))
    valid = node.optional(6)
    causal = _causal(b, scores, causal, valid)
    _mask(b, scores, node.optional(3), node.own)
    scale: float | None = node.real("scale", 0.0) if "scale" in node.attributes else None
    scale = None if scale is None else _scale(node, scale, width, "f32")
    softcap = node.real("softcap", 0.0)
    found = b.value(
        _attention(
            b, scores, q_tokens, (k, v), head_dim=width, causal=causal, scale=scale, softcap=softcap
        )
    )
    if q.rank == 3:
        return found
    out = found.type.shape[2]
    value_width = exact_divide(out, heads)
    assert value_width is not None
    return by_heads(b, found, (q.shape[0], heads, q.shape[2], value_width))


def _scale(node: Node, scale: float, width: int, dtype: str) -> float | None:
    """The scale, None for the usual one; our own emission writes that rounded to a dtype."""
    usual = np.asarray(1 / math.sqrt(width)).astype(numpy_dtype(dtype if node.own else "f32"))
    return None if scale == shortest(float(usual)) else scale


def _heads(node: Node, x: Entry, name: str) -> DimLike:
    if x.rank == 4:
        return x.shape[1]
    heads = node.integer(name, 0)
    if x.rank != 3 or heads < 1:
        raise Error(f"Attention over {x.rank} dimensions without {name}")
    return heads


def _tokens(b: Builder, q: Entry, heads: DimLike) -> tuple[Value, int]:
    """(the queries as [B, S, H*D], D)."""
    width = q.shape[3] if q.rank == 4 else exact_divide(q.shape[2], heads)
    if not isinstance(width, int):
        raise Error(f"Attention over heads of {width} features, which is no number")
    return (b.get(q) if q.rank == 3 else tokens(b, q)), width


def _attention(b: Builder, scores: Scores, q: Value, keys: tuple[Entry, Entry], **more: Any) -> Op:
    """The operation; `more` are attributes."""
    k, v = keys
    if k.rank == 4 and k.tokens is not None and v.tokens is not None:
        k_value, v_value = k.tokens, v.tokens
    else:
        k_value, v_value = b.get(k), b.get(v)

    def rows(entry: Entry | None) -> Value | None:
        return None if entry is None else per_row(b, entry, scores.batch)

    return ops.Attention(
        q,
        k_value,
        v_value,
        bias=None if scores.bias is None else _fitted(b, scores, scores.bias),
        mask=None if scores.mask is None else _fitted(b, scores, scores.mask),
        past=rows(scores.past),
        lengths=rows(scores.lengths),
        window=scores.window,
        **more,
    )


def _causal(b: Builder, scores: Scores, causal: bool, valid: Entry | None) -> bool:
    """Whether the operation is causal, after what else says so was noted.

    `nonpad_kv_seqlen` n: row b sees n[b] keys, and causal queries end at key n[b] - 1. Without it
    the first query sees the first key.
    """
    if not causal:
        scores.lengths = valid
        return False
    if valid is None:
        if scores.queries == scores.keys:
            return True
        scores.mask = _upper_left(b, scores)
        return False
    node = source(valid, "Add")
    if node is not None and _is(node.input(1), scores.queries):
        scores.past = node.input(0)
        return True
    expand = source(valid, "Expand")
    if expand is not None and _is(expand.input(0), scores.keys):
        return True
    if valid.content is not None and _is(valid, scores.keys):
        return True
    count = b.constant(np.array(scores.queries, object), valid.dtype, ())
    scores.past = b.entry(b.value(ops.Sub(b.get(valid), count)))
    return True


def _upper_left(b: Builder, scores: Scores) -> Entry:
    """key <= query, as a mask."""
    query = b.value(ops.Iota(size=scores.queries))
    query = b.value(ops.Unsqueeze(query, dims=(1,)))
    return b.entry(b.value(ops.Le(b.value(ops.Iota(size=scores.keys)), query)))


def _is(entry: Entry, size: DimLike) -> bool:
    """Whether all elements are this size."""
    content = content_of(entry)
    return content is not None and content.size > 0 and all(n == size for n in content.flat)


def _mask(b: Builder, scores: Scores, mask: Entry | None, own: bool) -> None:
    """A bool mask, or numbers to be added, taken apart as our own emission puts them together."""
    if mask is None:
        return
    if own:
        expand = source(mask, "Expand")
        inner = expand.input(0) if expand is not None else mask
        mask = inner if _splits(scores, inner) else mask
        where = source(mask, "Where")
        if where is not None and scalar(where.input(2)) == -math.inf:
            scores.bias, mask = where.input(1), where.input(0)
        rest = _conditions(scores, mask) if mask.dtype == "bool" else [mask]
    else:
        rest = [mask]
    for part in rest:
        if part.dtype != "bool":
            scores.bias = part
            continue
        if scores.mask is None:
            scores.mask = part
        else:
            both = ops.And(b.get(scores.mask), b.get(part))
            scores.mask = b.entry(b.value(both))


def _splits(scores: Scores, entry: Entry) -> bool:
    return entry.rank == 4 and entry.shape[3] == scores.keys


def _conditions(scores: Scores, mask: Entry) -> list[Entry]:
    """The parts of a conjunction that are neither the window nor the lengths."""
    both = source(mask, "And")
    if both is not None and both.final is False:
        return [*_conditions(scores, both.input(0)), *_conditions(scores, both.input(1))]
    return [] if _window(scores, mask) or _length(scores, mask) else [mask]


def _window(scores: Scores, entry: Entry) -> bool:
    """key > past + query - window, as `window` of the operation."""
    node = source(entry, "Greater")
    edge = source(node.input(1), "Sub") if node is not None else None
    query = source(edge.input(0), "Add") if edge is not None else None
    if node is None or edge is None or query is None or scores.window:
        return False
    size = scalar(edge.input(1))
    if not isinstance(size, int) or size < 1:
        return False
    if not _counts(node.input(0), scores.keys) or not _counts(query.input(1), scores.queries):
        return False
    first = source(query.input(0), "Reshape")
    start = first.input(0) if first is not None else query.input(0)
    if _is(start, scores.keys - scores.queries) and scores.past is None:
        scores.window = size
        return True
    if content_of(start) is not None or start.rank != 1:
        return False
    if scores.past is None:
        scores.past = start
    if _plain(scores.past) is not _plain(start):
        return False
    scores.window = size
    return True


def _plain(entry: Entry) -> Entry:
    """Before a cast to i64."""
    return entry.was if entry.was is not None else entry


def _length(scores: Scores, entry: Entry) -> bool:
    """key < length, as `lengths` of the operation."""
    node = source(entry, "Less")
    ends = source(node.input(1), "Reshape") if node is not None else None
    if node is None or ends is None or scores.lengths is not None:
        return False
    if not _counts(node.input(0), scores.keys) or ends.input(0).shape != (scores.batch,):
        return False
    scores.lengths = ends.input(0)
    return True


def _counts(entry: Entry, size: DimLike) -> bool:
    """Whether a value is 0, 1, 2, ... up to a size, in some shape."""
    reshape = source(entry, "Reshape")
    many = reshape.input(0) if reshape is not None else entry
    if _content_counts(many, size):
        return True
    node = source(many, "Range")
    if node is None:
        return False
    start, step = scalar(node.input(0)), scalar(node.input(2))
    return start == 0 and step == 1 and many.shape == (size,)


def _content_counts(entry: Entry, size: DimLike) -> bool:
    content = content_of(entry)
    if content is None or isinstance(size, Dim):
        return False
    return content.reshape(-1).tolist() == list(range(size))


def _fitted(b: Builder, scores: Scores, entry: Entry) -> Value:
    """A mask as [B|1, H|1, S|1, T]."""
    if entry.rank > 4 or not entry.rank:
        raise Error(f"Attention with a mask of {entry.rank} dimensions")
    value = b.get(entry)
    if entry.rank < 4:
        value = b.value(ops.Reshape(value, shape=(*[1] * (4 - entry.rank), *entry.shape)))
    if value.type.shape[3] == 1 and scores.keys != 1:
        wide = (*value.type.shape[:3], scores.keys)
        value = b.value(ops.Expand(value, shape=wide))
    if value.type.shape[3] != scores.keys:
        raise Error(f"Attention over {scores.keys} keys with a mask of {value.type.shape[3]}")
    return value


@reads(
    "TRT_Attention",
    domain="trt",
    known="query_form kv_form causal_kind TRT_decomposable TRT_normalization_op nb_rank",
)
@reads(
    "TRT_Attention",
    known="query_form kv_form causal_kind TRT_decomposable TRT_normalization_op nb_rank",
)
def of_tensorrt(b: Builder, node: Node) -> Made:
    """No scale of its own; causal attention may be aligned with the last key."""
    for name in ("query_form", "kv_form"):
        if node.text(name, "padded_bhnd") != "padded_bhnd":
            raise Error(f"TRT_Attention with {name}={node.text(name, '')}")
    if node.text("TRT_normalization_op", "softmax") != "softmax" or node.has(4):
        raise Error("TRT_Attention without softmax, or with query_lengths")
    q, scale = _scaled(node.shaped(0, 4, 4))
    k, v = node.shaped(1, 4, 4), node.shaped(2, 4, 4)
    q_tokens, width = _tokens(b, q, q.shape[1])
    scores = Scores(q_tokens.type.shape[1], k.shape[2], q.shape[0])
    kind, lengths = node.text("causal_kind", "none"), node.optional(5)
    causal = kind == "lower_right"
    if not causal:
        causal = _causal(b, scores, kind != "none", None)
        scores.lengths = lengths
    elif lengths is not None:
        _causal(b, scores, True, lengths)
    _mask(b, scores, node.optional(3), node.own)
    wanted = _scale(node, scale, width, q.dtype)
    found = b.value(
        _attention(b, scores, q_tokens, (k, v), head_dim=width, causal=causal, scale=wanted)
    )
    value_width = exact_divide(found.type.shape[2], q.shape[1])
    assert value_width is not None
    return by_heads(b, found, (q.shape[0], q.shape[1], q.shape[2], value_width))


def _scaled(q: Entry) -> tuple[Entry, float]:
    """(the queries before they were scaled, the scale)."""
    node = source(q, "Mul")
    number = scalar(node.input(1)) if node is not None else None
    if node is None or not isinstance(number, float):
        return q, 1.0
    return node.input(0), shortest(number)

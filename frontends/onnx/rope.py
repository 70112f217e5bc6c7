"""RotaryEmbedding: `rope` where its tables are those of a known base, else simpler operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from irc import ops
from irc.core import Value
from irc.dims import DimLike, exact_divide
from irc.errors import Error
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.caches import tokens
from irc.frontends.onnx.elementwise import scalar
from irc.frontends.onnx.entry import Entry, Node
from irc.frontends.onnx.reshaping import by_heads
from irc.frontends.onnx.reshaping import made_by as source
from irc.frontends.onnx.rope_base import known_base
from irc.frontends.onnx.rules import MICROSOFT, Made, reads
from irc.frontends.onnx.tensors import READ

_KNOWN = "interleaved num_heads rotary_embedding_dim"


@dataclass(frozen=True)
class _Rotation:
    """x [B, S, H*width], of whose heads the first `turned` features are turned by the tables."""

    x: Value
    width: int
    turned: int
    cos: Entry
    sin: Entry
    positions: Entry | None
    interleaved: bool
    own: bool


@reads("RotaryEmbedding", known=_KNOWN)
def rotary_embedding(b: Builder, node: Node) -> Made:
    return _rotated(b, node, node.input(1), node.input(2), node.optional(3))


@reads("RotaryEmbedding", domain=MICROSOFT, known=f"{_KNOWN} scale is_packed_batching")
def of_microsoft(b: Builder, node: Node) -> Made:
    """The operands stand in another order, and one position may stand for all rows."""
    position = node.input(1)
    if position.rank != 2 or node.real("scale", 1.0) != 1:
        raise Error("RotaryEmbedding of com.microsoft with one position for all rows, or a scale")
    if node.integer("is_packed_batching", 0):
        raise Error("RotaryEmbedding of com.microsoft with rows packed into one")
    return _rotated(b, node, node.input(2), node.input(3), position)


def _rotated(b: Builder, node: Node, cos: Entry, sin: Entry, positions: Entry | None) -> Made:
    x = node.shaped(0, 3, 4)
    heads: DimLike = x.shape[1] if x.rank == 4 else node.integer("num_heads", 0)
    width = x.shape[3] if x.rank == 4 else exact_divide(x.shape[2], heads) if heads else None
    if not isinstance(width, int):
        raise Error("RotaryEmbedding needs num_heads where its input has three dimensions")
    turned = node.integer("rotary_embedding_dim", 0) or width
    if not 0 < turned <= width or turned % 2:
        raise Error(f"RotaryEmbedding cannot turn {turned} of {width} features")
    value = b.get(x) if x.rank == 3 else tokens(b, x)
    interleaved = bool(node.integer("interleaved", 0))
    r = _Rotation(value, width, turned, cos, sin, positions, interleaved, node.own)
    found = _known(b, r) or _spelled(b, r)
    return b.entry(found) if x.rank == 3 else by_heads(b, found, x.shape)


def _known(b: Builder, r: _Rotation) -> Value | None:
    """As `rope`, where cos and sin are computed from positions as our own emission does."""
    tables = [_unscaled(_computed(table, r.own)) for table in (r.cos, r.sin)]
    cos, sin = (source(table[0], kind) for table, kind in zip(tables, ("Cos", "Sin"), strict=True))
    if cos is None or sin is None or cos.input(0) is not sin.input(0) or r.positions is not None:
        return None
    product = source(cos.input(0), "Mul")
    column = source(product.input(0), "Unsqueeze") if product is not None else None
    cast = source(column.input(0), "Cast") if column is not None else None
    if product is None or cast is None or tables[0][1] != tables[1][1]:
        return None
    positions, frequencies = cast.input(0), _numbers(product.input(1))
    if frequencies is None or positions.dtype not in ("i32", "i64"):
        return None
    if positions.shape != r.x.type.shape[:2]:
        return None
    attributes: dict[str, Any] = {"head_dim": r.width}
    attributes |= {} if r.turned == r.width else {"rotary_dim": r.turned}
    attributes |= {"interleaved": True} if r.interleaved else {}
    base = known_base(frequencies, tables[0][1], attributes)
    if base is None:
        return None
    return b.value(ops.Rope(r.x, b.get(positions), **(attributes | base)))


def _computed(entry: Entry, own: bool) -> Entry:
    """A table before our own emission cast it to the dtype of x, as TensorRT asks for."""
    cast = source(entry, "Cast") if own else None
    return entry if cast is None else cast.input(0)


def _unscaled(entry: Entry) -> tuple[Entry, float]:
    """A table before it was multiplied by a number, and the number."""
    node = source(entry, "Mul")
    factor = scalar(node.input(1)) if node is not None else None
    return (entry, 1.0) if node is None or factor is None else (node.input(0), float(factor))


def _numbers(entry: Entry) -> np.ndarray | None:
    if entry.data is not None and entry.data.count <= READ and entry.data.dtype == "f32":
        return entry.data.read()
    if entry.content is not None:
        return np.array(entry.content.tolist(), np.float32)
    return None


def _spelled(b: Builder, r: _Rotation) -> Value:
    """Halves, or neighbours, turned by tables of cos and sin."""
    width, turned = r.width, r.turned
    batch, count, features = r.x.type.shape
    heads = exact_divide(features, width)
    assert heads is not None
    shape = (batch, count, heads, width)
    by_head = b.value(ops.Reshape(r.x, shape=shape))
    cos, sin = (_table(b, table, r.positions, by_head) for table in (r.cos, r.sin))
    moving, still = by_head, None
    if turned != width:
        parts = b.add(ops.Split(by_head, dim=3, sizes=(turned, width - turned)))
        moving, still = parts.results
    if r.interleaved:
        pairs = b.value(ops.Reshape(moving, shape=(*shape[:3], turned // 2, 2)))
        halves = b.add(ops.Split(pairs, dim=4, sizes=(1, 1))).results
        first, second = (b.value(ops.Squeeze(h, dims=(4,))) for h in halves)
    else:
        first, second = b.add(ops.Split(moving, dim=3, sizes=(turned // 2,) * 2)).results
    real = ops.Sub(b.value(ops.Mul(first, cos)), b.value(ops.Mul(second, sin)))
    imaginary = ops.Add(b.value(ops.Mul(first, sin)), b.value(ops.Mul(second, cos)))
    done = [b.value(real), b.value(imaginary)]
    if r.interleaved:
        rows = [b.value(ops.Unsqueeze(part, dims=(4,))) for part in done]
        joined = b.value(ops.Concat(rows, dim=4))
        joined = b.value(ops.Reshape(joined, shape=(*shape[:3], turned)))
    else:
        joined = b.value(ops.Concat(done, dim=3))
    if still is not None:
        joined = b.value(ops.Concat([joined, still], dim=3))
    return b.value(ops.Reshape(joined, shape=(batch, count, features)))


def _table(b: Builder, entry: Entry, positions: Entry | None, like: Value) -> Value:
    """cos or sin of every token as [B, S, 1, pairs], in the dtype of x."""
    table = b.get(entry)
    if positions is not None:
        table = b.value(ops.Gather(table, b.get(positions), dim=0))
    table = b.value(ops.Unsqueeze(table, dims=(2,)))
    if table.type.dtype == like.type.dtype:
        return table
    return b.value(ops.Cast(table, dtype=like.type.dtype))

"""Attention and the key-value cache it reads."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np

from ..errors import Error
from ..ir.core import Op, Value
from ..ir.declare import Operand, OptionalOperand, operation, optional
from ..ir.dims import DimLike, Shape, exact_divide
from ..ir.types import TensorType
from .lookup import Gather, check_bounds
from .shape import Reshape, Transpose
from .shapes import bool_operand, float_operand, index_operand, rule_text, same_dtype

Array: TypeAlias = Any  # a numpy array


@operation("attention", safe_values={"past": 0}, reads="many")
class Attention(Op):
    """softmax(scale * q kᵀ + bias) v, head by head, over the keys that are visible.

    q [B, S, H*D]; k and v either tokens [B, T, Hk*D] and [B, T, Hk*Dv], or caches [B, Hk, T, D] and
    [B, Hk, T, Dv]. D is `head_dim`; query head h reads key-value head h // (H/Hk) (grouped and
    multi-query attention: Ainslie et al., 2023; Shazeer, 2019). Result [B, S, H*Dv] in the dtype of
    q, computed in f32. T need not be S (cross attention).

    Query i of row b is at key position past[b] + i (`past` i32 [B]: tokens before this call,
    past[b] + S <= T);
    without `past` at T - S + i, so that the last query sees the last key. Key j is visible where
    * `causal`: j <= position;
    * `window` w > 0: j > position - w (sliding window of w keys, the own one included);
    * `lengths` i32 [B]: j < lengths[b] (padding on the right, or the filled part of a cache);
    * `mask` bool [B|1, H|1, S|1, T]: true.
    A query that sees no key gives 0. `bias` (float, shape as mask) is added to the scores, after
    `softcap` c > 0 made them c*tanh(scores/c) (Gemma 2). `scale` is 1/sqrt(D) by default. `sinks`
    (float, [H]) are the scores of one more key per head, visible to all, whose value is 0 (Xiao et
    al., 2024: attention sinks; gpt-oss).
    `group` > 0 requires that H/Hk. Vaswani et al., 2017.
    """

    q: Operand
    k: Operand
    v: Operand
    head_dim: int
    bias: OptionalOperand = optional()
    mask: OptionalOperand = optional()
    past: OptionalOperand = optional()
    lengths: OptionalOperand = optional()
    sinks: OptionalOperand = optional()
    causal: bool = False
    window: int = 0
    scale: float | None = None
    softcap: float = 0.0
    group: int = 0

    @property
    def cached(self) -> bool:
        """Whether k and v are caches [B, Hk, T, D] rather than tokens [B, T, Hk*D]."""
        return self.k.type.ndim == 4

    @property
    def key_heads(self) -> DimLike:
        """How many key-value heads there are."""
        k = self.k.type.shape
        return k[1] if self.cached else _heads(self, "k", k[2])

    @property
    def score_scale(self) -> float:
        """What the products of q and k are multiplied by."""
        return score_scale(self.head_dim, self.scale)

    def infer(self) -> TensorType:
        q = float_operand("attention", self.q)
        same_dtype("attention", self.q, self.k, self.v)
        if self.window < 0 or self.softcap < 0:
            raise Error("attention: window and softcap cannot be negative; 0 is none")
        if q.ndim != 3:
            raise Error(f"attention takes q [batch, tokens, heads*{self.head_dim}], not {q}")
        batch, tokens = q.shape[:2]
        heads = _heads(self, "q", q.shape[2])
        keys, width = _keys(self, batch)
        group = exact_divide(heads, self.key_heads)
        if group is None or self.group not in (0, group):
            per_head = f", {self.group} to each" if self.group else ""
            raise Error(
                f"attention: {heads} query heads cannot share {self.key_heads} key-value heads"
                f"{per_head or ' evenly'}"
            )
        for name, value in (("past", self.past), ("lengths", self.lengths)):
            if value is not None and index_operand("attention", value).shape != (batch,):
                raise Error(
                    f"attention: {name} is {value.type}, but it has one number per row of q"
                )
        for name, value in (("mask", self.mask), ("bias", self.bias)):
            _check_scores(name, value, (batch, heads, tokens, keys))
        if self.sinks is not None and float_operand("attention", self.sinks).shape != (heads,):
            raise Error(f"attention: sinks is {self.sinks.type}, but there are {heads} query heads")
        return TensorType(q.dtype, (batch, tokens, heads * width))

    def sharding_rule(self) -> str:
        """Rows and heads may be sharded; queries where nothing depends on position.

        A single key-value head serves every query head, so it stays replicated.
        """
        h = "g!" if self.key_heads == 1 else "h"
        s = "s!" if self.causal or self.window else "s"
        k, v = (
            (["b", h, "t!", "d!"], ["b", h, "t!", "e!"])
            if self.cached
            else (["b", "t!", h], ["b", "t!", h])
        )
        scores = ("b", "h", s, "t!")
        operands = [
            ["b", s, "h"],
            k,
            v,
            scores_words(self.bias, scores),
            scores_words(self.mask, scores),
        ]
        return rule_text([*operands, ["b"], ["b"], ["h"]], [["b", s, "h"]])

    def localized(self, results: tuple[TensorType, ...]) -> dict[str, Any]:
        """A rank's query heads share its key-value heads as they do globally.

        All of them share the only one, whatever their number.
        """
        if results[0].shape[2] == self.result.type.shape[2]:
            return self.attributes
        if self.key_heads == 1:
            return self.attributes | {"group": 0}
        group = exact_divide(_heads(self, "q", self.q.type.shape[2]), self.key_heads)
        return self.attributes | {"group": group}

    def evaluate(
        self,
        q: Array,
        k: Array,
        v: Array,
        bias: Array = None,
        mask: Array = None,
        past: Array = None,
        lengths: Array = None,
        sinks: Array = None,
    ) -> Array:
        batch, tokens, features = q.shape
        if past is not None:
            _check_past(past, tokens, k.shape[2] if self.cached else k.shape[1])
        q = _by_head(q, features // self.head_dim)
        if not self.cached:
            heads = k.shape[2] // self.head_dim
            k, v = _by_head(k, heads), _by_head(v, heads)
        groups = q.shape[1] // k.shape[1]
        k, v = np.repeat(k, groups, axis=1), np.repeat(v, groups, axis=1)
        scores = np.matmul(q, np.swapaxes(k, 2, 3)) * q.dtype.type(self.score_scale)
        if self.softcap:
            scores = np.tanh(scores / q.dtype.type(self.softcap)) * q.dtype.type(self.softcap)
        if bias is not None:
            scores = scores + bias
        seen = visible(self, batch, tokens, k.shape[2], past, lengths)
        seen = seen if mask is None else seen & mask
        weights = _softmax(np.where(seen, scores, -np.inf), sinks)
        # A key that no query sees may hold NaN: 0 * NaN must not reach the sum.
        values = np.where(np.any(seen, axis=(1, 2))[:, None, :, None], v, 0)
        done = np.matmul(weights, values).transpose(0, 2, 1, 3)
        return done.reshape(batch, tokens, q.shape[1] * v.shape[3])


def score_scale(head_dim: int, scale: float | None) -> float:
    """What the products of queries and keys are multiplied by."""
    return 1 / math.sqrt(head_dim) if scale is None else scale


def _by_head(x: Array, heads: int) -> Array:
    """[B, S, H*D] as [B, H, S, D]; no size is left to numpy, which knows none for empty arrays."""
    batch, tokens, features = x.shape
    return x.reshape(batch, tokens, heads, features // heads).transpose(0, 2, 1, 3)


def _check_past(past: Array, tokens: int, keys: int) -> None:
    for row, before in enumerate(past.tolist()):
        if before < 0 or before + tokens > keys:
            raise Error(
                f"attention: row {row} has {before} tokens before its {tokens}, "
                f"but there are only {keys} keys"
            )


def visible(
    op: Attention, batch: int, tokens: int, keys: int, past: Array = None, lengths: Array = None
) -> Array:
    """Which keys each query may see, mask aside: bool [B, 1, S, T]."""
    first = np.full(batch, keys - tokens) if past is None else past
    query = (first[:, None] + np.arange(tokens))[:, None, :, None]
    key = np.arange(keys)
    seen = np.ones((batch, 1, tokens, keys), np.bool_)
    if op.causal:
        seen &= key <= query
    if op.window:
        seen &= key > query - op.window
    if lengths is not None:
        seen &= key < lengths[:, None, None, None]
    return seen


def _softmax(scores: Array, sinks: Array) -> Array:
    """Softmax over the last dimension and a sink per head; zeros where every score is -inf."""
    sink = -np.inf if sinks is None else sinks.astype(scores.dtype)[:, None, None]
    top = np.maximum(np.max(scores, axis=-1, keepdims=True, initial=-np.inf), sink)
    top = np.where(np.isfinite(top), top, 0)
    weights = np.exp(scores - top)
    total = np.sum(weights, axis=-1, keepdims=True) + np.exp(sink - top)
    return weights / np.where(total > 0, total, 1)


def _heads(op: Attention, name: str, features: DimLike) -> DimLike:
    heads = exact_divide(features, op.head_dim) if op.head_dim > 0 else None
    if heads is None:
        raise Error(f"attention: the {features} features of {name} are not heads of {op.head_dim}")
    return heads


def _keys(op: Attention, batch: DimLike) -> tuple[DimLike, DimLike]:
    """(keys, features of a head of v) after checking k against v."""
    k, v = op.k.type.shape, op.v.type.shape
    both = f"k is {op.k.type} and v is {op.v.type}"
    if len(k) != len(v) or len(k) not in (3, 4):
        raise Error(
            f"attention: {both}, but both are tokens [batch, keys, heads*{op.head_dim}] "
            f"or both caches [batch, heads, keys, {op.head_dim}]"
        )
    if k[0] != batch or v[0] != batch:
        raise Error(f"attention: {both}, but q is {op.q.type}: the batches differ")
    if len(k) == 4:
        if k[:3] != v[:3] or k[3] != op.head_dim:
            raise Error(f"attention: {both}, which are not caches of equal heads of {op.head_dim}")
        return k[2], v[3]
    heads = _heads(op, "k", k[2])
    width = exact_divide(v[2], heads)
    if k[1] != v[1] or width is None:
        raise Error(f"attention: {both}, but they must have equal keys and {heads} heads each")
    return k[1], width


def scores_words(value: Value | None, words: tuple[str, ...]) -> list[str]:
    """The words of a mask or bias, with `1` for a dimension that broadcasts."""
    if value is None:
        return []
    return ["1" if size == 1 else w for size, w in zip(value.type.shape, words, strict=True)]


def _check_scores(name: str, value: Value | None, scores: Shape) -> None:
    """Raise unless a mask or bias is there and fits [B|1, H|1, S|1, T], or is absent."""
    if value is None:
        return
    check = bool_operand if name == "mask" else float_operand
    shape = check("attention", value).shape
    fits = len(shape) == 4 and shape[3] == scores[3]
    if not fits or any(a not in (1, b) for a, b in zip(shape, scores, strict=True)):
        raise Error(
            f"attention: {name} is {value.type}, which does not fit the scores "
            f"[{', '.join(map(str, scores))}] of [batch, heads, queries, keys]"
        )


@operation("cache_update", moves_data=True, in_place="cache", safe_values={"past": 0, "pages": 0})
class CacheUpdate(Op):
    """The cache with this call's tokens written into it.

    cache [B, H, C, D], new [B, S, H*D] of the same dtype, past i32 [B]: token i of row b goes to
    position past[b] + i. Rows shorter than S write their padding behind their tokens, where the
    next call overwrites it. Writing beyond the capacity C is an error at run time. The result may
    alias the cache.

    With `pages` i32 [B, N] the cache is a pool of pages [P, H, C, D] that all rows share: position
    j of row b is place j % C of page pages[b][j // C], and N*C is the capacity of a row. What
    belongs into page -1 is not written. No two rows write into one page.
    """

    cache: Operand
    new: Operand
    past: Operand
    pages: OptionalOperand = optional()

    def infer(self) -> TensorType:
        cache, new = self.cache.type, self.new.type
        same_dtype("cache_update", self.cache, self.new)
        if cache.ndim != 4:
            raise Error(f"cache_update takes a cache [batch, heads, capacity, width], not {cache}")
        batch, heads, _, width = cache.shape
        if self.pages is not None:
            batch = pages_of("cache_update", self.pages)[0]
        if new.ndim != 3 or new.shape[0] != batch or new.shape[2] != heads * width:
            raise Error(
                f"cache_update: new is {new}, but the cache {cache} takes "
                f"[{batch}, tokens, {heads * width}]"
            )
        if index_operand("cache_update", self.past).shape != (batch,):
            raise Error(f"cache_update: past is {self.past.type}, but it has one number per row")
        return cache.replicated

    def sharding_rule(self) -> str:
        """Heads may be sharded, and rows where they share no pages."""
        cache = ["b" if self.pages is None else "p!", "h", "c!", "d!"]
        return rule_text([cache, ["b", "s!", "h"], ["b"], pages_words(self.pages)], [cache])

    def evaluate(self, cache: Array, new: Array, past: Array, pages: Array = None) -> Array:
        _, heads, size, width = cache.shape
        batch, tokens, _ = new.shape
        table = _page_table(batch, pages)
        capacity = table.shape[1] * size
        for row, start in enumerate(past.tolist()):
            if start < 0 or start + tokens > capacity:
                raise Error(
                    f"cache_update: row {row} writes positions {start} to {start + tokens - 1}, "
                    f"but the cache has the capacity {capacity}"
                )
        positions = np.asarray(past[:, None] + np.arange(tokens), np.int64)
        chosen = np.take_along_axis(table, positions // size, 1)
        written = chosen >= 0
        check_bounds("cache_update", chosen[written], len(cache))
        updated = cache.copy()
        places = chosen[written], (positions % size)[written]
        updated.swapaxes(1, 2)[places] = new.reshape(batch, tokens, heads, width)[written]
        return updated


def _page_table(rows: int, pages: Array) -> Array:
    """The pages of each row; without `pages` a cache is a pool whose page b is that of row b."""
    return np.arange(rows)[:, None] if pages is None else pages


def pages_words(pages: Value | None) -> list[str]:
    """The words of `pages`: a pool, which all rows share, has one state on all ranks."""
    return [] if pages is None else ["b!", "n!"]


def pages_of(op: str, pages: Value) -> Shape:
    """The shape [B, N] of the operand `pages`."""
    shape = index_operand(op, pages).shape
    if len(shape) != 2:
        raise Error(f"{op}: pages is {pages.type}; expected [batch, pages of a row]")
    return shape


@operation(
    "gather_pages",
    sharding="p! h c! d, b n! -> b h k d",
    sums="pool",
    moves_data=True,
    selects="pool",
    cheap=True,
    safe_values={"pages": 0},
)
class GatherPages(Op):
    """The caches [B, H, N*C, D] of rows whose pages [B, N] lie in a pool [P, H, C, D].

    As cache_update writes them. Page -1 is that of a gather, the last one: its keys must not be
    visible.
    """

    pool: Operand
    pages: Operand

    def expand(self) -> Op:
        if self.pool.type.ndim != 4:
            raise Error(
                f"takes a pool [pages, heads, tokens of a page, width], not {self.pool.type}"
            )
        batch, count = pages_of("gather_pages", self.pages)
        _, heads, size, width = self.pool.type.shape
        by_head = Transpose(Gather(self.pool, self.pages), order=(0, 2, 1, 3, 4))
        return Reshape(by_head, shape=(batch, heads, count * size, width))

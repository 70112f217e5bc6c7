"""Attention as the papers define it, in numpy and f64, for whole sequences and all heads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass
class Oracle:
    """The settings of a layer, by the names of `Attention`, and its complete weights.

    `qkv` are three weights [features, hidden], `o` is [hidden, features]; `prompts` the lengths of
    the prompts, which masks of prefixes need; `more` has what single kinds of positions need.
    """

    heads: int
    kv: int
    width: int
    qkv: tuple[Array, Array, Array]
    o: Array
    bias: Array | None = None  # of q, k and v
    o_bias: Array | None = None
    mask: str = "causal"
    position: str = "learned_absolute"
    prompts: Array = field(default_factory=lambda: np.zeros(0, np.int32))
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __call__(self, x: Array, source: Array | None = None) -> Array:
        """x [B, S, hidden] to the same; keys and values of `source` in cross attention."""
        scores_of = x if source is None else source
        parts = [given @ w.T for given, w in zip((x, scores_of, scores_of), self.qkv, strict=True)]
        if self.bias is not None:
            ends = np.cumsum([w.shape[0] for w in self.qkv])[:-1]
            parts = [p + b for p, b in zip(parts, np.split(self.bias, ends), strict=True)]
        clip = self.more.get("clip_qkv")
        parts = parts if clip is None else [np.clip(p, -clip, clip) for p in parts]
        q, k, v = (p.reshape(*p.shape[:2], -1, self.width).transpose(0, 2, 1, 3) for p in parts)
        norm = self.more.get("norm")
        if norm is not None:
            q, k = norm(q, "q"), norm(k, "k")
        if source is None:
            q, k = self.positioned(q), self.positioned(k)
        if "logn" in self.more:
            numbers = np.arange(1, x.shape[1] + 1)
            q = q * np.maximum(np.log(numbers) / np.log(self.more["logn"]), 1)[:, None]
        group = self.heads // self.kv
        k, v = (np.repeat(each, group, axis=1) for each in (k, v))
        scores = q @ k.swapaxes(2, 3) / (math.sqrt(self.width) * self.more.get("q_scaling", 1.0))
        cap = self.more.get("max_attn_value")
        scores = cap * np.tanh(scores / cap) if cap else scores
        if source is None:
            scores = scores + self.biases(x.shape[1])
        seen = self.visible(scores.shape, source is not None)
        scores = np.where(seen, scores, -np.inf)
        top = np.max(scores, axis=-1, keepdims=True)
        weights = np.exp(scores - np.where(np.isfinite(top), top, 0))
        total = weights.sum(-1, keepdims=True)
        mixed = weights / np.where(total > 0, total, 1) @ v
        out = mixed.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1) @ self.o.T
        return out if self.o_bias is None else out + self.o_bias

    def by_calls(self, x: Array, row: int, ends: list[int]) -> Array:
        """One row [S, hidden] in calls up to each of `ends`: no query sees keys of later calls."""
        pieces = zip([0, *ends], ends, strict=False)
        return np.concatenate([self(x[:, :last])[row, first:last] for first, last in pieces])

    # -- masks

    def visible(self, shape: tuple[int, ...], cross: bool) -> Array:
        """bool [B, heads, S, T]."""
        _, heads, tokens, keys = shape
        i, j = np.arange(tokens)[:, None], np.arange(keys)
        seen = np.ones(shape, np.bool_)
        hidden = self.more.get("key_mask")  # [B, T]
        if hidden is not None:
            seen &= hidden[:, None, None, :] != 0
        if cross or self.mask == "padding":
            if len(self.prompts):
                seen &= j < self.prompts[:, None, None, None]
        elif self.mask == "causal":
            seen &= j <= i
        elif self.mask == "sliding_window_causal":
            seen &= (j <= i) & (j > i - self.more["window"])
        elif self.mask in ("bidirectional", "bidirectionalglm"):
            last = self.prompts[:, None, None, None] - 1
            seen &= np.where(i < last, j < last, j <= i)  # the rows of the definition's drawing
        elif self.mask == "blocksparse":
            size, local, stride, alike = self.more["blocks"]
            step = 0 if alike else max(1, stride // heads)
            head = np.arange(heads)[:, None, None]
            strided = (j // size + 1 + head * step) % stride == 0
            seen &= (j <= i) & ((i // size - j // size < local) | strided)
        else:
            seen &= self.more["custom"][:, None, :tokens, :keys] != 0
        return seen

    # -- positions

    def biases(self, tokens: int) -> Array | float:
        away = np.arange(tokens) - np.arange(tokens)[:, None]
        if self.position in ("alibi", "alibi_with_scale"):
            slopes = np.array(slopes_of(self.heads, self.more.get("alibi_bias_max", 8)))
            scale = 1 / math.sqrt(self.width) if self.position == "alibi_with_scale" else 1
            return slopes[:, None, None] * scale * away
        if "table" in self.more:
            table = self.more["table"]
            if table.ndim == 3:
                return table[:, :tokens, :tokens]
            both, far = self.more.get("bidirectional", False), self.more["max_distance"]
            bucket = np.vectorize(lambda d: t5_bucket(d, both, table.shape[1], far))(away)
            return table[:, bucket]
        return 0.0

    def positioned(self, x: Array) -> Array:
        """x [B, heads, S, width] rotated."""
        batch, _, tokens, width = x.shape
        places = np.broadcast_to(np.arange(tokens), (batch, tokens))
        if self.position not in ("rope_gptj", "rope_gpt_neox", "long_rope", "yarn"):
            return x
        turned = int(width * self.more.get("percentage", 1.0))
        frequencies = self.more.get("frequencies", inverse(turned, self.more.get("base", 1e4)))
        by_two = self.position == "rope_gptj"
        done = rotated(x[..., :turned], places, frequencies, by_two) * self.more.get("factor", 1.0)
        return np.concatenate([done, x[..., turned:]], -1)


def inverse(width: int, base: float = 1e4) -> Array:
    """The radians per position of every pair."""
    return 1 / base ** (np.arange(0, width, 2) / width)


def rotated(x: Array, places: Array, frequencies: Array, by_two: bool = False) -> Array:
    """x [B, heads, S, width] times exp(i * place * frequency), pairs as complex numbers."""
    half = x.shape[-1] // 2
    real, imaginary = (x[..., 0::2], x[..., 1::2]) if by_two else (x[..., :half], x[..., half:])
    done = (real + 1j * imaginary) * np.exp(1j * places[:, None, :, None] * frequencies)
    if by_two:
        return np.stack([done.real, done.imag], -1).reshape(x.shape)
    return np.concatenate([done.real, done.imag], -1)


def slopes_of(heads: int, largest: float) -> list[float]:
    """The slopes of ALiBi."""
    power = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-largest * (i + 1) / power) for i in range(power)]
    return first if power == heads else first + slopes_of(2 * power, largest)[0::2][: heads - power]


def t5_bucket(distance: int, bidirectional: bool, buckets: int, far: int) -> int:
    """The bucket of key minus query."""
    if bidirectional:
        half = buckets // 2
        return half * (distance > 0) + t5_bucket(-abs(distance), False, half, far)
    away, single = max(-distance, 0), buckets // 2
    if away < single:
        return away
    grown = math.log(away / single) / math.log(far / single) * (buckets - single)
    return min(single + math.floor(grown + 1e-9), buckets - 1)

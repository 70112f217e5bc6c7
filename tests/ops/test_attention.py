"""Attention and the KV cache against plain loops, for every attribute."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from irc.errors import Error
from irc.ir.core import Function
from irc.ir.types import TensorType
from irc.ops import Attention
from tests.fresh import fresh
from tests.ops.compare import apply

RNG = fresh(7)
Arrays = dict[str, np.ndarray]


def normal(*shape: int) -> np.ndarray:
    """Random f32 numbers."""
    return RNG.standard_normal(shape).astype(np.float32)


def run(arrays: Arrays, **attributes: Any) -> np.ndarray:
    """The attention operation on arrays called q, k, v and so on."""
    named = {name: array for name, array in arrays.items() if name not in "qkv"}
    return apply("attention", *(arrays[name] for name in "qkv"), named=named, **attributes)


def by_loops(
    arrays: Arrays,
    head_dim: int,
    causal: bool = False,
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
) -> np.ndarray:
    """The same, one query of one head at a time, in f64."""
    q, k, v = (arrays[name].astype(np.float64) for name in "qkv")
    if k.ndim == 4:
        k, v = (x.swapaxes(1, 2) for x in (k, v))
    else:
        heads = k.shape[2] // head_dim
        k, v = (x.reshape(*x.shape[:2], heads, -1) for x in (k, v))
    q = q.reshape(*q.shape[:2], -1, head_dim)
    batch, tokens, heads, _ = q.shape
    keys, group = k.shape[1], heads // k.shape[2]
    out = np.zeros((batch, tokens, heads, v.shape[3]))
    for b, i, h in np.ndindex(batch, tokens, heads):
        at = i + (int(arrays["past"][b]) if "past" in arrays else keys - tokens)
        scores: dict[int, float] = {}
        for j in range(keys):
            if (causal and j > at) or (window and j <= at - window):
                continue
            if "lengths" in arrays and j >= arrays["lengths"][b]:
                continue
            if "mask" in arrays and not pick(arrays["mask"], b, h, i, j):
                continue
            score = float(q[b, i, h] @ k[b, j, h // group])
            score *= 1 / math.sqrt(head_dim) if scale is None else scale
            score = softcap * math.tanh(score / softcap) if softcap else score
            scores[j] = score + (float(pick(arrays["bias"], b, h, i, j)) if "bias" in arrays else 0)
        total = sum(map(math.exp, scores.values()))
        for j, score in scores.items():
            out[b, i, h] += math.exp(score) / total * v[b, j, h // group]
    return out.reshape(batch, tokens, -1)


def pick(array: np.ndarray, *at: int) -> Any:
    """An element of an array that broadcasts."""
    return array[tuple(0 if size == 1 else i for i, size in zip(at, array.shape, strict=True))]


def case(
    batch: int = 2,
    tokens: int = 3,
    keys: int = 5,
    heads: int = 4,
    key_heads: int = 2,
    width: int = 4,
    cached: bool = False,
    **more: np.ndarray,
) -> Arrays:
    """Random q, k and v with heads of 4, and the optional operands given."""
    if cached:
        k, v = normal(batch, key_heads, keys, 4), normal(batch, key_heads, keys, width)
    else:
        k, v = normal(batch, keys, key_heads * 4), normal(batch, keys, key_heads * width)
    return {"q": normal(batch, tokens, heads * 4), "k": k, "v": v, **more}


def ints(*numbers: int) -> np.ndarray:
    """An i32 vector."""
    return np.array(numbers, np.int32)


MASK = RNG.random((2, 4, 3, 5)) > 0.4
CASES: dict[str, tuple[Arrays, dict[str, Any]]] = {
    "plain": (case(), {}),
    "square": (case(tokens=5), {"causal": True}),
    "lower right": (case(), {"causal": True}),
    "more queries than keys": (case(tokens=5, keys=3), {"causal": True}),
    "window": (case(tokens=5), {"causal": True, "window": 2}),
    "window of one": (case(tokens=5), {"causal": True, "window": 1}),
    "window without causal": (case(tokens=5), {"window": 2}),
    "scale": (case(), {"scale": 0.2}),
    "softcap": (case(), {"softcap": 0.7, "scale": 2.0}),
    "softcap and bias": (case(bias=normal(2, 4, 3, 5)), {"softcap": 0.7}),
    "bias per head": (case(bias=normal(1, 4, 3, 5)), {"causal": True}),
    "bias per key": (case(bias=normal(2, 1, 1, 5)), {}),
    "mask": (case(mask=MASK), {}),
    "mask per row": (case(mask=MASK[:, :1, :1]), {"causal": True}),
    "mask and bias": (case(mask=MASK[:1], bias=normal(2, 4, 3, 5)), {}),
    "lengths": (case(lengths=ints(2, 5)), {}),
    "no visible key": (case(lengths=ints(0, 5)), {}),
    "lengths and causal": (case(lengths=ints(4, 1)), {"causal": True}),
    "past": (case(cached=True, past=ints(0, 2)), {"causal": True}),
    "past and window": (case(cached=True, past=ints(1, 2)), {"causal": True, "window": 2}),
    "past and lengths": (case(cached=True, past=ints(0, 2), lengths=ints(3, 4)), {"causal": True}),
    "decode": (case(tokens=1, cached=True, past=ints(3, 0)), {"causal": True}),
    "cache": (case(cached=True), {}),
    "one head each": (case(key_heads=4), {"causal": True}),
    "one key-value head": (case(key_heads=1), {"causal": True}),
    "wide values": (case(width=6), {}),
    "narrow values in a cache": (case(width=3, cached=True), {"causal": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_attention_agrees_with_loops(name: str) -> None:
    arrays, attributes = CASES[name]
    result = run(arrays, head_dim=4, **attributes)
    np.testing.assert_allclose(result, by_loops(arrays, 4, **attributes), rtol=1e-5, atol=1e-6)


def test_unused_cache_slots_do_not_matter() -> None:
    arrays = case(cached=True, past=ints(0, 1))
    clean = run(arrays, head_dim=4, causal=True)
    arrays["k"][:, :, 4:], arrays["v"][:, :, 4:] = np.nan, np.nan
    np.testing.assert_array_equal(run(arrays, head_dim=4, causal=True), clean)


def test_cache_update_appends_to_each_row() -> None:
    cache, new, past = normal(2, 3, 6, 4), normal(2, 2, 12), ints(0, 4)
    wanted = cache.copy()
    for b, i, h in np.ndindex(2, 2, 3):
        wanted[b, h, past[b] + i] = new[b, i, 4 * h : 4 * h + 4]
    before = cache.copy()
    np.testing.assert_array_equal(apply("cache_update", cache, new, past), wanted)
    np.testing.assert_array_equal(cache, before)  # the argument is not overwritten


@pytest.mark.parametrize("past", [5, -1])
def test_writing_outside_the_cache_is_an_error(past: int) -> None:
    with pytest.raises(Error, match=f"row 1 writes positions {past} to .* the capacity 6"):
        apply("cache_update", normal(2, 3, 6, 4), normal(2, 2, 12), ints(0, past))


Split = tuple[tuple[str, ...], ...]
WHOLE: Split = ((), (), ())
HEADS: Split = ((), (), ("tp",))
TOKENS: Split = ((), ("tp",), ())


@pytest.mark.parametrize(
    ("q", "k", "features", "attributes", "wanted"),
    [
        (HEADS, HEADS, 8, {}, "f32[2, 6, 16@tp]"),
        (HEADS, WHOLE, 4, {}, "f32[2, 6, 16@tp]"),  # one key-value head
        (TOKENS, WHOLE, 8, {}, "f32[2, 6@tp, 16]"),
        (HEADS, WHOLE, 8, {}, "dimension 'h' is sharded over tp in q and replicated in k"),
        (HEADS, HEADS, 4, {}, "needs dimension 'g' replicated"),
        (TOKENS, WHOLE, 8, {"causal": True}, "needs dimension 's' replicated"),
        (TOKENS, WHOLE, 8, {"window": 2}, "needs dimension 's' replicated"),
        (WHOLE, TOKENS, 8, {}, "needs dimension 't' replicated"),
    ],
)
def test_sharded_operands(
    q: Split, k: Split, features: int, attributes: dict[str, Any], wanted: str
) -> None:
    types = [TensorType("f32", (2, 6, 16), q), TensorType("f32", (2, 6, features), k)]
    query, key = Function("forward", list(zip("qk", types, strict=True))).args
    if wanted.startswith("f32"):
        op = Attention(query, key, key, head_dim=4, **attributes)
        assert str(op.result.type) == wanted
        return
    with pytest.raises(Error, match=wanted):
        Attention(query, key, key, head_dim=4, **attributes)


@pytest.mark.parametrize("past", [-1, 5])
def test_past_beyond_the_keys_is_an_error(past: int) -> None:
    q, k = np.zeros((1, 2, 4), np.float32), np.zeros((1, 6, 4), np.float32)
    inputs = {"q": q, "k": k, "v": k, "past": np.array([past], np.int32)}
    with pytest.raises(Error, match=f"row 0 has {past} tokens before its 2, but there are only 6"):
        run(inputs, head_dim=4, causal=True)

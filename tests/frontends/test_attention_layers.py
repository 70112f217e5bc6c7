"""Masks, biases and options of attention against their definitions, written in numpy."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import irc
from irc.errors import Error
from irc.frontends import Module, Tensor, random_weights
from irc.frontends.layers import Attention, BlockSparse, Cache, RelativePositions
from irc.frontends.layers.masks import prefix_mask, window_mask
from irc.frontends.layers.positions import alibi_slopes, logn_scale, query_positions, rotated
from irc.frontends.layers.scores import attend
from irc.weights.checkpoint import Reader
from tests.fresh import fresh
from tests.frontends.attention_oracle import Oracle, slopes_of, t5_bucket
from tests.frontends.helpers import computed

RANDOM = fresh(0)
PAST = np.array([0, 3], np.int32)  # two rows of four queries, among nine keys
QUERIES = PAST[:, None] + np.arange(4)
KEYS = 9


def mask_of(make: Callable[[Tensor], Tensor]) -> np.ndarray:
    """A mask of the queries at QUERIES."""
    return computed(lambda past: make(query_positions(4, past)), past=PAST)


def test_masks() -> None:
    q, k = QUERIES[:, None, :, None], np.arange(KEYS)
    prefix = np.array([5, 0], np.int32)
    found = computed(
        lambda past, prefix: prefix_mask(query_positions(4, past), KEYS, prefix),
        past=PAST,
        prefix=prefix,
    )
    assert np.array_equal(found, (k <= q) | (k < prefix[:, None, None, None]))
    found = computed(
        lambda past, window: window_mask(query_positions(4, past), KEYS, window),
        past=PAST,
        window=np.array([3], np.int32),
    )
    assert np.array_equal(found, (k <= q) & (k > q - 3))


@pytest.mark.parametrize(("heads", "alike"), [(3, False), (8, False), (3, True)])
def test_block_sparse(heads: int, alike: bool) -> None:
    rule = BlockSparse(block=2, local=1, stride=4, alike=alike)
    step = 0 if alike else max(1, 4 // heads)
    wanted = np.zeros((2, heads, 4, KEYS), np.bool_)
    for b, h, i, j in np.ndindex(wanted.shape):
        at = QUERIES[b, i]
        strided = (j // 2 + 1 + h * step) % 4 == 0
        wanted[b, h, i, j] = j <= at and (at // 2 - j // 2 < 1 or strided)
    found = mask_of(lambda queries: rule.mask(queries, KEYS, heads))
    assert np.array_equal(np.broadcast_to(found, wanted.shape), wanted)
    assert wanted.any() and not wanted[1].all()
    part = mask_of(lambda queries: rule.mask(queries, KEYS, heads, first=heads - 2, count=2))
    assert np.array_equal(np.broadcast_to(part, (2, 2, 4, KEYS)), wanted[:, -2:])


@pytest.mark.parametrize("heads", [1, 4, 6, 12, 40])
def test_slopes_of_alibi(heads: int) -> None:
    largest = float(RANDOM.integers(4, 17))
    whole = computed(lambda x: alibi_slopes(heads, largest), x=PAST)
    np.testing.assert_allclose(whole, slopes_of(heads, largest), rtol=1e-5)
    part = computed(lambda x: alibi_slopes(heads, largest, heads // 2, 1), x=PAST)
    np.testing.assert_allclose(part, whole[heads // 2 : heads // 2 + 1], rtol=1e-5)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "far"), [(32, 128), (16, 64), (8, 20), (40, 128), (12, 30)])
def test_buckets_are_those_of_t5(buckets: int, far: int, bidirectional: bool) -> None:
    distance = np.arange(-3 * far, 3 * far, dtype=np.int32)
    rule = RelativePositions(buckets, far, bidirectional)
    wanted = [t5_bucket(int(each), bidirectional, buckets, far) for each in distance]
    assert np.array_equal(computed(rule.bucket, distance=distance), wanted)


def test_logn_scale() -> None:
    found = mask_of(lambda queries: logn_scale(queries, 5))
    wanted = [[max(1.0, math.log(p + 1, 5)) for p in row] for row in QUERIES]
    np.testing.assert_allclose(found[..., 0], wanted, rtol=1e-5)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_by_given_angles_is_that_of_rope(interleaved: bool) -> None:
    from irc.frontends import functional as F

    x = RANDOM.normal(size=(2, 4, 3 * 10)).astype(np.float32)
    inverse = 1 / 100 ** (np.arange(0, 6, 2) / 6)
    angles = (QUERIES[..., None] * inverse).astype(np.float32)
    found = computed(
        lambda x, cos, sin: rotated(x, cos, sin, 10, interleaved),
        x=x,
        cos=np.cos(angles),
        sin=np.sin(angles),
    )
    wanted = computed(
        lambda x, p: F.rope(x, p, 10, theta=100.0, rotary_dim=6, interleaved=interleaved),
        x=x,
        p=QUERIES.astype(np.int32),
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


# an option of the layer, and what it is for the oracle
OPTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "clip": (0.5, {"more": {"clip_qkv": 0.5}}),
    "alibi": (8.0, {"position": "alibi"}),
    "relative": (RelativePositions(8, 20), {}),
    "logn": (3, {"more": {"logn": 3}}),
    "block_sparse": (
        BlockSparse(2, 1, 2),
        {"mask": "blocksparse", "more": {"blocks": (2, 1, 2, False)}},
    ),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_attention(option: str) -> None:
    """Against the definition, and with a cache, token by token."""
    heads, kv_heads, width, tokens = 6, 2, 4, 5
    value, settings = OPTIONS[option]
    layer = Attention(12, heads, kv_heads, width, **{option: value})
    x = RANDOM.normal(size=(2, tokens, 12)).astype(np.float32)
    module = random_weights(irc.trace(layer, {"x": irc.Spec("f32", x.shape)}), 5)
    reader = Reader(module)
    weights = {name: reader.read(w) for name, w in module.weights.items()}
    whole = irc.evaluate(module, {"x": x})["result0"]
    q, k, v, o = (weights[f"{name}_proj.weight"] for name in "qkvo")
    plain = Oracle(heads, kv_heads, width, (q, k, v), o)
    if "relative_table" in weights:
        settings = {"more": {"table": weights["relative_table"], "max_distance": 20}}
    np.testing.assert_allclose(whole, replace(plain, **settings)(x), rtol=1e-3, atol=1e-4)
    assert not np.allclose(whole, plain(x), rtol=1e-3, atol=1e-4)

    def step(x: Tensor, keys: Tensor, values: Tensor, past: Tensor) -> Any:
        out, cache = layer(x, cache=Cache(keys, values), past=past)
        return {"out": out, "keys": cache.keys, "values": cache.values}

    keys = values = np.zeros((2, kv_heads, 7, width), np.float32)
    for first, last in ((0, 2), (2, 3), (3, 5)):
        given = {"x": x[:, first:last], "keys": keys, "values": values}
        given["past"] = np.full(2, first, np.int32)
        specs = {n: irc.Spec("i32" if n == "past" else "f32", a.shape) for n, a in given.items()}
        piece = stepped(layer, step, specs)
        found = irc.evaluate(piece, given)
        keys, values = found["keys"], found["values"]
        np.testing.assert_allclose(found["out"], whole[:, first:last], rtol=1e-3, atol=1e-4)


def stepped(layer: Attention, step: Any, specs: Any) -> irc.Module:
    """A module of `step` with the weights that `layer` has alone."""

    class Step(Module):
        def __init__(self) -> None:
            for name, part in layer.children():
                setattr(self, name, part)
            self.forward = step

    return random_weights(irc.trace(Step(), specs), 5)


def test_impossible_options() -> None:
    with pytest.raises(Error, match="expected max_distance above 8"):
        RelativePositions(16, 8)
    with pytest.raises(Error, match="sizes of at least 1"):
        BlockSparse(block=0)
    with pytest.raises(Error, match="expected at most 5 angles for heads of 10, not 6"):
        angles = np.zeros((1, 2, 6), np.float32)
        x = np.zeros((1, 2, 10), np.float32)
        computed(lambda x, c, s: rotated(x, c, s, 10, False), x=x, c=angles, s=angles)


@pytest.mark.parametrize(("queries", "keys"), [(6, 4), (4, 6), (5, 5)])
def test_positions_where_the_last_query_is_at_the_last_key(queries: int, keys: int) -> None:
    def model(q: Tensor, k: Tensor) -> Tensor:
        return attend(q, k, k, 4, causal=False, scale=0.5, slopes=alibi_slopes(2, 4.0))

    specs = {"q": irc.Spec("f32", ("B", "S", 8)), "k": irc.Spec("f32", ("B", "C", 8))}
    q, k = (RANDOM.normal(size=(1, n, 8)).astype(np.float32) for n in (queries, keys))
    found = irc.evaluate(irc.trace(model, specs), {"q": q, "k": k})["result0"]
    a, b = (x.reshape(-1, 2, 4).transpose(1, 0, 2) for x in (q, k))
    gaps = np.arange(keys) - (np.arange(queries)[:, None] + keys - queries)
    scores = a @ b.transpose(0, 2, 1) / 2 + np.array([0.25, 0.0625])[:, None, None] * gaps
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = (weights / weights.sum(-1, keepdims=True)) @ b
    np.testing.assert_allclose(found[0], wanted.transpose(1, 0, 2).reshape(queries, 8), 1e-4, 1e-5)

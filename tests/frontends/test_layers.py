"""The layers against numpy and torch, and attention against its definition."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import irc
from irc.frontends import Module, Tensor, huggingface, layers, random_weights
from irc.frontends import functional as F
from irc.frontends.layers import BlockSparse, RelativePositions
from irc.frontends.layers.attention import Cache
from irc.frontends.layers.masks import prefix_mask, window_mask
from irc.frontends.layers.positions import alibi_slopes, logn_scale, query_positions, rotated
from irc.frontends.layers.scores import attend
from irc.ops import Rope
from irc.source import shown_path
from irc.weights.checkpoint import Reader
from tests.fresh import fresh
from tests.frontends.attention_oracle import Oracle, slopes_of, t5_bucket
from tests.frontends.helpers import computed
from tests.models.golden import write_safetensors

RANDOM = fresh(0)
X = RANDOM.normal(size=(2, 5, 12)).astype(np.float32)


def run(layer: Module, **arrays: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(results, weights) of a layer with random weights."""
    specs = {
        name: irc.Spec({"f": "f32", "i": "i32", "b": "bool"}[a.dtype.kind], a.shape)
        for name, a in arrays.items()
    }
    module = random_weights(irc.trace(layer, specs), 3)
    reader = Reader(module)
    weights = {name: reader.read(weight) for name, weight in module.weights.items()}
    return irc.evaluate(module, arrays), weights


def close(got: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_linear_and_embedding() -> None:
    out, w = run(layers.Linear(12, 7), x=X)
    close(out["result0"], X @ w["weight"].T + w["bias"])
    out, w = run(layers.Linear(12, 7, bias=False), x=X)
    assert list(w) == ["weight"]
    close(out["result0"], X @ w["weight"].T)
    out, w = run(layers.Embedding(10, 4), ids=np.array([3, -1, 10, 0], np.int32))
    row = w["weight"]
    close(out["result0"], np.stack([row[3], 0 * row[0], 0 * row[0], row[0]]))  # out of range: 0


def test_norms() -> None:
    out, w = run(layers.RmsNorm(12, eps=1e-3, offset=1.0), x=X)
    close(out["result0"], X / np.sqrt((X**2).mean(-1, keepdims=True) + 1e-3) * (1 + w["weight"]))
    out, w = run(layers.LayerNorm(12, eps=1e-3), x=X)
    close(out["result0"], standard(X) * w["weight"] + w["bias"])
    out, w = run(layers.LayerNorm(12, eps=1e-3, affine=False), x=X)
    assert not w
    close(out["result0"], standard(X))
    assert list(run(layers.LayerNorm(12, bias=False), x=X)[1]) == ["weight"]
    x = RANDOM.normal(size=(2, 6, 4)).astype(np.float32)
    out, w = run(layers.GroupNorm(3, 6, eps=1e-3), x=x)
    groups = standard(x.reshape(2, 3, 8)).reshape(2, 6, 4)
    close(out["result0"], groups * w["weight"][:, None] + w["bias"][:, None])


LIKE_TORCH: dict[str, tuple[Any, Any]] = {
    "conv": (
        lambda: layers.Conv2d(6, 4, (3, 2), stride=2, padding=(1, 0), dilation=(1, 2), groups=2),
        lambda nn: nn.Conv2d(6, 4, (3, 2), stride=2, padding=(1, 0), dilation=(1, 2), groups=2),
    ),
    "conv without bias": (
        lambda: layers.Conv2d(6, 4, 1, bias=False),
        lambda nn: nn.Conv2d(6, 4, 1, bias=False),
    ),
    "max": (lambda: layers.MaxPool2d(3, 2, 1), lambda nn: nn.MaxPool2d(3, 2, 1)),
    "max by height": (lambda: layers.MaxPool2d((3, 1)), lambda nn: nn.MaxPool2d((3, 1))),
    "mean": (lambda: layers.AvgPool2d(2), lambda nn: nn.AvgPool2d(2)),
    "padded mean": (
        lambda: layers.AvgPool2d((3, 2), 1, (1, 0)),
        lambda nn: nn.AvgPool2d((3, 2), 1, (1, 0)),
    ),
    "batch norm": (lambda: layers.BatchNorm(6, 1e-3), lambda nn: nn.BatchNorm2d(6, 1e-3)),
    "plain batch norm": (
        lambda: layers.BatchNorm(6, affine=False),
        lambda nn: nn.BatchNorm2d(6, affine=False),
    ),
    "dropout": (lambda: layers.Dropout(0.3), lambda nn: nn.Dropout(0.3)),
}


@pytest.mark.oracle
@pytest.mark.parametrize("case", LIKE_TORCH)
@pytest.mark.parametrize("size", [(2, 6, 7, 8), (1, 6, 5, 5)])
def test_layers_of_images_agree_with_torch(
    case: str, size: tuple[int, ...], tmp_path: Path
) -> None:
    import torch

    ours, theirs = LIKE_TORCH[case]
    other = theirs(torch.nn).eval()
    with torch.no_grad():
        for weight in other.state_dict().values():
            if weight.is_floating_point():
                weight.copy_(torch.from_numpy(RANDOM.uniform(0.5, 2, weight.shape)))
    x = RANDOM.normal(size=size).astype(np.float32)
    module = irc.trace(ours(), {"x": irc.Spec("f32", ("B", *size[1:]))}, {"B": (1, 1, 4)})
    if module.weights:
        arrays = {name: weight.numpy() for name, weight in other.state_dict().items()}
        arrays.pop("num_batches_tracked", None)
        write_safetensors(tmp_path / "model.safetensors", arrays)
        huggingface.bind(module, tmp_path)
    wanted = other(torch.from_numpy(x)).detach().numpy()
    close(irc.evaluate(module, {"x": x})["result0"], wanted)
    artifact = irc.compile(module, tmp_path / "out")
    close(artifact(x=x)["result0"], wanted)  # by name, or as run takes them
    close(artifact({"x": x})["result0"], wanted)


WRONG_IMAGES: dict[str, Any] = {
    "4 groups do not divide 6 channels and 4": lambda: layers.Conv2d(6, 4, 3, groups=4),
    "kernel_size is 0; expected a number of at least 1": lambda: layers.Conv2d(6, 4, 0),
    "kernel_size is (2, 2, 2); expected": lambda: layers.MaxPool2d(cast("Any", (2, 2, 2))),
    "stride is 1.5; expected": lambda: layers.MaxPool2d(2, cast("Any", 1.5)),
    "padding is 'same'; expected": lambda: layers.Conv2d(6, 4, 3, padding=cast("Any", "same")),
    "a padding of 2 is more than half of kernel_size 2": lambda: layers.AvgPool2d(2, padding=2),
    "a window of 9 does not fit into f32[1, 1, 8, 9]": lambda: run(
        layers.MaxPool2d(9), x=np.zeros((1, 1, 8, 9), np.float32)
    ),
    "expected an image [B, channels, height, width]": lambda: run(layers.MaxPool2d(2), x=X),
}


@pytest.mark.parametrize("message", WRONG_IMAGES)
def test_layers_of_images_refuse_other_sizes(message: str) -> None:
    with pytest.raises(irc.Error) as caught:
        WRONG_IMAGES[message]()
    assert message in str(caught.value) and "test_layers.py" in str(caught.value)


def standard(x: np.ndarray) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt(x.var(-1, keepdims=True) + 1e-3)


def silu(x: Any) -> Any:
    return x / (1 + np.exp(-x))


def test_feed_forward() -> None:
    out, w = run(layers.MLP(12, 20, act="relu"), x=X)
    hidden = np.maximum(X @ w["up_proj.weight"].T + w["up_proj.bias"], 0)
    close(out["result0"], hidden @ w["down_proj.weight"].T + w["down_proj.bias"])
    out, w = run(layers.GatedMLP(12, 20), x=X)
    assert list(w) == ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]
    hidden = silu(X @ w["gate_proj.weight"].T) * (X @ w["up_proj.weight"].T)
    close(out["result0"], hidden @ w["down_proj.weight"].T)
    module = irc.trace(layers.GatedMLP(12, 20), {"x": irc.Spec("f32", ("B", 12))})
    names = [op.opname for op in module.main]  # passes fuse them
    assert names == ["linear", "silu", "linear", "mul", "linear", "return"]


@pytest.mark.parametrize("name", sorted(layers.mlp.ACTIVATIONS))
def test_activations_have_their_operation(name: str) -> None:
    module = irc.trace(lambda x: layers.activation(name)(x), {"x": irc.Spec("f32", (4,))})
    first = next(iter(module.main)).opname
    assert first == {"swish": "silu", "relu2": "squared_relu"}.get(
        name, name.partition("_")[0] if name.startswith("gelu") else name
    )


def attention(w: dict[str, np.ndarray], heads: int, kv: int, width: int, **settings: Any) -> Oracle:
    """The definition of an attention layer with these weights."""
    q, k, v, o = (w[f"{name}_proj.weight"] for name in "qkvo")
    if "q_proj.bias" in w:
        settings["bias"] = np.concatenate([w[f"{name}_proj.bias"] for name in "qkv"])
    if "q_norm.weight" in w:
        settings["more"] = {"norm": lambda x, name: over_rms(x) * w[f"{name}_norm.weight"]}
    if "relative_table" in w:
        settings["more"] = {"table": w["relative_table"], "max_distance": 20}
    return Oracle(heads, kv, width, (q, k, v), o, o_bias=w.get("o_proj.bias"), **settings)


def over_rms(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True))


# options of a layer with 6 heads, 2 of keys, of width 4; what they are for the oracle
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grouped": ({}, {}),
    "multi head": ({"kv_heads": None, "head_dim": None}, {}),
    "multi query": ({"kv_heads": 1}, {}),
    "bidirectional": ({"causal": False}, {"mask": "padding"}),
    "window": ({"window": 2}, {"mask": "sliding_window_causal", "more": {"window": 2}}),
    "softcap": ({"softcap": 0.2}, {"more": {"max_attn_value": 0.2}}),
    "scale": ({"scale": 0.1}, {"more": {"q_scaling": 5.0}}),
    "norms": ({"qk_norm": 0.0}, {}),
    "biases": ({"qkv_bias": True, "output_bias": True}, {}),
    "rope": (
        {"rope": layers.Rope(theta=100.0)},
        {"position": "rope_gpt_neox", "more": {"base": 100.0}},
    ),
    "clip": ({"clip": 0.5}, {"more": {"clip_qkv": 0.5}}),
    "alibi": ({"alibi": 8.0}, {"position": "alibi"}),
    "relative": ({"relative": RelativePositions(8, 20)}, {}),
    "logn": ({"logn": 3}, {"more": {"logn": 3}}),
    "block_sparse": (
        {"block_sparse": BlockSparse(2, 1, 2)},
        {"mask": "blocksparse", "more": {"blocks": (2, 1, 2, False)}},
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_attention(name: str) -> None:
    """Against the definition, and with a cache, in three calls."""
    row, settings = OPTIONS[name]
    options: dict[str, Any] = {"kv_heads": 2, "head_dim": 4} | row
    layer = layers.Attention(12, 6, **options)
    kv, width = options["kv_heads"] or 6, options["head_dim"] or 2
    places = np.tile(np.arange(5, dtype=np.int32), (2, 1))
    out, w = run(layer, x=X, positions=places)
    whole, oracle = out["result0"], attention(w, 6, kv, width, **settings)
    np.testing.assert_allclose(whole, oracle(X), rtol=1e-3, atol=1e-4)
    plain = dataclasses.replace(oracle, mask="causal", position="learned_absolute", more={})
    assert np.allclose(whole, plain(X), rtol=1e-3, atol=1e-4) == (oracle == plain)
    if not layer.causal:
        return
    state = {part: np.zeros((2, kv, 7, width), np.float32) for part in ("keys", "values")}
    for first, last in ((0, 2), (2, 3), (3, 5)):
        given = {"x": X[:, first:last], "positions": places[:, first:last], **state}
        results, _ = run(Cached(layer), **given, past=np.full(2, first, np.int32))
        state = {part: results[part] for part in state}
        np.testing.assert_allclose(results["out"], whole[:, first:last], rtol=1e-3, atol=1e-4)


class Cached(Module):
    """An attention layer with a cache, and with the weights that the layer has alone."""

    def __init__(self, layer: layers.Attention) -> None:
        for name, part in layer.children():
            setattr(self, name, part)
        self.layer = layer

    def forward(
        self, x: Tensor, positions: Tensor, keys: Tensor, values: Tensor, past: Tensor
    ) -> Any:
        out, cache = self.layer(x, positions, cache=Cache(keys, values), past=past)
        return {"out": out, "keys": cache.keys, "values": cache.values}


class With(Module):
    """Attention with more inputs than x."""

    def __init__(self, **options: Any) -> None:
        self.a = layers.Attention(12, 4, **options)

    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        return self.a(x, **others)


def test_cross_attention() -> None:
    memory = RANDOM.normal(size=(2, 3, 7)).astype(np.float32)
    out, w = run(With(memory_size=7), x=X, memory=memory)
    w = {name.removeprefix("a."): value for name, value in w.items()}
    close(out["result0"], attention(w, 4, 4, 3)(X, memory))


def test_masks_lengths_and_biases_reach_the_operation() -> None:
    mask = RANDOM.random((1, 1, 5, 5)) < 0.6
    mask[..., 0] = True
    bias = RANDOM.normal(size=(1, 4, 5, 5)).astype(np.float32)
    lengths = np.array([5, 2], np.int32)
    out, w = run(With(causal=False), x=X, mask=mask, bias=bias, lengths=lengths)
    w = {name.removeprefix("a."): value for name, value in w.items()}
    visible = mask[:, 0] & (np.arange(5) < lengths[:, None, None])
    oracle = attention(w, 4, 4, 3, mask="custom", more={"custom": visible, "table": bias[0]})
    close(out["result0"], oracle(X))


def test_rope_settings_are_the_attributes_of_the_operation() -> None:
    settings = {field.name: field.default for field in dataclasses.fields(layers.Rope)}
    assert settings.keys() == Rope.attribute_types.keys() - {"head_dim"}
    assert settings.items() <= Rope.attribute_defaults.items()


ROPE = layers.Rope()
REFUSED: list[tuple[Any, str]] = [
    (lambda x: layers.Attention(12, 5), "12 is not a multiple of 5 heads; give head_dim"),
    (lambda x: layers.Attention(12, 4, 3), "4 heads cannot share 3 key and value heads"),
    (lambda x: layers.Attention(12, 4, rope=ROPE)(x), "requires positions"),
    (lambda x: layers.Attention(12, 4)(x, past=x), "cache and past must be given together"),
    (lambda x: layers.Attention(12, 4)(x, memory=x), "only with memory_size"),
    (lambda x: layers.Attention(12, 4, memory_size=4)(x), "requires memory"),
    (
        lambda x: layers.Attention(12, 4, memory_size=4, rope=ROPE)(x, x, memory=x),
        "neither rope nor a cache",
    ),
    (lambda x: layers.MLP(4, 4, act="sillu"), "'sillu'; did you mean 'silu'?"),
]


@pytest.mark.parametrize(("function", "message"), REFUSED)
def test_errors_state_what_to_change(function: Any, message: str) -> None:
    with pytest.raises(irc.Error) as caught:
        irc.trace(lambda x: function(x), {"x": irc.Spec("f32", ("B", "S", 12))})
    assert message in caught.value.message and str(caught.value).startswith(
        shown_path(__file__) + ":"
    )


# Masks and positions

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


def test_impossible_options() -> None:
    with pytest.raises(irc.Error, match="expected max_distance above 8"):
        RelativePositions(16, 8)
    with pytest.raises(irc.Error, match="sizes of at least 1"):
        BlockSparse(block=0)
    with pytest.raises(irc.Error, match="expected at most 5 angles for heads of 10, not 6"):
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

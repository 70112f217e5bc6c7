"""The layers against numpy, and attention with a cache against attention without."""

import dataclasses
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import irc
from irc.frontends import Module, Tensor, huggingface, layers, random_weights
from irc.frontends.layers.attention import Cache
from irc.ops import Rope
from irc.source import shown_path
from tests.fresh import fresh
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
    from irc.weights.checkpoint import Reader

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


def attend(
    q: Any, k: Any, v: Any, visible: Any, scale: float, cap: float = 0, bias: Any = 0
) -> Any:
    """q [B, S, H, D], k and v [B, T, Hk, D], visible [S, T] or [B, 1, S, T]."""
    k, v = (np.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
    scores = np.einsum("bshd,bthd->bhst", q, k) * scale + bias
    scores = cap * np.tanh(scores / cap) if cap else scores
    scores = np.where(visible, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhst,bthd->bshd", weights, v).reshape(*q.shape[:2], -1)


def projected(
    w: dict[str, np.ndarray], x: np.ndarray, source: np.ndarray, dim: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    def one(name: str, on: np.ndarray) -> np.ndarray:
        bias = w.get(f"{name}_proj.bias", 0)
        heads = (on @ w[f"{name}_proj.weight"].T + bias).reshape(*on.shape[:2], -1, dim)
        if f"{name}_norm.weight" not in w:
            return heads
        return heads / np.sqrt((heads**2).mean(-1, keepdims=True)) * w[f"{name}_norm.weight"]

    return one("q", x), one("k", source), one("v", source)


CAUSAL = np.tril(np.ones((5, 5), bool))
KINDS: dict[str, tuple[dict[str, Any], np.ndarray]] = {
    "multi head": ({}, CAUSAL),
    "bidirectional": ({"causal": False}, np.ones((5, 5), bool)),
    "grouped": ({"kv_heads": 2}, CAUSAL),
    "multi query": ({"kv_heads": 1, "head_dim": 6}, CAUSAL),
    "window": ({"window": 2}, CAUSAL & ~np.tril(np.ones((5, 5), bool), -2)),
    "softcap": ({"softcap": 0.7}, CAUSAL),
    "scale": ({"scale": 0.11}, CAUSAL),
    "norms": ({"kv_heads": 2, "qk_norm": 0.0}, CAUSAL),
    "biases": ({"qkv_bias": True, "output_bias": True}, CAUSAL),
}


@pytest.mark.parametrize("kind", KINDS)
def test_attention(kind: str) -> None:
    options, visible = KINDS[kind]
    out, w = run(layers.Attention(12, 4, **options), x=X)
    assert ("q_norm.weight" in w and "k_norm.weight" in w) == ("qk_norm" in options)
    dim = options.get("head_dim", 3)
    scale = options.get("scale", dim**-0.5)
    q, k, v = projected(w, X, X, dim)
    mixed = attend(q, k, v, visible, scale, options.get("softcap", 0))
    close(out["result0"], mixed @ w["o_proj.weight"].T + w.get("o_proj.bias", 0))


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
    mixed = attend(*projected(w, X, memory, 3), np.ones((5, 3), bool), 3**-0.5)
    close(out["result0"], mixed @ w["o_proj.weight"].T)


def test_masks_lengths_and_biases_reach_the_operation() -> None:
    mask = RANDOM.random((1, 1, 5, 5)) < 0.6
    mask[..., 0] = True
    bias = RANDOM.normal(size=(1, 4, 5, 5)).astype(np.float32)
    lengths = np.array([5, 2], np.int32)
    out, w = run(With(causal=False), x=X, mask=mask, bias=bias, lengths=lengths)
    w = {name.removeprefix("a."): value for name, value in w.items()}
    visible = mask & (np.arange(5) < lengths[:, None, None, None])
    mixed = attend(*projected(w, X, X, 3), visible, 3**-0.5, bias=bias)
    close(out["result0"], mixed @ w["o_proj.weight"].T)


class Cached(Module):
    def __init__(self) -> None:
        self.a = layers.Attention(12, 4, 2, 4, rope=layers.Rope(theta=100.0))

    def forward(self, x: Tensor, positions: Tensor, **cached: Tensor) -> Any:
        if not cached:
            return self.a(x, positions)
        out, cache = self.a(
            x, positions, cache=Cache(cached["k"], cached["v"]), past=cached["past"]
        )
        return {"out": out, "k": cache.keys, "v": cache.values}


def test_a_cache_changes_nothing() -> None:
    place = np.tile(np.arange(5, dtype=np.int32), (2, 1))
    whole, _ = run(Cached(), x=X, positions=place)
    state = {name: np.zeros((2, 2, 8, 4), np.float32) for name in "kv"}
    parts = []
    for begin, end in ((0, 3), (3, 4), (4, 5)):
        past = np.full(2, begin, np.int32)
        out, _ = run(Cached(), x=X[:, begin:end], positions=place[:, begin:end], past=past, **state)
        state = {name: out[name] for name in "kv"}
        parts.append(out["out"])
    close(np.concatenate(parts, 1), whole["result0"])


def test_rope_settings_are_the_attributes_of_the_operation() -> None:
    settings = {field.name: field.default for field in dataclasses.fields(layers.Rope)}
    assert settings.keys() == Rope.attribute_types.keys() - {"head_dim"}
    assert settings.items() <= Rope.attribute_defaults.items()


ROPE = layers.Rope()
REFUSED: list[tuple[Any, str]] = [
    (lambda x: layers.Attention(12, 5), "12 is no multiple of 5 heads; give head_dim"),
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

"""The mixture-of-experts layer against loops over tokens, and its weights in checkpoints."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irc
from irc.errors import Error
from irc.frontends import huggingface, layers, random_weights
from tests.choices import settled
from tests.fresh import fresh

from ..models.golden import write_safetensors
from .test_layers import close, run, silu

RANDOM = fresh(5)
HIDDEN, WIDTH = 12, 7


def tokens_for(layer: layers.MixtureOfExperts, *shape: int) -> np.ndarray:
    """Random tokens whose choice of experts no rounding changes."""
    return settled_in(random_weights(irc.trace(layer, {"x": irc.Spec("f32", shape)}), 3), *shape)


def settled_in(module: irc.Module, *shape: int) -> np.ndarray:
    return settled(
        lambda: RANDOM.normal(size=shape).astype(np.float32),
        module,
        lambda x: irc.evaluate(module, {"x": x}),
    )


def softmax(x: np.ndarray) -> np.ndarray:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def gated(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> Any:
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def by_hand(
    tokens: np.ndarray, w: dict[str, np.ndarray], chosen: int, normalize: bool, capacity: int
) -> tuple[np.ndarray, int]:
    """(results of the routed experts for tokens [T, hidden], how many choices were dropped)."""
    likes = softmax(tokens @ w["gate.weight"].T)
    out, dropped = np.zeros_like(tokens), 0
    queues = [0] * likes.shape[1]
    for t, token in enumerate(tokens):
        best = sorted(range(likes.shape[1]), key=lambda e: -likes[t, e])[:chosen]
        total = likes[t, best].sum() if normalize else 1
        for e in best:
            queues[e] += 1
            if capacity and queues[e] > capacity:
                dropped += 1
                continue
            parts = [w[f"experts.{name}"][e] for name in ("gate", "up", "down")]
            out[t] += likes[t, e] / total * gated(token, *parts)
    return out, dropped


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("experts", [3, 5, 8])
@pytest.mark.parametrize("chosen", [1, 2, 3])
def test_routed_experts(experts: int, chosen: int, normalize: bool) -> None:
    routing = layers.Routing(normalize)
    layer = layers.MixtureOfExperts(HIDDEN, WIDTH, experts, chosen, routing=routing)
    x = tokens_for(layer, 2, 5, HIDDEN)
    out, w = run(layer, x=x)
    wanted, _ = by_hand(x.reshape(-1, HIDDEN), w, chosen, normalize, 0)
    close(out["result0"], wanted.reshape(x.shape))


@pytest.mark.parametrize("capacity", [1, 2, 4])
def test_dropped_tokens_are_counted(capacity: int) -> None:
    layer = layers.MixtureOfExperts(HIDDEN, WIDTH, 3, 2, capacity=capacity)
    x = tokens_for(layer, 9, HIDDEN)
    out, w = run(layer, x=x)
    wanted, dropped = by_hand(x, w, 2, True, capacity)
    assert dropped >= 18 - 3 * capacity > 0
    close(out["result0"], wanted)
    assert out["result1"].tolist() == dropped


@pytest.mark.parametrize("own_gate", [True, False])
def test_a_shared_expert_sees_every_token(own_gate: bool) -> None:
    layer = layers.MixtureOfExperts(HIDDEN, WIDTH, 5, 2, shared_size=9, shared_gate=own_gate)
    x = tokens_for(layer, 5, HIDDEN)
    out, w = run(layer, x=x)
    names = [f"shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")]
    shared = gated(x, *(w[name] for name in names))
    if own_gate:
        shared = shared / (1 + np.exp(-(x @ w["shared_expert_gate.weight"].T)))
    close(out["result0"], by_hand(x, w, 2, True, 0)[0] + shared)


def test_wrong_sizes() -> None:
    with pytest.raises(Error, match="chosen=4 is outside 1 to 3 experts"):
        layers.MixtureOfExperts(HIDDEN, WIDTH, 3, 4)
    with pytest.raises(Error, match="shared_gate needs shared_size"):
        layers.MixtureOfExperts(HIDDEN, WIDTH, 3, 2, shared_gate=True)


def test_a_checkpoint_has_one_tensor_per_expert(tmp_path: Path) -> None:
    wide, narrow = (WIDTH, HIDDEN), (HIDDEN, WIDTH)
    shapes = {"gate_proj": wide, "up_proj": wide, "down_proj": narrow}
    tensors = {
        f"experts.{e}.{name}.weight": RANDOM.normal(size=shape).astype(np.float32)
        for e in range(3)
        for name, shape in shapes.items()
    }
    tensors["gate.weight"] = RANDOM.normal(size=(3, HIDDEN)).astype(np.float32)
    write_safetensors(tmp_path / "model.safetensors", tensors)
    layer = layers.MixtureOfExperts(HIDDEN, WIDTH, 3, 2)
    module = irc.trace(layer, {"x": irc.Spec("f32", ("T", HIDDEN))})
    up = module.weights["experts.up"]
    assert str(up.type) == f"f32[3, {WIDTH}, {HIDDEN}]"
    assert str(up.ref).startswith(
        f'concat(unbound("experts.0.up_proj.weight", [{WIDTH}, {HIDDEN}]).unsqueeze(0), '
    )
    huggingface.bind(module, tmp_path)
    x = settled_in(module, 4, HIDDEN)
    weights = {"gate.weight": tensors["gate.weight"]}
    for name in shapes:
        stacked = [tensors[f"experts.{e}.{name}.weight"] for e in range(3)]
        weights[f"experts.{name.removesuffix('_proj')}"] = np.stack(stacked)
    close(irc.evaluate(module, {"x": x})["result0"], by_hand(x, weights, 2, True, 0)[0])
    del tensors["experts.1.up_proj.weight"]
    write_safetensors(tmp_path / "model.safetensors", tensors)
    module = irc.trace(layer, {"x": irc.Spec("f32", ("T", HIDDEN))})
    with pytest.raises(Error, match=r"experts\.1\.up_proj\.weight"):
        huggingface.bind(module, tmp_path)

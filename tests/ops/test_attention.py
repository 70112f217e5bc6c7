"""The KV cache and sharded attention; rope against rotations of complex numbers, and every kind
against transformers. ONNX Runtime checks what attention computes (test_onnx.py)."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from irc.errors import Error
from irc.ir.core import Function
from irc.ir.types import TensorType
from irc.ops import Attention, Rope
from irc.ops.rope import inverse_frequencies
from tests.fresh import fresh
from tests.ops.compare import apply
from tests.ops.test_declarations import value

RNG = fresh(7)
Arrays = dict[str, np.ndarray]


def normal(*shape: int) -> np.ndarray:
    """Random f32 numbers."""
    return RNG.standard_normal(shape).astype(np.float32)


def run(arrays: Arrays, **attributes: Any) -> np.ndarray:
    """The attention operation on arrays called q, k, v and so on."""
    named = {name: array for name, array in arrays.items() if name not in "qkv"}
    return apply("attention", *(arrays[name] for name in "qkv"), named=named, **attributes)


def ints(*numbers: int) -> np.ndarray:
    """An i32 vector."""
    return np.array(numbers, np.int32)


def test_unused_cache_slots_do_not_matter() -> None:
    arrays = {"q": normal(2, 3, 16), "past": ints(0, 1)}
    arrays |= {name: normal(2, 2, 5, 4) for name in "kv"}
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


def test_sinks_take_probability() -> None:
    torch = import_module("torch")
    sinks = np.array([-1e9, -1.0, 0.5, 100.0], np.float32)
    arrays = {"q": normal(2, 3, 16), "k": normal(2, 5, 16), "v": normal(2, 5, 16)}
    q, k, v = (torch.tensor(x).view(2, -1, 4, 4).transpose(1, 2) for x in arrays.values())
    scores = q @ k.transpose(2, 3) / 2
    column = torch.tensor(sinks).view(1, 4, 1, 1).expand(2, 4, 3, 1)
    weights = torch.softmax(torch.cat([scores, column], dim=3), 3)[..., :5]
    wanted = (weights @ v).transpose(1, 2).reshape(2, 3, 16).numpy()
    np.testing.assert_allclose(run(arrays | {"sinks": sinks}, head_dim=4), wanted, atol=1e-6)


# rope

HEAD = 16


def rotated(x: np.ndarray, positions: np.ndarray, **attributes: Any) -> np.ndarray:
    """The rope of arrays with heads of HEAD features."""
    return apply("rope", x, positions, head_dim=HEAD, **attributes)


def drawn(tokens: int = 3, far: int = 50) -> tuple[np.ndarray, np.ndarray]:
    """Random x and positions, of which the largest is `far`."""
    positions = RNG.integers(0, far, (2, tokens)).astype(np.int32)
    positions[1, -1] = far
    return RNG.standard_normal((2, tokens, 2 * HEAD)).astype(np.float32), positions


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [0, 4, 16])
def test_rope_rotates_pairs(interleaved: bool, rotary: int) -> None:
    x, positions = drawn()
    result = rotated(x, positions, interleaved=interleaved, rotary_dim=rotary, theta=100.0)
    turned = rotary or HEAD
    for b, s, h in np.ndindex(2, 3, 2):
        head = x[b, s, h * HEAD : (h + 1) * HEAD].astype(np.float64)
        wanted = head.copy()
        for i in range(turned // 2):
            one, two = (2 * i, 2 * i + 1) if interleaved else (i, i + turned // 2)
            angle = float(positions[b, s]) * 100.0 ** (-2 * i / turned)
            z = complex(head[one], head[two]) * complex(math.cos(angle), math.sin(angle))
            wanted[one], wanted[two] = z.real, z.imag
        np.testing.assert_allclose(result[b, s, h * HEAD : (h + 1) * HEAD], wanted, atol=2e-5)


STRETCHED = {"factor": 4.0, "original_positions": 32}
KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.5},
    "dynamic": STRETCHED,
    "llama3": {"factor": 8.0, "original_positions": 64},
    "yarn": STRETCHED,
    "longrope": STRETCHED
    | {
        "short_factors": tuple(1 + i / 10 for i in range(HEAD // 2)),
        "long_factors": tuple(1.0 + i for i in range(HEAD // 2)),
    },
}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *KINDS.items(),
    ("default", {}),
    ("llama3", KINDS["llama3"] | {"low_freq_factor": 2.0, "high_freq_factor": 8.0}),
    ("llama3", KINDS["llama3"] | {"low_freq_factor": 1.0, "high_freq_factor": 1.0}),
    ("yarn", STRETCHED | {"attention_factor": 0.8, "beta_fast": 16.0, "beta_slow": 2.0}),
    ("yarn", STRETCHED | {"mscale": 0.7, "mscale_all_dim": 1.2, "truncate": False}),
    ("longrope", KINDS["longrope"] | {"attention_factor": 1.5}),
]


def hugging_face(kind: str, attributes: dict[str, Any], partial: float = 1.0) -> Any:
    """transformers' module for the same frequencies."""
    from transformers import LlamaConfig
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    names = {
        "original_positions": "original_max_position_embeddings",
        "short_factors": "short_factor",
        "long_factors": "long_factor",
    }
    scaling = {names.get(name, name): value for name, value in attributes.items()}
    scaling = {k: list(v) if isinstance(v, tuple) else v for k, v in scaling.items()}
    parameters = {
        "rope_type": kind,
        "rope_theta": 500.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "partial_rotary_factor": partial,
        **scaling,
    }
    config: Any = LlamaConfig(
        hidden_size=2 * HEAD,
        num_attention_heads=2,
        head_dim=HEAD,
        max_position_embeddings=attributes.get("original_positions", 64),
        rope_parameters=parameters,
    )
    return Phi3RotaryEmbedding(config)


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("far", [20, 50, 300])
@pytest.mark.parametrize("rotary", [HEAD, HEAD // 2])
@pytest.mark.parametrize(("kind", "attributes"), VARIANTS)
def test_transformers_agrees(kind: str, attributes: dict[str, Any], rotary: int, far: int) -> None:
    import torch
    from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb

    if kind == "longrope":
        cut = {n: attributes[n][: rotary // 2] for n in ("short_factors", "long_factors")}
        attributes = attributes | cut
    x, positions = drawn(tokens=4, far=far)
    module = hugging_face(kind, attributes, rotary / HEAD)
    q = torch.from_numpy(x.reshape(2, 4, 2, HEAD)).transpose(1, 2)
    cos, sin = module(q, torch.from_numpy(positions).long())
    wanted, _ = apply_rotary_pos_emb(q, q, cos, sin)
    attributes = attributes | {"kind": kind, "rotary_dim": rotary, "theta": 500.0}
    result = rotated(x, positions, **attributes)
    flat = wanted.transpose(1, 2).reshape(2, 4, 2 * HEAD).numpy()
    np.testing.assert_allclose(result, flat, rtol=1e-4, atol=1e-4)
    values = value("f32[2, 4, 32]"), value("i32[2, 4]")
    op = Rope(*values, head_dim=HEAD, **attributes)
    inverse, factor = inverse_frequencies(op, far + 1)
    np.testing.assert_allclose(inverse, module.inv_freq.numpy(), rtol=1e-6, atol=1e-6)
    assert factor == pytest.approx(module.attention_scaling)

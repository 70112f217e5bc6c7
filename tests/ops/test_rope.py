"""Rope against rotations of complex numbers, and every kind against transformers."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from irc.ops import Rope
from irc.ops.rope import inverse_frequencies
from tests.fresh import fresh
from tests.ops.compare import apply
from tests.ops.test_declarations import value

RNG = fresh(3)
HEAD = 16


def run(x: np.ndarray, positions: np.ndarray, **attributes: Any) -> np.ndarray:
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
    result = run(x, positions, interleaved=interleaved, rotary_dim=rotary, theta=100.0)
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
    result = run(x, positions, **attributes)
    flat = wanted.transpose(1, 2).reshape(2, 4, 2 * HEAD).numpy()
    np.testing.assert_allclose(result, flat, rtol=1e-4, atol=1e-4)
    values = value("f32[2, 4, 32]"), value("i32[2, 4]")
    op = Rope(*values, head_dim=HEAD, **attributes)
    inverse, factor = inverse_frequencies(op, far + 1)
    np.testing.assert_allclose(inverse, module.inv_freq.numpy(), rtol=1e-6, atol=1e-6)
    assert factor == pytest.approx(module.attention_scaling)

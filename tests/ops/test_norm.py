"""Norms and the gated feed-forward against their formulas in f64."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from tests.fresh import fresh
from tests.ops.compare import apply

RNG = fresh(5)
X = RNG.standard_normal((3, 4, 8)).astype(np.float32) * 3 + 1
WEIGHT, BIAS = (RNG.standard_normal(8).astype(np.float32) for _ in range(2))


def test_rms_norm() -> None:
    x = X.astype(np.float64)
    wanted = x / np.sqrt((x**2).mean(-1, keepdims=True) + 0.1) * (WEIGHT + 1)
    np.testing.assert_allclose(
        apply("rms_norm", X, WEIGHT, eps=0.1, offset=1.0), wanted, rtol=1e-5, atol=1e-6
    )


def test_layer_norm() -> None:
    x = X.astype(np.float64)
    plain = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 0.1)
    close = np.testing.assert_allclose
    close(apply("layer_norm", X, eps=0.1), plain, rtol=1e-5, atol=1e-6)
    close(apply("layer_norm", X, named={"bias": BIAS}, eps=0.1), plain + BIAS, rtol=1e-5, atol=1e-6)
    both = {"weight": WEIGHT, "bias": BIAS}
    close(apply("layer_norm", X, named=both, eps=0.1), plain * WEIGHT + BIAS, rtol=1e-4, atol=1e-6)


def test_group_norm() -> None:
    images = RNG.standard_normal((2, 6, 3, 5)).astype(np.float32) * 2 - 1
    both = {"weight": WEIGHT[:6], "bias": BIAS[:6]}
    found = apply("group_norm", images, named=both, groups=2, eps=0.1)
    for b, c in np.ndindex(2, 6):
        group = images[b, c // 3 * 3 : c // 3 * 3 + 3].astype(np.float64)
        plain = (images[b, c] - group.mean()) / math.sqrt(group.var() + 0.1)
        np.testing.assert_allclose(found[b, c], plain * WEIGHT[c] + BIAS[c], rtol=1e-4, atol=1e-6)


def test_sixteen_bit_norms_round_once() -> None:
    x, weight = X.astype(ml_dtypes.bfloat16), WEIGHT.astype(ml_dtypes.bfloat16)
    wide = apply("rms_norm", x.astype(np.float32), weight.astype(np.float32))
    np.testing.assert_array_equal(apply("rms_norm", x, weight), wide.astype(ml_dtypes.bfloat16))
    far = np.full((1, 8), 60000, np.float16)  # its square is no f16
    np.testing.assert_array_equal(apply("rms_norm", far, np.ones(8, np.float16)), np.ones((1, 8)))


ACTIVATIONS = {
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: (
        0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    ),
    "quick_gelu": lambda x: x / (1 + math.exp(-1.702 * x)),
    "relu": lambda x: max(x, 0.0),
    "squared_relu": lambda x: max(x, 0.0) ** 2,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
}


def quarters(*shape: int) -> np.ndarray:
    """Multiples of 1/4 up to 2, whose products f32 adds without rounding."""
    return (RNG.integers(-8, 9, shape) / 4).astype(np.float32)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_gated_mlp(act: str) -> None:
    x, gate, up = quarters(3, 4, 8), quarters(5, 8), quarters(5, 8)
    named = {"gate_bias": quarters(5), "up_bias": quarters(5)}
    active = np.vectorize(ACTIVATIONS[act])(x.astype(np.float64) @ gate.T + named["gate_bias"])
    found = apply("gated_mlp", x, gate, up, named=named, act=act)
    wanted = active * (x @ up.T + named["up_bias"])
    # gelu adds 1 to erf, which costs below -5 all digits of a number below 1e-6
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("op", ["rms_norm", "layer_norm"])
def test_a_norm_of_no_features_is_empty(op: str) -> None:
    weight = () if op == "layer_norm" else (np.zeros(0, np.float32),)
    assert apply(op, np.zeros((3, 0), np.float32), *weight).shape == (3, 0)

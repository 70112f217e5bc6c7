"""The operations of torch.ops that scripts quantize weights with, against their definitions."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from irc.frontends.checkpoints.mixed_gemm import unpack
from irc.frontends.tensorrt_llm.aliases import aliases
from irc.frontends.tensorrt_llm.context import new_session
from tests.fresh import fresh

K, N = 6, 8


@pytest.fixture(autouse=True)
def registered() -> None:
    """The operations are there once a script has imported tensorrt_llm."""
    with new_session("0.16"), aliases():
        __import__("tensorrt_llm")


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("namespace", ["fastertransformer", "trtllm"])
def test_weights_are_quantized_and_packed(namespace: str, bits: int) -> None:
    ops: Any = getattr(torch.ops, namespace)
    kind: Any = torch.int8 if bits == 8 else torch.quint4x2
    weight = torch.from_numpy(fresh(51).normal(size=(K, N))).half()
    stored, scales = ops.symmetric_quantize_last_axis_of_batched_matrix(weight, kind)
    plain, same, _ = ops._symmetric_quantize_last_axis_of_batched_matrix(weight, kind)
    assert scales.dtype == torch.float16 and stored.shape == (K, N * bits // 8)
    values, most = weight.float().numpy(), 1 << (bits - 1)
    steps = np.abs(values).max(0) / most
    wanted = np.clip(np.round(values / steps), -most, most - 1)
    np.testing.assert_array_equal(unpack(stored.numpy(), bits), wanted)
    np.testing.assert_array_equal(stored, same)
    np.testing.assert_allclose(scales, steps, rtol=1e-3)
    np.testing.assert_array_equal(stored, ops.preprocess_weights_for_mixed_gemm(plain, kind))
    if bits == 4:
        codes = ops.unpack_int4_packed_tensor_to_int8(plain)
        np.testing.assert_array_equal(codes, wanted)
        np.testing.assert_array_equal(ops.pack_int8_tensor_to_packed_int4(codes), plain)


@pytest.mark.parametrize(("name", "over"), [("activation", 1), ("weight", 0), ("per_tensor", None)])
def test_fp8_has_a_scale_per_row_column_or_one(name: str, over: int | None) -> None:
    ops: Any = torch.ops.tensorrt_llm
    x = fresh(52).normal(size=(K, N)).astype("float32")
    codes, scale = getattr(ops, f"quantize_e4m3_{name}")(torch.from_numpy(x))
    wanted = np.abs(x).max(over, keepdims=True) / np.float32(448)
    np.testing.assert_allclose(scale, wanted, rtol=1e-6)
    values = (x / scale.numpy()).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(codes, values.view(np.int8))
    again = getattr(ops, f"dequantize_e4m3_{name}")(codes, scale)
    np.testing.assert_allclose(again, values.astype(np.float32) * scale.numpy(), rtol=1e-6)

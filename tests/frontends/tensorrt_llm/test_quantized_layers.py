"""Quantized layers on 1, 2 and 4 ranks, against numpy on the complete codes and scales."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from irc.errors import Error
from irc.frontends.checkpoints.mixed_gemm import pack, unpack
from irc.frontends.tensorrt_llm.aliases import aliases
from irc.frontends.tensorrt_llm.context import new_session
from irc.frontends.tensorrt_llm.functional.quantized import weight_only_quant_matmul
from irc.frontends.tensorrt_llm.layers import MLP, MOE, ColumnLinear, GatedMLP, MoeConfig
from irc.frontends.tensorrt_llm.layers import quantized as layers
from irc.frontends.tensorrt_llm.mapping import Mapping as Ranks
from irc.frontends.tensorrt_llm.module import Module, Parameter
from irc.frontends.tensorrt_llm.quantization import QuantConfig, QuantMode
from tests.fresh import fresh
from tests.frontends.tensorrt_llm.worlds import every_rank, module_of, parallel, shard

K, N = 32, 16
SMOOTH = QuantMode.use_smooth_quant


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("row", [False, True], ids=["column", "row"])
@pytest.mark.parametrize(("bits", "version"), [(8, "0.16"), (4, "0.16"), (8, "0.5")])
def test_weight_only_linear(bits: int, version: str, row: bool, tp: int) -> None:
    """The outputs are gathered along the last dimension, of three dimensions too."""
    rng, most = fresh(31), 127 if bits == 8 else 7
    codes = rng.integers(-most, most + 1, (N, K)).astype("int8")
    scales, bias = rng.uniform(0.5, 2, N).astype("float32") / most, rng.normal(size=N)
    x = rng.normal(size=(2, 3, K)).astype("float32")

    def build(mapping: Ranks, x_: Any) -> Any:
        kind = getattr(layers, f"WeightOnlyQuant{'Row' * row}Linear")
        mode = QuantMode.use_weight_only(bits == 4)
        layer = kind(K, N, True, **parallel(mapping), quant_mode=mode)
        packed = pack(shard(codes, int(row), mapping).T, bits)
        layer.weight.value = packed.view(layer.weight.stored)
        for name, array in (("per_channel_scale", scales), ("bias", bias.astype("float32"))):
            getattr(layer, name).value = array if row else shard(array, 0, mapping)
        return layer(Parameter(shard(x, -1, mapping)).value if row else x_)

    want = x @ (codes * scales[:, None]).T + bias
    for (outputs,) in every_rank(build, {"x_": x}, tp, version):
        np.testing.assert_allclose(outputs, want, rtol=1e-3, atol=1e-3)


class Model(Module):
    """Two layers, of which the head is excluded by default."""

    def __init__(self, mapping: Ranks) -> None:
        self.mlp: Any = GatedMLP(K, 2 * K, "silu", True, **parallel(mapping))
        self.lm_head: Any = ColumnLinear(K, N, False, **parallel(mapping))

    def forward(self, x: Any) -> Any:
        return self.lm_head(self.mlp(x))


@pytest.mark.parametrize("algo", ["W8A16", "W4A16"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_model_is_quantized_to_nearest_codes(tp: int, algo: str) -> None:
    rng = fresh(33)
    x = rng.normal(size=(6, K)).astype("float32")
    shapes = {"mlp.fc": (2 * K, K), "mlp.gate": (2 * K, K), "mlp.proj": (K, 2 * K)}
    shapes["lm_head"] = N, K
    weights = {name: rng.normal(size=n).astype("float32") / 8 for name, n in shapes.items()}

    def build(mapping: Ranks, x: Any, how: str | None) -> Any:
        model = Model(mapping)
        for name, part in model.named_modules():
            if name in weights:
                part.weight.value = shard(weights[name], name == "mlp.proj", mapping)
                if part.bias is not None:
                    part.bias.value = np.full(part.bias.shape, 0.25, "float32")
        return (layers.quantize(model, QuantConfig(how, exclude_modules=[])) if how else model)(x)

    ((exact,),) = every_rank(lambda mapping, x: build(mapping, x, None), {"x": x})
    worst = 0.02 if algo == "W8A16" else 0.3
    for (y,) in every_rank(lambda mapping, x: build(mapping, x, algo), {"x": x}, tp):
        error = np.linalg.norm(y - exact) / np.linalg.norm(exact)
        assert 1e-5 < error < worst


@pytest.mark.parametrize(
    ("algo", "excluded", "quantized"),
    [
        ("W8A16", None, "mlp.fc mlp.gate mlp.proj"),
        ("W8A16", [], "mlp.fc mlp.gate mlp.proj lm_head"),  # not the default list
        ("W4A16", ["*gate", "lm_*"], "mlp.fc mlp.proj"),
    ],
)
def test_excluded_modules_stay(algo: str, excluded: list[str] | None, quantized: str) -> None:
    with new_session():
        config = QuantConfig(algo, exclude_modules=excluded)
        model = layers.quantize(Model(Ranks()), config)
        parts = {n for n, part in model.named_modules() if isinstance(part, layers.WeightOnly)}
    assert parts == {*quantized.split()}


def test_experts_that_stay_are_noted() -> None:
    class Experts(Module):
        def __init__(self) -> None:
            self.moe = MOE(MoeConfig(num_experts=4, top_k=2), K, N, "relu", Ranks())

    with new_session() as session:
        layers.quantize(Experts(), QuantConfig("W8A16"))
        assert any("experts keep their floats" in note for note in session.notes)


def changed(**config: Any) -> None:
    """Quantize a model."""
    layers.quantize(Model(Ranks()), QuantConfig(**config))


def set_floats(make: Any) -> None:
    """Set floats where codes are expected."""
    make().value = np.ones((K, N), np.float32)


CODES = Parameter(shape=(K, N), dtype="int8")
MESSAGES: dict[str, Any] = {
    "holds packed codes of 8 bits, .* found f32": (
        lambda: set_floats(lambda: layers.WeightOnlyQuantLinear(K, N).weight)
    ),
    "holds codes of i8, .* floats of f32; quantize them first": lambda: set_floats(lambda: CODES),
    "the weight of a layer such as WeightOnlyQuantLinear, found i8": (
        lambda: weight_only_quant_matmul(CODES.value, CODES.value, CODES.value, 1)
    ),
    "layers in FP8 are refused": lambda: MLP(K, N, "relu", quant_mode=QuantMode.FP8_QDQ),
    "irc compile FOLDER --quantize SCHEME": lambda: layers.quantize_model(Model(Ranks()), SMOOTH()),
    "two-level int4 is not": lambda: changed(quant_algo="W4A8_QSERVE_PER_GROUP"),
    "give a table of scopes": lambda: changed(quant_algo="MIXED_PRECISION"),
    "there is no QuantAlgo 'NVFP4'": lambda: changed(quant_algo="NVFP4"),
}


@pytest.mark.parametrize("message", MESSAGES)
def test_messages(message: str) -> None:
    with new_session("0.7"), pytest.raises(Error) as caught:
        module_of(lambda _, x: MESSAGES[message](), {"x": np.zeros((3, K), "float32")})
    assert re.search(message, caught.value.message)
    assert "test_quantized_layers.py" in str(caught.value)


@pytest.mark.parametrize(
    "path", ["layers.SmoothQuantLinear", "quantize.smooth_quantize", "functional.quantize"]
)
def test_other_schemes_are_refused_with_sources_too(path: str, tmp_path: Path) -> None:
    module, _, name = path.rpartition(".")
    (tmp_path / "quantization").mkdir()
    (tmp_path / "quantization" / f"{module}.py").write_text(f"def {name}(): ...\n")
    with new_session("0.16", sources=tmp_path), aliases():
        target = getattr(import_module(f"tensorrt_llm.quantization.{module}"), name)
        with pytest.raises(Error, match=f"{name} is not supported: .*--quantize SCHEME"):
            target()


# -- operations of torch.ops that scripts quantize weights with


@pytest.fixture
def registered() -> None:
    """The operations are there once a script has imported tensorrt_llm."""
    with new_session("0.16"), aliases():
        __import__("tensorrt_llm")


@pytest.mark.usefixtures("registered")
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
    away = np.trunc(values / steps + np.copysign(0.5, values))  # halves away from zero
    wanted = np.clip(away, -most, most - 1)
    np.testing.assert_array_equal(unpack(stored.numpy(), bits), wanted)
    np.testing.assert_array_equal(stored, same)
    np.testing.assert_allclose(scales, steps, rtol=1e-3)
    low, high = (wanted.astype(np.int8)[:, i::2] for i in (0, 1))
    codes = wanted if bits == 8 else (low & 15) | (high << 4)
    np.testing.assert_array_equal(plain, codes)
    refused = ops.preprocess_weights_for_mixed_gemm, torch.ops.tensorrt_llm.quantize_e4m3_weight
    for operation in refused:
        with pytest.raises(Error, match="or makes them with --quantize SCHEME"):
            operation(plain, kind)

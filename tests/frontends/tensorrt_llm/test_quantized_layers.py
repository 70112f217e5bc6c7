"""Quantized layers on 1, 2 and 4 ranks, against numpy on the complete codes and scales."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import irc
from irc.errors import Error
from irc.frontends.checkpoints.mixed_gemm import pack, quantize_columns, unpack
from irc.frontends.tensorrt_llm.aliases import aliases
from irc.frontends.tensorrt_llm.context import current_network, new_session
from irc.frontends.tensorrt_llm.functional import quantized as functions
from irc.frontends.tensorrt_llm.layers import MLP, MOE, ColumnLinear, GatedMLP, MoeConfig
from irc.frontends.tensorrt_llm.layers import quantized as layers
from irc.frontends.tensorrt_llm.mapping import Mapping as Ranks
from irc.frontends.tensorrt_llm.module import Module, Parameter
from irc.frontends.tensorrt_llm.quantization import QuantConfig, QuantMode
from tests.fresh import fresh
from tests.frontends.tensorrt_llm.worlds import Array, every_rank, module_of, parallel, shard

K, N, GROUP = 32, 16, 8
SMOOTH = QuantMode.use_smooth_quant
FP8 = ml_dtypes.float8_e4m3fn


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


@pytest.mark.parametrize("tp", [1, 2])
def test_feed_forward_in_fp8(tp: int) -> None:
    """Up to 0.9 the layers of a block whose quant_mode says so, with weights in floats."""
    ups, down = fresh(34).normal(size=(2, N, K)).astype("float32")
    x, scales = fresh(35).normal(size=(3, K)).astype("float32"), np.array([0.02, 0.03], "float32")

    def build(mapping: Ranks, x: Any) -> Any:
        mode = QuantMode.FP8_QDQ
        layer: Any = MLP(K, N, "relu", False, **parallel(mapping), quant_mode=mode)
        layer.fc.weight.value = shard(ups, 0, mapping)
        layer.proj.weight.value = shard(down.T, 1, mapping)
        for part in (layer.fc, layer.proj):
            part.activation_scaling_factor.value = scales[:1]
            part.weights_scaling_factor.value = scales[1:]
        return layer(x)

    def rounded(values: Array, scale: Any) -> Array:
        return np.clip(values / scale, -448, 448).astype(FP8).astype("float32") * scale

    inner = np.maximum(rounded(x, scales[0]) @ rounded(ups, scales[1]).T, 0)
    want = rounded(inner, scales[0]) @ rounded(down, scales[1])
    for (outputs,) in every_rank(build, {"x": x}, tp, "0.7"):
        np.testing.assert_allclose(outputs, want, rtol=1e-3, atol=1e-3)
    assert not np.allclose(want, np.maximum(x @ ups.T, 0) @ down, rtol=1e-3, atol=1e-3)


# Flags of weight_only_groupwise_quant_matmul: biases 1, zeros 2, pre_quant_scale 4, alpha and
# inputs in FP8 8, codes of 8 bits 16.
@pytest.mark.parametrize("flags", [0, 1, 3, 5, 15, 17])
def test_products_of_groups(flags: int) -> None:
    rng, bits = fresh(32), 8 if flags & 16 else 4
    codes = rng.integers(-7, 8, (K, N)).astype("int8")
    scales, zeros = rng.uniform(0.1, 0.5, (2, K // GROUP, N)).astype("float32")
    factors, bias = rng.uniform(0.5, 2, (1, K)).astype("float32"), rng.normal(size=N).astype("f4")
    x, alpha = rng.normal(size=(3, K)).astype("float32"), np.full(1, 0.7, np.float32)

    def build(mapping: Ranks, x: Any) -> Any:
        arrays = factors, pack(codes, bits), scales, zeros, bias
        operands = [Parameter(array).value for array in arrays]
        product: Any = functions.weight_only_groupwise_quant_matmul
        more: Any = {"alpha": Parameter(alpha).value, "quant_algo": flags, "group_size": GROUP}
        return product(x, *operands, **more)

    inputs = x * factors if flags & 4 else x
    inputs = np.clip(inputs, -448, 448).astype(FP8).astype("float32") if flags & 8 else inputs
    weight = codes * np.repeat(scales, GROUP, 0) + np.repeat(zeros, GROUP, 0) * bool(flags & 2)
    want = inputs @ weight * (0.7 if flags & 8 else 1) + bias * bool(flags & 1)
    ((outputs,),) = every_rank(build, {"x": x})
    np.testing.assert_allclose(outputs, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bits", [8, 4])
def test_constants_of_packed_codes(bits: int) -> None:
    """What scripts without layers give to weight_only_quant_matmul."""
    weight, x = fresh(35).normal(size=(K, N)), fresh(36).normal(size=(3, K)).astype("float32")
    codes, scales = quantize_columns(weight, bits)
    for values in (codes, np.full_like(codes, 3)):

        def build(mapping: Ranks, x: Any, values: Array = values) -> Any:
            current_network().plugin_config.weight_only_quant_matmul_plugin = "auto"
            packed = Parameter(pack(values, bits)).value
            return functions.weight_only_quant_matmul(x, packed, Parameter(scales).value, 8 // bits)

        ((y,),) = every_rank(build, {"x": x})
        np.testing.assert_allclose(y, x @ (values * scales), rtol=1e-3, atol=1e-4)


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


def codes_of(x: Array, limits: tuple[float, float] | None = None) -> tuple[Array, Array]:
    """(codes i8, scales) of every token, after clamping."""
    x = x if limits is None else np.clip(x, *limits)
    scales = np.abs(x).max(-1, keepdims=True) / 127
    return np.rint(x / scales), scales


def test_norms_in_codes() -> None:
    """Times a scale, or with a scale per token; those of 0.12 and later clamp the latter too."""
    rng, limits = fresh(37), (-0.5, 1.0)
    x = rng.normal(1, 1, (2, 3, K)).astype("float32")
    weight, bias = rng.normal(size=(2, K)).astype("float32")

    def build(mapping: Ranks, x: Any) -> Any:
        own: Any = {"weight": Parameter(weight).value, "bias": Parameter(bias).value}
        one, clamp = Parameter(np.full(1, 20, "f4")).value, Parameter(np.array(limits, "f4")).value
        layer: Any = functions.smooth_quant_layer_norm(x, (K,), **own, scale=one)
        by_token = functions.smooth_quant_layer_norm(x, (K,), **own, dynamic_act_scaling=True)
        rms = functions.smooth_quant_rms_norm(x, (K,), **own, scale=one, clamp_val=clamp)
        tokens = functions.smooth_quant_rms_norm(
            x, (K,), **own, clamp_val=clamp, dynamic_act_scaling=True, sum_per_token=True
        )
        return layer, *by_token, rms, *tokens

    centred = x - x.mean(-1, keepdims=True)
    normed, rms = (
        y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-5) * weight + bias for y in (centred, x)
    )
    clamped = np.clip(rms, *limits)
    want = np.clip(np.rint(normed * 20), -128, 127), *codes_of(normed), np.rint(clamped * 20)
    want = *want, *codes_of(clamped), clamped.sum(-1, keepdims=True)
    for own, other in zip(every_rank(build, {"x": x})[0], want, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1 if own.dtype == np.int8 else 1e-4)
        assert (own == other).mean() > 0.99 or own.dtype != np.int8


@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("name", ["smooth_quant_gemm", "fp8_rowwise_gemm"])
def test_products_of_codes(name: str, token: bool, channel: bool) -> None:
    rng, shape, kind = fresh(38), (2, 3, K), "int8" if name == "smooth_quant_gemm" else FP8
    x, weight = (rng.integers(-100, 101, n).astype(kind) for n in (shape, (N, K)))
    a = rng.uniform(0.001, 0.01, (6, 1) if token else (1, 1)).astype("float32")
    b = rng.uniform(0.001, 0.01, (1, N) if channel else (1, 1)).astype("float32")

    def build(mapping: Ranks, x: Any) -> Any:
        current_network().plugin_config.smooth_quant_gemm_plugin = "float32"
        operands = x, *(Parameter(array).value for array in (weight, a, b)), token, channel
        return getattr(functions, name)(*operands)

    ((y,),) = every_rank(build, {"x": x})
    product = x.reshape(6, K).astype("float32") @ weight.astype("float32").T * (a * b)
    np.testing.assert_allclose(y.reshape(6, N), product, rtol=1e-3)


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


misspelt: Any = layers.WeightOnlyQuantLinear


def grouped_in_f32() -> None:
    """Codes of 4 bits in words of 32, which would have twice as many outputs as the scales."""
    x, weight, scales = (np.ones(shape, "f4") for shape in ((3, K), (K, N // 4), (K // GROUP, N)))
    given = [Parameter(array).value for array in (x, weight, scales)]
    product: Any = functions.weight_only_groupwise_quant_matmul
    product(given[0], None, *given[1:], None, None, quant_algo=0, group_size=GROUP)


CODES = Parameter(shape=(K, N), dtype="int8")
MESSAGES: dict[str, Any] = {
    "holds packed codes of 8 bits, .* found f32": (
        lambda: set_floats(lambda: layers.WeightOnlyQuantLinear(K, N).weight)
    ),
    "holds codes of i8, .* floats of f32; quantize them first": lambda: set_floats(lambda: CODES),
    "copy of TensorRT-LLM: --tens": lambda: changed(quant_algo="W8A8_SQ_PER_CHANNEL"),
    "irc compile FOLDER --quantize SCHEME": lambda: layers.quantize_model(Model(Ranks()), SMOOTH()),
    "group_size need a mode with scales per group": lambda: layers.quantize_model(
        Model(Ranks()), QuantMode.use_weight_only(), group_size=64
    ),
    "take 16 bits here, so give them dtype='float16'": lambda: grouped_in_f32(),
    "two-level int4 is not": lambda: changed(quant_algo="W4A8_QSERVE_PER_GROUP"),
    "give a table of scopes": lambda: changed(quant_algo="MIXED_PRECISION"),
    "there is no QuantAlgo 'NVFP4'": lambda: changed(quant_algo="NVFP4"),
    "no argument 'biass'; did you mean 'bias'": lambda: misspelt(K, N, biass=True),
}


@pytest.mark.parametrize("message", MESSAGES)
def test_messages(message: str) -> None:
    with new_session("0.7"), pytest.raises(Error) as caught:
        module_of(lambda _, x: MESSAGES[message](), {"x": np.zeros((3, K), "float32")})
    assert re.search(message, caught.value.message)
    assert "test_quantized_layers.py" in str(caught.value)


# -- layers that come from the sources (here: of our own)


SOURCES = {
    "functional.py": "",
    "quantization/layers.py": """
from ..functional import allgather
from ..layers import Linear
from ..parameter import Parameter
from .functional import quantize_per_token, smooth_quant_gemm

class SmoothQuantLinear(Linear):
    def __init__(self, in_features, out_features, tp_group=None, tp_size=1):
        super().__init__(in_features, out_features, True, "float32", tp_group, tp_size)
        self.weight = Parameter(shape=(self.out_features, in_features), dtype="int8")
        self.per_channel_scale = Parameter(shape=(1, self.out_features), dtype="float32")

    def forward(self, x):
        codes, scales = quantize_per_token(x)
        weight, own = self.weight.value, self.per_channel_scale.value
        y = smooth_quant_gemm(codes, weight, scales, own, True, True, "float32") + self.bias.value
        return y if self.tp_group is None else allgather(y, self.tp_group, gather_dim=1)
""",
    "quantization/quantize.py": """
from .._utils import get_init_params
from .layers import SmoothQuantLinear

def smooth_quantize(model, quant_config):
    sizes = get_init_params(model.transformer, SmoothQuantLinear)
    sizes["out_features"] *= model.transformer.tp_size
    model.transformer = SmoothQuantLinear(**sizes)
    return model

def quantize(model, quant_config):
    assert quant_config.quant_mode.has_act_and_weight_quant()
    return smooth_quantize(model, quant_config)
""",
}


def test_smooth_quant_of_the_sources(tmp_path: Path) -> None:
    """A copy of TensorRT-LLM makes its layers over irc's, and irc's `quantize` asks it to."""
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    rng = fresh(39)
    weight, steps = rng.integers(-127, 128, (N, K)).astype("int8"), rng.uniform(0.01, 0.02, (1, N))
    x, steps = rng.normal(size=(3, K)).astype("float32"), steps.astype("float32")
    bias = rng.normal(size=N).astype("float32")

    class Head(Module):
        def __init__(self, mapping: Ranks) -> None:
            sizes = parallel(mapping, in_features=K, out_features=N, gather_output=False)
            self.transformer: Any = ColumnLinear(**sizes)

    def build(mapping: Ranks, x: Any) -> Any:
        algo = "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN"
        layer = layers.quantize(Head(mapping), QuantConfig(algo)).transformer
        layer.weight.value, layer.bias.value = (shard(w, 0, mapping) for w in (weight, bias))
        layer.per_channel_scale.value = shard(steps, 1, mapping)
        return layer(x)

    codes, scales = codes_of(x)
    want = codes @ weight.T * (scales * steps) + bias
    for tp in (1, 2):
        with new_session("0.16", sources=tmp_path), aliases():
            module = module_of(build, {"x": x}, tp)
            y = irc.evaluate(module, {"x": x})["out0"]
        np.testing.assert_allclose(y, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("path", ["layers.SmoothQuantLinear", "quantize.smooth_quantize"])
def test_without_sources_they_are_refused(path: str) -> None:
    module, _, name = path.rpartition(".")
    with new_session("0.16"), aliases():
        target = getattr(import_module(f"tensorrt_llm.quantization.{module}"), name)
        with pytest.raises(Error, match=f"{name} is not supported: .*--tensorrt-llm-sources DIR"):
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
    np.testing.assert_array_equal(stored, ops.preprocess_weights_for_mixed_gemm(plain, kind))
    if bits == 4:
        codes = ops.unpack_int4_packed_tensor_to_int8(plain)
        np.testing.assert_array_equal(codes, wanted)
        np.testing.assert_array_equal(ops.pack_int8_tensor_to_packed_int4(codes), plain)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(("name", "over"), [("activation", 1), ("weight", 0), ("per_tensor", None)])
def test_fp8_has_a_scale_per_row_column_or_one(name: str, over: int | None) -> None:
    ops: Any = torch.ops.tensorrt_llm
    x = fresh(52).normal(size=(K, N)).astype("float32")
    codes, scale = getattr(ops, f"quantize_e4m3_{name}")(torch.from_numpy(x))
    wanted = np.abs(x).max(over, keepdims=True) / np.float32(448)
    np.testing.assert_allclose(scale, wanted, rtol=1e-6)
    values = (x / scale.numpy()).astype(FP8)
    np.testing.assert_array_equal(codes, values.view(np.int8))
    again = getattr(ops, f"dequantize_e4m3_{name}")(codes, scale)
    np.testing.assert_allclose(again, values.astype(np.float32) * scale.numpy(), rtol=1e-6)

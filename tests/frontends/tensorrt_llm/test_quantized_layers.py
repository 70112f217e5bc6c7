"""Quantized layers on 1, 2 and 4 ranks, against numpy on the complete codes and scales."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from irc.errors import Error
from irc.frontends.checkpoints.mixed_gemm import pack, quantize_columns
from irc.frontends.tensorrt_llm.context import current_network, new_session
from irc.frontends.tensorrt_llm.functional import quantized as functions
from irc.frontends.tensorrt_llm.layers import (
    MOE,
    Attention,
    ColumnLinear,
    GatedMLP,
    LayerNorm,
    MoeConfig,
)
from irc.frontends.tensorrt_llm.layers import quantize as models
from irc.frontends.tensorrt_llm.layers import quantized as layers
from irc.frontends.tensorrt_llm.mapping import Mapping
from irc.frontends.tensorrt_llm.module import Module, Parameter
from irc.frontends.tensorrt_llm.quantization import QuantConfig, QuantMode
from tests.fresh import fresh
from tests.frontends.tensorrt_llm.worlds import Array, every_rank, module_of, shard

K, N, GROUP = 32, 16, 8
SMOOTH = QuantMode.use_smooth_quant
FP8 = ml_dtypes.float8_e4m3fn


@dataclass
class Case:
    """A pair of layers of a version: their names, options, the dtype of codes (`packed` by
    kernels), and the names of parameters. `per` is what has a scale: tensor, output or group."""

    name: str
    codes: str
    scales: str
    per: str = "output"
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    weight: str = "weight"
    static: str = ""
    token: bool = False
    factors: str = ""
    zero: str = ""
    alpha: str = ""
    clamp: tuple[float, ...] = ()
    version: str = "0.16"
    given: str = ""  # "codes" where x is codes i8, "pairs" where it comes with scales

    @property
    def floats(self) -> bool:
        """Whether the weight is set in floats, which the layer quantizes."""
        stored = {"Int8SmoothQuant": 8, "FP8": 10}.get(self.name, 0)
        return int(self.version[2:]) < stored


def groups(version: str = "0.16", **options: Any) -> Case:
    """Groupwise layers, whose parameters had other names up to 0.8."""
    old = version == "0.7"
    names = ("qweight", "scale", "pre_quant_scale") if old else (
        "weight", "weights_scaling_factor", "prequant_scaling_factor")  # fmt: skip
    return Case(
        "WeightOnlyGroupwiseQuant", "i8" if options.get("use_int8_weight") else "i4", names[1],
        "group", {"group_size": GROUP} | options, names[0],
        factors=names[2] if options.get("pre_quant_scale") else "",
        zero="zero" if options.get("zero") else "",
        alpha="alpha" if options.get("use_w4a8_awq") else "", version=version,
    )  # fmt: skip


def weight_only(codes: str, version: str = "0.16") -> Case:
    """Layers with codes per output."""
    mode = QuantMode.use_weight_only(codes == "i4")
    options = {"quant_mode": mode}
    return Case("WeightOnlyQuant", codes, "per_channel_scale", options=options, version=version)


def smooth(token: bool, channel: bool, version: str = "0.16") -> Case:
    """SmoothQuant layers."""
    return Case(
        "SmoothQuant", "i8", "per_channel_scale", "output" if channel else "tensor",
        {"quant_mode": SMOOTH(token, channel)}, static="" if token else "act_scale", token=token,
        given="pairs" if token else "codes", version=version,
    )  # fmt: skip


def scaled(name: str, codes: str, per: str, version: str = "0.16", **more: Any) -> Case:
    """Layers with a scale of inputs."""
    scales, static = "weights_scaling_factor", "activation_scaling_factor"
    return Case(name, codes, scales, per, static=static, version=version, **more)


MODELOPT: dict[str, Any] = {"factors": "prequant_scaling_factor"}
CASES = {
    "int8": weight_only("i8"),
    "int4": weight_only("i4"),
    "int8 of 0.5": weight_only("i8", "0.5"),
    "groups": groups(),
    "groups of 0.7": groups("0.7", zero=True, pre_quant_scale=True),
    "groups of int8": groups(use_int8_weight=True),
    "gptq": groups(zero=True),
    "awq": groups(pre_quant_scale=True),
    "awq with fp8": groups(pre_quant_scale=True, zero=True, use_w4a8_awq=True),
    **{f"smooth {a} {b}": smooth(a, b) for a in (False, True) for b in (False, True)},
    "modelopt": scaled("Int8SmoothQuant", "i8", "output", **MODELOPT),
    "modelopt of 0.7": scaled("Int8SmoothQuant", "i8", "output", "0.7", **MODELOPT),
    "fp8": scaled("FP8", "f8", "tensor"),
    "fp8 of 0.7": scaled("FP8", "f8", "tensor", "0.7"),
    "rowwise": Case("Fp8Rowwise", "f8", "per_channel_scale", token=True),
    "rowwise, clamped": Case(
        "Fp8Rowwise", "f8", "per_channel_scale", options={"clamp_val": [-0.5, 0.75]}, token=True,
        clamp=(-0.5, 0.75),
    ),
}  # fmt: skip
DTYPES = {"i8": np.dtype(np.int8), "i4": np.dtype(ml_dtypes.int4), "f8": np.dtype(FP8)}


class Whole:
    """The complete parameters of a case."""

    def __init__(self, case: Case) -> None:
        rng = fresh(31)
        most = {"i8": 127, "i4": 7, "f8": 200}[case.codes]
        drawn = rng.integers(-most, most + 1, (N, K)).astype("float32")
        self.codes = drawn.astype(DTYPES[case.codes])
        shape = {"tensor": (1, 1), "output": (N, 1), "group": (N, K // GROUP)}[case.per]
        self.scales = rng.uniform(0.5, 2, shape).astype("float32") / most
        self.factors = rng.uniform(0.5, 2, K).astype("float32")
        self.zero = rng.normal(size=(N, K // GROUP)).astype("float32")
        self.static, self.alpha = np.float32(0.013), np.float32(0.7)
        self.bias = rng.normal(size=N).astype("float32")
        self.tokens = rng.uniform(0.5, 2, (2, 3, 1)).astype("float32")  # scales of given codes


def rounded(x: Array, scale: Any, codes: str) -> Array:
    """x by codes and scales."""
    if codes == "f8":
        found = np.clip(x / scale, -448, 448).astype(FP8).astype("float32")
    else:
        found = np.clip(np.rint(x / scale), -128, 127)
    return (found * scale).astype("float32")


def expected(case: Case, w: Whole, x: Array, parts: int) -> Array:
    """The layer on complete arrays; scales per token are those of each of `parts` of the inputs."""
    if case.given:
        x = x * (w.tokens[: x.shape[0], : x.shape[-2]] if case.token else w.static)
    x = x * w.factors if case.factors else x
    if case.clamp:
        low, high = np.array(case.clamp, "float32")
        x = np.clip(x, low, high)
    if case.token and not case.given:
        cut = x.reshape(*x.shape[:-1], parts, -1)
        most = np.abs(cut).max(-1, keepdims=True) / np.float32(448)
        x = rounded(cut, most, case.codes).reshape(x.shape)
    elif case.static and not case.given:
        x = rounded(x, w.static, case.codes)
    elif case.alpha:
        x = rounded(x, np.float32(1), "f8")
    weight = w.codes.astype("float32") * np.repeat(w.scales, K // w.scales.shape[1], 1)
    if case.zero:
        weight = weight + np.repeat(w.zero, GROUP, 1)
    return x @ weight.T * (w.alpha if case.alpha else 1) + w.bias


def filled(layer: Any, case: Case, w: Whole, mapping: Mapping, row: bool) -> Any:
    """The layer with this rank's part of the parameters."""

    def own(array: Array) -> Array:  # of [outputs, inputs], or [.., groups]
        dim = 1 if row else 0
        return shard(array, dim, mapping) if array.shape[dim] > 1 else array

    weight, scales, codes = getattr(layer, case.weight), getattr(layer, case.scales), own(w.codes)
    if isinstance(weight, functions.PackedWeight):
        packed = pack(codes.T.astype(np.int8), weight.bits)
        weight.value = packed.view(weight.stored)
    elif case.floats:
        weight.value = codes.astype("float32") * own(w.scales)
    else:
        weight.value = codes
    scales.value = own(w.scales).T.reshape(scales.shape)
    if case.factors:
        factors = getattr(layer, case.factors)
        factors.value = (shard(w.factors, 0, mapping) if row else w.factors).reshape(factors.shape)
    if case.zero:
        layer.zero.value = own(w.zero).T
    for name, value in ((case.static, w.static), (case.alpha, w.alpha)):
        if name:
            getattr(layer, name).value = value.reshape(getattr(layer, name).shape)
    layer.bias.value = w.bias if row else shard(w.bias, 0, mapping)
    return layer


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("row", [False, True], ids=["column", "row"])
@pytest.mark.parametrize("name", CASES)
def test_quantized_linear(name: str, row: bool, tp: int) -> None:
    """The outputs are gathered along the last dimension, of three dimensions too."""
    case = CASES[name]
    w, x = Whole(case), fresh(32).normal(size=(2, 3, K)).astype("float32")
    x = np.clip(np.rint(x * 40), -128, 127).astype("int8") if case.given else x
    scales = w.tokens if case.token else np.ones(1, "float32")

    def build(mapping: Mapping, x_: Any, scales: Any) -> Any:
        group, size = mapping.tp_group, mapping.tp_size
        sizes = {"in_features": K, "out_features": N, "bias": True, "dtype": "float32"}
        cls = getattr(layers, f"{case.name}{'Row' * row}Linear")
        layer = cls(**sizes, tp_group=group, tp_size=size, **case.options)
        filled(layer, case, w, mapping, row)
        own = Parameter(shard(x, -1, mapping)).value if row else x_
        return layer((own, scales) if case.given == "pairs" else own)

    want = expected(case, w, x, tp if row else 1)
    inputs = {"x_": x, "scales": scales}
    for (found,) in every_rank(build, inputs, tp, case.version):  # pyright: ignore[reportArgumentType]
        np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bits", [8, 4])
def test_constants_of_packed_codes(bits: int) -> None:
    """What scripts without layers give to weight_only_quant_matmul."""
    weight, x = fresh(35).normal(size=(K, N)), fresh(36).normal(size=(3, K)).astype("float32")
    codes, scales = quantize_columns(weight, bits)
    for values in (codes, np.full_like(codes, 3)):

        def build(mapping: Mapping, x: Any, values: Array = values) -> Any:
            current_network().plugin_config.weight_only_quant_matmul_plugin = "auto"
            packed = Parameter(pack(values, bits)).value
            return functions.weight_only_quant_matmul(x, packed, Parameter(scales).value, 8 // bits)

        ((found,),) = every_rank(build, {"x": x})
        np.testing.assert_allclose(found, x @ (values * scales), rtol=1e-3, atol=1e-4)


class Model(Module):
    """Two layers, of which the head is excluded by default."""

    def __init__(self, mapping: Mapping) -> None:
        group, size = mapping.tp_group, mapping.tp_size
        self.mlp: Any = GatedMLP(K, 2 * K, "silu", True, "float32", group, size)
        self.lm_head: Any = ColumnLinear(K, N, False, "float32", group, size)

    def forward(self, x: Any) -> Any:
        return self.lm_head(self.mlp(x))


@pytest.mark.parametrize("algo", ["W8A16", "W4A16", "W4A16_GPTQ", "FP8_PER_CHANNEL_PER_TOKEN"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_model_is_quantized_to_nearest_codes(tp: int, algo: str) -> None:
    rng = fresh(33)
    shapes = {
        "mlp.fc": (2 * K, K),
        "mlp.gate": (2 * K, K),
        "mlp.proj": (K, 2 * K),
        "lm_head": (N, K),
    }
    weights = {
        name: (rng.normal(size=shape) / np.sqrt(shape[1])).astype("float32")
        for name, shape in shapes.items()
    }
    x = rng.normal(size=(6, K)).astype("float32")

    def build(mapping: Mapping, x: Any, how: str | None) -> Any:
        model = Model(mapping)
        for name, part in model.named_modules():
            if name in weights:
                part.weight.value = shard(weights[name], name == "mlp.proj", mapping)
                if part.bias is not None:
                    part.bias.value = np.full(part.bias.shape, 0.25, "float32")
        if how is not None:
            config = QuantConfig(how, group_size=16, exclude_modules=[])
            models.quantize(model, config)
        return model(x)

    ((exact,),) = every_rank(lambda mapping, x: build(mapping, x, None), {"x": x})
    worst = {"W8A16": 0.02, "FP8_PER_CHANNEL_PER_TOKEN": 0.15}.get(algo, 0.3)
    for (found,) in every_rank(lambda mapping, x: build(mapping, x, algo), {"x": x}, tp):
        error = np.linalg.norm(found - exact) / np.linalg.norm(exact)
        assert 1e-5 < error < worst


@pytest.mark.parametrize(
    ("excluded", "quantized"),
    [
        (None, {"mlp.fc", "mlp.gate", "mlp.proj"}),
        ([], {"mlp.fc", "mlp.gate", "mlp.proj", "lm_head"}),  # not the default list
        (["*gate", "lm_*"], {"mlp.fc", "mlp.proj"}),
    ],
)
@pytest.mark.parametrize("algo", ["W8A16", "W4A16_AWQ", "W8A8_SQ_PER_CHANNEL", "FP8"])
def test_excluded_modules_stay(algo: str, excluded: list[str] | None, quantized: set[str]) -> None:
    with new_session():
        config = QuantConfig(algo, group_size=16, exclude_modules=excluded)
        model = models.quantize(Model(Mapping()), config)
        found = {n for n, part in model.named_modules() if isinstance(part, layers.QuantizedLinear)}
    assert found == quantized


class Block(Module):
    """What SmoothQuant replaces."""

    def __init__(self) -> None:
        self.input_layernorm: Any = LayerNorm(N, dtype="float32")
        sizes: Any = {"hidden_size": N, "num_attention_heads": 2, "bias": False, "dtype": "float32"}
        self.attention: Any = Attention(**sizes)
        self.post_layernorm: Any = LayerNorm(N, dtype="float32")
        self.mlp: Any = GatedMLP(N, K, "silu", False, "float32")

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.input_layernorm(x))
        return x + self.mlp(self.post_layernorm(x))


@pytest.mark.parametrize("token", [False, True])
def test_smooth_quant_of_a_layer(token: bool) -> None:
    """Codes of the norms, of the context and of the feed-forward stay near the floats."""
    rng, mode = fresh(34), SMOOTH(token, True)
    x = rng.normal(size=(2, 3, N)).astype("float32")
    floats: dict[str, Array] = {}

    def build(mapping: Mapping, x: Any, quantized: bool) -> Any:
        block = Block()
        for name, parameter in block.named_parameters():
            shape = parameter.shape
            value = rng.normal(size=shape) / 4 if len(shape) == 2 else np.ones(shape)
            floats.setdefault(name, value.astype("float32"))
            parameter.value = floats[name]
        if not quantized:
            return block(x)
        models.quantize_model(block, mode)
        for name, parameter in block.named_parameters():
            path, _, end = name.rpartition(".")
            weight = np.abs(floats.get(f"{path}.weight", np.ones((1, 1))))
            steps = weight.max(-1, keepdims=True) / 127
            if end == "weight" and parameter.type.dtype == "i8":
                parameter.value = np.rint(floats[name] / steps).clip(-128, 127).astype("int8")
            elif end == "per_channel_scale":
                parameter.value = steps.T.astype("float32")
            elif end in ("act_scale", "scale_to_int", "quantization_scaling_factor"):
                inverse = np.float32(30.0) if end != "act_scale" else np.float32(1 / 30)
                parameter.value = np.full(parameter.shape, inverse)
            else:
                parameter.value = floats.get(name, np.ones(parameter.shape, "float32"))
        return block(x)

    ((exact,),) = every_rank(lambda m, x: build(m, x, False), {"x": x}, 1, "0.16")
    ((found,),) = every_rank(lambda m, x: build(m, x, True), {"x": x}, 1, "0.16")
    assert 1e-5 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < (0.1 if token else 0.5)


@pytest.mark.parametrize("name", ["Fp8RowwiseMLP", "Fp8RowwiseGatedMLP", "Fp8RowwiseFusedGatedMLP"])
def test_feed_forwards_in_fp8(name: str) -> None:
    cls: Any = getattr(models, name)
    rng, w = fresh(34), dict[str, Array]()
    x = rng.normal(size=(3, K)).astype("float32")

    def build(mapping: Mapping, x: Any) -> Any:
        mode = QuantMode(0).set_fp8_rowwise()
        layer = cls(K, 2 * K, "silu", False, "float32", quant_mode=mode)
        for path, part in layer.named_modules():
            if path:
                w[path] = (rng.normal(size=(part.out_features, part.in_features)) / 8).astype("f4")
                part.weight.value = w[path].astype(FP8)
                part.per_channel_scale.value = np.ones(part.out_features, "float32")
        return layer(x)

    ((found,),) = every_rank(build, {"x": x})
    gate, fc = np.split(w["fused_fc"], 2) if "Fused" in name else (w.get("gate"), w["fc"])
    inner = x @ fc.T
    inner = inner / (1 + np.exp(-inner)) * (1 if gate is None else x @ gate.T)
    want = inner @ w["proj"].T
    assert np.linalg.norm(found - want) / np.linalg.norm(want) < 0.2


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_quantized_table(tp: int, dim: int) -> None:
    rng = fresh(36)
    codes = rng.integers(-127, 128, (10, 8)).astype("int8")
    factors = rng.uniform(0.5, 2, 10).astype("float32")
    ids = np.arange(-1, 12, dtype="int32")

    def build(mapping: Mapping, ids: Any) -> Any:
        place: Any = {"tp_size": mapping.tp_size, "tp_group": mapping.tp_group}
        place |= {"sharding_dim": dim, "tp_rank": mapping.tp_rank}
        table = layers.WeightOnlyQuantEmbedding(
            num_embeddings=10, embedding_dim=8, dtype="float32", **place
        )
        table.weight.value, table.per_token_scale.value = shard(codes, dim, mapping), factors
        return table(ids)

    want = np.zeros((13, 8), "float32")
    want[1:11] = codes * factors[:, None]
    for (found,) in every_rank(build, {"ids": ids}, tp):
        np.testing.assert_array_equal(found, want)


def test_experts_that_stay_are_noted() -> None:
    class Experts(Module):
        def __init__(self) -> None:
            self.moe = MOE(MoeConfig(num_experts=4, top_k=2), K, N, "relu", Mapping())

    with new_session() as session:
        models.quantize(Experts(), QuantConfig("FP8"))
        assert any("experts keep their floats" in note for note in session.notes)


def changed(config: QuantConfig) -> Module:
    """A model with quantized layers."""
    return models.quantize(Model(Mapping()), config)


def floats_in_codes() -> None:
    layers.WeightOnlyQuantLinear(K, N).weight.value = np.ones((K, N), np.float32)


def floats_in_int8() -> None:
    layer: Any = layers.SmoothQuantLinear(K, N, quant_mode=SMOOTH())
    layer.weight.value = np.ones((N, K), np.float32)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (floats_in_codes, "holds packed codes of 8 bits, .* found f32"),
        (floats_in_int8, "holds codes of i8, .* floats of f32; quantize them first"),
        (lambda: layers.WeightOnlyGroupwiseQuantLinear(36, N, 8), "groups of 8 do not divide"),
        (lambda: changed(QuantConfig("W4A8_QSERVE_PER_GROUP")), "two-level int4 is not"),
        (lambda: changed(QuantConfig("MIXED_PRECISION")), "give a table of scopes"),
        (lambda: changed(QuantConfig("NVFP4")), "no layers for .*NVFP4"),
        (lambda: layers.FP8Linear(K, N, biass=True), "no argument 'biass'; did you mean 'bias'"),
        (lambda: changed(QuantConfig("FP8", use_meta_recipe=True)), "use_meta_recipe is not"),
    ],
)  # fmt: skip
def test_messages(make: Any, message: str) -> None:
    def build(mapping: Mapping, x: Any) -> Any:
        make()
        return x

    with new_session(), pytest.raises(Error, match=message) as caught:
        module_of(build, {"x": np.zeros((3, K), "float32")})
    assert "test_quantized_layers.py" in str(caught.value)

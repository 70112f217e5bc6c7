"""Quantized layers on 1, 2 and 4 ranks, against numpy on the complete codes and scales."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from irc.errors import Error
from irc.frontends.tensorrt_llm.context import new_session
from irc.frontends.tensorrt_llm.layers import MOE, ColumnLinear, GatedMLP, MoeConfig
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
    """A pair of layers: names of their parameters, options, and how inputs are quantized."""

    column: type[Any]
    row: type[Any]
    codes: str
    scales: str
    per: str = "output"  # tensor, output or group
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    static: str = ""
    token: bool = False
    factors: str = ""
    divides: bool = False
    zero: str = ""
    alpha: str = ""
    clamp: tuple[float, ...] = ()
    kinds: tuple[str, ...] = ("column", "row")


def groups(**options: Any) -> Case:
    """Groupwise layers."""
    awq = bool(options.get("use_w4a8_awq"))
    return Case(
        layers.WeightOnlyGroupwiseQuantLinear,
        layers.WeightOnlyGroupwiseQuantRowLinear,
        "i8" if options.get("use_int8_weight") else "i4",
        "weights_scaling_factor",
        "group",
        {"group_size": GROUP} | options,
        factors="prequant_scaling_factor" if options.get("pre_quant_scale") else "",
        zero="zero" if options.get("zero") else "",
        alpha="alpha" if awq else "",
    )


def weight_only(codes: str, mode: QuantMode) -> Case:
    """Layers with codes per output."""
    pair = layers.WeightOnlyQuantLinear, layers.WeightOnlyQuantRowLinear
    return Case(*pair, codes, "per_channel_scale", options={"quant_mode": mode})


def smooth(token: bool, channel: bool) -> Case:
    """SmoothQuant layers."""
    mode = QuantMode.use_smooth_quant(token, channel)
    pair = layers.SmoothQuantLinear, layers.SmoothQuantRowLinear
    return Case(
        *pair, "i8", "per_channel_scale", "output" if channel else "tensor", {"quant_mode": mode},
        static="" if token else "act_scale", token=token, factors="smoother", divides=True,
    )  # fmt: skip


CASES = {
    "int8": weight_only("i8", QuantMode.use_weight_only()),
    "int4": weight_only("i4", QuantMode.use_weight_only(True)),
    "groups": groups(),
    "groups of int8": groups(use_int8_weight=True),
    "gptq": groups(zero=True),
    "awq": groups(pre_quant_scale=True),
    "awq with fp8": groups(pre_quant_scale=True, zero=True, use_w4a8_awq=True),
    **{f"smooth {a} {b}": smooth(a, b) for a in (False, True) for b in (False, True)},
    "modelopt": Case(
        layers.Int8SmoothQuantLinear, layers.Int8SmoothQuantRowLinear, "i8",
        "weights_scaling_factor", static="activation_scaling_factor",
        factors="prequant_scaling_factor",
    ),
    "fp8": Case(
        layers.FP8Linear, layers.FP8RowLinear, "f8", "weights_scaling_factor", "tensor",
        static="activation_scaling_factor",
    ),
    "fp8 rowwise": Case(
        layers.Fp8RowwiseLinear, layers.Fp8RowwiseRowLinear, "f8", "per_channel_scale", token=True,
    ),
    "fp8 rowwise, clamped": Case(
        layers.Fp8RowwiseLinear, layers.Fp8RowwiseRowLinear, "f8", "per_channel_scale",
        options={"clamp_val": [-0.5, 0.75]}, token=True, clamp=(-0.5, 0.75),
    ),
}  # fmt: skip
DTYPES = {"i8": np.dtype(np.int8), "i4": np.dtype(ml_dtypes.int4), "f8": np.dtype(FP8)}


class Whole:
    """The complete parameters of a case."""

    def __init__(self, case: Case, row: bool) -> None:
        rng = fresh(31)
        most = {"i8": 127, "i4": 7, "f8": 200}[case.codes]
        self.codes = (
            rng.integers(-most, most + 1, (N, K)).astype("float32").astype(DTYPES[case.codes])
        )
        shape = {"tensor": (1, 1), "output": (N, 1), "group": (N, K // GROUP)}[case.per]
        self.scales = rng.uniform(0.5, 2, shape).astype("float32") / most
        self.factors = rng.uniform(0.5, 2, K).astype("float32")
        self.zero = rng.normal(size=(N, K // GROUP)).astype("float32")
        self.static, self.alpha = np.float32(0.013), np.float32(0.7)
        self.bias = rng.normal(size=N).astype("float32")
        self.has_factors = bool(case.factors) and (row or not case.divides)


def rounded(x: Array, scale: Any, codes: str) -> Array:
    """x by codes and scales."""
    if codes == "f8":
        found = np.clip(x / scale, -448, 448).astype(FP8).astype("float32")
    else:
        found = np.clip(np.rint(x / scale), -128, 127)
    return (found * scale).astype("float32")


def expected(case: Case, w: Whole, x: Array, parts: int) -> Array:
    """The layer on complete arrays; scales per token are those of each of `parts` of the inputs."""
    if w.has_factors:
        x = x / w.factors if case.divides else x * w.factors
    if case.clamp:
        low, high = np.array(case.clamp, "float32")
        x = np.clip(x, low, high)
    if case.token:
        most = np.float32(127 if case.codes == "i8" else 448)
        cut = x.reshape(*x.shape[:-1], parts, -1)
        x = rounded(cut, np.abs(cut).max(-1, keepdims=True) / most, case.codes).reshape(x.shape)
    elif case.static:
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

    layer.weight.value = own(w.codes)
    scales = getattr(layer, case.scales)
    scales.value = own(w.scales).T.reshape(scales.shape)
    if w.has_factors:
        factors = getattr(layer, case.factors)
        factors.value = (shard(w.factors, 0, mapping) if row else w.factors).reshape(factors.shape)
    if case.zero:
        layer.zero.value = own(w.zero).T
    for name, value in ((case.static, w.static), (case.alpha, w.alpha)):
        if name:
            getattr(layer, name).value = value.reshape(getattr(layer, name).shape)
    layer.bias.value = w.bias if row else shard(w.bias, 0, mapping)
    return layer


@pytest.mark.parametrize("shape", [(5, K), (2, 3, K)], ids=["packed", "padded"])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("row", [False, True], ids=["column", "row"])
@pytest.mark.parametrize("name", CASES)
def test_quantized_linear(name: str, row: bool, tp: int, shape: tuple[int, ...]) -> None:
    """With three dimensions too the outputs are gathered along the last one; TensorRT-LLM gathers
    those of quantized layers along dimension 1."""
    case = CASES[name]
    w, x = Whole(case, row), fresh(32).normal(size=shape).astype("float32")

    def build(mapping: Mapping, x_: Any) -> Any:
        group, size = mapping.tp_group, mapping.tp_size
        sizes = {"in_features": K, "out_features": N, "bias": True, "dtype": "float32"}
        kind = case.row if row else case.column
        layer = kind(**sizes, tp_group=group, tp_size=size, **case.options)
        filled(layer, case, w, mapping, row)
        return layer(Parameter(shard(x, -1, mapping)).value if row else x_)

    want = expected(case, w, x, tp if row else 1)
    dynamic = 0 if row else len(shape) - 1
    for (found,) in every_rank(build, {"x_": x}, tp, dynamic=dynamic):
        np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-3)


class Model(Module):
    """Two layers, of which the head is excluded by default."""

    def __init__(self, mapping: Mapping) -> None:
        group, size = mapping.tp_group, mapping.tp_size
        self.mlp = GatedMLP(K, 2 * K, "silu", True, "float32", group, size)
        self.lm_head = ColumnLinear(K, N, False, "float32", group, size)

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
            layers.quantize(model, config)
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
        model = layers.quantize(Model(Mapping()), config)
        found = {n for n, part in model.named_modules() if isinstance(part, layers.QuantizedLinear)}
    assert found == quantized


@pytest.mark.parametrize(
    "name",
    [
        *("SmoothQuantMLP", "SmoothQuantGatedMLP", "Fp8RowwiseMLP", "Fp8RowwiseGatedMLP"),
        "Fp8RowwiseFusedGatedMLP",
    ],
)
def test_feed_forwards_of_quantized_layers(name: str) -> None:
    cls: Any = getattr(layers, name)
    mode = SMOOTH(True, True) if "Smooth" in name else QuantMode(0).set_fp8_rowwise()
    rng, w = fresh(34), dict[str, Array]()
    x = rng.normal(size=(3, K)).astype("float32")

    def build(mapping: Mapping, x: Any) -> Any:
        layer = cls(K, 2 * K, "silu", False, "float32", mapping.tp_group, mapping.tp_size, mode)
        for path, part in layer.named_modules():
            if not path:
                continue
            assert type(part) is (cls.row if path == "proj" else cls.column)
            shape = part.out_features, part.in_features
            w[path] = (rng.normal(size=shape) / 8).astype("float32")
            part.load(w[path])
            if hasattr(part, "smoother"):
                part.smoother.value = np.ones(part.smoother.shape, "float32")
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
        group, size = mapping.tp_group, mapping.tp_size
        table = layers.WeightOnlyQuantEmbedding(10, 8, "float32", size, group, dim, mapping.tp_rank)
        table.weight.value, table.per_token_scale.value = shard(codes, dim, mapping), factors
        return table(ids)

    want = np.zeros((13, 8), "float32")
    want[1:11] = codes * factors[:, None]
    for (found,) in every_rank(build, {"ids": ids}, tp):
        np.testing.assert_array_equal(found, want)


def test_a_config_clamps_the_inputs_of_its_layers() -> None:
    config = QuantConfig("FP8_PER_CHANNEL_PER_TOKEN", clamp_val=[-0.5, 0.75])
    with new_session():
        model = layers.quantize_model(Model(Mapping()), config)
        found = [part for _, part in model.named_modules() if hasattr(part, "recipe")]
    assert len(found) == 3 and {part.recipe.clamp for part in found} == {(-0.5, 0.75)}


def test_codes_are_no_floats() -> None:
    with new_session(), pytest.raises(Error, match="holds codes of i8, .* floats of f32; quantize"):
        layers.WeightOnlyQuantLinear(K, N).weight.value = np.ones((N, K), np.float32)


def test_layers_with_groups_have_no_bias_unless_told() -> None:
    with new_session():
        assert layers.WeightOnlyGroupwiseQuantRowLinear(K, N, GROUP).bias is None
        assert layers.WeightOnlyGroupwiseQuantLinear(K, N, GROUP, bias=True).bias is not None
        assert layers.WeightOnlyQuantRowLinear(K, N).bias is not None


def test_experts_that_stay_are_noted() -> None:
    class Block(Module):
        def __init__(self) -> None:
            self.moe = MOE(MoeConfig(4, 0, 2), K, N, "relu", Mapping())

    with new_session() as session:
        layers.quantize(Block(), QuantConfig("FP8"))
        assert any(
            "experts keep their floats, which --quantize rounds: moe" in note
            for note in session.notes
        )


def changed(config: QuantConfig) -> Module:
    """A model with quantized layers."""
    return layers.quantize(Model(Mapping()), config)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: layers.WeightOnlyGroupwiseQuantLinear(36, N, 8), "groups of 8 do not divide"),
        (lambda: changed(QuantConfig("W4A8_QSERVE_PER_GROUP")), "two-level int4 is not"),
        (lambda: changed(QuantConfig("MIXED_PRECISION")), "give a table of scopes"),
        (lambda: changed(QuantConfig("NVFP4")), "no layers for .*NVFP4"),
        (lambda: layers.FP8Linear(K, N, biass=True), "no argument 'biass'; did you mean 'bias'"),
        (lambda: layers.FP8Linear(K, N, out_features=N), "FP8Linear: expected each argument once"),
        (lambda: layers.FP8Linear(K, N, *[None] * 7), "found 9 by position"),
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

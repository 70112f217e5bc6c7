"""Quantized layers on 1, 2 and 4 ranks, against numpy on the complete codes and scales."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import irc
from irc.errors import Error
from irc.frontends.checkpoints.mixed_gemm import pack, quantize_columns
from irc.frontends.tensorrt_llm.aliases import aliases
from irc.frontends.tensorrt_llm.context import current_network, new_session
from irc.frontends.tensorrt_llm.functional import embedding
from irc.frontends.tensorrt_llm.functional import quantized as functions
from irc.frontends.tensorrt_llm.layers import MOE, ColumnLinear, GatedMLP, MoeConfig
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
    pairs: bool = False  # x comes with scales

    @property
    def floats(self) -> bool:
        """Whether the weight is set in floats, which the layer quantizes."""
        return self.name == "FP8" and int(self.version[2:]) < 10


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


def rowwise(**more: Any) -> Case:
    """FP8 layers with scales per output and token."""
    return Case("Fp8Rowwise", "f8", "per_channel_scale", token=True, **more)


FP8_SCALES: Any = {"per": "tensor", "static": "activation_scaling_factor"}
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
    "fp8": Case("FP8", "f8", "weights_scaling_factor", **FP8_SCALES),
    "fp8 of 0.7": Case("FP8", "f8", "weights_scaling_factor", version="0.7", **FP8_SCALES),
    "rowwise": rowwise(),
    "rowwise, clamped": rowwise(options={"clamp_val": [-0.5, 0.75]}, clamp=(-0.5, 0.75)),
    "rowwise, of pairs": rowwise(pairs=True),
}
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
    x = x * w.tokens if case.pairs else x
    x = x * w.factors if case.factors else x
    if case.clamp:
        low, high = np.array(case.clamp, "float32")
        x = np.clip(x, low, high)
    if case.token and not case.pairs:
        cut = x.reshape(*x.shape[:-1], parts, -1)
        most = np.abs(cut).max(-1, keepdims=True) / np.float32(448)
        x = rounded(cut, most, case.codes).reshape(x.shape)
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
    x = x.astype(FP8) if case.pairs else x

    def build(mapping: Mapping, x_: Any, scales: Any) -> Any:
        group, size = mapping.tp_group, mapping.tp_size
        sizes = {"in_features": K, "out_features": N, "bias": True, "dtype": "float32"}
        cls = getattr(layers, f"{case.name}{'Row' * row}Linear")
        layer = cls(**sizes, tp_group=group, tp_size=size, **case.options)
        filled(layer, case, w, mapping, row)
        own = Parameter(shard(x, -1, mapping)).value if row else x_
        return layer((own, scales) if case.pairs else own)

    want = expected(case, w, x.astype("float32"), tp if row else 1)
    inputs = {"x_": x, "scales": w.tokens}
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


@pytest.mark.parametrize("algo", ["W8A16", "W4A16", "FP8_PER_CHANNEL_PER_TOKEN"])
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
@pytest.mark.parametrize("algo", ["W8A16", "W4A16_AWQ", "FP8"])
def test_excluded_modules_stay(algo: str, excluded: list[str] | None, quantized: set[str]) -> None:
    with new_session():
        config = QuantConfig(algo, group_size=16, exclude_modules=excluded)
        model = models.quantize(Model(Mapping()), config)
        found = {n for n, part in model.named_modules() if isinstance(part, layers.QuantizedLinear)}
    assert found == quantized


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_table_of_codes(tp: int, dim: int) -> None:
    """With a factor per row, as the sources' WeightOnlyQuantEmbedding has it."""
    rng = fresh(36)
    codes = rng.integers(-127, 128, (10, 8)).astype("int8")
    factors = rng.uniform(0.5, 2, 10).astype("float32")
    ids = np.arange(-1, 12, dtype="int32")

    def build(mapping: Mapping, ids: Any) -> Any:
        table, scale = (Parameter(w).value for w in (shard(codes, dim, mapping), factors))
        place = mapping.tp_size, mapping.tp_group, dim, mapping.tp_rank
        call: Any = embedding
        return call(ids, table, *place, per_token_scale=scale)

    want = np.zeros((13, 8), "float32")
    want[1:11] = codes * factors[:, None]
    for (found,) in every_rank(build, {"ids": ids}, tp):
        np.testing.assert_array_equal(found, want)


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

    def build(mapping: Mapping, x: Any) -> Any:
        own: Any = {"weight": Parameter(weight).value, "bias": Parameter(bias).value}
        one, clamp = Parameter(np.full(1, 20, "f4")).value, Parameter(np.array(limits, "f4")).value
        layer: Any = functions.smooth_quant_layer_norm(x, (K,), **own, scale=one)
        layers = functions.smooth_quant_layer_norm(x, (K,), **own, dynamic_act_scaling=True)
        rms = functions.smooth_quant_rms_norm(x, (K,), **own, scale=one, clamp_val=clamp)
        tokens = functions.smooth_quant_rms_norm(
            x, (K,), **own, clamp_val=clamp, dynamic_act_scaling=True, sum_per_token=True
        )
        return layer, *layers, rms, *tokens

    centred = x - x.mean(-1, keepdims=True)
    normed, rms = (
        y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-5) * weight + bias for y in (centred, x)
    )
    clamped = np.clip(rms, *limits)
    want = np.clip(np.rint(normed * 20), -128, 127), *codes_of(normed), np.rint(clamped * 20)
    want = *want, *codes_of(clamped), clamped.sum(-1, keepdims=True)
    (found,) = every_rank(build, {"x": x})
    for own, other in zip(found, want, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-4, atol=1 if own.dtype == np.int8 else 1e-4)
        assert (own == other).mean() > 0.99 or own.dtype != np.int8


@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize("token", [False, True])
@pytest.mark.parametrize("kind", ["i8", "f8"])
def test_products_of_codes(kind: str, token: bool, channel: bool) -> None:
    rng, shape = fresh(38), (2, 3, K)
    x, weight = (rng.integers(-100, 101, n).astype(DTYPES[kind]) for n in (shape, (N, K)))
    a = rng.uniform(0.001, 0.01, (6, 1) if token else (1, 1)).astype("float32")
    b = rng.uniform(0.001, 0.01, (1, N) if channel else (1, 1)).astype("float32")

    def build(mapping: Mapping, x: Any) -> Any:
        operands = x, *(Parameter(each).value for each in (weight, a, b)), token, channel
        if kind == "f8":
            return functions.fp8_rowwise_gemm(*operands)
        current_network().plugin_config.smooth_quant_gemm_plugin = "float32"
        return functions.smooth_quant_gemm(*operands)

    ((found,),) = every_rank(build, {"x": x})
    product = x.reshape(6, K).astype("float32") @ weight.astype("float32").T * (a * b)
    np.testing.assert_allclose(found.reshape(6, N), product, rtol=1e-3)


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
    Parameter(shape=(N, K), dtype="int8").value = np.ones((N, K), np.float32)


def set_before(algo: str) -> None:
    model = Model(Mapping())
    model.mlp.fc.weight.value = np.ones((2 * K, K), np.float32)
    models.quantize(model, QuantConfig(algo, group_size=GROUP))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (floats_in_codes, "holds packed codes of 8 bits, .* found f32"),
        (floats_in_int8, "holds codes of i8, .* floats of f32; quantize them first"),
        (lambda: set_before("FP8"), "FP8Linear gets codes and scales, which need a calibration"),
        (lambda: set_before("W4A16_GPTQ"), "GroupwiseQuantLinear gets codes and scales, which"),
        (lambda: changed(QuantConfig("W8A8_SQ_PER_CHANNEL")), "copy of .*--tensorrt-llm-sources"),
        (lambda: models.quantize_model(Model(Mapping()), SMOOTH()), "--quantize w8a8_sq --calib"),
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
        def __init__(self, mapping: Mapping) -> None:
            self.transformer: Any = ColumnLinear(
                K, N, True, "float32", mapping.tp_group, mapping.tp_size, gather_output=False
            )

    def build(mapping: Mapping, x: Any) -> Any:
        algo = "W8A8_SQ_PER_CHANNEL_PER_TOKEN_PLUGIN"
        layer = models.quantize(Head(mapping), QuantConfig(algo)).transformer
        layer.weight.value, layer.bias.value = (shard(w, 0, mapping) for w in (weight, bias))
        layer.per_channel_scale.value = shard(steps, 1, mapping)
        return layer(x)

    codes, scales = codes_of(x)
    want = codes @ weight.T * (scales * steps) + bias
    for tp in (1, 2):
        with new_session("0.16", sources=tmp_path), aliases():
            module = module_of(build, {"x": x}, tp)
            found = irc.evaluate(module, {"x": x})["out0"]
        np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("path", ["layers.SmoothQuantLinear", "quantize.smooth_quantize"])
def test_without_sources_they_are_refused(path: str) -> None:
    module, _, name = path.rpartition(".")
    with new_session("0.16"), aliases():
        target = getattr(import_module(f"tensorrt_llm.quantization.{module}"), name)
        with pytest.raises(Error, match=f"{name} is not supported: .*--tensorrt-llm-sources DIR"):
            target()

"""Layers with quantized weights and inputs, whose parameters are those of TensorRT-LLM.

Codes of 8 and 4 bits that TensorRT-LLM stores in the order of its kernels are `PackedWeight`s. A
bias is added once, after the sum over ranks.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np

from ....errors import Error
from ....quantization.formats import encode
from ....source import here
from ... import functional as F
from ...checkpoints.mixed_gemm import pack, quantize_columns
from ...tensor import Tensor
from ..api import api, register, release
from ..functional import quantized as q
from ..module import Module, Parameter
from ..quantization import QuantMode
from .embedding import Embedding
from .linear import NO_MODE, Linear, LinearBase, RowLinear
from .norms import Norm


@dataclass(frozen=True)
class Recipe:
    """How a weight is quantized: its format, the names of its parameters, and inputs per scale.

    `scales` are one in all, per output, or per group of `group` inputs. Inputs have a scale per
    "token", or the one in the parameter `inputs`. `zero` are offsets per output and group.
    """

    format: str
    scales: str
    group: int = 0
    per_output: bool = True
    inputs: str = ""
    zero: str = ""
    weight: str = "weight"


class QuantizedLinear(LinearBase):
    """What quantized linear layers have."""

    @property
    @abstractmethod
    def recipe(self) -> Recipe:
        """How the weight is quantized."""

    def load(self, weight: Any) -> None:
        """Quantize an array, this rank's weight in floats, to the nearest codes."""
        how = self.recipe
        codes = encode(np.asarray(weight), how.format, (1 if how.per_output else 0, how.group))
        scales: Parameter = getattr(self, how.scales)
        own: Parameter = getattr(self, how.weight)
        own.bound = codes.codes
        scales.value = np.asarray(codes.scales, np.float32).T.reshape(scales.shape)


# -- weights of 8 or 4 bits


@dataclass(eq=False, repr=False)
class WeightOnly(QuantizedLinear):
    """x · codes * scales: per rank weight [inputs, outputs * bits / 8] and per_channel_scale
    [outputs]."""

    quant_mode: QuantMode = QuantMode.INT8_WEIGHTS

    def make_parameters(self) -> None:
        bits = 4 if self.quant_mode.is_int4_weight_only() else 8
        self.weight_only_quant_mode = 8 // bits
        per_row = self.out_features * bits // 8
        if release() < 6:  # the same bytes as floats
            self.weight = packed(self, (self.in_features, per_row // 4), bits, "float32")
        else:
            self.weight = packed(self, (self.in_features, per_row), bits)
        self.per_channel_scale = self.parameter((self.out_features,), self.dtype, 0)

    @property
    def recipe(self) -> Recipe:
        return Recipe(f"int{8 // self.weight_only_quant_mode}", "per_channel_scale")

    def load(self, weight: Any) -> None:
        bits = 8 // self.weight_only_quant_mode
        codes, scales = quantize_columns(np.asarray(weight).T, bits)
        self.weight.value = pack(codes, bits)
        self.per_channel_scale.value = scales

    def multiply(self, x: Tensor) -> Tensor:
        scales = self.per_channel_scale.inner
        return q.weight_only_quant_matmul(
            input=x,
            weights=self.weight.inner,
            scales=scales,
            weightTypeId=self.weight_only_quant_mode,
        )


def packed(
    layer: LinearBase, shape: tuple[int, int], bits: int, dtype: str = "int8"
) -> q.PackedWeight:
    """The codes of one rank of a layer."""
    weight = q.PackedWeight(shape, bits, dtype)
    model = layer.parameter((1, 1), "int8", 0, 1)
    weight.sharded = model.sharded
    return weight


@dataclass(eq=False, repr=False)
class Groupwise(QuantizedLinear):
    """x · (codes * scales + zeros), whose scales hold for `group_size` inputs (AWQ, GPTQ).

    Per rank the codes are [inputs, outputs / 4] of f16; in 0.6 and 0.7 [inputs, outputs / 2] of i8,
    in 0.5 [inputs, outputs / 8] of f32.
    """

    group_size: int = 128
    pre_quant_scale: Any = False
    zero: Any = False
    bias: Any = False
    use_w4a8_awq: bool = False
    use_int8_weight: bool = False

    def make_parameters(self) -> None:
        n, k, size = self.out_features, self.in_features, self.group_size
        if k % size:
            raise Error(
                f"{type(self).__name__}: groups of {size} do not divide the {k} inputs of one "
                "rank; choose a group_size that does, or a smaller tp_size",
                loc=here(),
            )
        old, bits = release() < 8, 8 if self.use_int8_weight else 4
        factors, zeros = vars(self).pop("pre_quant_scale"), vars(self).pop("zero")
        self.names = ("qweight", "scale", "pre_quant_scale") if old else (
            "weight", "weights_scaling_factor", "prequant_scaling_factor")  # fmt: skip
        self.quant_algo = 2 * zeros + 4 * factors + 8 * self.use_w4a8_awq + 16 * (bits == 8)
        kind = "float16" if not old else "float32" if release() == 5 else "int8"
        shape = k, n * bits // {"float16": 16, "float32": 32, "int8": 8}[kind]
        group = k // size, n
        values = (
            packed(self, shape, bits, kind),
            self.parameter(group, self.dtype, 1, 0),
            self.parameter((1, k), self.dtype, None, 1) if factors else None,
        )
        for name, value in zip(self.names, values, strict=True):
            setattr(self, name, value)
        self.zero = self.parameter(group, self.dtype, 1, 0) if zeros else None
        self.alpha = self.parameter((1,), "float32") if self.use_w4a8_awq else None

    @property
    def recipe(self) -> Recipe:
        weight, scales, _ = self.names
        kind = "int8" if self.use_int8_weight else "int4"
        zero = "" if self.zero is None else "zero"
        return Recipe(kind, scales, self.group_size, weight=weight, zero=zero)

    def multiply(self, x: Tensor) -> Tensor:
        weight, scales, factors = (inner(getattr(self, name)) for name in self.names)
        return q.weight_only_groupwise_quant_matmul(
            input=x,
            pre_quant_scale=factors,
            weights=weight,
            scales=scales,
            zeros=inner(self.zero),
            biases=None,
            alpha=inner(self.alpha),
            quant_algo=self.quant_algo,
            group_size=self.group_size,
        )


def inner(parameter: Parameter | None) -> Any:
    """The tensor of a parameter."""
    return None if parameter is None else parameter.inner


# -- codes of inputs too


@dataclass(eq=False, repr=False)
class SmoothQuant(QuantizedLinear):
    """Codes i8 of x times codes i8 [outputs, inputs]; x is a pair (codes, scales) per token, or
    codes of the scale `act_scale`."""

    quant_mode: QuantMode = NO_MODE

    def make_parameters(self) -> None:
        if not self.quant_mode.has_act_and_weight_quant():
            raise ValueError("SmoothQuant Linear has to have act+weight quantization mode set")
        n, k = self.out_features, self.in_features
        self.weight = self.parameter((n, k), "int8", 0, 1)
        per_channel = self.quant_mode.has_per_channel_scaling()
        outputs = (n, 1) if per_channel else (1, None)
        self.per_channel_scale = self.parameter((1, outputs[0]), "float32", outputs[1])
        if self.quant_mode.has_act_static_scaling():
            self.act_scale = self.parameter((1, 1), "float32")
        if self.shard_dim == 1:
            self.smoother = self.parameter((1, k), "float32", None, 1)

    @property
    def recipe(self) -> Recipe:
        each, token = self.quant_mode.has_per_channel_scaling(), hasattr(self, "act_scale")
        inputs = "act_scale" if token else "token"
        return Recipe("int8", "per_channel_scale", per_output=each, inputs=inputs)

    def multiply(self, x: Any) -> Tensor:
        mode = self.quant_mode
        x, scales = (x, self.act_scale.inner) if mode.has_act_static_scaling() else x
        return q.smooth_quant_gemm(
            input=x,
            weights=self.weight.inner,
            scales_a=scales,
            scales_b=self.per_channel_scale.inner,
            per_token_scaling=mode.has_per_token_dynamic_scaling(),
            per_channel_scaling=mode.has_per_channel_scaling(),
            dtype=None if release() < 15 else self.dtype,
        )


@dataclass(eq=False, repr=False)
class StaticScales(QuantizedLinear):
    """x and weight as codes of `codes`, of scales in activation_scaling_factor [1] and
    weights_scaling_factor. The weight is in codes from version 0.`stored` on, before in floats."""

    codes: ClassVar[Any] = "f8e4m3"
    stored: ClassVar[int] = 10
    per_output: ClassVar[bool] = False

    def make_parameters(self) -> None:
        n, k = self.out_features, self.in_features
        kind = self.codes if release() >= self.stored else self.dtype
        self.weight = self.parameter((n, k), kind, 0, 1)
        self.activation_scaling_factor = self.parameter((1,), "float32")
        scales = n if self.per_output else 1
        outputs = 0 if self.per_output else None
        self.weights_scaling_factor = self.parameter((scales,), "float32", outputs)

    @property
    def recipe(self) -> Recipe:
        kind, names = ("fp8", "int8")[self.per_output], ("weights_", "activation_")
        scales, inputs = (f"{name}scaling_factor" for name in names)
        return Recipe(kind, scales, per_output=self.per_output, inputs=inputs)

    def multiply(self, x: Tensor) -> Tensor:
        kind: Any = x.dtype
        scale = self.activation_scaling_factor.inner.reshape((1,) * x.ndim)
        scales, weight = self.weights_scaling_factor.inner.reshape(-1, 1), self.weight.inner
        if weight.dtype != self.codes:
            weight = F.quantize(weight, scales, dtype=self.codes)
        x = F.dequantize(F.quantize(x, scale, dtype=self.codes), scale, dtype=kind)
        return F.linear(x, F.dequantize(weight, scales, dtype=kind))


@dataclass(eq=False, repr=False)
class Int8Static(StaticScales):
    """Codes i8 of x * prequant_scaling_factor, as ModelOpt exports them."""

    codes: ClassVar[Any] = "i8"
    stored: ClassVar[int] = 8
    per_output: ClassVar[bool] = True

    def make_parameters(self) -> None:
        super().make_parameters()
        self.prequant_scaling_factor = self.parameter((self.in_features,), self.dtype, None, 0)

    def multiply(self, x: Tensor) -> Tensor:
        return super().multiply(x * self.prequant_scaling_factor.inner.cast(x.dtype))


@dataclass(eq=False, repr=False)
class Rowwise(QuantizedLinear):
    """FP8 codes of x, with a scale per token, times FP8 codes with a scale per output.

    x is a pair (codes, scales), or quantized here, after clamping to `clamp_val`.
    """

    quant_mode: QuantMode = NO_MODE
    clamp_val: Any = None

    def make_parameters(self) -> None:
        n, k = self.out_features, self.in_features
        self.weight = self.parameter((n, k), "fp8", 0, 1)
        self.per_channel_scale = self.parameter((n,), "float32", 0)

    @property
    def recipe(self) -> Recipe:
        return Recipe("fp8", "per_channel_scale", inputs="token")

    def multiply(self, x: Any) -> Tensor:
        limits = self.clamp_val and F.constant(tuple(self.clamp_val), shape=(2,), dtype="f32")
        kind: Any = "f32" if isinstance(x, tuple) else x.dtype
        codes, scales = (
            cast("Any", x)
            if isinstance(x, tuple)
            else q.quantize_fp8_per_token(x=x, clamp_val=limits)
        )
        own = self.per_channel_scale.inner.reshape(-1, 1)
        weight = F.dequantize(self.weight.inner, own, dtype=kind)
        return F.linear(F.dequantize(codes, scales, dtype=kind), weight)


def _layers(name: str, base: type[LinearBase], is_column: bool = False) -> tuple[Any, Any]:
    """The column and the row layer of a base, by the names of TensorRT-LLM."""
    made: list[Any] = []
    for kind, end in ((Linear, "Linear"), (RowLinear, "RowLinear")):
        body: dict[str, Any] = {"__module__": __name__, "__doc__": base.__doc__}
        cls: Any = type(f"{name}{end}", (base, kind), body)
        cls = dataclass(eq=False, repr=False)(cls)
        made.append(api(f"quantization.layers.{name}{end}", inner=True)(cls))
    if is_column:
        register(f"quantization.layers.{name}ColumnLinear", made[0])
    return made[0], made[1]


WeightOnlyQuantLinear, WeightOnlyQuantRowLinear = _layers("WeightOnlyQuant", WeightOnly, True)
WeightOnlyGroupwiseQuantLinear, WeightOnlyGroupwiseQuantRowLinear = _layers(
    "WeightOnlyGroupwiseQuant", Groupwise, True
)
SmoothQuantLinear, SmoothQuantRowLinear = _layers("SmoothQuant", SmoothQuant, True)
Int8SmoothQuantLinear, Int8SmoothQuantRowLinear = _layers("Int8SmoothQuant", Int8Static)
FP8Linear, FP8RowLinear = _layers("FP8", StaticScales)
Fp8RowwiseLinear, Fp8RowwiseRowLinear = _layers("Fp8Rowwise", Rowwise)


# -- norms, tables, and conversions


@dataclass(eq=False, repr=False)
class SmoothQuantNorm(Norm):
    """A norm whose result is codes i8: times `scale_to_int`, or with a scale per token."""

    quant_mode: QuantMode = NO_MODE
    clamp_val: Any = None

    def __post_init__(self) -> None:
        if not self.quant_mode.has_act_and_weight_quant():
            raise ValueError("SmoothQuant norms have to have some quantization mode set")
        super().__post_init__()
        self.scale_to_int = Parameter(shape=(1,), dtype=self.dtype)

    def forward(self, x: Any) -> Any:
        """Codes i8, or (codes, scales)."""
        more: Any = {}
        function: Any = q.smooth_quant_layer_norm
        if isinstance(self, SmoothQuantRmsNorm):
            limits = tuple(self.clamp_val or ())
            function = q.smooth_quant_rms_norm
            more = {"clamp_val": F.constant(limits, dtype="f32") if limits else None}
        return function(
            x,
            self.normalized_shape,
            weight=inner(self.weight),
            bias=inner(self.bias),
            scale=self.scale_to_int.inner,
            eps=self.eps,
            dynamic_act_scaling=self.quant_mode.has_per_token_dynamic_scaling(),
            **more,
        )


@api("quantization.layers.SmoothQuantLayerNorm", inner=True)
@dataclass(eq=False, repr=False)
class SmoothQuantLayerNorm(SmoothQuantNorm):
    """layer_norm as codes i8."""

    bias: Any = True


@api("quantization.layers.SmoothQuantRmsNorm", inner=True)
@dataclass(eq=False, repr=False)
class SmoothQuantRmsNorm(SmoothQuantNorm):
    """rms_norm as codes i8."""

    eps: float = 1e-06


@api("quantization.layers.WeightOnlyQuantEmbedding", inner=True)
@dataclass(eq=False, repr=False)
class WeightOnlyQuantEmbedding(Embedding):
    """An embedding table of 8 bits, with a factor per row in `per_token_scale` [num_embeddings]."""

    stored_dtype: ClassVar[str] = "i8"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.per_token_scale = Parameter(shape=(self.num_embeddings,), dtype=self.dtype)

    def forward(self, x: Any) -> Any:
        return self.look_up(x, self.per_token_scale.inner)


@api("quantization.layers.Quantize", inner=True)
@dataclass(eq=False, repr=False)
class Quantize(Module):
    """The codes of x, of a scale for all or for each of `in_channels` indices of `axis`."""

    output_dtype: str = "int8"
    scaling_factor_dtype: str = "float32"
    in_channels: int = -1
    axis: int = -1

    def __post_init__(self) -> None:
        shape = (self.in_channels,) if self.axis != -1 else ()
        self.scaling_factor = Parameter(shape=shape, dtype=self.scaling_factor_dtype)

    def forward(self, x: Any) -> Any:
        """Of the same shape."""
        scale, kind = self.scaling_factor.inner, self.output_dtype
        return q.quantize(input=x, scale_factor=scale, dtype=kind, axis=self.axis)


@api("quantization.layers.Dequantize", inner=True)
@dataclass(eq=False, repr=False)
class Dequantize(Module):
    """Codes times a scale."""

    axis: int = -1

    def __post_init__(self) -> None:
        self.scaling_factor = Parameter(shape=(), dtype="float32")

    def forward(self, input: Any) -> Any:
        """Of the same shape."""
        scale = self.scaling_factor.inner
        return q.dequantize(input=input, scale_factor=scale, axis=self.axis, output_type="float32")


@api("quantization.layers.QuantizePerToken", inner=True)
class QuantizePerToken(Module):
    """(codes i8, scales) of every token."""

    def forward(self, x: Any) -> Any:
        """Of the same shape, and [..., 1]."""
        return q.quantize_per_token(x=x)

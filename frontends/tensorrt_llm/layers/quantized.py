"""Linear layers with quantized weights, whose parameters are those of TensorRT-LLM.

Codes of 8 and 4 bits that TensorRT-LLM stores in the order of its kernels are `PackedWeight`s. A
bias is added once, after the sum over ranks. Layers that irc lacks, those of SmoothQuant, come from
the user's copy of TensorRT-LLM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ....ir.dtypes import numpy_dtype
from ....quantization.formats import encode
from ... import functional as F
from ...checkpoints.mixed_gemm import pack, quantize_columns
from ...tensor import Tensor
from ..api import api, register, release
from ..dtypes import irc_dtype
from ..errors import ScriptError
from ..functional import quantized as q
from ..module import Parameter
from ..quantization import QuantMode
from .linear import NO_MODE, Linear, LinearBase, RowLinear


@dataclass(frozen=True)
class Recipe:
    """How a weight is quantized: its format, the parameter of its scales, and inputs per scale.

    Inputs have a scale per "token", or the one in the parameter `inputs`. `zero` are offsets per
    output and group.
    """

    format: str
    scales: str
    group: int = 0
    inputs: str = ""
    zero: str = ""


class QuantizedLinear(LinearBase):
    """What quantized linear layers have."""

    recipe: Recipe

    def load(self, weight: Any) -> None:
        """Quantize an array, this rank's weight in floats, to the nearest codes."""
        raise ScriptError(
            f"{type(self).__name__} gets codes and scales, which need a calibration: load those of "
            "a quantized checkpoint, or give irc compile --quantize SCHEME --calibration PATH"
        )

    def packed(self, bits: int, dtype: str = "int8") -> q.PackedWeight:
        """The codes of one rank, of which a number of the dtype holds several."""
        several = numpy_dtype(irc_dtype(dtype)).itemsize * 8 // bits
        weight = q.PackedWeight((self.in_features, self.out_features // several), bits, dtype)
        weight.sharded = self.parameter((1, 1), "int8", 0, 1).sharded
        return weight


@dataclass(eq=False, repr=False)
class WeightOnly(QuantizedLinear):
    """x · codes * scales: per rank weight [inputs, outputs * bits / 8] of i8, the same bytes as f32
    in 0.5, and per_channel_scale [outputs]."""

    quant_mode: QuantMode = QuantMode.INT8_WEIGHTS

    def make_parameters(self) -> None:
        self.bits = 4 if self.quant_mode.is_int4_weight_only() else 8
        self.weight_only_quant_mode = 8 // self.bits
        self.weight = self.packed(self.bits, "float32" if release() < 6 else "int8")
        self.per_channel_scale = self.parameter((self.out_features,), self.dtype, 0)
        self.recipe = Recipe(f"int{self.bits}", "per_channel_scale")

    def load(self, weight: Any) -> None:
        codes, scales = quantize_columns(np.asarray(weight).T, self.bits)
        self.weight.value = pack(codes, self.bits).view(self.weight.stored)
        self.per_channel_scale.value = scales.astype(numpy_dtype(self.per_channel_scale.type.dtype))

    def multiply(self, x: Tensor) -> Tensor:
        return q.weight_only_quant_matmul(
            input=x,
            weights=self.weight.inner,
            scales=self.per_channel_scale.inner,
            weightTypeId=self.weight_only_quant_mode,
        )


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
        inputs, size = self.in_features, self.group_size
        if inputs % size:
            raise ScriptError(
                f"{type(self).__name__}: groups of {size} do not divide the {inputs} inputs of one "
                "rank; choose a group_size that does, or a smaller tp_size"
            )
        group, bits = (inputs // size, self.out_features), 8 if self.use_int8_weight else 4
        factors, zeros = vars(self).pop("pre_quant_scale"), vars(self).pop("zero")
        self.quant_algo = 2 * zeros + 4 * factors + 8 * self.use_w4a8_awq + 16 * (bits == 8)
        self.names = ("weight", "weights_scaling_factor", "prequant_scaling_factor")
        if release() < 8:
            self.names = ("qweight", "scale", "pre_quant_scale")
        values = (
            self.packed(bits, {5: "float32", 6: "int8", 7: "int8"}.get(release(), "float16")),
            self.parameter(group, self.dtype, 1, 0),
            self.parameter((1, inputs), self.dtype, None, 1) if factors else None,
        )
        for name, value in zip(self.names, values, strict=True):
            setattr(self, name, value)
        self.zero = self.parameter(group, self.dtype, 1, 0) if zeros else None
        self.alpha = self.parameter((1,), "float32") if self.use_w4a8_awq else None
        self.recipe = Recipe(f"int{bits}", self.names[1], size, zero="zero" * zeros)

    def multiply(self, x: Tensor) -> Tensor:
        parameters: list[Parameter | None] = [getattr(self, name) for name in self.names]
        weight, scales, factors, zeros, alpha = (
            None if each is None else each.inner for each in (*parameters, self.zero, self.alpha)
        )
        return q.weight_only_groupwise_quant_matmul(
            input=x,
            pre_quant_scale=factors,
            weights=weight,
            scales=scales,
            zeros=zeros,
            biases=None,
            alpha=alpha,
            quant_algo=self.quant_algo,
            group_size=self.group_size,
        )


@dataclass(eq=False, repr=False)
class StaticScales(QuantizedLinear):
    """x and weight as FP8 codes, of scales in activation_scaling_factor [1] and
    weights_scaling_factor [1]. The weight is in codes from version 0.10 on, before in floats."""

    def make_parameters(self) -> None:
        shape = self.out_features, self.in_features
        self.weight = self.parameter(shape, self.dtype if release() < 10 else "fp8", 0, 1)
        self.activation_scaling_factor = self.parameter((1,), "float32")
        self.weights_scaling_factor = self.parameter((1,), "float32")
        self.recipe = Recipe("fp8", "weights_scaling_factor", inputs="activation_scaling_factor")

    def multiply(self, x: Tensor) -> Tensor:
        kind: Any = x.dtype
        scale = self.activation_scaling_factor.inner.reshape((1,) * x.ndim)
        scales, weight = self.weights_scaling_factor.inner.reshape(1, 1), self.weight.inner
        if weight.dtype != "f8e4m3":
            weight = F.quantize(weight, scales, dtype="f8e4m3")
        x = F.dequantize(F.quantize(x, scale, dtype="f8e4m3"), scale, dtype=kind)
        return F.linear(x, F.dequantize(weight, scales, dtype=kind))


@dataclass(eq=False, repr=False)
class Rowwise(QuantizedLinear):
    """FP8 codes of x, with a scale per token, times FP8 codes with a scale per output.

    x is a pair (codes, scales), or quantized here, after clamping to `clamp_val`.
    """

    quant_mode: QuantMode = NO_MODE
    clamp_val: Any = None

    def make_parameters(self) -> None:
        shape = self.out_features, self.in_features
        self.weight = self.parameter(shape, "fp8", 0, 1)
        self.per_channel_scale = self.parameter(shape[:1], "float32", 0)
        self.recipe = Recipe("fp8", "per_channel_scale", inputs="token")

    def load(self, weight: Any) -> None:
        encoded = encode(np.asarray(weight), "fp8", (1, 0))
        self.weight.bound = encoded.codes
        self.per_channel_scale.value = np.asarray(encoded.scales, np.float32).reshape(-1)

    def multiply(self, x: Any) -> Tensor:
        if isinstance(x, tuple):
            kind: Any = "f32"
            codes, scales = cast("tuple[Tensor, Tensor]", x)
        else:
            limits = self.clamp_val and F.constant(tuple(self.clamp_val), shape=(2,), dtype="f32")
            kind = x.dtype
            codes, scales = q.quantize_fp8_per_token(x=x, clamp_val=limits)
        own = self.per_channel_scale.inner.reshape(-1, 1)
        weight = F.dequantize(self.weight.inner, own, dtype=kind)
        return F.linear(F.dequantize(codes, scales, dtype=kind), weight)


def _layers(name: str, base: type[LinearBase]) -> tuple[Any, Any]:
    """The column and the row layer of a base, by the names of TensorRT-LLM."""
    classes: list[Any] = []
    for kind, end in ((Linear, "Linear"), (RowLinear, "RowLinear")):
        body: dict[str, Any] = {"__module__": __name__, "__doc__": base.__doc__}
        cls: Any = dataclass(eq=False, repr=False)(type(f"{name}{end}", (base, kind), body))
        classes.append(api(f"quantization.layers.{name}{end}", inner=True)(cls))
    return classes[0], classes[1]


WeightOnlyQuantLinear, WeightOnlyQuantRowLinear = _layers("WeightOnlyQuant", WeightOnly)
WeightOnlyGroupwiseQuantLinear, WeightOnlyGroupwiseQuantRowLinear = _layers(
    "WeightOnlyGroupwiseQuant", Groupwise
)
FP8Linear, FP8RowLinear = _layers("FP8", StaticScales)
Fp8RowwiseLinear, Fp8RowwiseRowLinear = _layers("Fp8Rowwise", Rowwise)
for _column in (WeightOnlyQuantLinear, WeightOnlyGroupwiseQuantLinear):
    _name = _column.__name__.replace("Linear", "ColumnLinear")
    register(f"quantization.layers.{_name}", _column)

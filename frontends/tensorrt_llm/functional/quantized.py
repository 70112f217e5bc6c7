"""`quantization.functional`: codes and scales as scripts of TensorRT-LLM compute with them.

Products of integer codes are exact: they are summed in f32, and scaled once.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from ....ir.dtypes import dtype_of, numpy_dtype
from ....weights import Ref
from ... import functional as F
from ...checkpoints.mixed_gemm import pack, unpack
from ...tensor import Tensor
from ..api import api
from ..arithmetic import unwrapped
from ..context import current_network
from ..dtypes import as_array, irc_dtype
from ..errors import ScriptError
from ..module import Parameter, Weight
from . import layer_norm, rms_norm


class PackedWeight(Parameter):
    """Integer codes in the order of TensorRT-LLM's kernels, held as [..., outputs, inputs].

    Scripts see `shape` [..., inputs, outputs * bits / 8] of i8 (or f16 or f32, of fewer numbers),
    and set such arrays.
    """

    def __init__(self, shape: tuple[int, ...], bits: int, dtype: Any = "int8") -> None:
        self.bits, self.packed = bits, shape
        self.stored = numpy_dtype(irc_dtype(dtype))
        *front, k, n = shape
        outputs = n * self.stored.itemsize * 8 // bits
        super().__init__(shape=(*front, outputs, k), dtype="i4" if bits == 4 else "i8")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the packed bytes."""
        return self.packed

    @property
    def value(self) -> Any:
        """The tensor of the codes in the network in progress."""
        return Parameter.value.fget(self)  # pyright: ignore[reportOptionalCall]

    @value.setter
    def value(self, value: Any) -> None:
        if isinstance(value, Ref):
            self.bound = value  # of codes as the graph has them
            return
        array = as_array(value)
        fits = array.dtype.itemsize == self.stored.itemsize and dtype_of(array) not in ("i4", "u4")
        if array.shape == self.packed and fits:
            packed = np.ascontiguousarray(array).view(np.int8).reshape(*array.shape[:-1], -1)
            codes = np.swapaxes(unpack(packed, self.bits), -1, -2)
            self.bound = np.ascontiguousarray(codes, numpy_dtype(self.type.dtype))
            return
        raise ScriptError(
            f"the parameter {self.name or 'weight'} holds packed codes of {self.bits} bits, "
            f"{list(self.packed)}; found {dtype_of(array)} {list(array.shape)}: quantize and pack "
            "the weight first, as "
            "torch.ops.trtllm.symmetric_quantize_last_axis_of_batched_matrix does"
        )

    @property
    def raw_value(self) -> np.ndarray[Any, Any]:
        """The packed array."""
        codes = np.swapaxes(super().raw_value.astype(np.int8), -1, -2)
        return pack(codes, self.bits).view(self.stored)


def owner_of(tensor: Tensor) -> Parameter | None:
    """The parameter or constant whose tensor this is."""
    value, named = tensor.value, current_network().tracer.weights
    return next((cast("Weight", w).owner for w in named if named[w] is value), None)


def code_tensor(weights: Tensor, bits: int) -> Tensor:
    """The codes [outputs, inputs] of a parameter of a layer, of an array, or of computed bytes."""
    owner = owner_of(weights)
    if isinstance(owner, PackedWeight):
        return weights
    if owner is not None and isinstance(owner.bound, np.ndarray):
        packed = PackedWeight(owner.bound.shape, bits, dtype_of(owner.bound))
        packed.value = owner.bound
        return packed.inner
    if weights.dtype != "i8":
        raise ScriptError(f"expected packed codes i8, found {weights.type}")
    inputs, outputs = weights.shape[-2], weights.shape[-1] * 8 // bits
    if bits == 8:
        return weights.reshape((outputs, inputs))
    pairs = weights.reshape((outputs, inputs // 2, 1)).cast("f32")
    high = F.floor(pairs / 16.0)
    low = pairs - high * 16.0
    signed = low - F.floor(low / 8.0) * 16.0
    return F.concat((signed, high), dim=-1).reshape((outputs, inputs)).cast("i8")


# -- what scripts call


@api("quantization.functional.quantize", inner=True)
def quantize(input: Any, scale_factor: Any, dtype: Any, axis: int = -1) -> Any:
    """The codes of input / scale_factor, which is one number, or one per index of `axis`."""
    codes: Any = irc_dtype(dtype)
    return F.quantize(input, _spread(scale_factor, input, axis), dtype=codes)


@api("quantization.functional.dequantize", inner=True)
def dequantize(input: Any, scale_factor: Any, axis: int = -1, output_type: Any = None) -> Any:
    """Codes times scale_factor, which is one number, or one per index of `axis`."""
    kind: Any = scale_factor.dtype if output_type is None else irc_dtype(output_type)
    return F.dequantize(input, _spread(scale_factor, input, axis), dtype=kind)


def _spread(scale: Tensor, x: Tensor, axis: int) -> Tensor:
    """A scale with as many dimensions as x."""
    if not scale.ndim or scale.shape == (1,):
        return scale.reshape((1,) * x.ndim)
    return scale.reshape(tuple(-1 if i == axis % x.ndim else 1 for i in range(x.ndim)))


@api("quantization.functional.quantize_tensor", inner=True)
def quantize_tensor(x: Any, scale: Any) -> Any:
    """x * scale rounded to i8."""
    return _rounded(x.cast("f32") * scale.cast("f32"))


def _rounded(x: Tensor) -> Tensor:
    return F.clip(F.round(x), low=-128.0, high=127.0).cast("i8")


@api("quantization.functional.quantize_per_token", inner=True)
def quantize_per_token(
    x: Any,
    clamp_val: Any = None,
    scale_dtype: Any = "float32",
    sum_per_token: bool = False,
    sum_dtype: Any = "float32",
) -> Any:
    """(codes i8, scales [..., 1]) of every token, and with `sum_per_token` the sums of tokens."""
    x = clamped(x.cast("f32"), clamp_val)
    most = F.reduce_max(F.abs(x), dims=(-1,), keep=True)
    codes, scales = _rounded(x * 127.0 / most), (most / 127.0).cast(irc_dtype(scale_dtype))
    if not sum_per_token:
        return codes, scales
    return codes, scales, x.sum(-1, keep=True).cast(irc_dtype(sum_dtype))


def clamped(x: Tensor, clamp_val: Tensor | None) -> Tensor:
    """x between the two numbers of `clamp_val`."""
    if clamp_val is None:
        return x
    low, high = (bound.reshape(1) for bound in clamp_val.cast("f32").split(1, 0))
    return F.minimum(F.maximum(x, low), high)


@api("quantization.functional.smooth_quant_gemm", inner=True)
def smooth_quant_gemm(dtype: Any = None, **operands: Any) -> Any:
    """input i8 [..., K] times weights i8 [N, K], times the scales of tokens and of outputs."""
    plugin = current_network().plugin_config.smooth_quant_gemm_plugin
    if not plugin and dtype is None:
        raise TypeError("Smooth Quant GEMM is only supported with plugin")
    result = _scaled_product(**operands)
    kind = irc_dtype(plugin if isinstance(plugin, str) and plugin != "auto" else dtype or "float16")
    return (F.round(result) if kind == "i32" else result).cast(kind)


@api("quantization.functional.fp8_rowwise_gemm", inner=True)
def fp8_rowwise_gemm(**operands: Any) -> Any:
    """input [..., K] times weights [N, K], both in FP8, times the scales of tokens and outputs."""
    return _scaled_product(**operands).cast("f16")


def _scaled_product(
    input: Tensor,
    weights: Tensor,
    scales_a: Tensor,
    scales_b: Tensor,
    per_token_scaling: bool,
    per_channel_scaling: bool,
) -> Tensor:
    ones = (1,) * (input.ndim - 1)
    tokens = input.shape[:-1] if per_token_scaling else ones
    outputs = weights.shape[0] if per_channel_scaling else 1
    product = F.linear(input.cast("f32"), weights.cast("f32"))
    return product * (scales_a.reshape((*tokens, 1)) * scales_b.reshape((*ones, outputs)))


@api("quantization.functional.weight_only_quant_matmul", inner=True)
def weight_only_quant_matmul(
    input: Any, weights: Any, scales: Any, weightTypeId: int, dtype: Any = None
) -> Any:
    """input [..., K] times codes of 8 bits (weightTypeId 1) or 4 (2), times a scale per output.

    Without the plugin codes of 8 bits, but for those of layers, are plain ones [K, N].
    """
    plain = not current_network().plugin_config.weight_only_quant_matmul_plugin
    if plain and weightTypeId == 1 and not isinstance(owner_of(weights), PackedWeight):
        codes = weights.transpose(0, 1)
    else:
        codes = code_tensor(weights, 8 // weightTypeId)
    kind: Any = input.dtype
    return F.linear(input, F.dequantize(codes, scales.reshape(-1, 1), dtype=kind))


@api("quantization.functional.weight_only_groupwise_quant_matmul", inner=True)
def weight_only_groupwise_quant_matmul(
    input: Any,
    pre_quant_scale: Any,
    weights: Any,
    scales: Any,
    zeros: Any,
    biases: Any,
    quant_algo: int,
    group_size: int,
    alpha: Any = None,
    dtype: Any = None,
) -> Any:
    """input times codes * scales + zeros, which hold for groups of `group_size` inputs.

    The flags of `quant_algo` say which operands count: 1 biases, 2 zeros, 4 pre_quant_scale, 8
    alpha, with which inputs are in FP8; 16 says that the codes have 8 bits.
    """
    if weights.dtype == "f32":
        raise ScriptError(
            "weight_only_groupwise_quant_matmul: expected codes packed as numbers of 8 or 16 bits, "
            f"found {weights.type}; TensorRT-LLM's layers take 16 bits here, so give them "
            "dtype='float16' or 'bfloat16'"
        )
    x, kind = input, input.dtype
    x = x * pre_quant_scale.cast(kind) if quant_algo & 4 else x
    if quant_algo & 8:
        one = F.full(1.0, shape=(1,) * x.ndim, dtype="f32")
        x = F.dequantize(F.quantize(x, one, dtype="f8e4m3"), one, dtype=kind)
    codes = code_tensor(weights, 8 if quant_algo & 16 else 4)
    y = F.linear(x, F.dequantize(codes, scales.transpose(0, 1), dtype=kind))
    if quant_algo & 2:  # zeros * (sum of the group)
        sums = x.reshape((*x.shape[:-1], -1, group_size)).sum(-1)
        y = y + F.linear(sums, zeros.cast(kind).transpose(0, 1))
    y = y * alpha.cast(kind) if quant_algo & 8 and alpha is not None else y
    return y + biases.cast(kind) if quant_algo & 1 else y


@api("quantization.functional.smooth_quant_layer_norm", inner=True)
def smooth_quant_layer_norm(
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-05,
    **scaling: Any,
) -> Any:
    """layer_norm as codes i8, times `scale`; or (codes, scales) of every token."""
    y = unwrapped(layer_norm(input, normalized_shape, weight, bias, eps))
    return _codes(y, **scaling)


@api("quantization.functional.smooth_quant_rms_norm", inner=True)
def smooth_quant_rms_norm(
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-05,
    **scaling: Any,
) -> Any:
    """rms_norm as codes i8, times `scale`; or what quantize_per_token gives."""
    y = unwrapped(rms_norm(input, normalized_shape, weight=weight, eps=eps))
    return _codes(y if bias is None else y + bias.cast(y.dtype), **scaling)


def _codes(
    x: Tensor, scale: Any, dynamic_act_scaling: bool, clamp_val: Any = None, **options: Any
) -> Any:
    """The codes i8 of x times a scale; or what quantize_per_token gives."""
    if dynamic_act_scaling:
        return quantize_per_token(x=x, clamp_val=clamp_val, **options)
    return quantize_tensor(x=clamped(x, clamp_val), scale=scale)

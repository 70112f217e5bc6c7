"""Weight-only codes in TensorRT-LLM's own storage order, and products with them."""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from ....ir.dtypes import dtype_of, numpy_dtype
from ....weights import Ref
from ... import functional as F
from ...checkpoints.mixed_gemm import pack, unpack
from ..api import api
from ..context import current_network
from ..dtypes import as_array, irc_dtype
from ..errors import ScriptError
from ..module import Parameter, Weight


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


@api("quantization.functional.weight_only_quant_matmul", inner=True)
def weight_only_quant_matmul(
    input: Any, weights: Any, scales: Any, weightTypeId: int, dtype: Any = None
) -> Any:
    """input [..., K] times the codes of a layer, times a scale per output."""
    value, named = weights.value, current_network().tracer.weights
    owners = [cast("Weight", inner).owner for inner in named if named[inner] is value]
    if not any(isinstance(owner, PackedWeight) for owner in owners):
        raise ScriptError(
            "weight_only_quant_matmul: expected the weight of a layer such as "
            f"WeightOnlyQuantLinear, found {weights.type}"
        )
    return F.linear(input, F.dequantize(weights, scales.reshape(-1, 1), dtype=input.dtype))

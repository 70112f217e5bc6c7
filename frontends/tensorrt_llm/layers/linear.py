"""Linear layers whose weight is sharded by outputs (column) or by inputs (row)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import numpy as np

from ... import functional as F
from ...tensor import Tensor
from ..api import api, register, release
from ..arithmetic import unwrapped
from ..dtypes import as_array, numpy_to_torch, torch_of
from ..errors import ArgumentError
from ..functional.collectives import (
    AllReduceFusionOp,
    AllReduceParams,
    allgather,
    allreduce,
    group_of,
)
from ..module import Module, Parameter
from ..quantization import QuantMode

NO_MODE = QuantMode(0)


def shard_size(layer: str, what: str, size: int, parts: int) -> int:
    """One rank's shard of `size` features; an Error where they cannot be divided evenly."""
    if size % parts:
        raise ArgumentError(
            f"{layer}: {what}={size} is not a multiple of tp_size={parts}; pad it to "
            f"{-(-size // parts) * parts}, or choose another tp_size"
        )
    return size // parts


def sharded_parameter(
    shape: Sequence[int],
    dtype: Any,
    dim: int | None = None,
    group: Sequence[int] | None = None,
    whole_size: int = 0,
) -> Parameter:
    """A parameter of one rank's `shape`, of which the ranks of a group hold shards along `dim`."""
    parameter = Parameter(shape=tuple(shape), dtype=dtype)
    axis = group_of(group).axis if group is not None and dim is not None else ""
    if axis:
        parameter.sharded, parameter.whole_size = (dim or 0, tuple(axis.split("."))), whole_size
    return parameter


def summed(x: Any, group: Sequence[int], params: Any = None) -> Any:
    """The sum over the ranks of a group; with a fusion_op of `params` (the normalized, the sum)."""
    return unwrapped(allreduce(tensor=x, group=group, all_reduce_params=params))


@dataclass(eq=False, repr=False)
class LinearBase(Module):
    """What all linear layers have: sizes, tensor parallelism, and the product.

    The ranks hold shards of the weight [out_features, in_features] along `shard_dim`. As in
    TensorRT-LLM the attributes `in_features` and `out_features` are those of one rank.
    """

    shard_dim: ClassVar[int] = 0
    prefer_managed_weight: ClassVar[bool] = False  # which layers of the sources read

    in_features: int
    out_features: int
    bias: Any = True
    dtype: Any = None
    tp_group: Sequence[int] | None = None
    tp_size: int = 1

    def __post_init__(self) -> None:
        if self.tp_size == 1:
            self.tp_group = None
        name, parts = type(self).__name__, 1 if self.tp_group is None else self.tp_size
        if self.tp_group is not None and len(self.tp_group) != self.tp_size:
            raise ArgumentError(
                f"{name}: expected a tp_group of tp_size={self.tp_size} ranks, found "
                f"{list(self.tp_group)}"
            )
        if self.shard_dim == 0:
            self.out_features = shard_size(name, "out_features", self.out_features, parts)
        else:
            self.in_features = shard_size(name, "in_features", self.in_features, parts)
        self.parts, has_bias = parts, vars(self).pop("bias")
        self.make_parameters()
        self.bias = self.parameter((self.out_features,), self.dtype, 0) if has_bias else None

    def make_parameters(self) -> None:
        """Make the weight of this rank, and what belongs to it."""
        shape = self.out_features, self.in_features
        self.weight = self.parameter(shape, self.dtype, outputs=0, inputs=1)

    def parameter(
        self,
        shape: Sequence[int],
        dtype: Any,
        outputs: int | None = None,
        inputs: int | None = None,
    ) -> Parameter:
        """A parameter of one rank, with the dimensions of it that are outputs and inputs."""
        return sharded_parameter(shape, dtype, (outputs, inputs)[self.shard_dim], self.tp_group)

    @property
    def tp_dim(self) -> int:
        """The dimension of the weight that loaders of the sources split over the ranks."""
        return self.shard_dim

    def multiply(self, x: Tensor) -> Tensor:
        """x · weightᵀ."""
        return F.linear(x, self.weight.inner.cast(x.dtype))

    def biased(self, y: Tensor, parts: int = 1) -> Tensor:
        """y + bias / parts, in the dtype of y."""
        bias = None if self.bias is None else self.bias.inner.cast(y.dtype)
        return y if bias is None else y + (bias if parts == 1 else bias / parts)


@api("layers.linear.Linear", inner=True)
@dataclass(eq=False, repr=False)
class Linear(LinearBase):
    """x · weightᵀ + bias, the outputs sharded over the group; with `gather_output` all of them.

    Per rank weight [out_features/tp_size, in_features] and bias [out_features/tp_size]. With
    `share_weight` the weight is another layer's parameter.
    """

    gather_output: bool = True
    share_weight: Parameter | None = None
    is_qkv: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.share_weight is not None:
            self.weight = self.share_weight

    def postprocess(self, tllm_key: str, weights: Any, **options: Any) -> Any:
        """A parameter as a loader of the sources read it: one tensor, or those of q, k and v."""
        parts = cast("list[Any]", weights if isinstance(weights, list) else [weights])
        joined = np.concatenate([as_array(part) for part in parts])
        return numpy_to_torch(joined).to(torch_of(self.dtype))

    def forward(self, x: Any) -> Any:
        """x [..., in_features] to [..., out_features], of this rank or of all."""
        y = self.biased(self.multiply(x))
        if not self.gather_output or self.tp_group is None:
            return y
        gather: Any = allgather
        return unwrapped(gather(y, self.tp_group, gather_dim=-1))


ColumnLinear = Linear
register("layers.linear.ColumnLinear", Linear)


@api("layers.linear.RowLinear", inner=True)
@dataclass(eq=False, repr=False)
class RowLinear(LinearBase):
    """The sum over the group of x · weightᵀ, plus bias; x has the features of this rank.

    Per rank weight [out_features, in_features/tp_size]; the bias [out_features] is that of all
    ranks and added once, after the sum. With `is_expert` there is no sum, and each rank adds its
    part of the bias.
    """

    shard_dim: ClassVar[int] = 1

    is_expert: bool = False

    def forward(
        self, x: Any, all_reduce_params: Any = None, reduce_fusion_params: Any = None
    ) -> Any:
        """x [..., in_features/tp_size] to [..., out_features] on every rank; with a fusion_op of
        `all_reduce_params` to (the normalized sum, the sum)."""
        y = self.multiply(x)
        if self.is_expert:
            return self.biased(y, self.parts)
        params = all_reduce_params or reduce_fusion_params or AllReduceParams()
        if params.fusion_op == AllReduceFusionOp.NONE:
            return self.biased(y if self.tp_group is None else summed(y, self.tp_group))
        bias = params.bias if self.bias is None else self.bias.inner.cast(y.dtype)
        return summed(y, self.tp_group or [0], replace(params, bias=bias))


# -- in FP8


@dataclass(eq=False, repr=False)
class StaticScales(LinearBase):
    """x and weight as FP8 codes, of scales in activation_scaling_factor [1] and
    weights_scaling_factor [1]. The weight is in codes from version 0.10 on, before in floats."""

    def make_parameters(self) -> None:
        shape = self.out_features, self.in_features
        self.weight = self.parameter(shape, self.dtype if release() < 10 else "fp8", 0, 1)
        self.activation_scaling_factor = self.parameter((1,), "float32")
        self.weights_scaling_factor = self.parameter((1,), "float32")

    def multiply(self, x: Tensor) -> Tensor:
        kind: Any = x.dtype
        scale = self.activation_scaling_factor.inner.reshape((1,) * x.ndim)
        scales, weight = self.weights_scaling_factor.inner.reshape(1, 1), self.weight.inner
        if weight.dtype != "f8e4m3":
            weight = F.quantize(weight, scales, dtype="f8e4m3")
        x = F.dequantize(F.quantize(x, scale, dtype="f8e4m3"), scale, dtype=kind)
        return F.linear(x, F.dequantize(weight, scales, dtype=kind))


@api("quantization.layers.FP8Linear", inner=True)
@dataclass(eq=False, repr=False)
class FP8Linear(StaticScales, Linear):
    """Its outputs are sharded over the group."""


@api("quantization.layers.FP8RowLinear", inner=True)
@dataclass(eq=False, repr=False)
class FP8RowLinear(StaticScales, RowLinear):
    """Its inputs are sharded over the group."""

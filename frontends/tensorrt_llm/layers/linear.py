"""Linear layers whose weight is sharded by outputs (column) or by inputs (row)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ....errors import Error
from ....source import here
from ... import functional as F
from ...tensor import Tensor as Inner
from ..context import signatures
from ..dtypes import irc_dtype
from ..errors import ArgumentError
from ..functional.collectives import (
    AllReduceFusionOp,
    AllReduceParams,
    allgather,
    allreduce,
    group_of,
)
from ..module import Module, Parameter
from ..tensor import Tensor, unwrap, wrap

_COMMON = "in_features, out_features, bias, dtype, tp_group, tp_size"


def shard_size(layer: str, what: str, size: int, parts: int) -> int:
    """One rank's shard of `size` features; an Error where they cannot be divided evenly."""
    if size % parts:
        raise ArgumentError(
            f"{layer}: {what}={size} is no multiple of tp_size={parts}; pad it to "
            f"{-(-size // parts) * parts}, or choose another tp_size",
            loc=here(),
        )
    return size // parts


def sharded_parameter(
    shape: Sequence[int], dtype: Any, dim: int | None = None, group: Sequence[int] | None = None
) -> Parameter:
    """A parameter of one rank's `shape`, of which the ranks of a group hold shards along `dim`."""
    found = Parameter(shape=tuple(shape), dtype=dtype)
    axis = group_of(group).axis if group is not None and dim is not None else ""
    if axis:
        found.sharded = (dim or 0, tuple(axis.split(".")))
    return found


def refuse_lora(*given: Any) -> None:
    """An Error where a layer gets LoRA weights at run time."""
    if any(each is not None for each in given):
        raise Error(
            "LoRA weights at run time are not supported; add them to the weights of the model "
            "before it is compiled",
            loc=here(),
        )


class LinearBase(Module):
    """What all linear layers have: sizes, tensor parallelism, and the product.

    The ranks hold shards of the weight [out_features, in_features] along `shard_dim`. As in
    TensorRT-LLM the attributes `in_features` and `out_features` are those of one rank.
    """

    shard_dim = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: Any,
        tp_group: Sequence[int] | None,
        tp_size: int,
        share_weight: Parameter | None = None,
    ) -> None:
        self.parallel = tp_size > 1 and tp_group is not None
        self.tp_group, self.tp_size = (tp_group if self.parallel else None), tp_size
        self.parts = tp_size if self.parallel else 1
        self.dtype = irc_dtype(dtype) if dtype is not None else "f32"
        name, cut = type(self).__name__, self.parts
        if self.tp_group is not None and len(self.tp_group) != tp_size:
            raise ArgumentError(
                f"{name}: expected a tp_group of tp_size={tp_size} ranks, found "
                f"{list(self.tp_group)}",
                loc=here(),
            )
        if self.shard_dim == 0:
            out_features = shard_size(name, "out_features", out_features, cut)
        else:
            in_features = shard_size(name, "in_features", in_features, cut)
        self.in_features, self.out_features = in_features, out_features
        self.weight = share_weight if share_weight is not None else self.make_weight()
        self.bias = self.make((out_features,), self.dtype, outputs=0) if bias else None

    def make_weight(self) -> Parameter:
        """The weight of this rank; layers with further parameters set them here."""
        return self.make((self.out_features, self.in_features), self.dtype, outputs=0, inputs=1)

    def make(
        self,
        shape: Sequence[int],
        dtype: str,
        outputs: int | None = None,
        inputs: int | None = None,
    ) -> Parameter:
        """A parameter of one rank, with the dimensions of it that are outputs and inputs."""
        return sharded_parameter(shape, dtype, (outputs, inputs)[self.shard_dim], self.tp_group)

    def multiply(self, x: Inner) -> Inner:
        """x · weightᵀ."""
        return F.linear(x, unwrap(self.weight.value).cast(x.dtype))

    def bias_as(self, x: Inner) -> Inner:
        """The bias, in the dtype of x."""
        assert self.bias is not None
        return unwrap(self.bias.value).cast(x.dtype)


class Linear(LinearBase):
    """x · weightᵀ + bias, the outputs sharded over the group; with `gather_output` all of them.

    Per rank weight [out_features/tp_size, in_features] and bias [out_features/tp_size]. With
    `share_weight` the weight is another layer's parameter. `strict_dtype`, `pad_lda`, `pad_ldc`,
    `prefer_managed_weight`, `is_qkv` and `max_lora_rank` have no effect.
    """

    @signatures(
        a=f"{_COMMON}, gather_output, share_weight, strict_dtype, max_lora_rank",
        b=f"{_COMMON}, gather_output, share_weight, strict_dtype, pad_lda, pad_ldc, "
        "prefer_managed_weight, is_qkv",
    )
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: Any = None,
        tp_group: Sequence[int] | None = None,
        tp_size: int = 1,
        gather_output: bool = True,
        share_weight: Parameter | None = None,
        strict_dtype: bool = False,
        pad_lda: int = 0,
        pad_ldc: int = 0,
        prefer_managed_weight: bool = True,
        is_qkv: bool = False,
        max_lora_rank: int | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, dtype, tp_group, tp_size, share_weight)
        self.gather_output, self.is_qkv = gather_output, is_qkv

    def forward(
        self, x: Tensor, lora_runtime_params: Any = None, lora_hidden_state: Any = None
    ) -> Tensor:
        """x [..., in_features] to [..., out_features], of this rank or of all."""
        refuse_lora(lora_runtime_params, lora_hidden_state)
        y = self.multiply(unwrap(x))
        y = y if self.bias is None else y + self.bias_as(y)
        if not self.gather_output or self.tp_group is None:
            return wrap(y)
        return allgather(wrap(y), self.tp_group, gather_dim=-1)


ColumnLinear = Linear


class RowLinear(LinearBase):
    """The sum over the group of x · weightᵀ, plus bias; x has the features of this rank.

    Per rank weight [out_features, in_features/tp_size]; the bias [out_features] is that of all
    ranks and added once, after the sum. With `is_expert` there is no sum, and each rank adds its
    part of the bias. `strict_dtype`, `pad_lda`, `prefer_managed_weight` and `max_lora_rank` have no
    effect.
    """

    shard_dim = 1

    @signatures(
        a=f"{_COMMON}, instance_id, max_lora_rank",
        b=f"{_COMMON}, strict_dtype, pad_lda, prefer_managed_weight, is_expert",
    )
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: Any = None,
        tp_group: Sequence[int] | None = None,
        tp_size: int = 1,
        strict_dtype: bool = False,
        pad_lda: int = 0,
        prefer_managed_weight: bool = True,
        is_expert: bool = False,
        instance_id: int | None = None,
        max_lora_rank: int | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, dtype, tp_group, tp_size)
        self.is_expert, self.instance_id = is_expert, instance_id

    @signatures(
        a="x, workspace, lora_runtime_params",
        b="x, lora_runtime_params, lora_hidden_state, all_reduce_params",
    )
    def forward(
        self,
        x: Tensor,
        workspace: Tensor | None = None,
        lora_runtime_params: Any = None,
        lora_hidden_state: Any = None,
        all_reduce_params: AllReduceParams | None = None,
    ) -> Any:
        """x [..., in_features/tp_size] to [..., out_features] on every rank; with a fusion_op of
        `all_reduce_params` to (the normalized sum, the sum)."""
        refuse_lora(lora_runtime_params, lora_hidden_state)
        y = self.multiply(unwrap(x))
        if self.is_expert:
            return wrap(y if self.bias is None else y + self.bias_as(y) / self.parts)
        params = all_reduce_params or AllReduceParams()
        if params.fusion_op == AllReduceFusionOp.NONE:
            if self.tp_group:
                y = unwrap(allreduce(wrap(y), self.tp_group))
            return wrap(y if self.bias is None else y + self.bias_as(y))
        bias = params.bias if self.bias is None else wrap(self.bias_as(y))
        return allreduce(wrap(y), self.tp_group or [0], replace(params, bias=bias))

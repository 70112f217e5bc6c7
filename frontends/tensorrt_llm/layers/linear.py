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
    claim_instance,
    group_of,
)
from ..module import Module, Parameter
from ..tensor import Tensor, unwrap, wrap


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
    """What all linear layers have: sizes, tensor parallelism, and the product."""

    weight: Parameter

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        dtype: Any,
        tp_group: Sequence[int] | None,
        tp_size: int,
    ) -> None:
        self.parallel = tp_size > 1 and tp_group is not None
        self.tp_group, self.tp_size = (tp_group if self.parallel else None), tp_size
        self.dtype = irc_dtype(dtype) if dtype is not None else "f32"
        self.in_features, self.out_features = in_features, out_features
        self.bias = self.make_bias() if bias else None

    @property
    def parts(self) -> int:
        """Over how many ranks the weight is sharded."""
        return self.tp_size if self.parallel else 1

    def make_bias(self) -> Parameter:
        """The bias [out_features] of this rank."""
        raise NotImplementedError

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
        super().__init__(in_features, out_features, bias, dtype, tp_group, tp_size)
        self.gather_output, self.is_qkv = gather_output, is_qkv
        self.weight = share_weight if share_weight is not None else self.make_weight()

    @property
    def outputs(self) -> int:
        """The outputs of this rank."""
        return shard_size(type(self).__name__, "out_features", self.out_features, self.parts)

    def make_weight(self) -> Parameter:
        """The weight of this rank."""
        return sharded_parameter((self.outputs, self.in_features), self.dtype, 0, self.tp_group)

    def make_bias(self) -> Parameter:
        return sharded_parameter((self.outputs,), self.dtype, 0, self.tp_group)

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

    @signatures(
        a="in_features, out_features, bias, dtype, tp_group, tp_size, instance_id, max_lora_rank",
        b="in_features, out_features, bias, dtype, tp_group, tp_size, strict_dtype, pad_lda, "
        "prefer_managed_weight, is_expert",
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
        self.weight = self.make_weight()

    @property
    def inputs(self) -> int:
        """The inputs of this rank."""
        return shard_size(type(self).__name__, "in_features", self.in_features, self.parts)

    def make_weight(self) -> Parameter:
        """The weight of this rank."""
        return sharded_parameter((self.out_features, self.inputs), self.dtype, 1, self.tp_group)

    def make_bias(self) -> Parameter:
        return sharded_parameter((self.out_features,), self.dtype)

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
        claim_instance(self.instance_id)
        params = all_reduce_params or AllReduceParams()
        if params.fusion_op == AllReduceFusionOp.NONE:
            y = unwrap(allreduce(wrap(y), self.tp_group)) if self.tp_group else y
            return wrap(y if self.bias is None else y + self.bias_as(y))
        bias = params.bias if self.bias is None else wrap(self.bias_as(y))
        return allreduce(wrap(y), self.tp_group or [0], replace(params, bias=bias))

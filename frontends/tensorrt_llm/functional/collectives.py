"""Collectives over groups of ranks, by the axes of the mesh that the groups are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any

from ....errors import Error
from ....source import here
from ... import functional as F
from ...tensor import Tensor as Inner
from ..arithmetic import data
from ..context import current_network, current_session, signatures
from ..dtypes import dim_resolve_negative
from ..errors import ArgumentError
from ..mapping import Mapping
from ..tensor import Tensor, wrap


class AllReduceStrategy(IntEnum):
    """How the ranks add: accepted, without effect. NCCL or ONNX Runtime choose when they run."""

    NCCL = 0
    RING = 0
    ONESHOT = 1
    TWOSHOT = 2
    UB = 3
    AUTO = 4
    MIN_LATENCY = 5
    LOWPRECISION = 6
    MNNVL = 7
    NCCL_SYMMETRIC = 8


class AllReduceConfig(IntFlag):
    """How buffers are exchanged: accepted, without effect."""

    USE_MEMCPY = 1
    PUSH_MODE = 2


class AllReduceFusionOp(IntEnum):
    """What follows the sum in the same call."""

    NONE = 0
    RESIDUAL_RMS_NORM = 1
    LAST_PROCESS_FOR_UB = 2
    RESIDUAL_RMS_PREPOST_NORM = 3
    RESIDUAL_RMS_NORM_QUANT_FP8 = 4
    RESIDUAL_RMS_NORM_QUANT_NVFP4 = 5


@dataclass
class AllReduceParams:
    """What `allreduce` adds and normalizes after the sum over the ranks.

    The functions never change it, unlike those of TensorRT-LLM, so one may serve several calls.
    """

    strategy: AllReduceStrategy = AllReduceStrategy.AUTO
    config: int = 0
    fusion_op: AllReduceFusionOp = AllReduceFusionOp.NONE
    bias: Tensor | None = None
    residual: Tensor | None = None
    norm_weight: Tensor | None = None
    scale: Tensor | None = None
    norm_pre_residual_weight: Tensor | None = None
    eps: float = 1e-6


@dataclass(frozen=True)
class Group:
    """Ranks that communicate: their mesh axes (joined by dots, "" for one rank), how many they are,
    and which of them, counted along the axes, comes where in the group as it was given."""

    axis: str
    size: int
    order: tuple[int, ...]

    @property
    def in_order(self) -> bool:
        """Whether the order is that of the axes, or the session asks for it."""
        return current_session().sorted_groups or self.order == tuple(range(self.size))

    def position(self) -> Inner:
        """This rank's position in the group as it was given: i32[]."""
        rank = F.rank(self.axis)
        if self.order == tuple(range(self.size)):
            return rank
        places = [self.order.index(i) for i in range(self.size)]
        return F.gather(F.constant(places, shape=(self.size,), dtype="i32"), rank)

    def reordered(self, x: Inner, dim: int, order: Sequence[int]) -> Inner:
        """x with its `size` equal blocks along `dim` in another order."""
        cut, shape = x.shape[dim] // self.size, x.shape
        apart = x.reshape((*shape[:dim], self.size, cut, *shape[dim + 1 :]))
        places = F.constant(tuple(order), shape=(self.size,), dtype="i32")
        return F.gather(apart, places, dim=dim).reshape(shape)


def group_of(ranks: Sequence[int]) -> Group:
    """The group of some ranks of the world, by the session's Mapping."""
    found = list(ranks)
    mapping = current_session().mapping
    if mapping is None and sorted(found) == list(range(len(found))):
        mapping = Mapping(len(found), tp_size=len(found))  # an old script with one group only
    if mapping is None:
        raise Error(
            f"the group {found} needs a Mapping, which says how the world is divided; make a "
            "Mapping(world_size=..., rank=..., tp_size=..., pp_size=...) first",
            loc=here(),
        )
    axes, order = mapping.axis_of(found)
    return Group(".".join(axes), len(found), order)


@signatures(
    a="tensor, group, workspace, instance_id, strategy", b="tensor, group, all_reduce_params"
)
def allreduce(
    tensor: Tensor,
    group: Sequence[int],
    all_reduce_params: AllReduceParams | AllReduceStrategy | None = None,
    workspace: Tensor | None = None,
    instance_id: int | None = None,
    strategy: AllReduceStrategy | None = None,
    config: AllReduceConfig | None = None,
) -> Any:
    """The sum of the tensors [...] of a group, on every rank of it; as the operand.

    With a fusion_op of `all_reduce_params` a pair: the normalized sum, and the sum. The dtype is
    that of the tensor: nccl_plugin changes none. `workspace`, `strategy` and `config` have no
    effect.
    """
    over, x = group_of(group), data(tensor)
    is_strategy = isinstance(all_reduce_params, AllReduceStrategy)  # of 0.8 to 0.10
    params = AllReduceParams() if not all_reduce_params or is_strategy else all_reduce_params
    fusion = AllReduceFusionOp(params.fusion_op)
    _check_fusion(params, fusion)
    if fusion == AllReduceFusionOp.RESIDUAL_RMS_NORM:
        return _normalized(x, over, params)
    total = _sum(x, over)
    if params.bias is not None:
        total = total + data(params.bias)
    if fusion == AllReduceFusionOp.NONE:
        return wrap(total)
    weight = _norm_weight(total, params.norm_pre_residual_weight)
    total = F.rms_norm(total, weight, eps=params.eps) + data(params.residual)
    normed = F.rms_norm(total, _norm_weight(total, params.norm_weight), eps=params.eps)
    return wrap(normed), wrap(total)


def _check_fusion(params: AllReduceParams, fusion: AllReduceFusionOp) -> None:
    norms = (AllReduceFusionOp.RESIDUAL_RMS_NORM, AllReduceFusionOp.RESIDUAL_RMS_PREPOST_NORM)
    if params.scale is not None or fusion not in (AllReduceFusionOp.NONE, *norms):
        raise Error(
            f"allreduce: {fusion.name} with quantization or user buffers is not supported; use "
            "RESIDUAL_RMS_NORM, and quantize the result by the options of the build",
            loc=here(),
        )
    if fusion in norms and params.residual is None:
        raise ArgumentError(f"allreduce: {fusion.name} needs a residual, found None", loc=here())


def _sum(x: Inner, over: Group) -> Inner:
    return x if over.size == 1 else F.all_reduce(x, over.axis, group_size=over.size)


def _normalized(x: Inner, over: Group, params: AllReduceParams) -> tuple[Tensor, Tensor]:
    """(rms_norm of the sum and the residual, that sum)."""
    weight, residual = _norm_weight(x, params.norm_weight), data(params.residual)
    if params.bias is None and over.size > 1:
        normed, total = F.all_reduce_rms_norm(
            x, residual, weight, over.axis, eps=params.eps, group_size=over.size
        )
        return wrap(normed), wrap(total)
    total = _sum(x, over)
    total = (total if params.bias is None else total + data(params.bias)) + residual
    return wrap(F.rms_norm(total, weight, eps=params.eps)), wrap(total)


def _norm_weight(x: Inner, weight: Tensor | None) -> Inner:
    if weight is not None:
        return data(weight)
    return F.full(1.0, shape=(x.shape[-1],), dtype=x.dtype)


def allgather(tensor: Tensor, group: Sequence[int], gather_dim: int = 0) -> Tensor:
    """The tensors [..., n, ...] of a group joined along `gather_dim`, in the order of the group as
    it is given: [..., size*n, ...]. TensorRT-LLM joins in ascending order of ranks; see
    `sorted_groups` of the session."""
    over, x = group_of(group), data(tensor)
    if over.size == 1:
        return wrap(x)
    (dim,) = dim_resolve_negative(gather_dim, x.ndim)
    found = F.all_gather(x, over.axis, dim, group_size=over.size)
    return wrap(found if over.in_order else over.reordered(found, dim, over.order))


def reduce_scatter(tensor: Tensor, group: Sequence[int]) -> Tensor:
    """Of the sum of the tensors [n, ...] of a group, the block [n/size, ...] whose number is this
    rank's position in the group. n must be a multiple of the size."""
    over, x = group_of(group), data(tensor)
    if over.size == 1:
        return wrap(x)
    (dim,) = dim_resolve_negative(0, x.ndim)
    if not over.in_order:
        x = over.reordered(x, dim, [over.order.index(i) for i in range(over.size)])
    return wrap(F.reduce_scatter(x, over.axis, dim, group_size=over.size))


def send(tensor: Tensor, tgt: int) -> Tensor:
    """The tensor itself, which is also sent to rank `tgt` of the next pipeline stage."""
    return current_network().send(tensor, tgt)


def recv(tensor: Tensor, src: int) -> Tensor:
    """What rank `src` of the stage before sends, of the type of the tensor."""
    return current_network().receive(tensor, src)

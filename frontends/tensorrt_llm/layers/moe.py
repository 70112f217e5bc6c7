"""Mixture of experts, whose experts are sharded, distributed over the ranks, or both."""

from __future__ import annotations

from collections.abc import Mapping as Table
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from ....errors import Error
from ....ir.dims import product
from ....source import here
from ... import functional as F
from ...layers.mlp import find_activation
from ...layers.moe import route
from ...tensor import Tensor as Inner
from ..context import current_session, signatures
from ..dtypes import irc_dtype
from ..errors import ArgumentError
from ..functional.basic import ACT2FN
from ..functional.collectives import allreduce
from ..mapping import Mapping
from ..module import Module, Parameter
from ..quantization import QuantMode
from ..tensor import Tensor, unwrap, wrap
from .linear import Linear, refuse_lora, shard_size
from .mlp import DOUBLE, MLP


class ExpertScaleNormalizationMode(IntEnum):
    """How the probabilities of the chosen experts become their weights."""

    NONE = 0
    RENORMALIZE = 1
    SPARSE_MIXER = 2
    DEVICE_LIMITED = 3
    DEVICE_LIMITED_RENORM = 4


class ParallelismMode(IntEnum):
    """How the ranks share the experts in dialect A."""

    NONE = 0
    EXPERT_PARALLEL = 1
    TENSOR_PARALLEL = 2


@dataclass
class MoeConfig:
    """The experts of a layer: how many there are, and how many a token uses.

    `tp_mode` is dialect A's: later ones have moe_tp_size and moe_ep_size of the Mapping.
    """

    ExpertScaleNormalizationMode = ExpertScaleNormalizationMode
    ParallelismMode = ParallelismMode

    num_experts: int = 0
    shared_expert_intermediate_size: int = 0
    top_k: int = 0
    normalization_mode: int = ExpertScaleNormalizationMode.RENORMALIZE
    tp_mode: int = ParallelismMode.TENSOR_PARALLEL
    sparse_mixer_epsilon: float = 0.01
    device_limited_n_group: int = 0
    device_limited_topk_group: int = 0
    device_limited_routed_scaling_factor: float = 1.0

    def has_moe(self) -> bool:
        """Whether there are several experts."""
        return self.num_experts > 1

    def validate(self) -> MoeConfig:
        """The config; an Error where it contradicts itself."""
        if (self.num_experts == 0) != (self.top_k == 0) or self.top_k > self.num_experts:
            raise ArgumentError(
                f"expected top_k from 1 to num_experts, or both 0; found top_k={self.top_k}, "
                f"num_experts={self.num_experts}",
                loc=here(),
            )
        modes = ExpertScaleNormalizationMode
        if self.normalization_mode not in (modes.NONE, modes.RENORMALIZE):
            raise Error(
                f"normalization_mode {modes(self.normalization_mode).name} is not supported; use "
                "NONE or RENORMALIZE",
                loc=here(),
            )
        return self

    @classmethod
    def from_dict(cls, table: Table[str, Any]) -> MoeConfig:
        """The `moe` of a checkpoint's config.json; what irc does not use is left out."""
        return cls(**{name: table[name] for name in cls.__dataclass_fields__ if name in table})

    def to_dict(self) -> dict[str, Any]:
        """The fields as config.json has them."""
        return asdict(self)


class ExpertWeights(Module):
    """One projection of this rank's experts: weight [experts, outputs, inputs] and bias
    [experts, outputs]."""

    def __init__(self, experts: int, outputs: int, inputs: int, bias: bool, dtype: str) -> None:
        self.weight = Parameter(shape=(experts, outputs, inputs), dtype=dtype)
        self.bias = Parameter(shape=(experts, outputs), dtype=dtype) if bias else None

    def forward(self, x: Inner, only: Inner | None = None) -> Inner:
        """x [experts, tokens, inputs] to [..., outputs]; the bias only where `only` is true."""
        y = F.matmul(x, unwrap(self.weight.value).cast(x.dtype).transpose(1, 2))
        if self.bias is None:
            return y
        bias = unwrap(self.bias.value).cast(y.dtype).unsqueeze(1)
        return y + (bias if only is None else F.where(only, bias, F.full(0.0, dtype=y.dtype)))


_A = "moe_config, hidden_size, ffn_hidden_size, hidden_act, bias, dtype, tp_group, tp_size, tp_rank"
_B = "moe_config, hidden_size, ffn_hidden_size, hidden_act, mapping, bias, dtype, tp_group, tp_size"


class MixtureOfExperts(Module):
    """The weighted sum of the top_k experts with the highest router scores, per token.

    Of the ranks of the tensor parallel group, moe_ep_size hold different experts, each as
    moe_tp_size shards. Per rank fc.weight [experts, ffn/moe_tp, hidden], for gated activations such
    as swiglu [experts, 2*ffn/moe_tp, hidden] with the rows of the linear branch first, and
    proj.weight [experts, hidden, ffn/moe_tp]. The router [num_experts, hidden] is on every
    rank; its scores are computed in f32.
    """

    @signatures(a=f"{_A}, quant_mode", b=f"{_B}, quant_mode, use_all_reduce")
    def __init__(
        self,
        moe_config: MoeConfig,
        hidden_size: int,
        ffn_hidden_size: int,
        hidden_act: str,
        mapping: Mapping | None = None,
        bias: bool = True,
        dtype: Any = None,
        tp_group: Sequence[int] | None = None,
        tp_size: int = 1,
        quant_mode: QuantMode = QuantMode(0),  # noqa: B008
        use_all_reduce: bool = True,
        tp_rank: int | None = None,
    ) -> None:
        if quant_mode.has_any_quant(exclude_kv_cache=True):
            raise Error(
                "MixtureOfExperts: the experts are quantized by the options of the build, not by "
                f"quant_mode; leave {quant_mode!r} out",
                loc=here(),
            )
        self.moe_config, self.hidden_size = moe_config.validate(), hidden_size
        self.ffn_hidden_size, self.hidden_act = ffn_hidden_size, hidden_act
        ranks: Mapping = mapping or current_session().mapping or Mapping()
        self.parallel = tp_size > 1 and tp_group is not None
        self.tp_group, self.use_all_reduce = tp_group if self.parallel else None, use_all_reduce
        self.tp_axes, self.ep_axes, tp, ep = self._division(ranks, tp_size)
        count = moe_config.num_experts
        if count % ep:
            raise ArgumentError(
                f"{count} experts cannot be distributed over {ep} ranks; choose a moe_ep_size that "
                "divides them",
                loc=here(),
            )
        self.dtype = irc_dtype(dtype) if dtype is not None else "f32"
        self.act = find_activation(hidden_act, ACT2FN)
        self.experts = count // ep
        inner = shard_size("MixtureOfExperts", "ffn_hidden_size", ffn_hidden_size, tp)
        outputs = inner * (2 if hidden_act in DOUBLE else 1)
        self.router = Linear(hidden_size, count, bias=False, dtype="float32")
        self.fc = ExpertWeights(self.experts, outputs, hidden_size, bias, self.dtype)
        self.proj = ExpertWeights(self.experts, hidden_size, inner, bias, self.dtype)

    def _division(
        self, mapping: Mapping, tp_size: int
    ) -> tuple[tuple[str, ...], tuple[str, ...], int, int]:
        """(axes of the shards of experts, axes of the sets of experts, how many of both)."""
        if not self.parallel:
            return (), (), 1, 1
        if mapping.tp_size != tp_size:
            raise ArgumentError(
                f"MixtureOfExperts: tp_size is {tp_size}, but that of the mapping "
                f"{mapping.tp_size}; give the mapping of the group",
                loc=here(),
            )
        if self.moe_config.tp_mode == ParallelismMode.EXPERT_PARALLEL:
            return (), mapping.axes_of("tp"), 1, tp_size
        axes = mapping.axes_of("moe_tp"), mapping.axes_of("moe_ep")
        return *axes, mapping.moe_tp_size, mapping.moe_ep_size

    def forward(
        self,
        hidden_states: Tensor,
        finished: Tensor | None = None,
        workspace: Tensor | None = None,
        lora_layer_params: Any = None,
        all_reduce_params: Any = None,
        static_routing_input: Tensor | None = None,
    ) -> Any:
        """hidden_states [..., hidden_size] to the same. `finished` has no effect."""
        refuse_lora(lora_layer_params)
        if static_routing_input is not None:
            raise Error("MixtureOfExperts: static routing is not supported", loc=here())
        x = unwrap(hidden_states)
        tokens = x.reshape(product(x.shape[:-1]), x.shape[-1])
        scores = unwrap(self.router(wrap(tokens.cast("f32"))))
        normalize = self.moe_config.normalization_mode == ExpertScaleNormalizationMode.RENORMALIZE
        weights, chosen = route(scores, self.moe_config.top_k, normalize, tokens.dtype)
        mixed = wrap(self.mixed(tokens, weights, chosen).reshape(x.shape))
        if not self.use_all_reduce:
            return mixed
        return allreduce(mixed, self.tp_group or [0], all_reduce_params=all_reduce_params)

    def mixed(self, tokens: Inner, weights: Inner, chosen: Inner) -> Inner:
        """The weighted sum [T, hidden_size] of this rank's experts, partial over the group."""
        first = None
        if self.ep_axes:
            first = F.rank(".".join(self.ep_axes)) * self.experts
        slots = F.moe_slots(chosen, self.moe_config.num_experts)
        queued = F.moe_dispatch(tokens, chosen, slots, self.experts, first=first)
        is_first = F.eq(F.rank(".".join(self.tp_axes)), 0) if self.tp_axes else None
        done = self.proj.forward(unwrap(self.act(wrap(self.fc.forward(queued)))), is_first)
        return F.moe_combine(done, chosen, slots, weights, first=first)


MOE = MixtureOfExperts


class SharedMoE(MixtureOfExperts):
    """A mixture of experts, plus a feed-forward that every token uses, times the sigmoid of its own
    gate if `use_shared_gate`. `use_side_stream` has no effect."""

    def __init__(
        self,
        *args: Any,
        use_shared_gate: bool = False,
        use_side_stream: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.shared_expert = MLP(
            hidden_size=self.hidden_size,
            ffn_hidden_size=self.moe_config.shared_expert_intermediate_size,
            hidden_act=self.hidden_act,
            bias=False,
            dtype=self.dtype,
            tp_group=self.tp_group,
            tp_size=len(self.tp_group or [0]),
            is_expert=True,
        )
        self.shared_expert_gate = (
            Linear(self.hidden_size, 1, bias=False, dtype=self.dtype) if use_shared_gate else None
        )

    def mixed(self, tokens: Inner, weights: Inner, chosen: Inner) -> Inner:
        shared = unwrap(self.shared_expert(wrap(tokens)))
        if self.shared_expert_gate is not None:
            shared = F.sigmoid(unwrap(self.shared_expert_gate(wrap(tokens)))) * shared
        return super().mixed(tokens, weights, chosen) + shared

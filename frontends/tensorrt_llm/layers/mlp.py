"""Feed-forward layers: plain, gated, fused, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Mapping as Table
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any, ClassVar

from ....ir.dims import product
from ... import functional as F
from ...layers.mlp import find_activation
from ...layers.moe import Routing, mix_experts, route
from ...tensor import Tensor
from ..api import api, register, release
from ..arithmetic import unwrapped
from ..context import current_session
from ..errors import ArgumentError, ScriptError
from ..functional.basic import ACT2FN, GATED_ACT_2_ACT
from ..functional.collectives import group_of
from ..functional.quantized import PackedWeight
from ..mapping import Mapping
from ..module import Module, Parameter
from ..quantization import QuantMode
from .linear import NO_MODE, ColumnLinear, FP8Linear, FP8RowLinear, RowLinear, shard_size, summed


@api("layers.mlp.MLP", inner=True)
@dataclass(eq=False, repr=False)
class MLP(Module):
    """proj(act(fc(x))): one sum over the group. fc has twice the outputs for the gated
    activations, such as swiglu."""

    inner_layernorm: ClassVar[None] = None

    hidden_size: int
    ffn_hidden_size: int
    hidden_act: str
    bias: bool = True
    dtype: Any = None
    tp_group: Sequence[int] | None = None
    tp_size: int = 1
    quant_mode: QuantMode = NO_MODE
    is_expert: bool = False

    def __post_init__(self) -> None:
        self.act = find_activation(self.hidden_act, ACT2FN)
        self.use_fp8_qdq = self.quant_mode.has_fp8_qdq() and release() < 10
        column, row = (FP8Linear, FP8RowLinear) if self.use_fp8_qdq else (ColumnLinear, RowLinear)
        names = "bias", "dtype", "tp_group", "tp_size"
        common: dict[str, Any] = {name: getattr(self, name) for name in names}
        self.make_branches(
            lambda features: column(self.hidden_size, features, gather_output=False, **common)
        )
        common["is_expert"] = self.is_expert
        self.proj = row(self.ffn_hidden_size, self.hidden_size, **common)

    def make_branches(self, column: Callable[[int], Any]) -> None:
        """Make the layers before the activation; `column` makes one of so many features."""
        self.fc = column(self.ffn_hidden_size * (2 if self.hidden_act in GATED_ACT_2_ACT else 1))

    def inner(self, x: Any) -> Any:
        """The features before proj, those of this rank."""
        return unwrapped(self.act(self.fc(x)))

    def forward(
        self, hidden_states: Any, all_reduce_params: Any = None, reduce_fusion_params: Any = None
    ) -> Any:
        """hidden_states [..., hidden_size] to the same; with a fusion_op of `all_reduce_params` to
        (the normalized sum, the sum)."""
        inner = self.inner(hidden_states)
        return self.proj(inner, all_reduce_params=all_reduce_params or reduce_fusion_params)


@api("layers.mlp.GatedMLP", inner=True)
@dataclass(eq=False, repr=False)
class GatedMLP(MLP):
    """proj(act(fc(x)) * gate(x)): fc is Hugging Face's gate_proj, gate its up_proj."""

    def make_branches(self, column: Callable[[int], Any]) -> None:
        super().make_branches(column)
        self.gate = column(self.ffn_hidden_size)

    def inner(self, x: Any) -> Any:
        return super().inner(x) * self.gate(x)


@api("layers.mlp.FusedGatedMLP", inner=True)
@dataclass(eq=False, repr=False)
class FusedGatedMLP(GatedMLP):
    """GatedMLP with one product for both branches.

    Per rank the weight of fused_fc [2*ffn_hidden_size/tp_size, hidden_size] has the rows of gate,
    then those of fc. Up to 0.7 the parameters are those of GatedMLP, which irc fuses itself.
    """

    def make_branches(self, column: Callable[[int], Any]) -> None:
        if self.hidden_act not in ("silu", "gelu"):
            raise ScriptError(
                f"FusedGatedMLP: expected the activation silu or gelu, found {self.hidden_act!r}; "
                "use GatedMLP, which irc fuses where it can"
            )
        if release() < 8:
            super().make_branches(column)
        else:
            self.fused_fc = column(2 * self.ffn_hidden_size)

    def inner(self, x: Any) -> Any:
        if release() < 8:
            return super().inner(x)
        y: Any = self.fused_fc(x)
        gate, fc = y.split(y.shape[-1] // 2)
        return unwrapped(self.act(fc)) * gate


# -- mixtures of experts, which are sharded, distributed over the ranks, or both


# how the probabilities of the chosen experts become their weights
ExpertScaleNormalizationMode = IntEnum(
    "ExpertScaleNormalizationMode",
    "NONE RENORMALIZE SPARSE_MIXER DEVICE_LIMITED DEVICE_LIMITED_RENORM",
    start=0,
)
# how the ranks share the experts up to 0.10
ParallelismMode = IntEnum("ParallelismMode", "NONE EXPERT_PARALLEL TENSOR_PARALLEL", start=0)


@api("layers.moe.MoeConfig")
@dataclass(kw_only=True)
class MoeConfig:
    """The experts of a layer: how many there are, and how many a token uses.

    `tp_mode` counts up to 0.10: later versions have moe_tp_size and moe_ep_size of the Mapping.
    """

    ExpertScaleNormalizationMode: ClassVar[Any] = ExpertScaleNormalizationMode
    ParallelismMode: ClassVar[Any] = ParallelismMode

    num_experts: int = 0
    shared_expert_intermediate_size: int = 0
    top_k: int = 0
    normalization_mode: int = ExpertScaleNormalizationMode.RENORMALIZE
    tp_mode: int = ParallelismMode.TENSOR_PARALLEL

    def has_moe(self) -> bool:
        """Whether there are several experts."""
        return self.num_experts > 1

    def validate(self) -> MoeConfig:
        """The config; an Error where it contradicts itself."""
        if (self.num_experts == 0) != (self.top_k == 0) or self.top_k > self.num_experts:
            raise ArgumentError(
                f"expected top_k from 1 to num_experts, or both 0; found top_k={self.top_k}, "
                f"num_experts={self.num_experts}"
            )
        modes = ExpertScaleNormalizationMode
        if self.normalization_mode not in (modes.NONE, modes.RENORMALIZE):
            raise ScriptError(
                f"normalization_mode {modes(self.normalization_mode).name} is not supported; use "
                "NONE or RENORMALIZE"
            )
        return self

    @classmethod
    def from_dict(cls, config: Table[str, Any]) -> MoeConfig:
        """The `moe` of a checkpoint's config.json."""
        return cls(**config)

    def to_dict(self) -> dict[str, Any]:
        """The fields as config.json has them."""
        return asdict(self)


class ExpertWeights(Module):
    """One projection of this rank's experts: weight [experts, outputs, inputs] and bias
    [experts, outputs]. Weight-only codes have a per_channel_scale [experts, outputs]."""

    def __init__(
        self, experts: int, outputs: int, inputs: int, bias: bool, dtype: Any, mode: QuantMode
    ) -> None:
        self.per_channel_scale: Parameter | None = None
        self.weight = Parameter(shape=(experts, outputs, inputs), dtype=dtype)
        if mode.is_weight_only():
            bits = 4 if mode.is_int4_weight_only() else 8
            self.weight = PackedWeight((experts, inputs, outputs * bits // 8), bits)
            self.per_channel_scale = Parameter(shape=(experts, outputs), dtype=dtype)
        self.bias = Parameter(shape=(experts, outputs), dtype=dtype) if bias else None

    def forward(self, x: Tensor, only: Tensor | None = None) -> Tensor:
        """x [experts, tokens, inputs] to [..., outputs]; the bias only where `only` is true."""
        weight, kind = self.weight.inner, x.dtype
        if self.per_channel_scale is not None:
            scales: Any = self.per_channel_scale.inner.unsqueeze(2)
            weight = F.dequantize(weight, scales, dtype=kind)  # pyright: ignore[reportArgumentType]
        y = F.matmul(x, weight.cast(kind).transpose(1, 2))
        if self.bias is None:
            return y
        bias = self.bias.inner.cast(kind).unsqueeze(1)
        return y + (bias if only is None else F.where(only, bias, F.full(0.0, dtype=kind)))


@api("layers.moe.MixtureOfExperts", inner=True)
@dataclass(eq=False, repr=False)
class MixtureOfExperts(Module):
    """The weighted sum of the top_k experts with the highest router scores, per token.

    Of the ranks of the tensor parallel group, moe_ep_size hold different experts, each as
    moe_tp_size shards. Per rank fc.weight is [experts, ffn/moe_tp, hidden], for gated activations
    such as swiglu [experts, 2*ffn/moe_tp, hidden] with the rows of the linear branch first, and
    proj.weight [experts, hidden, ffn/moe_tp]; up to 0.9 they are experts_weight_1 and 2. The router
    [num_experts, hidden] is on every rank, up to 0.8 a shard of its inputs; its scores are
    computed in f32.
    """

    moe_config: MoeConfig
    hidden_size: int
    ffn_hidden_size: int
    hidden_act: str
    mapping: Mapping | None = None
    bias: bool = True
    dtype: Any = None
    tp_group: Sequence[int] | None = None
    tp_size: int = 1
    tp_rank: int = 0
    quant_mode: QuantMode = NO_MODE
    use_all_reduce: bool = True

    def __post_init__(self) -> None:
        mode, config = self.quant_mode, self.moe_config.validate()
        if mode.has_any_quant(exclude_kv_cache=True) and not mode.is_weight_only():
            raise ScriptError(
                "MixtureOfExperts: experts are quantized weight-only, or by the options of the "
                f"build; leave {mode!r} out"
            )
        self.num_experts, self.top_k = config.num_experts, config.top_k
        self.tp_group = None if self.tp_size == 1 else self.tp_group
        self.tp_axes, self.ep_axes, tp, ep = self._division()
        if self.num_experts % ep:
            raise ArgumentError(
                f"{self.num_experts} experts cannot be distributed over {ep} ranks; choose a "
                "moe_ep_size that divides them"
            )
        self.act = find_activation(self.hidden_act, ACT2FN)
        self.experts_per_node = self.num_experts // ep
        inner = shard_size("MixtureOfExperts", "ffn_hidden_size", self.ffn_hidden_size, tp)
        outputs = inner * (2 if self.hidden_act in GATED_ACT_2_ACT else 1)
        group: Any = {"tp_group": self.tp_group, "tp_size": self.tp_size} if release() < 9 else {}
        router: Any = RowLinear
        self.router = router(
            self.hidden_size, self.num_experts, bias=False, dtype="float32", **group
        )
        count, own = self.experts_per_node, (self.bias, self.dtype, mode)
        fc = ExpertWeights(count, outputs, self.hidden_size, *own)
        proj = ExpertWeights(count, self.hidden_size, inner, *own)
        self.projections = fc, proj
        if release() >= 10:
            self.fc, self.proj = fc, proj
            return
        for number, weights in enumerate(self.projections, start=1):
            setattr(self, f"experts_weight_{number}", weights.weight)
            setattr(self, f"experts_bias_{number}", weights.bias)
            setattr(self, f"experts_scale_{number}", weights.per_channel_scale)

    def _division(self) -> tuple[tuple[str, ...], tuple[str, ...], int, int]:
        """(axes of the shards of experts, axes of the sets of experts, how many of both)."""
        if self.tp_group is None:
            return (), (), 1, 1
        mapping: Mapping = self.mapping or current_session().mapping or Mapping()
        if mapping.tp_size != self.tp_size:
            raise ArgumentError(
                f"MixtureOfExperts: tp_size is {self.tp_size}, but that of the mapping "
                f"{mapping.tp_size}; give the mapping of the group"
            )
        if release() > 10:
            axes = mapping.axes_of("moe_tp"), mapping.axes_of("moe_ep")
            return *axes, mapping.moe_tp_size, mapping.moe_ep_size
        match self.moe_config.tp_mode:
            case ParallelismMode.EXPERT_PARALLEL:
                return (), mapping.axes_of("tp"), 1, self.tp_size
            case ParallelismMode.TENSOR_PARALLEL:
                return mapping.axes_of("tp"), (), self.tp_size, 1
            case _:
                return (), (), 1, 1

    def to(self, moe_cls: Any) -> MixtureOfExperts:
        """The layer itself: all classes of experts compute the same."""
        return self

    def forward(
        self, hidden_states: Any, all_reduce_params: Any = None, reduce_fusion_params: Any = None
    ) -> Any:
        """hidden_states [..., hidden_size] to the same."""
        x: Tensor = hidden_states
        tokens = x.reshape(product(x.shape[:-1]), x.shape[-1])
        first, is_first = None, None
        if self.ep_axes:
            first = F.rank(".".join(self.ep_axes)) * self.experts_per_node
        if self.tp_axes:  # of the ranks with shards of an expert, one adds the bias
            is_first = F.eq(F.rank(".".join(self.tp_axes)), 0)
        fc, proj = self.projections
        mixed, _ = mix_experts(
            lambda queued: proj.forward(unwrapped(self.act(fc.forward(queued))), is_first),
            tokens,
            *self._routed(tokens),
            self.num_experts,
            local=self.experts_per_node,
            first=first,
        )
        is_whole = release() < 11 and self.moe_config.tp_mode == ParallelismMode.NONE
        if is_whole or not self.use_all_reduce:
            return mixed.reshape(x.shape)
        params = all_reduce_params or reduce_fusion_params
        return summed(mixed.reshape(x.shape), self.tp_group or [0], params)

    def _routed(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The weights and the numbers of the experts of each token."""
        given = tokens.cast("f32")
        if self.router.tp_group is not None:
            over, width = group_of(self.router.tp_group), self.router.in_features
            parts = given.reshape(given.shape[0], over.size, width)
            given = F.gather(parts, F.rank(over.axis), dim=1)
        normalize = self.moe_config.normalization_mode == ExpertScaleNormalizationMode.RENORMALIZE
        return route(self.router(given), self.top_k, Routing(normalize), tokens.dtype)


MOE = MixtureOfExperts
register("layers.moe.MOE", MixtureOfExperts)

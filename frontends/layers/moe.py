"""Mixture of experts: a router, and gated feed-forwards of which each token uses a few."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ...errors import Error
from ...ir.dims import DimLike, product
from ...source import here
from .. import functional as F
from ..module import Module, Parameter, StackedParameter
from ..tensor import Tensor
from .basic import Linear
from .mlp import GatedMLP, activation

Names = tuple[str, str, str]  # of gate, up and down projection of one expert in a checkpoint
_LOWEST = -1e30  # below every score


@dataclass(frozen=True)
class ClampedSwiGLU:
    """gate * sigmoid(alpha * gate) * (up + 1); gate and |up| are at most `limit` (gpt-oss)."""

    alpha: float = 1.702
    limit: float = 7.0

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Gate and up projection of equal shapes to the same."""
        gate = F.minimum(gate, self.limit)
        up = F.clip(up, low=-self.limit, high=self.limit)
        return gate * F.sigmoid(gate * self.alpha) * (up + 1.0)


@dataclass(frozen=True)
class Routing:
    """How a router chooses experts for a token, and weighs their outputs.

    The scores are softmax or sigmoid of logits, which have a `bias`, computed in `dtype` ("": that
    of the tokens). The weights are the scores of the chosen experts, scaled to a sum of 1 if
    `normalize`, times `scale`. For the choice alone a trained `correction` is added to the scores,
    and only `chosen_groups` of `groups` of experts are eligible: those with the largest sums of
    their `group_best` highest scores (DeepSeek-AI, 2024: V2 and V3).
    """

    normalize: bool = True
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    scale: float = 1.0
    bias: bool = False
    correction: bool = False
    groups: int = 1
    chosen_groups: int = 1
    group_best: int = 1
    dtype: str = ""


class Router(Module):
    """The weights and numbers of the experts of every token; correction as in DeepSeek-V3."""

    def __init__(
        self, hidden_size: int, experts: int, chosen: int, routing: Routing, dtype: str = "f32"
    ) -> None:
        dtype = routing.dtype or dtype
        self.weight = Parameter((experts, hidden_size), dtype)
        self.bias = Parameter((experts,), dtype) if routing.bias else None
        self.e_score_correction_bias = Parameter((experts,)) if routing.correction else None
        self.routing, self.chosen = routing, chosen
        in_group, limits = experts // routing.groups, (routing.chosen_groups, routing.group_best)
        if experts % routing.groups or min(limits) < 1 or chosen > limits[0] * in_group:
            raise Error(
                f"{chosen} of {experts} experts cannot be chosen from {limits[0]} of "
                f"{routing.groups} equal groups",
                loc=here(),
            )

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """(weights of the dtype of tokens [T, hidden_size], indices i32) [T, chosen]."""
        logits = F.linear(tokens.cast(self.weight.dtype), self.weight, bias=self.bias)
        correction = self.e_score_correction_bias
        return route(logits, self.chosen, self.routing, tokens.dtype, correction)


class Experts(Module):
    """Gated feed-forwards, each applied to its own tokens.

    gate and up [experts, intermediate_size, hidden_size], down [experts, hidden_size,
    intermediate_size]; a checkpoint stores each expert separately, as `0.<name>.weight`. With
    `bias`, gate_bias, up_bias and down_bias [experts, outputs]; that of down is not added here.
    """

    def __init__(
        self,
        experts: int,
        hidden_size: int,
        intermediate_size: int,
        act: str | ClampedSwiGLU = "silu",
        names: Names = ("gate_proj", "up_proj", "down_proj"),
        dtype: str = "f32",
        bias: bool = False,
    ) -> None:
        inner, outer = (intermediate_size, hidden_size), (hidden_size, intermediate_size)
        gate, up, down = (f"{name}.weight" for name in names)
        self.gate = StackedParameter(experts, inner, gate, dtype)
        self.up = StackedParameter(experts, inner, up, dtype)
        self.down = StackedParameter(experts, outer, down, dtype)
        self.gate_bias, self.up_bias, self.down_bias = (
            StackedParameter(experts, sizes[:1], f"{name}.bias", dtype) if bias else None
            for name, sizes in zip(names, (inner, inner, outer), strict=True)
        )
        self.act = activation(act) if isinstance(act, str) else act

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [experts, slots, hidden_size] to the same, without the bias of down."""
        gate, up = tokens @ self.gate.transpose(1, 2), tokens @ self.up.transpose(1, 2)
        if self.gate_bias is not None and self.up_bias is not None:
            gate, up = gate + self.gate_bias.unsqueeze(1), up + self.up_bias.unsqueeze(1)
        act = self.act
        hidden = act(gate, up) if isinstance(act, ClampedSwiGLU) else act(gate) * up
        return hidden @ self.down.transpose(1, 2)


class MixtureOfExperts(Module):
    """The weighted sum of the `chosen` experts with the highest router scores, per token.

    `routing` says how they are chosen and weighed; with `weigh_inputs` the weights multiply what
    an expert gets, not what it gives. `shared_size` adds a gated feed-forward of that width for
    every token, times the sigmoid of its own gate if `shared_gate`. An expert has `capacity` slots
    per call; 0 means one for every token. `bias` and `act` are as in Experts. Shazeer et al., 2017;
    Jiang et al., 2024 (Mixtral); names of parameters as in the checkpoints of Qwen2-MoE.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        experts: int,
        chosen: int,
        *,
        routing: Routing | None = None,
        act: str | ClampedSwiGLU = "silu",
        bias: bool = False,
        weigh_inputs: bool = False,
        shared_size: int = 0,
        shared_gate: bool = False,
        capacity: DimLike = 0,
        names: Names = ("gate_proj", "up_proj", "down_proj"),
        dtype: str = "f32",
    ) -> None:
        if not 1 <= chosen <= experts:
            raise Error(f"chosen={chosen} is outside 1 to {experts} experts", loc=here())
        if shared_gate and not shared_size:
            raise Error("shared_gate needs shared_size", loc=here())
        self.gate = Router(hidden_size, experts, chosen, routing or Routing(), dtype)
        self.experts = Experts(experts, hidden_size, intermediate_size, act, names, dtype, bias)
        self.shared_expert = (
            GatedMLP(hidden_size, shared_size, "silu" if callable(act) else act, dtype=dtype)
            if shared_size
            else None
        )
        self.shared_expert_gate = Linear(hidden_size, 1, False, dtype) if shared_gate else None
        self.count, self.weigh_inputs, self.capacity = experts, weigh_inputs, capacity

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """x [..., hidden_size] to the same; with a capacity, to (the same, dropped i32[]).

        `dropped` counts the pairs of a token and an expert beyond the capacity, which contribute
        nothing.
        """
        tokens = x.reshape(product(x.shape[:-1]), x.shape[-1])
        weights, chosen = self.gate(tokens)
        mixed, slots = self._mixed(tokens, weights, chosen)
        mixed = (mixed + self.share(tokens) if self.shared_expert else mixed).reshape(x.shape)
        return mixed if self.capacity == 0 else (mixed, (slots < 0).cast("i32").sum())

    def _mixed(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """(sum of the chosen experts' outputs [T, H], slots) for tokens [T, H]."""
        pairs = chosen.shape
        if self.weigh_inputs:  # every pair is a token of its own
            tokens = (tokens.unsqueeze(1) * weights.unsqueeze(2)).reshape(-1, tokens.shape[1])
            chosen = chosen.reshape(-1, 1)
            weights = F.full(1.0, shape=chosen.shape, dtype=tokens.dtype)
        mixed, slots = mix_experts(
            self.experts, tokens, weights, chosen, self.count, capacity=self.capacity
        )
        bias = self.experts.down_bias
        if bias is not None:  # one row for each expert; dropped pairs stay dropped
            mixed += F.moe_combine(bias.unsqueeze(1), chosen, F.minimum(slots, 0), weights)
        return mixed.reshape(*pairs, -1).sum(1) if self.weigh_inputs else mixed, slots

    def share(self, tokens: Tensor) -> Tensor:
        """The output of the shared expert for tokens [T, hidden_size]."""
        assert self.shared_expert is not None
        shared = self.shared_expert(tokens)
        gate = self.shared_expert_gate
        return shared if gate is None else F.sigmoid(gate(tokens)) * shared


def route(
    logits: Tensor, chosen: int, routing: Routing, dtype: str, correction: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(weights of `dtype`, indices i32) [T, chosen] of experts by `logits` [T, experts].

    Scores are computed in f32; `correction` f32 [experts] is added to them for the choice alone.
    """
    logits = logits.cast("f32")
    scores = F.softmax(logits) if routing.scoring == "softmax" else F.sigmoid(logits)
    eligible = scores if correction is None else scores + correction
    if routing.groups > 1:
        eligible = _of_best_groups(eligible, routing)
    weights, indices = F.topk(eligible, chosen)
    if eligible is not scores:
        weights = F.gather_elements(scores, indices, dim=1)
    if routing.normalize:
        weights = weights / weights.sum(-1, keep=True)
    if routing.scale != 1:
        weights = weights * routing.scale
    return weights.cast(dtype).named("weights"), indices.named("chosen")


def _of_best_groups(scores: Tensor, routing: Routing) -> Tensor:
    """The scores [T, experts] of the best groups; those of others are below all scores."""
    grouped = scores.reshape(scores.shape[0], routing.groups, -1)
    best = F.topk(grouped, routing.group_best)[0].sum(-1)
    _, groups = F.topk(best, routing.chosen_groups)
    chosen = F.one_hot(groups, size=routing.groups, dtype="i32").sum(1).unsqueeze(2) > 0
    return F.where(chosen, grouped, _LOWEST).reshape(*scores.shape)


def mix_experts(
    experts: Callable[[Tensor], Tensor],
    tokens: Tensor,
    weights: Tensor,
    chosen: Tensor,
    count: int,
    *,
    local: int = 0,
    first: Tensor | None = None,
    capacity: DimLike = 0,
) -> tuple[Tensor, Tensor]:
    """(weighted sum of the chosen experts' outputs [T, H], slots of tokens) for tokens [T, H].

    `experts` maps [experts, slots, H] to the same. Of `count` experts, this rank has `local` (0:
    all) from number `first` i32[] on; then the sum is partial.
    """
    local = local or count
    slots = F.moe_slots(chosen, count, capacity=capacity).named("slots")
    queued = F.moe_dispatch(tokens, chosen, slots, local, first=first, capacity=capacity)
    done = experts(queued.named("queued"))
    return F.moe_combine(done, chosen, slots, weights, first=first).named("mixed"), slots

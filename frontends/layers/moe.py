"""Mixture of experts: a router, and gated feed-forwards of which each token uses a few."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import Error
from ...ir.dims import DimLike, product
from ...source import here
from .. import functional as F
from ..module import Module, StackedParameter
from ..tensor import Tensor
from .basic import Linear
from .mlp import GatedMLP, activation

Names = tuple[str, str, str]  # of gate, up and down projection of one expert in a checkpoint


class Experts(Module):
    """Gated feed-forwards without biases, each applied to its own tokens.

    gate and up [experts, intermediate_size, hidden_size], down [experts, hidden_size,
    intermediate_size]; a checkpoint stores each expert separately, as `0.<name>.weight`.
    """

    def __init__(
        self,
        experts: int,
        hidden_size: int,
        intermediate_size: int,
        act: str = "silu",
        names: Names = ("gate_proj", "up_proj", "down_proj"),
        dtype: str = "f32",
    ) -> None:
        inner, outer = (intermediate_size, hidden_size), (hidden_size, intermediate_size)
        gate, up, down = (f"{name}.weight" for name in names)
        self.gate = StackedParameter(experts, inner, gate, dtype)
        self.up = StackedParameter(experts, inner, up, dtype)
        self.down = StackedParameter(experts, outer, down, dtype)
        self.act = activation(act)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [experts, slots, hidden_size] to the same."""
        gated = self.act(tokens @ self.gate.transpose(1, 2))
        hidden = gated * (tokens @ self.up.transpose(1, 2))
        return hidden @ self.down.transpose(1, 2)


class MixtureOfExperts(Module):
    """The weighted sum of the `chosen` experts with the highest router scores, per token.

    The weights are the softmax probabilities of those experts, scaled to a sum of 1 if
    `normalize`. `shared_size` adds a gated feed-forward of that width for every token, times the
    sigmoid of its own gate if `shared_gate`. An expert has `capacity` slots per call; 0 means one
    for every token. Shazeer et al., 2017; Jiang et al., 2024 (Mixtral); names of parameters as in
    the checkpoints of Qwen2-MoE.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        experts: int,
        chosen: int,
        *,
        normalize: bool = True,
        act: str = "silu",
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
        self.gate = Linear(hidden_size, experts, False, dtype)
        self.experts = Experts(experts, hidden_size, intermediate_size, act, names, dtype)
        self.shared_expert = (
            GatedMLP(hidden_size, shared_size, act, dtype=dtype) if shared_size else None
        )
        self.shared_expert_gate = Linear(hidden_size, 1, False, dtype) if shared_gate else None
        self.count, self.chosen = experts, chosen
        self.normalize, self.capacity = normalize, capacity

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """x [..., hidden_size] to the same; with a capacity, to (the same, dropped i32[]).

        `dropped` counts the pairs of a token and an expert beyond the capacity, which contribute
        nothing.
        """
        tokens = x.reshape(product(x.shape[:-1]), x.shape[-1])
        scores = self.gate(tokens)
        weights, chosen = route(scores, self.chosen, self.normalize, tokens.dtype)
        mixed, slots = mix_experts(
            self.experts, tokens, weights, chosen, self.count, capacity=self.capacity
        )
        mixed = (mixed + self.share(tokens) if self.shared_expert else mixed).reshape(x.shape)
        return mixed if self.capacity == 0 else (mixed, (slots < 0).cast("i32").sum())

    def share(self, tokens: Tensor) -> Tensor:
        """The output of the shared expert for tokens [T, hidden_size]."""
        assert self.shared_expert is not None
        shared = self.shared_expert(tokens)
        gate = self.shared_expert_gate
        return shared if gate is None else F.sigmoid(gate(tokens)) * shared


def route(scores: Tensor, chosen: int, normalize: bool, dtype: str) -> tuple[Tensor, Tensor]:
    """(weights of `dtype`, indices i32) [T, chosen] of the highest `scores` [T, experts].

    The weights are softmax probabilities in f32, scaled to a sum of 1 if `normalize`.
    """
    weights, indices = F.topk(F.softmax(scores.cast("f32")), chosen)
    if normalize:
        weights = weights / weights.sum(-1, keep=True)
    return weights.cast(dtype).named("weights"), indices.named("chosen")


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

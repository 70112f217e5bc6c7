"""Layers with a recurrence over the sequence in place of attention: Mamba-2, gated delta nets.

They take states that replace a cache of keys and values, and have one size for any length: the last
inputs of each causal convolution, [B, width-1, channels], and f32 [B, heads, ., .] of the
recurrence. What checkpoints store as one product is a projection for each part here, and so are
convolutions, so that heads can be sharded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .. import functional as F
from ..module import Module, Parameter
from ..tensor import Tensor
from ..trace import Spec
from .basic import Linear, RmsNorm
from .mlp import activation

States = Mapping[str, Tensor]


@dataclass(frozen=True)
class RecurrentSizes:
    """The sizes of a recurrent layer.

    `heads` have `value_size` features; consecutive ones share one of the `groups` of keys of
    `key_size` features. `width` is that of the convolutions, `limits` are those of step sizes (none
    where empty).
    """

    heads: int
    groups: int
    key_size: int
    value_size: int
    width: int = 4
    bias: bool = False
    conv_bias: bool = False
    act: str = "silu"
    limits: tuple[float, ...] = ()

    @property
    def keys(self) -> int:
        """The number of features of all keys."""
        return self.groups * self.key_size

    @property
    def values(self) -> int:
        """The number of features of all values."""
        return self.heads * self.value_size

    def channels(self, part: str) -> int:
        """The number of features of a projection: x and v are values, all others keys."""
        return self.values if part in "xv" else self.keys


class CausalConv(Module):
    """A causal convolution of every channel over the sequence; weight [channels, 1, width]."""

    def __init__(self, channels: int, width: int, bias: bool, dtype: str = "f32") -> None:
        self.weight = Parameter((channels, 1, width), dtype)
        self.bias = Parameter((channels,), dtype) if bias else None

    def forward(self, x: Tensor, state: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [B, S, channels] to the same, and the state [B, width-1, channels] after it."""
        weight = self.weight.squeeze(1)
        y, state = F.short_conv(x, weight, state, bias=self.bias, lengths=lengths)
        return y, state


class Recurrent(Module):
    """Base of the layers: three projections with convolutions, a gate and step sizes per head.

    `parts` name those projections, in the order in which checkpoints join them.
    """

    parts: tuple[str, str, str]
    state: str  # the name of the state of the recurrence

    def __init__(self, hidden_size: int, sizes: RecurrentSizes, eps: float, dtype: str) -> None:
        for part in self.parts:
            channels = sizes.channels(part)
            setattr(self, f"{part}_proj", Linear(hidden_size, channels, sizes.bias, dtype))
            setattr(self, f"{part}_conv", CausalConv(channels, sizes.width, sizes.conv_bias, dtype))
        self.z_proj = Linear(hidden_size, sizes.values, sizes.bias, dtype)
        self.dt_proj = Linear(hidden_size, sizes.heads, sizes.bias, dtype)
        self.dt_bias = Parameter((sizes.heads,), "f32")
        self.A_log = Parameter((sizes.heads,), "f32")
        self.out_proj = Linear(sizes.values, hidden_size, sizes.bias, dtype)
        self.sizes, self.act = sizes, activation(sizes.act)

    @classmethod
    def states(cls, sizes: RecurrentSizes, dtype: str) -> dict[str, Spec]:
        """The states of a layer by the names that `forward` takes."""
        specs = {
            f"{part}_inputs": Spec(dtype, ("B", sizes.width - 1, sizes.channels(part)))
            for part in cls.parts
        }
        return specs | {cls.state: Spec("f32", ("B", sizes.heads, *cls.matrix(sizes)))}

    @staticmethod
    def matrix(sizes: RecurrentSizes) -> tuple[int, int]:
        """The shape of a head's state."""
        raise NotImplementedError

    def projected(
        self, x: Tensor, states: States, lengths: Tensor | None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The three parts [B, S, features] of x behind their convolutions, and the states after."""
        parts: list[Tensor] = []
        after: dict[str, Tensor] = {}
        for part in self.parts:
            name = f"{part}_inputs"
            projected = getattr(self, f"{part}_proj")(x)
            y, after[name] = getattr(self, f"{part}_conv")(projected, states[name], lengths)
            parts.append(self.act(y))
        return parts, after

    def by_head(self, values: Tensor) -> Tensor:
        """[B, S, values] as [B, S, heads, value_size]."""
        return values.reshape(*values.shape[:2], self.sizes.heads, self.sizes.value_size)

    def by_group(self, keys: Tensor) -> Tensor:
        """[B, S, keys] as [B, S, groups, key_size]."""
        return keys.reshape(*keys.shape[:2], self.sizes.groups, self.sizes.key_size)

    def steps(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of x [B, S, hidden_size]: step sizes f32 [B, S, heads], and A f32 [heads], negative."""
        steps = F.softplus(self.dt_proj(x).cast("f32") + self.dt_bias)
        low, high = self.sizes.limits or (0.0, math.inf)
        if low > 0 or high < math.inf:
            steps = F.clip(steps, low=low, high=high)
        return steps, -F.exp(self.A_log)


class Mamba2(Recurrent):
    """A selective state space with scalar decays and a gated norm. Dao & Gu, 2024."""

    parts = ("x", "b", "c")
    state = "scan"

    def __init__(self, hidden_size: int, sizes: RecurrentSizes, eps: float, dtype: str) -> None:
        super().__init__(hidden_size, sizes, eps, dtype)
        self.D = Parameter((sizes.heads,), "f32")
        self.norm_weight = Parameter((sizes.values,), dtype)
        self.eps = eps

    @staticmethod
    def matrix(sizes: RecurrentSizes) -> tuple[int, int]:
        """[value_size, key_size]."""
        return sizes.value_size, sizes.key_size

    def forward(
        self, x: Tensor, states: States, lengths: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """x [B, S, hidden_size] to the same, and the states after it."""
        (values, b, c), after = self.projected(x, states, lengths)
        steps, decay = self.steps(x)
        values, b, c = self.by_head(values), *map(self.by_group, (b, c))
        y, after[self.state] = F.selective_scan(
            values, steps, decay, b, c, states[self.state], d=self.D, lengths=lengths
        )
        gate = self.z_proj(x)
        return self.out_proj(self._normalized(y.reshape(*gate.shape), gate)), after

    def _normalized(self, y: Tensor, gate: Tensor) -> Tensor:
        """The RMS norm of every group of y * act(gate), as sums that ranks can share."""
        gated = y.cast("f32") * self.act(gate.cast("f32"))
        groups = gated.reshape(*y.shape[:2], self.sizes.groups, -1)
        mean = (groups * groups).sum(-1, keep=True) * (self.sizes.groups / self.sizes.values)
        normed = (groups * F.rsqrt(mean + self.eps)).reshape(*y.shape)
        return normed.cast(y.dtype) * self.norm_weight


class GatedDeltaNet(Recurrent):
    """The gated delta rule with normalized queries and keys. Yang et al., 2024."""

    parts = ("q", "k", "v")
    state = "delta"

    def __init__(self, hidden_size: int, sizes: RecurrentSizes, eps: float, dtype: str) -> None:
        super().__init__(hidden_size, sizes, eps, dtype)
        self.beta_proj = Linear(hidden_size, sizes.heads, sizes.bias, dtype)
        self.norm = RmsNorm(sizes.value_size, eps, dtype=dtype)

    @staticmethod
    def matrix(sizes: RecurrentSizes) -> tuple[int, int]:
        """[key_size, value_size]."""
        return sizes.key_size, sizes.value_size

    def forward(
        self, x: Tensor, states: States, lengths: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """x [B, S, hidden_size] to the same, and the states after it."""
        (q, k, v), after = self.projected(x, states, lengths)
        steps, decay = self.steps(x)
        q, k = self._unit(q, self.sizes.key_size**-0.5), self._unit(k, 1.0)
        beta, values = F.sigmoid(self.beta_proj(x)), self.by_head(v)
        y, after[self.state] = F.gated_delta(
            values, q, k, steps * decay, beta, states[self.state], lengths=lengths
        )
        gate = self.act(self.z_proj(x).cast("f32"))
        normed = self.norm(y).reshape(*gate.shape).cast("f32")
        return self.out_proj((normed * gate).cast(y.dtype)), after

    def _unit(self, x: Tensor, length: float) -> Tensor:
        """x [B, S, keys] as f32 [B, S, groups, key_size], vectors of this length but for 1e-6."""
        size = self.sizes.key_size
        weight = F.full(value=length * size**-0.5, shape=(size,), dtype="f32")
        return F.rms_norm(self.by_group(x.cast("f32")), weight, eps=1e-6 / size)

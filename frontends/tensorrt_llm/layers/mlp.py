"""Feed-forward layers: plain, gated, and gated with one product for both branches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...layers.mlp import find_activation
from ..api import api, release
from ..arithmetic import unwrapped
from ..errors import ScriptError
from ..functional.basic import ACT2FN, GATED_ACT_2_ACT
from ..module import Module
from ..quantization import QuantMode
from .linear import NO_MODE, ColumnLinear, RowLinear, refuse_fp8


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
        refuse_fp8(self.quant_mode, 9)
        self.act = find_activation(self.hidden_act, ACT2FN)
        names = "bias", "dtype", "tp_group", "tp_size"
        common: dict[str, Any] = {name: getattr(self, name) for name in names}
        self.make_branches(
            lambda features: ColumnLinear(self.hidden_size, features, gather_output=False, **common)
        )
        common["is_expert"] = self.is_expert
        self.proj = RowLinear(self.ffn_hidden_size, self.hidden_size, **common)

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

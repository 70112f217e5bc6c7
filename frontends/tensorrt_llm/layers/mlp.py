"""Feed-forward layers: plain, gated, and gated with one product for both branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ....errors import Error
from ....source import here
from ... import functional as F
from ...layers.mlp import find_activation
from ...tensor import Tensor
from ..api import api, release
from ..arithmetic import unwrapped
from ..functional.basic import ACT2FN, GATED_ACT_2_ACT
from ..functional.collectives import group_of
from ..module import Module
from ..quantization import QuantMode
from .linear import NO_MODE, ColumnLinear, RowLinear, gathered
from .norms import LayerNorm
from .quantized import FP8Linear, FP8RowLinear

DOUBLE = (*GATED_ACT_2_ACT, "gegelu")  # activations that halve the features


@api("layers.mlp.MLP", inner=True)
@dataclass(eq=False, repr=False)
class MLP(Module):
    """proj(act(fc(x))): one sum over the group. An `inner_layernorm` of all features may come
    before proj. fc has twice the outputs for the gated activations, such as swiglu."""

    linear: ClassVar[tuple[Any, Any]] = ColumnLinear, RowLinear

    hidden_size: int
    ffn_hidden_size: int
    hidden_act: str
    bias: bool = True
    dtype: Any = None
    tp_group: Sequence[int] | None = None
    tp_size: int = 1
    quant_mode: QuantMode = NO_MODE
    inner_layernorm: Any = False
    eps: float = 1e-5
    is_expert: bool = False

    def __post_init__(self) -> None:
        self.act = find_activation(self.hidden_act, ACT2FN)
        self.use_fp8_qdq = self.quant_mode.has_fp8_qdq() and release() < 10
        self.column, row = (FP8Linear, FP8RowLinear) if self.use_fp8_qdq else self.linear
        has_norm = vars(self).pop("inner_layernorm")
        self.make_branches()
        self.inner_layernorm = None
        if has_norm:
            self.inner_layernorm = LayerNorm(self.ffn_hidden_size, dtype=self.dtype, eps=self.eps)
        more = {} if self.use_fp8_qdq else self.options() | {"is_expert": self.is_expert}
        self.proj = row(self.ffn_hidden_size, self.hidden_size, **self._common, **more)

    def options(self) -> dict[str, Any]:
        """Further arguments of the linear layers."""
        return {}

    @property
    def _common(self) -> dict[str, Any]:
        names = "bias", "dtype", "tp_group", "tp_size"
        return {name: getattr(self, name) for name in names}

    def make_branches(self) -> None:
        """Make the layers before the activation."""
        self.fc = self.branch(self.ffn_hidden_size * (2 if self.hidden_act in DOUBLE else 1))

    def branch(self, features: int) -> Any:
        """A column-parallel layer from hidden_size to `features`."""
        more = {} if self.use_fp8_qdq else self.options()
        return self.column(self.hidden_size, features, gather_output=False, **self._common, **more)

    def inner(self, x: Any, gegelu_limit: float | None) -> Any:
        """The features before proj, those of this rank."""
        y = self.fc(x)
        return self.activated(y, *([gegelu_limit] if self.hidden_act == "gegelu" else []))

    def activated(self, y: Any, *limit: Any) -> Any:
        """act(y)."""
        return unwrapped(self.act(y, *limit))

    def normed(self, x: Tensor) -> Tensor:
        """The inner_layernorm over the features of all ranks, of which each keeps its own."""
        if self.inner_layernorm is None:
            return x
        if self.tp_group is None or self.tp_size == 1:
            return self.inner_layernorm(x)
        over, part = group_of(self.tp_group), x.shape[-1]
        every = self.inner_layernorm(gathered(x, self.tp_group))
        apart = every.reshape((*every.shape[:-1], over.size, part))
        return F.gather(apart, over.position(), dim=-2)

    def forward(
        self,
        hidden_states: Any,
        gegelu_limit: float | None = None,
        all_reduce_params: Any = None,
        reduce_fusion_params: Any = None,
    ) -> Any:
        """hidden_states [..., hidden_size] to the same; with a fusion_op of `all_reduce_params` to
        (the normalized sum, the sum)."""
        inner = self.normed(self.inner(hidden_states, gegelu_limit))
        params = all_reduce_params or reduce_fusion_params
        return self.proj(inner, **({"all_reduce_params": params} if params else {}))


@api("layers.mlp.GatedMLP", inner=True)
@dataclass(eq=False, repr=False)
class GatedMLP(MLP):
    """proj(act(fc(x)) * gate(x)): fc is Hugging Face's gate_proj, gate its up_proj."""

    def make_branches(self) -> None:
        super().make_branches()
        self.gate = self.branch(self.ffn_hidden_size)

    def inner(self, x: Any, gegelu_limit: float | None) -> Any:
        return super().inner(x, gegelu_limit) * self.gate(x)


@api("layers.mlp.FusedGatedMLP", inner=True)
@dataclass(eq=False, repr=False)
class FusedGatedMLP(GatedMLP):
    """GatedMLP with one product for both branches.

    Per rank the weight of fused_fc [2*ffn_hidden_size/tp_size, hidden_size] has the rows of gate,
    then those of fc. Up to 0.7 the parameters are those of GatedMLP, which irc fuses itself.
    """

    def make_branches(self) -> None:
        if self.hidden_act not in ("silu", "gelu"):
            raise Error(
                f"FusedGatedMLP: expected the activation silu or gelu, found {self.hidden_act!r}; "
                "use GatedMLP, which irc fuses where it can",
                loc=here(),
            )
        if release() < 8:
            super().make_branches()
        else:
            self.fused_fc = self.branch(2 * self.ffn_hidden_size)

    def inner(self, x: Any, gegelu_limit: float | None) -> Any:
        if release() < 8:
            return super().inner(x, gegelu_limit)
        y: Any = self.fused_fc(x)
        gate, fc = y.split(y.shape[-1] // 2)
        return self.activated(fc) * gate

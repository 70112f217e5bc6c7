"""Feed-forward layers: plain, gated, and gated with one product for both branches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....errors import Error
from ....source import here
from ... import functional as F
from ...layers.mlp import find_activation
from ..context import dialect, signatures
from ..functional.basic import ACT2FN, GATED_ACT_2_ACT
from ..functional.collectives import AllReduceParams, allgather, group_of
from ..module import Module
from ..quantization import QuantMode
from ..tensor import Tensor, unwrap, wrap
from .linear import ColumnLinear, RowLinear, refuse_lora
from .norms import LayerNorm

_A = "hidden_size, ffn_hidden_size, hidden_act, bias, dtype, tp_group, tp_size, quant_mode"
_B = f"{_A}, inner_layernorm, eps, is_expert"
DOUBLE = (*GATED_ACT_2_ACT, "gegelu")  # activations that halve the features


class MLP(Module):
    """proj(act(fc(x))): one sum over the group. An `inner_layernorm` of all features may come
    before proj. fc has twice the outputs for the gated activations, such as swiglu."""

    column: Any = ColumnLinear
    row: Any = RowLinear
    takes_mode = False  # whether these take the quant_mode

    @signatures(a=f"{_A}, instance_id", b=_B)
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        hidden_act: str,
        bias: bool = True,
        dtype: Any = None,
        tp_group: Sequence[int] | None = None,
        tp_size: int = 1,
        quant_mode: QuantMode = QuantMode(0),  # noqa: B008
        inner_layernorm: bool = False,
        eps: float = 1e-5,
        is_expert: bool = False,
        instance_id: int | None = None,
        max_lora_rank: int | None = None,
        **extra: Any,
    ) -> None:
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.hidden_act, self.dtype, self.quant_mode = hidden_act, dtype, quant_mode
        self.act = find_activation(hidden_act, ACT2FN)
        self.tp_group, self.tp_size, self.eps = tp_group, tp_size, eps
        self.has_bias = bias
        self.extra = extra | ({"quant_mode": quant_mode} if self.takes_mode else {})
        self.fc = self.branch(ffn_hidden_size * (2 if hidden_act in DOUBLE else 1))
        self.inner_layernorm = (
            LayerNorm(normalized_shape=ffn_hidden_size, dtype=dtype, eps=eps)
            if inner_layernorm
            else None
        )
        ids = {"instance_id": instance_id, "is_expert": is_expert}
        self.proj = self.row(
            in_features=ffn_hidden_size,
            out_features=hidden_size,
            bias=bias,
            dtype=dtype,
            tp_group=tp_group,
            tp_size=tp_size,
            **ids,
            **self.extra,
        )

    def branch(self, features: int) -> Any:
        """A column-parallel layer from hidden_size to `features`."""
        return self.column(
            in_features=self.hidden_size,
            out_features=features,
            bias=self.has_bias,
            dtype=self.dtype,
            tp_group=self.tp_group,
            tp_size=self.tp_size,
            gather_output=False,
            **self.extra,
        )

    def inner(self, x: Tensor, gegelu_limit: float | None) -> Tensor:
        """The features before proj, those of this rank."""
        y = self.fc(x)
        return self.act(y, gegelu_limit) if self.hidden_act == "gegelu" else self.act(y)

    def normed(self, x: Tensor) -> Tensor:
        """The inner_layernorm over the features of all ranks, of which each keeps its own."""
        if self.inner_layernorm is None:
            return x
        if self.tp_group is None or self.tp_size == 1:
            return self.inner_layernorm(x)
        over, part = group_of(self.tp_group), unwrap(x).shape[-1]
        every = unwrap(self.inner_layernorm(allgather(x, self.tp_group, gather_dim=-1)))
        apart = every.reshape((*every.shape[:-1], over.size, part))
        return wrap(F.gather(apart, over.position(), dim=-2))

    @signatures(
        a="hidden_states, workspace, lora_layer_params",
        b="hidden_states, lora_layer_params, gegelu_limit, all_reduce_params",
    )
    def forward(
        self,
        hidden_states: Tensor,
        lora_layer_params: Any = None,
        gegelu_limit: float | None = None,
        all_reduce_params: AllReduceParams | None = None,
        workspace: Tensor | None = None,
    ) -> Any:
        """hidden_states [..., hidden_size] to the same; with a fusion_op of `all_reduce_params` to
        (the normalized sum, the sum)."""
        refuse_lora(lora_layer_params)
        inner = self.normed(self.inner(hidden_states, gegelu_limit))
        params = {} if all_reduce_params is None else {"all_reduce_params": all_reduce_params}
        return self.proj(inner, **params)


class GatedMLP(MLP):
    """proj(act(fc(x)) * gate(x)): fc is Hugging Face's gate_proj, gate its up_proj."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate = self.branch(self.ffn_hidden_size)

    def inner(self, x: Tensor, gegelu_limit: float | None) -> Tensor:
        return super().inner(x, gegelu_limit) * self.gate(x)


class FusedGatedMLP(GatedMLP):
    """GatedMLP with one product for both branches.

    Per rank the weight of fused_fc [2*ffn_hidden_size/tp_size, hidden_size] has the rows of gate,
    then those of fc.

    In dialect A the parameters are those of GatedMLP, which irc fuses itself.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.hidden_act not in ("silu", "gelu"):
            raise Error(
                f"FusedGatedMLP: expected the activation silu or gelu, found {self.hidden_act!r}; "
                "use GatedMLP, which irc fuses where it can",
                loc=here(),
            )
        self.is_fused = dialect() == "B"
        if self.is_fused:
            del self.fc, self.gate
            self.fused_fc = self.branch(2 * self.ffn_hidden_size)

    def inner(self, x: Tensor, gegelu_limit: float | None) -> Tensor:
        if not self.is_fused:
            return super().inner(x, gegelu_limit)
        y = unwrap(self.fused_fc(x))
        gate, fc = y.split(y.shape[-1] // 2)
        return self.act(wrap(fc)) * wrap(gate)

"""Decoders of which some layers have a recurrence with fixed states in place of attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import Error
from ..layers.recurrent import Recurrent, RecurrentSizes
from ..tensor import Tensor
from .config_reader import ConfigReader
from .decoder import Call, DecoderConfig, DecoderLayer
from .language_model import States
from .stored import Stored, in_turn, joined


@dataclass(frozen=True)
class HybridConfig(DecoderConfig):
    """A decoder whose layers have a `mixer` of the sizes `recurrent`, or attention where None."""

    mixer: type[Recurrent] | None = None
    recurrent: RecurrentSizes = field(default_factory=lambda: RecurrentSizes(1, 1, 1, 1))

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = self.recurrent
        if min(sizes.heads, sizes.groups, sizes.key_size, sizes.value_size, sizes.width - 1) < 1:
            raise Error(f"config.json has a recurrence with a size below 1: {sizes}")
        if sizes.heads % sizes.groups:
            raise Error(
                f"config.json has {sizes.heads} heads of a recurrence, which cannot share "
                f"{sizes.groups} groups of keys evenly"
            )


class HybridLayer(DecoderLayer):
    """A recurrence or attention, and a feed-forward."""

    @staticmethod
    def states(config: Any, dtype: str) -> States:
        """The states of a layer with these options."""
        if config.mixer is None:
            return DecoderLayer.states(config, dtype)
        return config.mixer.states(config.recurrent, dtype)

    def add_attention(self, config: Any, dtype: str) -> None:
        """Create the recurrence or the attention."""
        kind, self.mixer = config.mixer, None
        if kind is None:
            super().add_attention(config, dtype)
        else:
            self.mixer = kind(config.hidden_size, config.recurrent, config.norm_eps, dtype)

    def attend(
        self, x: Tensor, call: Call, states: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """x [B, S, hidden_size] to the same, and the states after this call."""
        if self.mixer is None:
            return super().attend(x, call, states)
        return self.mixer(x, states, call.lengths)


def read_mamba2(config: ConfigReader, prefix: str) -> RecurrentSizes:
    """The sizes of Mamba2 by keys with this prefix."""
    config.ignore(f"{prefix}chunk_size {prefix}d_head")
    heads, values = config.integer(f"{prefix}n_heads", 128), config.integer(f"{prefix}expand", 2)
    return RecurrentSizes(
        heads=heads,
        groups=config.integer(f"{prefix}n_groups", 1),
        key_size=config.integer(f"{prefix}d_state", 256),
        value_size=values * config.integer("hidden_size") // max(1, heads),
        width=config.integer(f"{prefix}d_conv", 4),
        bias=config.flag(f"{prefix}proj_bias"),
        conv_bias=config.flag(f"{prefix}conv_bias", True),
        act=config.word("hidden_act", "silu"),
        limits=config.numbers("time_step_limit"),
    )


def mamba2_stored(own: str, key: str, sizes: RecurrentSizes) -> list[Stored]:
    """The parameters of Mamba2 below `own`, as checkpoints have them below `key`."""
    parts = (sizes.values, sizes.keys, sizes.keys)
    products = in_turn(sizes.values, *parts, sizes.heads)
    return [
        *joined(own, "z_proj x_proj b_proj c_proj dt_proj", f"{key}in_proj", products),
        *joined(own, "x_conv b_conv c_conv", f"{key}conv1d", in_turn(*parts)),
        Stored(f"{own}norm_weight", f"{key}norm.weight"),
        Stored(own[:-1], key[:-1]),
    ]

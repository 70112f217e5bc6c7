"""Granite 3 with mixtures of experts, whose gate and up projections are joined. IBM, 2024."""

from __future__ import annotations

from collections.abc import Sequence

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, register_decoder
from ..mixture import read_mixture
from ..stored import LAYER, MLP, Stored, in_turn, joined
from .granite import read_granite


def _read(config: ConfigReader) -> DecoderConfig:
    mixture = read_mixture(config, "intermediate_size", "num_local_experts", (8, 2))
    return read_granite(config, mixture=mixture)


def stored_granite_moe(config: DecoderConfig) -> Sequence[Stored]:
    """The experts of a Granite and their router, if it has any."""
    if config.mixture is None:
        return []
    key, width = f"{LAYER}block_sparse_moe.", config.mixture.intermediate_size
    widths = in_turn(width, width)
    return [
        *joined(f"{MLP}experts.", "gate up", f"{key}input_linear.weight", widths, dim=1),
        Stored(f"{MLP}experts.down", f"{key}output_linear.weight"),
        Stored(f"{MLP}gate", f"{key}router.layer"),
    ]


GRANITE_MOE = register_decoder(
    "granitemoe", ("GraniteMoeForCausalLM",), _read, stored=stored_granite_moe
)

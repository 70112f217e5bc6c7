"""Granite 3 with mixtures of experts, whose gate and up projections are joined. IBM, 2024."""

from __future__ import annotations

from collections.abc import Sequence

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, register_decoder
from ..hybrid import parts_of
from ..mixture import read_mixture
from ..stored import Stored
from .granite import read_granite


def _read(config: ConfigReader) -> DecoderConfig:
    mixture = read_mixture(config, "intermediate_size", "num_local_experts", (8, 2))
    return read_granite(config, mixture=mixture)


def _stored(config: DecoderConfig) -> Sequence[Stored]:
    own, stored = "model.layers.*.mlp.", "model.layers.*.block_sparse_moe."
    joined, widths = f"{stored}input_linear.weight", [config.intermediate_size] * 2
    return [
        *parts_of(f"{own}experts.", ("gate", "up"), joined, widths, 1),
        Stored(f"{own}experts.down", f"{stored}output_linear.weight"),
        Stored(f"{own}gate", f"{stored}router.layer"),
    ]


GRANITE_MOE = register_decoder("granitemoe", ("GraniteMoeForCausalLM",), _read, stored=_stored)

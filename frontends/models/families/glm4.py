"""GLM-4 of 2025: a GLM with norms before and behind attention and feed-forward. GLM Team, 2025."""

from __future__ import annotations

from collections.abc import Sequence

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, register_decoder
from ..stored import Stored, renamed
from .glm import read_glm, stored_glm

_NAMES = {
    "attention_output_norm": "post_self_attn_layernorm",
    "feed_forward_output_norm": "post_mlp_layernorm",
}


def _read(config: ConfigReader) -> DecoderConfig:
    return read_glm(config, block="sandwich")


def _stored(config: DecoderConfig) -> Sequence[Stored]:
    return [*stored_glm(config), *renamed(_NAMES)]


GLM4 = register_decoder("glm4", ("Glm4ForCausalLM",), _read, stored=_stored)

"""OLMoE: mixtures of experts, and norms over all heads. Muennighoff et al., 2024."""

from __future__ import annotations

from ...layers import Routing
from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_decoder, register_decoder
from ..mixture import read_mixture


def _read(config: ConfigReader) -> DecoderConfig:
    config.require("clip_qkv", None, "irc clips queries and keys before their norm only")
    routing = Routing(config.flag("norm_topk_prob"))
    return read_decoder(
        config,
        defaults={"max_position_embeddings": 4096, "norm_eps": 1e-5},
        attention_bias=config.flag("attention_bias"),
        qk_norm="all_heads",
        mixture=read_mixture(config, "intermediate_size", routing=routing),
    )


OLMOE = register_decoder("olmoe", ("OlmoeForCausalLM",), _read)

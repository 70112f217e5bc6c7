"""StableLM: layer norms, and rope of a quarter of a head. Bellagente et al., 2024."""

from __future__ import annotations

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_decoder, register_decoder


def _read(config: ConfigReader) -> DecoderConfig:
    config.require("qk_layernorm", False, "irc has no layer norms that are stored head by head")
    return read_decoder(
        config,
        keys={"norm_eps": "layer_norm_eps"},
        defaults={"norm_eps": 1e-5, "max_position_embeddings": 4096, "num_key_value_heads": 32},
        rotary_fraction=0.25,
        norm="layer",
        block="parallel" if config.flag("use_parallel_residual") else "pre",
        qkv_bias=config.flag("use_qkv_bias"),
    )


STABLELM = register_decoder("stablelm", ("StableLmForCausalLM",), _read)

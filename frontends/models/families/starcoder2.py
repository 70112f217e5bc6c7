"""StarCoder2: layer norms, and a feed-forward without gate. Lozhkov et al., 2024."""

from __future__ import annotations

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_decoder, register_decoder
from ..stored import renamed

_STORED = renamed({"mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"})


def _read(config: ConfigReader) -> DecoderConfig:
    config.ignore("residual_dropout embedding_dropout layer_norm_epsilon")
    config.require("mlp_type", "default", "expected default")
    config.require("norm_type", "layer_norm", "expected layer_norm")
    defaults = {
        "hidden_act": "gelu_pytorch_tanh",
        "norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
    return read_decoder(
        config,
        keys={"norm_eps": "norm_epsilon"},
        defaults=defaults,
        sliding_window=config.integer("sliding_window", 0),
        norm="layer",
        gated=False,
        biases=config.flag("use_bias", True),
    )


STARCODER2 = register_decoder("starcoder2", ("Starcoder2ForCausalLM",), _read, stored=_STORED)

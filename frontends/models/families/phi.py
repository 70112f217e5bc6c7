"""Phi-1, Phi-1.5 and Phi-2: attention and feed-forward of one norm. Gunasekar et al., 2023."""

from __future__ import annotations

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_decoder, register_decoder
from ..stored import Stored, renamed

_NAMES = {
    "self_attn.o_proj": "self_attn.dense",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
}
_STORED = [Stored("model.norm", "model.final_layernorm"), *renamed(_NAMES)]


def _read(config: ConfigReader) -> DecoderConfig:
    return read_decoder(
        config,
        keys={"norm_eps": "layer_norm_eps"},
        defaults={"hidden_act": "gelu_new", "norm_eps": 1e-5, "max_position_embeddings": 2048},
        rotary_fraction=0.5,
        norm="layer",
        block="parallel",
        gated=False,
        biases=True,
        head_bias=True,
        qk_norm="head" if config.flag("qk_layernorm") else "",
    )


PHI = register_decoder("phi", ("PhiForCausalLM",), _read, stored=_STORED)

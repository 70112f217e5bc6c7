"""OPT: learned positions and feed-forwards with ReLU. Zhang et al., 2022."""

from __future__ import annotations

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_decoder, register_decoder
from ..stored import Stored, renamed

_KEYS = {"intermediate_size": "ffn_dim", "hidden_act": "activation_function"}
_NAMES = {
    "input_layernorm": "self_attn_layer_norm",
    "post_attention_layernorm": "final_layer_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
}
_STORED = [
    *renamed(_NAMES, "model.decoder.layers.*."),
    Stored("model.norm", "model.decoder.final_layer_norm"),
    Stored("model", "model.decoder"),
]
_OFFSET = 2  # rows of the table of positions before that of position 0


def _read(config: ConfigReader) -> DecoderConfig:
    config.ignore("dropout layerdrop init_std activation_dropout")
    config.require("do_layer_norm_before", True, "irc has OPT with norms before its layers only")
    config.require("_remove_final_layer_norm", False, "irc has OPT with a last norm only")
    config.require("enable_bias", True, "irc has OPT with biases only")
    config.require("layer_norm_elementwise_affine", True, "irc has OPT with weights of norms only")
    hidden = config.integer("hidden_size")
    config.require("word_embed_proj_dim", hidden, "irc projects no embeddings of another size")
    return read_decoder(
        config,
        keys=_KEYS,
        defaults={"hidden_act": "relu", "tie_word_embeddings": True},
        norm="layer",
        norm_eps=1e-5,
        gated=False,
        rope=None,
        learned_positions=config.integer("max_position_embeddings") + _OFFSET,
        position_offset=_OFFSET,
        biases=True,
    )


OPT = register_decoder(
    "opt", ("OPTForCausalLM",), _read, stored=_STORED, prefixes=("model.decoder.", "decoder.")
)

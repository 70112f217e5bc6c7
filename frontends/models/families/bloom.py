"""BLOOM: ALiBi in place of positions, and a norm of embeddings. Le Scao et al., 2022."""

from __future__ import annotations

from collections.abc import Sequence

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_decoder, register_decoder
from ..stored import Stored, megatron_layers

_KEYS = {
    "hidden_size": "hidden_size|n_embed",
    "num_hidden_layers": "n_layer|num_hidden_layers",
    "num_attention_heads": "n_head|num_attention_heads",
    "max_position_embeddings": "seq_length",
    "norm_eps": "layer_norm_epsilon",
}


def _read(config: ConfigReader) -> DecoderConfig:
    config.ignore("offset_alibi skip_bias_add skip_bias_add_qkv slow_but_exact n_inner")
    config.ignore("attention_softmax_in_fp32 masked_softmax_fusion hidden_dropout_prob")
    config.ignore("unk_token_id pretraining_pp")
    reason = "irc adds the input of a norm to its layer, not the output"
    config.require("apply_residual_connection_post_layernorm", False, reason)
    hidden = config.integer(config.key(_KEYS["hidden_size"]))
    return read_decoder(
        config,
        keys=_KEYS,
        defaults={"norm_eps": 1e-5, "max_position_embeddings": 2048, "tie_word_embeddings": True},
        intermediate_size=4 * hidden,
        hidden_act="gelu_tanh",
        norm="layer",
        gated=False,
        rope=None,
        attention={"alibi": 8.0},
        embedding_norm=True,
        biases=True,
    )


def _stored(config: DecoderConfig) -> Sequence[Stored]:
    return [
        Stored("model.embed_tokens", "transformer.word_embeddings"),
        Stored("model.embedding_norm", "transformer.word_embeddings_layernorm"),
        Stored("model.norm", "transformer.ln_f"),
        *megatron_layers(config, "transformer.h.*.", "self_attention"),
    ]


BLOOM = register_decoder(
    "bloom", ("BloomForCausalLM",), _read, stored=_stored, prefixes=("transformer.", "")
)

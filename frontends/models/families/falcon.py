"""Falcon: attention and feed-forward side by side, few key-value heads. Almazrouei et al., 2023."""

from __future__ import annotations

from collections.abc import Sequence

from ..config_reader import ConfigReader
from ..decoder import Block, DecoderConfig, read_decoder, register_decoder
from ..stored import Stored, megatron_layers, renamed

_KEYS = {
    "intermediate_size": "ffn_hidden_size",
    "num_hidden_layers": "num_hidden_layers|n_layer",
    "num_attention_heads": "num_attention_heads|n_head",
    "hidden_act": "activation",
    "norm_eps": "layer_norm_epsilon",
}
_TWO_NORMS = renamed(
    {"input_layernorm": "ln_attn", "post_attention_layernorm": "ln_mlp"}, "transformer.h.*."
)


def _read(config: ConfigReader) -> DecoderConfig:
    config.ignore("apply_residual_connection_post_layernorm")
    config.require("alibi", False, "irc has Falcon with rope only")
    heads = config.integer(config.key(_KEYS["num_attention_heads"]))
    grouped = config.flag("new_decoder_architecture")
    kv_heads = 1 if config.flag("multi_query", True) else heads
    stated = config.integer(config.key("num_kv_heads|n_head_kv"), heads)
    return read_decoder(
        config,
        keys=_KEYS,
        defaults={
            "hidden_act": "gelu",
            "norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
            "intermediate_size": 4 * config.integer("hidden_size"),
        },
        num_key_value_heads=stated if grouped else kv_heads,
        norm="layer",
        block=_block(config, grouped),
        gated=False,
        biases=config.flag("bias"),
    )


def _block(config: ConfigReader, grouped: bool) -> Block:
    norms = config.integer("num_ln_in_parallel_attn", 2 if grouped else 1)
    if not (config.flag("parallel_attn", True) or grouped):
        return "pre"
    return "parallel_two_norms" if grouped and norms == 2 else "parallel"


def _stored(config: DecoderConfig) -> Sequence[Stored]:
    return [
        Stored("model.embed_tokens", "transformer.word_embeddings"),
        Stored("model.norm", "transformer.ln_f"),
        *(_TWO_NORMS if config.block == "parallel_two_norms" else []),
        *megatron_layers(config, "transformer.h.*.", "self_attention"),
    ]


FALCON = register_decoder("falcon", ("FalconForCausalLM",), _read, stored=_stored)

"""GPT-2: learned positions, and weights that are stored [in, out]. Radford et al., 2019."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_decoder, register_decoder
from ..stored import ATTENTION, QKV, Stored, in_turn, joined, renamed

_KEYS = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "norm_eps": "layer_norm_epsilon",
}
_NAMES = {
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
}


def read_gpt2(config: ConfigReader, **options: Any) -> DecoderConfig:
    """The sizes of a model with the keys of GPT-2."""
    summary = "type use_proj activation proj_to_labels first_dropout"  # of other heads
    config.ignore(" ".join(f"summary_{key}" for key in summary.split()))
    config.ignore("n_ctx attn_pdrop")
    defaults = {
        "hidden_act": "gelu_new",
        "norm_eps": 1e-5,
        "intermediate_size": 4 * config.integer("n_embd"),
    }
    return read_decoder(config, keys=_KEYS, defaults=defaults, norm="layer", gated=False, **options)


def _read(config: ConfigReader) -> DecoderConfig:
    config.require("scale_attn_weights", True, "irc scales the scores by 1/sqrt(head size)")
    return read_gpt2(
        config,
        rope=None,
        learned_positions=config.integer("n_positions"),
        biases=True,
        tie_word_embeddings=config.flag("tie_word_embeddings", True),
    )


def _stored(config: DecoderConfig) -> Sequence[Stored]:
    layer, parts = "transformer.h.*.", in_turn(*[config.hidden_size] * 3)
    return [
        Stored("model.embed_tokens", "transformer.wte"),
        Stored("model.embed_positions", "transformer.wpe"),
        Stored("model.norm", "transformer.ln_f"),
        *joined(ATTENTION, QKV, f"{layer}attn.c_attn", parts, transposed=True),
        *renamed(_NAMES, layer, transposed=True),  # vectors are not
    ]


GPT2 = register_decoder(
    "gpt2", ("GPT2LMHeadModel",), _read, stored=_stored, prefixes=("transformer.", "")
)

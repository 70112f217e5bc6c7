"""MPT: ALiBi in place of positions, and no biases. MosaicML, 2023."""

from __future__ import annotations

from collections.abc import Sequence

from ..config_reader import HARMLESS, ConfigReader
from ..decoder import DecoderConfig, read_decoder, register_decoder
from ..stored import ATTENTION, QKV, Stored, in_turn, joined, renamed

_KEYS = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "max_position_embeddings": "max_seq_len",
    "norm_eps": "layer_norm_epsilon",
}
_NAMES = {
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
    "self_attn.o_proj": "attn.out_proj",
    "mlp": "ffn",
}


def _read(config: ConfigReader) -> DecoderConfig:
    config.ignore("emb_pdrop init_config init_device learned_pos_emb norm_type verbose")
    config.ignore("embedding_fraction tokenizer_name")
    config.require("no_bias", True, "irc has MPT without biases only")
    config.require("logit_scale", None, "irc scales no logits of MPT")
    attention = ConfigReader(config.inner("attn_config"), "config.json: attn_config")
    attention.ignore("attn_impl attn_pdrop attn_uses_sequence_id model_type softmax_scale")
    attention.require("attn_type", "multihead_attention", "irc has MPT with all heads only")
    attention.require("alibi", True, "irc has MPT with ALiBi only")
    attention.require("softmax_scale", None, "irc scales scores by 1/sqrt(head size)")
    attention.require("qk_ln", False, "irc has MPT without norms of queries and keys only")
    attention.require("prefix_lm", False, "irc has causal MPT only")
    heads, hidden = config.integer("n_heads"), config.integer("d_model")
    if heads & (heads - 1):
        raise config.error("n_heads", "irc has MPT with a power of two of heads only")
    sizes = read_decoder(
        config,
        keys=_KEYS,
        defaults={"max_position_embeddings": 2048, "norm_eps": 1e-5, "tie_word_embeddings": True},
        intermediate_size=config.integer("expansion_ratio", 4) * hidden,
        hidden_act="gelu",
        norm="layer",
        norm_bias=False,
        gated=False,
        rope=None,
        attention={
            "alibi": float(attention.integer("alibi_bias_max", 8)),
            "clip": attention.number("clip_qkv", 0.0),
        },
    )
    attention.finish("MPT", HARMLESS)
    return sizes


def _stored(config: DecoderConfig) -> Sequence[Stored]:
    size = config.hidden_size
    return [
        Stored("model.embed_tokens", "transformer.wte"),
        Stored("model.norm", "transformer.norm_f"),
        *renamed(_NAMES, "transformer.blocks.*."),
        *joined(ATTENTION, QKV, "transformer.blocks.*.attn.Wqkv", in_turn(size, size, size)),
    ]


MPT = register_decoder("mpt", ("MptForCausalLM",), _read, stored=_stored)

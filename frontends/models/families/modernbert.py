"""ModernBERT: rotary positions, and near tokens only in most layers. Warner et al., 2024."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config_reader import ConfigReader
from ..decoder import read_layer_types, window_types
from ..encoder import EncoderConfig, read_encoder, register_text_encoder
from ..heads import SENTENCE_POOLS, Head, first_token, text_heads
from ..rope_config import read_rope
from ..stored import QKV, Stored, in_turn, joined, renamed

_NAMES = {
    "embed_tokens": "embeddings.tok_embeddings",
    "embedding_norm": "embeddings.norm",
    "layers.*.input_layernorm": "layers.*.attn_norm",
    "layers.*.self_attn.o_proj": "layers.*.attn.Wo",
    "layers.*.post_attention_layernorm": "layers.*.mlp_norm",
    "layers.*.mlp.down_proj": "layers.*.mlp.Wo",
    "norm": "final_norm",
}
_WITHOUT_EFFECT = """
    embedding_dropout mlp_dropout initializer_cutoff_factor deterministic_flash_attn
    reference_compile repad_logits_with_grad sparse_prediction sparse_pred_ignore_index
    layer_norm_eps position_embedding_type
"""


def _stored(config: EncoderConfig) -> list[Stored]:
    layer, size, width = "encoder.layers.*.", config.hidden_size, config.intermediate_size
    return [
        *renamed(_NAMES, "", "encoder."),
        *joined(f"{layer}self_attn.", QKV, "layers.*.attn.Wqkv", in_turn(size, size, size)),
        *joined(f"{layer}mlp.", "gate_proj up_proj", "layers.*.mlp.Wi", in_turn(width, width)),
    ]


def _heads(config: ConfigReader) -> dict[str, Head]:
    """A dense layer with a norm in front of every output."""
    pooling = config.word("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise config.error("classifier_pooling", "expected cls or mean")
    tokens = Head(
        dense="head.dense",
        dense_bias=config.flag("classifier_bias"),
        act=config.word("classifier_activation", "gelu"),
        norm="head.norm",
        output="classifier",
    )
    pool = first_token if pooling == "cls" else SENTENCE_POOLS["mean"]
    words = replace(tokens, output="decoder", output_bias=config.flag("decoder_bias", True))
    heads = text_heads(Head(), replace(tokens, pool=pool), words)
    return heads | dict.fromkeys(("ForTokenClassification", "ForQuestionAnswering"), tokens)


def _layers(config: ConfigReader) -> tuple[Mapping[str, Any], ...]:
    """The window and the rope of every layer; the first of `every` layers sees all tokens."""
    count, every = config.layers(), config.integer("global_attn_every_n_layers", 3)
    window = config.integer("local_attention", 128)
    if window < 2 or every < 1:
        raise config.error(
            "local_attention", f"expected at least 2, and 1 of {every} layers global"
        )
    types = window_types(window // 2)
    head_size = config.integer("hidden_size") // max(1, config.integer("num_attention_heads"))
    context = config.integer("max_position_embeddings", 8192)
    for kind, key, theta in (
        ("full_attention", "global_rope_theta", 160000.0),
        ("sliding_attention", "local_rope_theta", 10000.0),
    ):
        rope = read_rope(config, head_size, context, theta, layer_type=kind, local_theta=key)
        types[kind] = {**types[kind], "rope": rope}
    default = ["sliding_attention" if i % every else "full_attention" for i in range(count)]
    first, *others = read_layer_types(config, types, default=default)
    return {**first, "input_norm": False}, *others


def _read(config: ConfigReader) -> EncoderConfig:
    config.ignore(_WITHOUT_EFFECT)
    return read_encoder(
        config,
        {"hidden_act": "hidden_activation", "norm_eps": "norm_eps"},
        {"norm_eps": 1e-5, "max_position_embeddings": 8192},
        layers=_layers(config),
        gated=True,
        embedding_norm=True,
        attention_bias=config.flag("attention_bias"),
        biases=False,
        mlp_bias=config.flag("mlp_bias"),
        norm_bias=config.flag("norm_bias"),
    )


_UNUSED = "head.* decoder.* classifier.*"
register_text_encoder("modernbert", "ModernBert", _read, _heads, _stored, "model.", _UNUSED)

"""ModernBERT: rotary positions, and near tokens only in most layers. Warner et al., 2024."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..config_reader import ConfigReader
from ..encoder import TextConfig
from ..heads import SENTENCE_POOLS, Head, first_token
from ..rope_config import read_rope
from ..stored import Stored, merged
from ..towers import Tower, named, read_sizes, read_text, register_text

_NAMES = {
    "embed_tokens": "embeddings.tok_embeddings",
    "embed_norm": "embeddings.norm",
    "layers.*.attention_norm": "layers.*.attn_norm",
    "layers.*.attention.o_proj": "layers.*.attn.Wo",
    "layers.*.mlp_norm": "layers.*.mlp_norm",
    "layers.*.mlp.down_proj": "layers.*.mlp.Wo",
    "final_norm": "final_norm",
}
_KINDS = {
    "full_attention": ("global_rope_theta", 160000.0),
    "sliding_attention": ("local_rope_theta", 10000.0),
}
_WITHOUT_EFFECT = """
    embedding_dropout mlp_dropout initializer_cutoff_factor deterministic_flash_attn
    reference_compile repad_logits_with_grad sparse_prediction sparse_pred_ignore_index
    layer_norm_eps position_embedding_type
"""


def _stored(encoder: Any) -> list[Stored]:
    entries, size, width = named(_NAMES), encoder.hidden_size, encoder.intermediate_size
    inner = "encoder.layers.*."
    for part, ranges in zip("qkv", merged(size, size, size), strict=True):
        name = f"{inner}attention.{part}_proj"
        entries.append(Stored(name, "layers.*.attn.Wqkv", ranges, 3 * size))
    for part, ranges in zip(("gate", "up"), merged(width, width), strict=True):
        entries.append(Stored(f"{inner}mlp.{part}_proj", "layers.*.mlp.Wi", ranges, 2 * width))
    return entries


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
    bias = config.flag("decoder_bias", True)
    return {
        "Model": Head(),
        "ForSequenceClassification": replace(tokens, pool=pool),
        "ForTokenClassification": tokens,
        "ForMaskedLM": replace(tokens, output="decoder", output_bias=bias),
        "ForQuestionAnswering": tokens,
    }


def _layers(config: ConfigReader, sizes: dict[str, Any], context: int) -> dict[str, Any]:
    """Of every layer, how many tokens a query sees on either side (0: all), and its rope."""
    head_size = sizes["hidden_size"] // max(sizes["num_attention_heads"], 1)
    ropes = {
        kind: read_rope(config, head_size, context, theta, layer_type=kind, local_theta=key)
        for kind, (key, theta) in _KINDS.items()
    }
    every, (full, local) = config.integer("global_attn_every_n_layers", 3), _KINDS
    count, reach = sizes["num_hidden_layers"], config.integer("local_attention", 128) // 2
    kinds = config.words("layer_types") or [local if i % every else full for i in range(count)]
    if set(kinds) - set(_KINDS) or len(kinds) != count or reach < 1:
        raise config.error("layer_types", f"expected {count} of {', '.join(_KINDS)}")
    reaches = [reach if kind == local else 0 for kind in kinds]
    return {"reaches": reaches, "ropes": [ropes[kind] for kind in kinds]}


def _read(config: ConfigReader) -> Tower:
    config.ignore(_WITHOUT_EFFECT)
    act, eps = ("hidden_activation", "gelu"), ("norm_eps", 1e-5)
    sizes = read_sizes(config, act, eps)
    context, bias = config.integer("max_position_embeddings", 8192), config.flag("attention_bias")
    encoder = TextConfig(
        **sizes, **_layers(config, sizes, context), vocab_size=config.integer("vocab_size"),
        max_position_embeddings=context, learned_positions=False, pre_norm=True, first_norm=False,
        final_norm=True, gated=True, attention_bias=bias, output_bias=bias,
        mlp_bias=config.flag("mlp_bias"), norm_bias=config.flag("norm_bias"),
    )  # fmt: skip
    return read_text(config, "ModernBert", _heads(config), encoder)


_UNUSED = ("head.*", "decoder.*", "classifier.*")
register_text("modernbert", "ModernBert", _read, _stored, "model.", _UNUSED)

"""Reads encoders of images, and of the texts beside them, from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .config_reader import ConfigReader
from .encoder import TextConfig, VisionConfig
from .stored import Stored
from .towers import named


def read_vision(
    config: ConfigReader, sizes: Mapping[str, Any], patch: int = 16, **more: Any
) -> VisionConfig:
    """An encoder of images with these sizes, a default size of patches, and `more` fields."""
    return VisionConfig(
        **sizes,
        image_size=config.pair("image_size", 224),
        patch_size=config.pair("patch_size", patch),
        num_channels=config.integer("num_channels", 3),
        pre_norm=True,
        **more,
    )


def read_clip_text(
    config: ConfigReader, sizes: Mapping[str, Any], tokens: int, context: int, causal: bool
) -> TextConfig:
    """An encoder of texts of CLIP or SigLIP; `tokens` and `context` are defaults."""
    return TextConfig(
        **sizes,
        vocab_size=config.integer("vocab_size", tokens),
        max_position_embeddings=config.integer("max_position_embeddings", context),
        pre_norm=True,
        embed_norm=False,
        final_norm=True,
        causal=causal,
    )


def clip_names(encoder: object) -> list[Stored]:
    """Where checkpoints of CLIP and SigLIP have an encoder."""
    text = isinstance(encoder, TextConfig)
    names = {
        "embed_tokens": "embeddings.token_embedding",
        "embed_positions": "embeddings.position_embedding",
        "class_token": "embeddings.class_embedding",
        "patches": "embeddings.patch_embedding",
        "position_embeddings": "embeddings.position_embedding.weight",
        "embed_norm": "pre_layrnorm",
        "layers.*.attention.q_proj": "encoder.layers.*.self_attn.q_proj",
        "layers.*.attention.k_proj": "encoder.layers.*.self_attn.k_proj",
        "layers.*.attention.v_proj": "encoder.layers.*.self_attn.v_proj",
        "layers.*.attention.o_proj": "encoder.layers.*.self_attn.out_proj",
        "layers.*.attention_norm": "encoder.layers.*.layer_norm1",
        "layers.*.mlp.up_proj": "encoder.layers.*.mlp.fc1",
        "layers.*.mlp.down_proj": "encoder.layers.*.mlp.fc2",
        "layers.*.mlp_norm": "encoder.layers.*.layer_norm2",
        "final_norm": "final_layer_norm" if text else "post_layernorm",
    }
    return named(names)

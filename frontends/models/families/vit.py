"""ViT, the Vision Transformer. Dosovitskiy et al., 2021."""

from __future__ import annotations

from dataclasses import replace

from ..config_reader import ConfigReader
from ..encoder import EncoderConfig, bert_names, named, read_labels, register_encoder
from ..heads import Head, first_token
from ..stored import Stored
from ..vision import read_vision

_NAMES = {
    "class_token": "embeddings.cls_token",
    "position_embeddings": "embeddings.position_embeddings",
    "patches": "embeddings.patch_embeddings.projection",
    "layers.*.attention.q_proj": "encoder.layer.*.attention.attention.query",
    "layers.*.attention.k_proj": "encoder.layer.*.attention.attention.key",
    "layers.*.attention.v_proj": "encoder.layer.*.attention.attention.value",
    "layers.*.attention_norm": "encoder.layer.*.layernorm_before",
    "layers.*.mlp_norm": "encoder.layer.*.layernorm_after",
    "final_norm": "layernorm",
}


def _stored(config: EncoderConfig) -> list[Stored]:
    return [*named(_NAMES), *bert_names(config)]


def _read(config: ConfigReader) -> EncoderConfig:
    config.ignore("encoder_stride")
    bias = config.flag("qkv_bias", True)
    encoder = read_vision(config, {}, leading_ones=True, qkv_bias=bias)
    width, act = config.integer("pooler_output_size", 0), config.word("pooler_act", "tanh")
    scores = Head(pool=first_token, output="classifier", outputs=read_labels(config))
    if config.architecture == "ViTForImageClassification":
        return replace(encoder, head=scores)
    dense = "vit.pooler.dense"
    pooled = Head(("pooler_output",), True, first_token, dense, dense_size=width, act=act)
    return replace(encoder, head=pooled)


_CLASSES, _UNUSED = ("ViTModel", "ViTForImageClassification"), ("*pooler.dense.*",)
register_encoder("vit", _CLASSES, _read, _stored, "vit.", _UNUSED)

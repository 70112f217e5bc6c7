"""ViT, the Vision Transformer. Dosovitskiy et al., 2021."""

from __future__ import annotations

from dataclasses import replace

from ..config_reader import ConfigReader
from ..encoder import BERT_STORED, EncoderConfig, read_labels, register_encoder
from ..heads import Head, first_token
from ..stored import renamed
from ..vision import read_vision

_NAMES = {
    "class_token": "embeddings.cls_token",
    "position_embeddings": "embeddings.position_embeddings",
    "patches": "embeddings.patch_embeddings.projection",
    "layers.*.self_attn.q_proj": "encoder.layer.*.attention.attention.query",
    "layers.*.self_attn.k_proj": "encoder.layer.*.attention.attention.key",
    "layers.*.self_attn.v_proj": "encoder.layer.*.attention.attention.value",
    "layers.*.input_layernorm": "encoder.layer.*.layernorm_before",
    "layers.*.post_attention_layernorm": "encoder.layer.*.layernorm_after",
    "norm": "layernorm",
}
_STORED = [*renamed(_NAMES, "", "encoder."), *BERT_STORED]


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
register_encoder("vit", _CLASSES, _read, _STORED, "vit.", _UNUSED)

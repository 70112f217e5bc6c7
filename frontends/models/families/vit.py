"""ViT, the Vision Transformer. Dosovitskiy et al., 2021."""

from __future__ import annotations

from ..config_reader import ConfigReader
from ..heads import Head, first_token
from ..stored import Stored
from ..towers import Tower, bert_names, named, read_labels, read_sizes, register_tower
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


def _stored(encoder: object) -> list[Stored]:
    return [*named(_NAMES), *bert_names()]


def _read(config: ConfigReader) -> Tower:
    config.ignore("encoder_stride")
    bias = config.flag("qkv_bias", True)
    encoder = read_vision(
        config, read_sizes(config), embed_norm=False, final_norm=True, leading_ones=True,
        attention_bias=bias,
    )  # fmt: skip
    width, act = config.integer("pooler_output_size", 0), config.word("pooler_act", "tanh")
    pooled = Head(
        ("pooler_output",), True, first_token, "vit.pooler.dense", dense_size=width, act=act
    )
    scores = Head(pool=first_token, output="classifier", outputs=read_labels(config))
    return Tower(encoder, pooled if config.architecture == "ViTModel" else scores)


register_tower(
    "vit", ("ViTModel", "ViTForImageClassification"), _read, _stored, "vit.", ("*pooler.dense.*",)
)

"""SigLIP: encoders of texts and of images, alone or compared. Zhai et al., 2023."""

from __future__ import annotations

from typing import Any

from ..config_reader import ConfigReader
from ..heads import AttentionPool, Head, last_token
from ..stored import Stored, merged
from ..towers import (
    BASE,
    Tower,
    TwoTowers,
    named,
    read_inner,
    read_sizes,
    register_tower,
    register_two_towers,
)  # fmt: skip
from ..vision import clip_names, read_clip_text, read_vision

_ACT, _EPS = ("hidden_act", "gelu_pytorch_tanh"), ("layer_norm_eps", 1e-6)
_POOL = {
    "pool.probe": "head.probe",
    "pool.attention.o_proj": "head.attention.out_proj",
    "pool.norm": "head.layernorm",
    "pool.mlp.up_proj": "head.mlp.fc1",
    "pool.mlp.down_proj": "head.mlp.fc2",
}


def _stored(encoder: Any) -> list[Stored]:
    entries, size = [*clip_names(encoder), *named(_POOL, "head.")], encoder.hidden_size
    for part, ranges in zip("qkv", merged(size, size, size), strict=True):
        for kind in ("weight", "bias"):
            name = f"head.pool.attention.{part}_proj.{kind}"
            entries.append(Stored(name, f"head.attention.in_proj_{kind}", ranges, 3 * size))
    return entries


def _text(config: ConfigReader) -> Tower:
    config.ignore("eos_token_id")
    encoder = read_clip_text(config, read_sizes(config, _ACT, _EPS), 32000, 64, False)
    outputs = config.integer("projection_size", encoder.hidden_size)
    head = Head(("pooler_output",), True, last_token, output="text_model.head", outputs=outputs)
    return Tower(encoder, head)


def _vision(config: ConfigReader) -> Tower:
    sizes = read_sizes(config, _ACT, _EPS)
    encoder = read_vision(config, sizes, embed_norm=False, final_norm=True, class_token=False)
    has_head = config.flag("vision_use_head", True)
    pooled = Head(("pooler_output",), True, AttentionPool)
    return Tower(encoder, pooled if has_head else Head((), True))


def _both(config: ConfigReader) -> TwoTowers:
    text = read_inner(config, "text_config", _text, BASE)
    return TwoTowers(text, read_inner(config, "vision_config", _vision, BASE), bias=True)


register_two_towers("siglip", "SiglipModel", _both, _stored)
register_tower("siglip_vision_model", ("SiglipVisionModel",), _vision, _stored, "vision_model.")
register_tower("siglip_text_model", ("SiglipTextModel",), _text, _stored, "text_model.")

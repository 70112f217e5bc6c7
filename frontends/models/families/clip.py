"""CLIP: encoders of texts and of images, alone or compared. Radford et al., 2021."""

from __future__ import annotations

from dataclasses import replace

from ..config_reader import ConfigReader
from ..encoder import TextConfig, VisionConfig
from ..heads import Head, at_token, first_token
from ..towers import (
    BASE,
    Tower,
    TwoTowers,
    read_inner,
    read_sizes,
    register_tower,
    register_two_towers,
)
from ..vision import clip_names, read_clip_text, read_vision

_ACT, _EPS = ("hidden_act", "quick_gelu"), ("layer_norm_eps", 1e-5)


def _text(config: ConfigReader) -> Tower:
    encoder = read_clip_text(config, read_sizes(config, _ACT, _EPS), 49408, 77, True)
    pool = at_token(config.integer("eos_token_id", 49407))
    return _projected(config, encoder, Head(pool=pool), "text_embeds", "text_projection")


def _vision(config: ConfigReader) -> Tower:
    encoder = read_vision(config, read_sizes(config, _ACT, _EPS), 32, patch_bias=False)
    head = Head(pool=first_token, norm="vision_model.post_layernorm")
    return _projected(config, encoder, head, "image_embeds", "visual_projection")


def _projected(
    config: ConfigReader, encoder: TextConfig | VisionConfig, head: Head, result: str, name: str
) -> Tower:
    """With a product behind the pooling where the architecture has one."""
    outputs = config.integer("projection_dim", 512)
    if config.architecture in ("CLIPTextModel", "CLIPVisionModel"):
        return Tower(encoder, replace(head, results=("pooler_output",), last_hidden_state=True))
    projected = replace(head, output=name, outputs=outputs, output_bias=False, results=(result,))
    return Tower(encoder, replace(projected, last_hidden_state=True))


def _both(config: ConfigReader) -> TwoTowers:
    config.ignore("logit_scale_init_value")
    width = config.integer("projection_dim", 512)
    texts = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
    return TwoTowers(
        read_inner(config, "text_config", _text, BASE | texts, projection_dim=width),
        read_inner(config, "vision_config", _vision, BASE, projection_dim=width),
    )


register_two_towers("clip", "CLIPModel", _both, clip_names)
for _kind, _read in {"Text": _text, "Vision": _vision}.items():
    _names, _type = (f"CLIP{_kind}Model", f"CLIP{_kind}ModelWithProjection"), _kind.lower()
    register_tower(f"clip_{_type}_model", _names, _read, clip_names, f"{_type}_model.")

"""Encoders of images, and of texts beside images."""

from __future__ import annotations

from typing import Any

from . import Case
from .encoders import SIZES

VISION: dict[str, Any] = {
    "hidden_size": 36,
    "intermediate_size": 42,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 12,
    "patch_size": 4,
    "initializer_range": 0.2,
}
TEXT = {**SIZES, "hidden_size": 30, "eos_token_id": 7}
CLIP = {"text_config": TEXT, "vision_config": VISION, "projection_dim": 20}
SIGLIP = {"text_config": TEXT | {"projection_size": 36}, "vision_config": VISION}
NONE, ONE, MESHES = (), ("tp=2",), ("tp=2", "tp=3", "pp=2")
PROJECTED = {"projection_dim": 20}
ENCODERS: dict[str, Case] = {
    case.architecture: case
    for case in (
        Case("vit", VISION, MESHES, "ViTModel"),
        Case("vit", {**VISION, "num_labels": 3}, NONE, "ViTForImageClassification"),
        Case("clip", CLIP, MESHES, "CLIPModel"),
        Case("clip_vision_model", VISION, NONE, "CLIPVisionModel"),
        Case("clip_vision_model", VISION | PROJECTED, ONE, "CLIPVisionModelWithProjection"),
        Case("clip_text_model", TEXT, NONE, "CLIPTextModel"),
        Case("clip_text_model", TEXT | PROJECTED, ONE, "CLIPTextModelWithProjection"),
        Case("siglip", SIGLIP, MESHES, "SiglipModel"),
        Case("siglip_vision_model", VISION, ONE, "SiglipVisionModel"),
        Case("siglip_text_model", TEXT, ONE, "SiglipTextModel"),
    )
}
ENCODERS |= {
    "CLIPTextModel/old": Case("clip_text_model", TEXT | {"eos_token_id": 2}, NONE, "CLIPTextModel"),
    "SiglipVisionModel/no head": Case(
        "siglip_vision_model", VISION | {"vision_use_head": False}, NONE, "SiglipVisionModel"
    ),
}

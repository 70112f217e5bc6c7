"""CLIP: encoders of texts and of images, alone or compared. Radford et al., 2021."""

from __future__ import annotations

from dataclasses import replace

from ..config_reader import ConfigReader
from ..encoder import EncoderConfig, read_encoder, register_encoder
from ..heads import Head, at_token, first_token
from ..vision import TwoEncoders, clip_names, read_inner, read_vision, register_two_encoders

_DEFAULTS = {"hidden_act": "quick_gelu", "norm_eps": 1e-5}


def _text(config: ConfigReader) -> EncoderConfig:
    longest = config.integer("max_position_embeddings", 77)
    sizes = {"vocab_size": 49408, "max_position_embeddings": 77}
    encoder = read_encoder(
        config, defaults=_DEFAULTS | sizes, learned_positions=longest, causal=True
    )
    pool = at_token(config.integer("eos_token_id", 49407))
    return _projected(config, encoder, Head(pool=pool), "text_embeds", "text_projection")


def _vision(config: ConfigReader) -> EncoderConfig:
    encoder = read_vision(
        config, _DEFAULTS, 32, patch_bias=False, embedding_norm=True, last_norm=False
    )
    head = Head(pool=first_token, norm="vision_model.post_layernorm")
    return _projected(config, encoder, head, "image_embeds", "visual_projection")


def _projected(
    config: ConfigReader, encoder: EncoderConfig, head: Head, result: str, name: str
) -> EncoderConfig:
    """With a product behind the pooling where the architecture has one."""
    head, width = replace(head, last_hidden_state=True), config.integer("projection_dim", 512)
    if config.architecture in ("CLIPTextModel", "CLIPVisionModel"):
        return replace(encoder, head=replace(head, results=("pooler_output",)))
    head = replace(head, output=name, outputs=width, output_bias=False, results=(result,))
    return replace(encoder, head=head)


def _both(config: ConfigReader) -> TwoEncoders:
    config.ignore("logit_scale_init_value")
    width = config.integer("projection_dim", 512)
    texts = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8}
    return TwoEncoders(
        read_inner(config, "text_config", _text, texts, projection_dim=width),
        read_inner(config, "vision_config", _vision, {}, projection_dim=width),
    )


register_two_encoders("clip", "CLIPModel", _both, clip_names)
for _kind, _read in {"Text": _text, "Vision": _vision}.items():
    _names, _type = (f"CLIP{_kind}Model", f"CLIP{_kind}ModelWithProjection"), _kind.lower()
    register_encoder(f"clip_{_type}_model", _names, _read, clip_names, f"{_type}_model.")

"""SigLIP: encoders of texts and of images, alone or compared. Zhai et al., 2023."""

from __future__ import annotations

from dataclasses import replace

from ..config_reader import ConfigReader
from ..encoder import EncoderConfig, read_encoder, register_encoder
from ..heads import AttentionPool, Head, last_token
from ..stored import Stored, in_turn, joined, renamed
from ..vision import TwoEncoders, clip_names, read_inner, read_vision, register_two_encoders

_DEFAULTS = {"hidden_act": "gelu_pytorch_tanh", "norm_eps": 1e-6}
_POOL = {
    "probe": "probe",
    "attention.o_proj": "attention.out_proj",
    "norm": "layernorm",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
}


def _stored(config: EncoderConfig) -> list[Stored]:
    entries = [*clip_names(config), *renamed(_POOL, "head.", "head.pool.")]
    ranges = in_turn(*[config.hidden_size] * 3)
    for kind in ("weight", "bias"):
        names = " ".join(f"{part}_proj.{kind}" for part in "qkv")
        key = f"head.attention.in_proj_{kind}"
        entries += joined("head.pool.attention.", names, key, ranges)
    return entries


def _text(config: ConfigReader) -> EncoderConfig:
    longest = config.integer("max_position_embeddings", 64)
    sizes = {"vocab_size": 32000, "max_position_embeddings": 64}
    encoder = read_encoder(config, defaults=_DEFAULTS | sizes, learned_positions=longest)
    outputs = config.integer("projection_size", encoder.hidden_size)
    head = Head(("pooler_output",), True, last_token, output="text_model.head", outputs=outputs)
    return replace(encoder, head=head)


def _vision(config: ConfigReader) -> EncoderConfig:
    pooled = Head(("pooler_output",), True, AttentionPool)
    head = pooled if config.flag("vision_use_head", True) else Head((), True)
    return read_vision(config, _DEFAULTS, class_token=False, head=head)


def _both(config: ConfigReader) -> TwoEncoders:
    text = read_inner(config, "text_config", _text, {})
    return TwoEncoders(text, read_inner(config, "vision_config", _vision, {}), bias=True)


register_two_encoders("siglip", "SiglipModel", _both, _stored)
for _kind, _read in {"Text": _text, "Vision": _vision}.items():
    _type, _names = _kind.lower(), (f"Siglip{_kind}Model",)
    register_encoder(f"siglip_{_type}_model", _names, _read, _stored, f"{_type}_model.")

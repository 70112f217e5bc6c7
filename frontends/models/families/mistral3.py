"""Mistral 3, its text: a Mistral or a Ministral 3. Mistral AI, 2025."""

from __future__ import annotations

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, register_decoder
from .ministral3 import MINISTRAL3
from .mistral import MISTRAL

_TEXTS = {family.model_type: family for family in (MINISTRAL3, MISTRAL)}


def _read(config: ConfigReader) -> DecoderConfig:
    name = config.word("model_type", "mistral")
    if name not in _TEXTS:
        raise config.error("model_type", f"expected {' or '.join(_TEXTS)} in text_config")
    return _TEXTS[name].read(config)


MISTRAL3 = register_decoder(
    "mistral3",
    ("Mistral3ForConditionalGeneration",),
    _read,
    inside="text_config",
    prefixes=("model.", "language_model.model.", "model.language_model."),
    unused=("*vision_tower.*", "*multi_modal_projector.*"),
)

"""Mistral 3, its text: a Mistral or a Ministral 3. Mistral AI, 2025."""

from __future__ import annotations

from dataclasses import replace

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig
from ..family import register_inside
from .ministral3 import MINISTRAL3
from .mistral import MISTRAL

_TEXTS = {family.model_type: family for family in (MINISTRAL3, MISTRAL)}


def _read(config: ConfigReader) -> DecoderConfig:
    name = config.word("model_type", "mistral")
    if name not in _TEXTS:
        raise config.error("model_type", f"expected {' or '.join(_TEXTS)} in text_config")
    return _TEXTS[name].read(config)


_NAME, _OTHERS = "Mistral3ForConditionalGeneration", "*vision_tower.* *multi_modal_projector.*"
MISTRAL3 = register_inside(replace(MISTRAL, read=_read), "mistral3", _NAME, _OTHERS)

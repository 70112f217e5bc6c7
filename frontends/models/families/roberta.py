"""RoBERTa (Liu et al., 2019) and XLM-RoBERTa (Conneau et al., 2020)."""

from __future__ import annotations

from ..config_reader import ConfigReader
from ..encoder import BERT_STORED, EncoderConfig, read_bert, register_text_encoder
from ..heads import ROBERTA_UNUSED, roberta_heads


def _read(config: ConfigReader) -> EncoderConfig:
    padding, types = config.integer("pad_token_id", 1), config.integer("type_vocab_size", 2)
    return read_bert(config, padding_id=padding, type_vocab_size=types)


for _type, _name in {"roberta": "Roberta", "xlm-roberta": "XLMRoberta"}.items():
    register_text_encoder(
        _type, _name, _read, roberta_heads("roberta."), BERT_STORED, "roberta.", ROBERTA_UNUSED
    )

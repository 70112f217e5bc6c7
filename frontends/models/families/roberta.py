"""RoBERTa (Liu et al., 2019) and XLM-RoBERTa (Conneau et al., 2020)."""

from __future__ import annotations

from functools import partial

from ..config_reader import ConfigReader
from ..heads import roberta_heads
from ..towers import Tower, bert_names, read_bert, read_text, register_text


def _read(name: str, config: ConfigReader) -> Tower:
    padding, types = config.integer("pad_token_id", 1), config.integer("type_vocab_size", 2)
    encoder = read_bert(config, padding_id=padding, type_vocab_size=types)
    return read_text(config, name, roberta_heads("roberta."), encoder)


for _type, _name in {"roberta": "Roberta", "xlm-roberta": "XLMRoberta"}.items():
    _unused = ("*pooler.dense.*", "lm_head.*")
    register_text(_type, _name, partial(_read, _name), bert_names, "roberta.", _unused)

"""BERT. Devlin et al., 2019."""

from __future__ import annotations

from dataclasses import replace

from ..config_reader import ConfigReader
from ..encoder import BERT_STORED, EncoderConfig, read_bert, register_text_encoder
from ..heads import Head, first_token, text_heads

_POOLED = Head(pool=first_token, dense="bert.pooler.dense", act="tanh")
_WORDS = Head(
    dense="cls.predictions.transform.dense",
    norm="cls.predictions.transform.LayerNorm",
    output="cls.predictions.decoder",
    bias="cls.predictions.bias",
)
_HEADS = text_heads(_POOLED, replace(_POOLED, output="classifier"), _WORDS)
_OLD = """
    directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
    pooler_size_per_head pooler_type
"""


def _read(config: ConfigReader) -> EncoderConfig:
    config.ignore(_OLD)
    types = config.integer("type_vocab_size", 2)
    return read_bert(config, type_vocab_size=types)


register_text_encoder("bert", "Bert", _read, _HEADS, BERT_STORED, "bert.", "*pooler.dense.* cls.*")

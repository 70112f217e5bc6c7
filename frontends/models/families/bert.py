"""BERT. Devlin et al., 2019."""

from __future__ import annotations

from ..config_reader import ConfigReader
from ..heads import Head, first_token
from ..towers import Tower, bert_names, read_bert, read_text, register_text

_HEADS = {
    "Model": Head(pool=first_token, dense="bert.pooler.dense", act="tanh"),
    "ForSequenceClassification": Head(
        pool=first_token, dense="bert.pooler.dense", act="tanh", output="classifier"
    ),
    "ForTokenClassification": Head(output="classifier"),
    "ForMaskedLM": Head(
        dense="cls.predictions.transform.dense",
        norm="cls.predictions.transform.LayerNorm",
        output="cls.predictions.decoder",
        bias="cls.predictions.bias",
    ),
    "ForQuestionAnswering": Head(output="qa_outputs"),
}
_LEGACY = """
    directionality pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers
    pooler_size_per_head pooler_type
"""


def _read(config: ConfigReader) -> Tower:
    config.ignore(_LEGACY)
    types = config.integer("type_vocab_size", 2)
    return read_text(config, "Bert", _HEADS, read_bert(config, type_vocab_size=types))


register_text("bert", "Bert", _read, bert_names, "bert.", ("*pooler.dense.*", "cls.*"))

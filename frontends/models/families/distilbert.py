"""DistilBERT: BERT without types of tokens and without a pooler. Sanh et al., 2019."""

from __future__ import annotations

from ..config_reader import ConfigReader
from ..encoder import EncoderConfig, bert_names, read_bert, register_text_encoder
from ..heads import Head, first_token
from ..stored import Stored, renamed

_HEADS = {
    "Model": Head(),
    "ForSequenceClassification": Head(
        pool=first_token, dense="pre_classifier", act="relu", output="classifier"
    ),
    "ForTokenClassification": Head(output="classifier"),
    "ForMaskedLM": Head(dense="vocab_transform", norm="vocab_layer_norm", output="vocab_projector"),
    "ForQuestionAnswering": Head(output="qa_outputs"),
}
_NAMES = {
    **{f"self_attn.{part}_proj": f"attention.{part}_lin" for part in "qkv"},
    "self_attn.o_proj": "attention.out_lin",
    "attention_output_norm": "sa_layer_norm",
    "mlp.up_proj": "ffn.lin1",
    "mlp.down_proj": "ffn.lin2",
    "feed_forward_output_norm": "output_layer_norm",
}
_KEYS = {
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "hidden_act": "activation",
}


def _stored(config: EncoderConfig) -> list[Stored]:
    return [*renamed(_NAMES, "transformer.layer.*.", "encoder.layers.*."), *bert_names(config)]


def _read(config: ConfigReader) -> EncoderConfig:
    config.ignore("qa_dropout seq_classif_dropout sinusoidal_pos_embds")
    return read_bert(config, _KEYS)


_UNUSED = "vocab_* pre_classifier.*"
register_text_encoder(
    "distilbert", "DistilBert", _read, lambda config: _HEADS, _stored, "distilbert.", _UNUSED
)

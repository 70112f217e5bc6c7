"""DistilBERT: BERT without types of tokens and without a pooler. Sanh et al., 2019."""

from __future__ import annotations

from ..config_reader import ConfigReader
from ..encoder import BERT_STORED, EncoderConfig, read_bert, register_text_encoder
from ..heads import Head, first_token, text_heads
from ..stored import renamed

_HEADS = text_heads(
    Head(),
    Head(pool=first_token, dense="pre_classifier", act="relu", output="classifier"),
    Head(dense="vocab_transform", norm="vocab_layer_norm", output="vocab_projector"),
)
_NAMES = {
    **{f"self_attn.{part}_proj": f"attention.{part}_lin" for part in "qkv"},
    "self_attn.o_proj": "attention.out_lin",
    "attention_output_norm": "sa_layer_norm",
    "mlp.up_proj": "ffn.lin1",
    "mlp.down_proj": "ffn.lin2",
    "feed_forward_output_norm": "output_layer_norm",
}
_STORED = [*renamed(_NAMES, "transformer.layer.*.", "encoder.layers.*."), *BERT_STORED]
_KEYS = {
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "hidden_act": "activation",
}


def _read(config: ConfigReader) -> EncoderConfig:
    config.ignore("qa_dropout seq_classif_dropout sinusoidal_pos_embds")
    return read_bert(config, _KEYS)


_UNUSED = "vocab_* pre_classifier.*"
register_text_encoder("distilbert", "DistilBert", _read, _HEADS, _STORED, "distilbert.", _UNUSED)

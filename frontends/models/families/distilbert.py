"""DistilBERT: BERT without types of tokens and without a pooler. Sanh et al., 2019."""

from __future__ import annotations

from ..config_reader import MOST_LAYERS, ConfigReader
from ..encoder import TextConfig
from ..heads import Head, first_token
from ..stored import Stored
from ..towers import Tower, bert_names, named, read_text, register_text

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
    "layers.*.attention.q_proj": "transformer.layer.*.attention.q_lin",
    "layers.*.attention.k_proj": "transformer.layer.*.attention.k_lin",
    "layers.*.attention.v_proj": "transformer.layer.*.attention.v_lin",
    "layers.*.attention.o_proj": "transformer.layer.*.attention.out_lin",
    "layers.*.attention_norm": "transformer.layer.*.sa_layer_norm",
    "layers.*.mlp.up_proj": "transformer.layer.*.ffn.lin1",
    "layers.*.mlp.down_proj": "transformer.layer.*.ffn.lin2",
    "layers.*.mlp_norm": "transformer.layer.*.output_layer_norm",
}


def _stored(encoder: object) -> list[Stored]:
    return [*named(_NAMES), *bert_names()]


def _read(config: ConfigReader) -> Tower:
    config.ignore("qa_dropout seq_classif_dropout sinusoidal_pos_embds")
    encoder = TextConfig(
        hidden_size=config.integer("dim"),
        intermediate_size=config.integer("hidden_dim"),
        num_hidden_layers=config.integer("n_layers", most=MOST_LAYERS),
        num_attention_heads=config.integer("n_heads"),
        act=config.word("activation", "gelu"),
        eps=1e-12,
        vocab_size=config.integer("vocab_size"),
        max_position_embeddings=config.integer("max_position_embeddings", 512),
    )
    return read_text(config, "DistilBert", _HEADS, encoder)


register_text(
    "distilbert", "DistilBert", _read, _stored, "distilbert.", ("vocab_*", "pre_classifier.*")
)

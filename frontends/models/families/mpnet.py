"""MPNet: biases by relative position, which all layers share. Song et al., 2020."""

from __future__ import annotations

from ...layers.positions import RelativePositions
from ..config_reader import ConfigReader
from ..heads import roberta_heads
from ..stored import Stored
from ..towers import Tower, bert_names, named, read_bert, read_text, register_text

_NAMES = {
    "layers.*.attention.q_proj": "encoder.layer.*.attention.attn.q",
    "layers.*.attention.k_proj": "encoder.layer.*.attention.attn.k",
    "layers.*.attention.v_proj": "encoder.layer.*.attention.attn.v",
    "layers.*.attention.o_proj": "encoder.layer.*.attention.attn.o",
    "layers.*.attention_norm": "encoder.layer.*.attention.LayerNorm",
}
_TABLE = "encoder.layers.*.attention.relative_table"


def _stored(encoder: object) -> list[Stored]:
    table = Stored(_TABLE, "encoder.relative_attention_bias.weight", transposed=True)
    return [table, *named(_NAMES), *bert_names()]


def _read(config: ConfigReader) -> Tower:
    config.require("relative_attention_num_buckets", 32, "transformers computes 32 buckets only")
    relative = RelativePositions(32, 128, bidirectional=True)
    encoder = read_bert(config, padding_id=config.integer("pad_token_id", 1), relative=relative)
    return read_text(config, "MPNet", roberta_heads("mpnet."), encoder)


register_text("mpnet", "MPNet", _read, _stored, "mpnet.", ("*pooler.dense.*", "lm_head.*"))

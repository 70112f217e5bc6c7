"""MPNet: biases by relative position, which all layers share. Song et al., 2020."""

from __future__ import annotations

from ...layers.positions import RelativePositions
from ..config_reader import ConfigReader
from ..encoder import EncoderConfig, bert_names, named, read_bert, register_text_encoder
from ..heads import ROBERTA_UNUSED, roberta_heads
from ..stored import Stored

_TABLE = "encoder.layers.*.attention.relative_table"
_NAMES = {
    **{f"layers.*.attention.{p}_proj": f"encoder.layer.*.attention.attn.{p}" for p in "qkvo"},
    "layers.*.attention_norm": "encoder.layer.*.attention.LayerNorm",
}


def _stored(config: EncoderConfig) -> list[Stored]:
    table = Stored(_TABLE, "encoder.relative_attention_bias.weight", transposed=True)
    return [table, *named(_NAMES), *bert_names(config)]


def _read(config: ConfigReader) -> EncoderConfig:
    config.require("relative_attention_num_buckets", 32, "transformers computes 32 buckets only")
    relative = RelativePositions(32, 128, bidirectional=True)
    return read_bert(config, padding_id=config.integer("pad_token_id", 1), relative=relative)


register_text_encoder(
    "mpnet", "MPNet", _read, roberta_heads("mpnet."), _stored, "mpnet.", ROBERTA_UNUSED
)

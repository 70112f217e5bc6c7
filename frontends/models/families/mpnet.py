"""MPNet: biases by relative position, which all layers share. Song et al., 2020."""

from __future__ import annotations

from ...layers.positions import RelativePositions
from ..config_reader import ConfigReader
from ..encoder import BERT_STORED, EncoderConfig, read_bert, register_text_encoder
from ..heads import ROBERTA_UNUSED, roberta_heads
from ..stored import Stored, renamed

_NAMES = {
    **{f"self_attn.{part}_proj": f"attention.attn.{part}" for part in "qkvo"},
    "attention_output_norm": "attention.LayerNorm",
}
_STORED = [
    Stored("encoder.relative_table", "encoder.relative_attention_bias.weight", transposed=True),
    *renamed(_NAMES, "encoder.layer.*.", "encoder.layers.*."),
    *BERT_STORED,
]


def _read(config: ConfigReader) -> EncoderConfig:
    config.require("relative_attention_num_buckets", 32, "transformers computes 32 buckets only")
    relative = RelativePositions(32, 128, bidirectional=True)
    return read_bert(config, padding_id=config.integer("pad_token_id", 1), relative=relative)


register_text_encoder(
    "mpnet", "MPNet", _read, roberta_heads("mpnet."), _STORED, "mpnet.", ROBERTA_UNUSED
)

"""BART, and mBART, whose norms precede the layers. Lewis et al., 2020; Liu et al., 2020."""

from __future__ import annotations

from functools import partial

from ..config_reader import ConfigReader
from ..encoder_decoder import BART_STORED, BART_UNUSED, read_bart, register_encoder_decoder
from ..encoder_decoder import EncoderDecoderConfig as Config
from ..stored import Stored

# Keys of old folders, which transformers does not read either.
_OLD = """
    _num_labels add_bias_logits add_final_layer_norm classif_dropout extra_pos_embeddings
    force_bos_token_to_be_generated gradient_checkpointing normalize_before normalize_embedding
    num_labels output_past replacing_rate save_step static_position_embeddings
    student_decoder_layers student_encoder_layers
"""


def _read(config: ConfigReader, block: str) -> Config:
    config.ignore(_OLD)
    longest = "max_position_embeddings"
    root = config.integer("d_model") ** 0.5
    return read_bart(
        config,
        Config,
        (longest, longest),
        block=block,
        last_norm=block == "pre",
        embedding_norm=True,
        embedding_multiplier=root if config.flag("scale_embedding") else 1.0,
        offset=2,
        logits_bias=True,
    )


_STORED = [
    Stored("model.embed_tokens", "model.shared"),
    Stored("logits_bias", "final_logits_bias"),
    *BART_STORED,
]
for _type, _name in (("bart", "Bart"), ("mbart", "MBart")):
    _reader = partial(_read, block="sums" if _type == "bart" else "pre")
    _class = f"{_name}ForConditionalGeneration"
    register_encoder_decoder(_type, _class, _reader, _STORED, unused=BART_UNUSED)

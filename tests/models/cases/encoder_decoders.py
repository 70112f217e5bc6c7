"""Models of an encoder and a decoder."""

from __future__ import annotations

from . import Case

START = {"vocab_size": 96, "d_model": 48, "decoder_start_token_id": 1}
T5 = START | {
    "d_kv": 12,
    "d_ff": 80,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
BART = START | {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 72,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 6,
    "init_std": 0.15,
}
TOKENS = {"max_position_embeddings": 64}
WHISPER = {
    "begin_suppress_tokens": None,
    "num_mel_bins": 10,
    "max_source_positions": 9,
    "max_target_positions": 64,
}
CODES = ("int8 caches",)

ENCODER_DECODERS = {
    "t5": Case("t5", T5, architecture="T5ForConditionalGeneration"),
    "flan_t5": Case("t5", T5 | GATED, architecture="T5ForConditionalGeneration"),
    "mt5": Case("mt5", T5, ("tp=2",), architecture="MT5ForConditionalGeneration"),
    "bart": Case(
        "bart",
        BART | TOKENS | {"scale_embedding": True},
        architecture="BartForConditionalGeneration",
        schemes=CODES,
    ),
    "mbart": Case("mbart", BART | TOKENS, ("tp=2",), architecture="MBartForConditionalGeneration"),
    "whisper": Case(
        "whisper", BART | WHISPER, architecture="WhisperForConditionalGeneration", schemes=CODES
    ),
}

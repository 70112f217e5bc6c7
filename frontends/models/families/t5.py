"""T5, T5 1.1 (Flan-T5) and mT5: relative biases, scores without a scale. Raffel et al., 2020."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ...layers import RelativePositions
from ..config_reader import ConfigReader
from ..decoder import read_decoder
from ..encoder_decoder import EncoderDecoderConfig as Config
from ..encoder_decoder import register_encoder_decoder
from ..family import register
from ..stored import Stored, renamed

_KEYS = {
    "hidden_size": "d_model",
    "intermediate_size": "d_ff",
    "num_hidden_layers": "num_decoder_layers",
    "num_attention_heads": "num_heads",
    "head_dim": "d_kv",
    "max_position_embeddings": "n_positions",
    "norm_eps": "layer_norm_epsilon",
}


def _read(config: ConfigReader, scaled: bool, encoder_only: bool = False) -> Config:
    config.ignore("dropout_rate initializer_factor classifier_dropout is_encoder_decoder")
    config.ignore("dense_act_fn is_gated_act output_past")  # feed_forward_proj has both
    layers = config.layers("num_layers")
    gated, _, act = config.word("feed_forward_proj", "relu").rpartition("-")
    tied = config.flag("tie_word_embeddings", True)
    scaled = config.flag("scale_decoder_outputs", tied) and scaled
    buckets = config.integer("relative_attention_num_buckets", 32)
    relative = RelativePositions(buckets, config.integer("relative_attention_max_distance", 128))
    return read_decoder(
        config,
        Config,
        keys=_KEYS,
        defaults={"num_hidden_layers": layers, "max_position_embeddings": 512},
        encoder={"num_hidden_layers": layers, "relative": replace(relative, bidirectional=True)},
        hidden_act="gelu_new" if gated and act == "gelu" else act,
        gated=bool(gated),
        num_key_value_heads=None,
        rope=None,
        attention={"scale": 1.0},
        relative=relative,
        logits_multiplier=config.integer("d_model") ** -0.5 if scaled else 1.0,
        tie_word_embeddings=tied and not encoder_only,
        cross_attention=not encoder_only,
    )


def _stored(config: Config) -> Sequence[Stored]:
    products = {"up_proj": "wi_1" if config.gated else "wi", "gate_proj": "wi_0", "down_proj": "wo"}
    table = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    entries = [Stored("model.embed_tokens", "shared")]
    for own, stack, last in (("encoder", "encoder", 1), ("model", "decoder", 2)):
        layer = {f"mlp.{name}": f"{last}.DenseReluDense.{key}" for name, key in products.items()}
        for name, at in (("self_attn", "0.SelfAttention"), ("cross_attn", "1.EncDecAttention")):
            layer |= {f"{name}.{part}_proj": f"{at}.{part}" for part in "qkvo"}
        layer["input_layernorm"] = "0.layer_norm"
        layer["cross_attn_input_norm"] = "1.layer_norm"
        layer["post_attention_layernorm"] = f"{last}.layer_norm"
        entries += [
            *renamed(layer, f"{stack}.block.*.layer.", f"{own}.layers.*."),
            Stored(f"{own}.norm", f"{stack}.final_layer_norm"),
            Stored(f"{own}.relative_table", f"{stack}.{table}", transposed=True),
        ]
    return entries


UNUSED = {
    "decoder": ("encoder.*", "decoder.block.*.layer.1.EncDecAttention.[kvr]*.weight"),
    "encoder": ("decoder.*",),
}
for _type, _name in (("t5", "T5"), ("mt5", "MT5")):
    _reader = partial(_read, scaled=_type == "t5")
    _class = f"{_name}ForConditionalGeneration"
    _family = register_encoder_decoder(_type, _class, _reader, _stored, unused=UNUSED)
    register(
        replace(
            _family.part("encoder"),
            architectures=(f"{_name}EncoderModel",),
            read=partial(_reader, encoder_only=True),
            unused=("encoder.embed_tokens.weight",),
        )
    )

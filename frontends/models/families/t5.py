"""T5, T5 1.1 (Flan-T5) and mT5: relative biases, scores without a scale. Raffel et al., 2020."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ..config_reader import MOST_LAYERS, ConfigReader
from ..decoder import read_decoder
from ..encoder_decoder import EncoderDecoderConfig as Config
from ..encoder_decoder import EncoderPart, encoder_signature, register_encoder_decoder
from ..family import Family, register
from ..stored import Stored

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
    layers = config.integer("num_layers", most=MOST_LAYERS)
    gated, _, act = config.word("feed_forward_proj", "relu").rpartition("-")
    tied = config.flag("tie_word_embeddings", True)
    scaled = config.flag("scale_decoder_outputs", tied) and scaled
    buckets = config.integer("relative_attention_num_buckets", 32)
    return read_decoder(
        config,
        Config,
        keys=_KEYS,
        defaults={"num_hidden_layers": layers, "max_position_embeddings": 512},
        encoder={"num_hidden_layers": layers},
        hidden_act="gelu_new" if gated and act == "gelu" else act,
        gated=bool(gated),
        num_key_value_heads=None,
        rope=None,
        attention_scale=1.0,
        relative=(buckets, config.integer("relative_attention_max_distance", 128)),
        logits_multiplier=config.integer("d_model") ** -0.5 if scaled else 1.0,
        tie_word_embeddings=tied and not encoder_only,
        encoder_only=encoder_only,
    )


def _stored(config: Config) -> Sequence[Stored]:
    names: dict[str, str] = {"embed_tokens": "shared"}
    products = {"up_proj": "wi_1" if config.gated else "wi", "gate_proj": "wi_0", "down_proj": "wo"}
    attentions = (("self_attn", "0.SelfAttention"), ("cross_attn", "1.EncDecAttention"))
    for stack, last in (("encoder", 1), ("decoder", 2)):
        layer, block = f"{stack}.layers.*", f"{stack}.block.*.layer"
        for name, at in attentions:
            names |= {f"{layer}.{name}.{x}_proj": f"{block}.{at}.{x}" for x in "qkvo"}
            names[f"{layer}.{name}_norm"] = f"{block}.{at[0]}.layer_norm"
        dense = f"{block}.{last}.DenseReluDense"
        names |= {f"{layer}.mlp.{own}": f"{dense}.{key}" for own, key in products.items()}
        names[f"{layer}.mlp_norm"] = f"{block}.{last}.layer_norm"
        names[f"{stack}.norm"] = f"{stack}.final_layer_norm"
    table = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    tables = [
        Stored(f"{stack}.relative_table", f"{stack}.{table}", transposed=True)
        for stack in ("encoder", "decoder")
    ]
    return [*tables, *(Stored(own, key) for own, key in names.items())]


UNUSED = {
    "decoder": ("encoder.*", "decoder.block.*.layer.1.EncDecAttention.[kvr]*.weight"),
    "encoder": ("decoder.*",),
}
for _type, _name in (("t5", "T5"), ("mt5", "MT5")):
    _reader = partial(_read, scaled=_type == "t5")
    register_encoder_decoder(
        _type, f"{_name}ForConditionalGeneration", _reader, _stored, unused=UNUSED
    )
    register(
        Family(
            _type,
            (f"{_name}EncoderModel",),
            partial(_reader, encoder_only=True),
            EncoderPart,
            encoder_signature,
            stored=_stored,
            unused=("encoder.embed_tokens.weight",),
        )
    )

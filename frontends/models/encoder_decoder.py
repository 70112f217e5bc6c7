"""Encoder-decoder models: an encoder that runs once, and a decoder that runs for every token.

They are the parts `encoder` and `decoder` of a checkpoint, each a program. The encoder takes
`input_ids` i32 [B, E] and `encoder_lengths` i32 [B], the numbers of tokens in front of the padding,
or what else a family encodes. It returns `last_hidden_state` f32 [B, E, hidden_size], and the keys
and values of the decoder's cross attention, `cross_k0`, `cross_v0`, `cross_k1`, ... [B, heads, E,
head_dim], so that the decoder need not compute them for every token. The decoder takes these and
`encoder_lengths` beside the arguments of language_model.py. Where all sequences of the encoder have
one length, there are no `encoder_lengths`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from ..layers.positions import query_positions
from ..module import Module
from ..tensor import Tensor
from ..trace import Spec
from .config_reader import ConfigReader
from .decoder import Call, CausalLM, Decoder, DecoderConfig, Stack, read_decoder, tied_embeddings
from .family import Family, Signature, register
from .language_model import signature as language_model_signature
from .stored import Layout, Stored, renamed


@dataclass(frozen=True)
class EncoderDecoderConfig(DecoderConfig):
    """The sizes and options of a decoder, and in `encoder` those in which its encoder differs.

    `padded`: sequences of the encoder have any length up to its max_position_embeddings; else all
    have that length.
    """

    encoder: Mapping[str, Any] = field(default_factory=dict[str, Any])
    cross_attention: bool = True
    padded: bool = True

    @property
    def of_encoder(self) -> EncoderDecoderConfig:
        """The sizes and options of the encoder."""
        return replace(self, cross_attention=False, causal=False, encoder={}, **self.encoder)


Config = TypeVar("Config", bound=EncoderDecoderConfig)


class EncoderPart(Module):
    """The encoder, and the keys and values of what it returns in the decoder's layers.

    Only those parameters of the decoder that are used become weights.
    """

    def __init__(self, config: EncoderDecoderConfig, dtype: str) -> None:
        self.model, self.encoder = Decoder(config, dtype), Stack(config.of_encoder, dtype)
        self.config, self.dtype = config, dtype

    def embed_source(self, source: Tensor) -> Tensor:
        """What is encoded, here ids [B, E], to embeddings [B, E, hidden_size]."""
        return self.model.embed(source, Call())

    def forward(self, encoder_lengths: Tensor | None = None, **source: Tensor) -> dict[str, Tensor]:
        """The results by name; `source` is the only other argument."""
        x = self.embed_source(*source.values())
        x, _ = self.encoder(x, Call(query_positions(x.shape[1]), lengths=encoder_lengths))
        hidden = self.encoder.last(x)
        results = {"last_hidden_state": hidden.cast("f32")}
        layers: Any = self.model.layers if self.config.cross_attention else []
        for i, layer in enumerate(layers):
            keys, values = layer.cross_attn.memory_cache(hidden)
            results |= {f"cross_k{i}": keys, f"cross_v{i}": values}
        return results


def encoder_signature(config: EncoderDecoderConfig, dtype: str) -> Signature:
    """The signature of an encoder of tokens: up to 8 rows."""
    ids, lengths = Spec("i32", ("B", "E")), Spec("i32", ("B",))
    dims = {"B": (1, 1, 8)} | _encoder_range(config)
    return Signature({"input_ids": ids, "encoder_lengths": lengths}, dims)


def decoder_signature(config: EncoderDecoderConfig, dtype: str) -> Signature:
    """The signature of a decoder."""
    own = language_model_signature(config, dtype)
    length = "E" if config.padded else config.of_encoder.max_position_embeddings
    memory = Spec(dtype, ("B", config.kv_heads, length, config.head_size))
    inputs = dict(own.inputs)
    if config.padded:
        inputs["encoder_lengths"] = Spec("i32", ("B",))
    for i in range(config.num_hidden_layers):
        inputs |= {f"cross_k{i}": memory, f"cross_v{i}": memory}
    dims = {**own.dims, **(_encoder_range(config) if config.padded else {})}
    return Signature(inputs, dims, own.aliases)


def _encoder_range(config: EncoderDecoderConfig) -> dict[str, tuple[int, int, int]]:
    longest = config.of_encoder.max_position_embeddings
    return {"E": (1, min(128, longest), longest)}


def register_encoder_decoder(
    model_type: str,
    architecture: str,
    read: Callable[[ConfigReader], Config],
    stored: Layout,
    *,
    unused: Mapping[str, Sequence[str]],
    head: str = "lm_head.weight",
    encoder: type[EncoderPart] = EncoderPart,
    inputs: Callable[[Config, str], Signature] = encoder_signature,
) -> Family[Config]:
    """Register the family whose parts are a decoder and an `encoder` with this signature.

    `unused` has the patterns of tensors that each part leaves to the other. `head` is the key of
    the head, which a checkpoint may have in place of tied embeddings.
    """

    family = Family[Config](
        model_type, (architecture,), read, CausalLM, decoder_signature, stored=stored
    )
    copies = "*.embed_tokens.weight"
    decoder = replace(
        family,
        alternatives=partial(tied_embeddings, head=head),
        unused=(copies, *unused["decoder"]),
    )
    source = replace(
        family, build=encoder, signature=inputs, unused=(copies, head, *unused["encoder"])
    )
    return register(replace(decoder, parts={"decoder": decoder, "encoder": source}))


# Of BART, mBART and Whisper: the tensors that a part leaves to the other, sizes, and names.
BART_UNUSED = {
    "decoder": ("model.encoder.*", "model.decoder.layers.*.encoder_attn.[kv]_proj.*"),
    "encoder": ("model.decoder.*", "final_logits_bias"),
}


def read_bart(
    config: ConfigReader, kind: type[Config], longest: tuple[str, str], offset: int = 0, **more: Any
) -> Config:
    """The sizes of encoder and decoder; `longest` are the keys of their longest sequences.

    Tables of positions have `offset` rows in front of that of position 0.
    """
    encoder_longest = config.integer(longest[0])
    config.ignore("dropout activation_dropout classifier_dropout init_std is_encoder_decoder")
    config.ignore("encoder_layerdrop decoder_layerdrop num_hidden_layers")
    keys = {
        "hidden_size": "d_model",
        "intermediate_size": "decoder_ffn_dim",
        "num_hidden_layers": "decoder_layers",
        "num_attention_heads": "decoder_attention_heads",
        "hidden_act": "activation_function",
        "max_position_embeddings": longest[1],
    }
    return read_decoder(
        config,
        kind,
        keys=keys,
        defaults={"hidden_act": "gelu", "tie_word_embeddings": True},
        encoder={
            "intermediate_size": config.integer("encoder_ffn_dim"),
            "num_hidden_layers": config.layers("encoder_layers"),
            "num_attention_heads": config.integer("encoder_attention_heads"),
            "max_position_embeddings": encoder_longest,
            "learned_positions": encoder_longest + offset,
        },
        learned_positions=config.integer(longest[1]) + offset,
        position_offset=offset,
        gated=False,
        norm="layer",
        norm_eps=1e-5,
        num_key_value_heads=None,
        head_dim=None,
        rope=None,
        biases=True,
        **more,
    )


def _bart_stored() -> Iterator[Stored]:
    names = {
        "self_attn.o_proj": "self_attn.out_proj",
        "cross_attn.o_proj": "encoder_attn.out_proj",
        "cross_attn": "encoder_attn",
        "mlp.up_proj": "fc1",
        "mlp.down_proj": "fc2",
        "input_layernorm": "self_attn_layer_norm",
        "attention_output_norm": "self_attn_layer_norm",
        "cross_attn_input_norm": "encoder_attn_layer_norm",
        "cross_attn_output_norm": "encoder_attn_layer_norm",
        "post_attention_layernorm": "final_layer_norm",
        "feed_forward_output_norm": "final_layer_norm",
    }
    for own, key in (("encoder", "model.encoder"), ("model", "model.decoder")):
        yield from renamed(names, f"{key}.layers.*.", f"{own}.layers.*.")
        yield Stored(f"{own}.embedding_norm", f"{key}.layernorm_embedding")
        yield Stored(f"{own}.norm", f"{key}.layer_norm")
        yield Stored(own, key)


BART_STORED = [*_bart_stored()]  # where checkpoints have both stacks

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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ...weights import Ref, UnboundRef
from ..layers import MLP, Attention, Embedding, GatedMLP, Linear, RelativePositions
from ..layers.attention import Cache
from ..layers.positions import query_positions
from ..module import Module, ModuleList, Parameter
from ..tensor import Tensor
from ..trace import Spec
from .config_reader import MOST_LAYERS, ConfigReader
from .decoder import DecoderConfig, make_norm, read_decoder
from .family import Family, Signature, register
from .language_model import at_positions, layer_caches, results
from .language_model import signature as language_model_signature
from .stored import Stored


@dataclass(frozen=True)
class EncoderDecoderConfig(DecoderConfig):
    """The sizes and options of a decoder, and in `encoder` those in which its encoder differs.

    `norm_sums`: a norm follows the sum of every sublayer and its input (Vaswani et al., 2017), and
    none the last layer. `relative` is the number of buckets and the largest distance of relative
    positions, the same in all layers. `padded`: sequences of the encoder have any length up to its
    max_position_embeddings; else all have that length. `encoder_only`: there is no decoder.
    """

    encoder: Mapping[str, Any] = field(default_factory=dict[str, Any])
    decodes: bool = True
    norm_sums: bool = False
    key_bias: bool = True
    relative: tuple[int, int] | None = None
    logits_bias: bool = False
    padded: bool = True
    encoder_only: bool = False

    @property
    def of_encoder(self) -> EncoderDecoderConfig:
        """The sizes and options of the encoder."""
        return replace(self, decodes=False, encoder={}, **self.encoder)


Config = TypeVar("Config", bound=EncoderDecoderConfig)


class Layer(Module):
    """Self attention, in a decoder cross attention, and a feed-forward, added to their input."""

    def __init__(self, config: EncoderDecoderConfig, dtype: str) -> None:
        self.norm_sums = config.norm_sums
        self.self_attn = self._attention(config, dtype, causal=config.decodes)
        self.self_attn_norm = make_norm(config, dtype)
        if config.decodes:
            self.cross_attn = self._attention(config, dtype, memory_size=config.hidden_size)
            self.cross_attn_norm = make_norm(config, dtype)
        sizes = config.hidden_size, config.intermediate_size
        mlp = GatedMLP if config.gated else MLP
        self.mlp = mlp(*sizes, config.hidden_act, config.mlp_bias, dtype)
        self.mlp_norm = make_norm(config, dtype)

    @staticmethod
    def _attention(config: EncoderDecoderConfig, dtype: str, **options: Any) -> Attention:
        attention = Attention(
            config.hidden_size,
            config.num_attention_heads,
            head_dim=config.head_size,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            scale=config.attention_scale,
            dtype=dtype,
            **options,
        )
        if not config.key_bias:
            attention.k_proj.bias = None
        return attention

    def forward(
        self, x: Tensor, memory: Cache | None, lengths: Tensor | None, **options: Any
    ) -> tuple[Tensor, Cache | None]:
        """x [B, S, hidden_size] to the same, and the cache after this call in a decoder.

        `memory` are the keys and values of cross attention, `lengths` i32 [B] the tokens of the
        encoder without padding. `options` are those of self attention.
        """
        own = {} if memory is not None else {"lengths": lengths}
        mixed: Any = self.self_attn(self._before(self.self_attn_norm, x), **own, **options)
        mixed, cache = (mixed, None) if memory is None else mixed
        x = self._after(self.self_attn_norm, x + mixed)
        if memory is not None:
            normed = self._before(self.cross_attn_norm, x)
            mixed = self.cross_attn(normed, memory=memory, lengths=lengths)
            x = self._after(self.cross_attn_norm, x + mixed)
        fed = self.mlp(self._before(self.mlp_norm, x))
        return self._after(self.mlp_norm, x + fed), cache

    def _before(self, norm: Module, x: Tensor) -> Tensor:
        return x if self.norm_sums else norm(x)

    def _after(self, norm: Module, x: Tensor) -> Tensor:
        return norm(x) if self.norm_sums else x


class Stack(Module):
    """The layers of an encoder or a decoder between positions and the last norm."""

    def __init__(self, config: EncoderDecoderConfig, dtype: str) -> None:
        self.offset, self.relative, self.norm = config.position_offset, None, None
        if config.relative is not None:
            self.relative = RelativePositions(*config.relative, bidirectional=not config.decodes)
            shape = config.num_attention_heads, self.relative.buckets
            self.relative_table = Parameter(shape, dtype)
        else:
            size = config.max_position_embeddings + self.offset
            self.embed_positions = Embedding(size, config.hidden_size, dtype)
        self.embed_norm = make_norm(config, dtype) if config.embedding_norm else None
        self.layers = ModuleList(Layer(config, dtype) for _ in range(config.num_hidden_layers))
        if not config.norm_sums:
            self.norm = make_norm(config, dtype)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        lengths: Tensor | None,
        past: Tensor | None = None,
        caches: Sequence[tuple[Cache, Cache]] = (),
    ) -> tuple[Tensor, list[Cache]]:
        """x [B, S, hidden_size] at positions i32 [B|1, S] to the same, before the last norm.

        `caches` are those of self and cross attention in every layer of a decoder, of which the
        first ones are returned as they are after this call.
        """
        if self.relative is None:
            x = x + self.embed_positions(positions + self.offset if self.offset else positions)
        x = x if self.embed_norm is None else self.embed_norm(x)
        bias = None
        if self.relative is not None:  # once for all layers
            keys = caches[0][0].keys.shape[2] if caches else x.shape[1]
            bias = self.relative.bias(self.relative_table, positions, keys)
        updated: list[Cache] = []
        for i, layer in enumerate(self.layers):
            cache, memory = caches[i] if caches else (None, None)
            x, cache = layer(x, memory, lengths, cache=cache, past=past, bias=bias)
            updated += [] if cache is None else [cache]
        return x, updated

    def last(self, x: Tensor) -> Tensor:
        """The last norm of x, where there is one."""
        return x if self.norm is None else self.norm(x)


class EncoderDecoder(Module):
    """The parameters of both parts, of which each part has those that it uses as its weights."""

    def __init__(self, config: EncoderDecoderConfig, dtype: str) -> None:
        self.config, self.dtype = config, dtype
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.encoder, self.decoder = Stack(config.of_encoder, dtype), Stack(config, dtype)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        if config.logits_bias:
            self.logits_bias = Parameter((1, config.vocab_size), dtype)

    def embedded(self, input_ids: Tensor) -> Tensor:
        """Ids [B, S] to embeddings [B, S, hidden_size]."""
        return _scaled(self.embed_tokens(input_ids), self.config.embedding_multiplier)


def _scaled(x: Tensor, factor: float) -> Tensor:
    """x times a number that is not rounded to the dtype of x."""
    return x if factor == 1 else (x.cast("f32") * factor).cast(x.dtype)


class EncoderPart(EncoderDecoder):
    """The encoder, and the keys and values of what it returns in the decoder's layers."""

    def embed_source(self, source: Tensor) -> Tensor:
        """What is encoded, here ids [B, E], to embeddings [B, E, hidden_size]."""
        return self.embedded(source)

    def forward(self, encoder_lengths: Tensor | None = None, **source: Tensor) -> dict[str, Tensor]:
        """The results by name; `source` is the only other argument."""
        x = self.embed_source(*source.values())
        x, _ = self.encoder(x, query_positions(x.shape[1]), encoder_lengths)
        hidden = self.encoder.last(x)
        named = {"last_hidden_state": hidden.cast("f32")}
        for i, layer in enumerate([] if self.config.encoder_only else self.decoder.layers):
            keys, values = layer.cross_attn.memory_cache(hidden)
            named |= {f"cross_k{i}": keys, f"cross_v{i}": values}
        return named


class DecoderPart(EncoderDecoder):
    """The decoder with its language model head."""

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        past_lengths: Tensor,
        logit_positions: Tensor,
        encoder_lengths: Tensor | None = None,
        **states: Tensor,
    ) -> dict[str, Tensor]:
        """Logits f32 [B, T, vocab_size] and the caches after this call."""
        count, x = len(self.decoder.layers), self.embedded(input_ids)
        memory = [Cache(states[f"cross_k{i}"], states[f"cross_v{i}"]) for i in range(count)]
        caches = list(zip(layer_caches(states, count), memory, strict=True))
        x, caches = self.decoder(x, positions, encoder_lengths, past_lengths, caches)
        rows = self.decoder.last(at_positions(x, logit_positions))
        logits = self.lm_head(_scaled(rows, self.config.logits_multiplier)).cast("f32")
        if self.config.logits_bias:
            logits = logits + self.logits_bias.cast("f32")
        return results(logits, caches)


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
    stored: Callable[[Config], Sequence[Stored]],
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

    def alternatives(config: Config) -> Mapping[str, Ref]:
        return {"embed_tokens.weight": UnboundRef(head)} if config.tie_word_embeddings else {}

    names, copies = (architecture,), ("*.embed_tokens.weight",)
    encodes, decodes = ((*copies, *unused[part]) for part in ("encoder", "decoder"))
    parts: dict[str, Family[Config]] = {
        "decoder": Family(
            model_type,
            names,
            read,
            DecoderPart,
            decoder_signature,
            alternatives,
            stored,
            unused=decodes,
        ),
        "encoder": Family(
            model_type, names, read, encoder, inputs, stored=stored, unused=(*encodes, head)
        ),
    }
    return register(replace(parts["decoder"], parts=parts))


# Of BART, mBART and Whisper: the tensors that a part leaves to the other, sizes, and names.
BART_UNUSED = {
    "decoder": ("model.encoder.*", "model.decoder.layers.*.encoder_attn.[kv]_proj.*"),
    "encoder": ("model.decoder.*", "final_logits_bias"),
}


def read_bart(
    config: ConfigReader, kind: type[Config], longest: tuple[str, str], **more: Any
) -> Config:
    """The sizes of encoder and decoder; `longest` are the keys of their longest sequences."""
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
            "num_hidden_layers": config.integer("encoder_layers", most=MOST_LAYERS),
            "num_attention_heads": config.integer("encoder_attention_heads"),
            "max_position_embeddings": config.integer(longest[0]),
        },
        gated=False,
        norm="layer",
        norm_eps=1e-5,
        num_key_value_heads=None,
        head_dim=None,
        rope=None,
        **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), True),
        **more,
    )


def bart_names(config: EncoderDecoderConfig) -> Sequence[Stored]:
    """Where checkpoints have the parameters of both stacks."""
    layer = {
        "self_attn.o_proj": "self_attn.out_proj",
        "self_attn_norm": "self_attn_layer_norm",
        "cross_attn.o_proj": "encoder_attn.out_proj",
        "cross_attn_norm": "encoder_attn_layer_norm",
        "cross_attn": "encoder_attn",
        "mlp.up_proj": "fc1",
        "mlp.down_proj": "fc2",
        "mlp_norm": "final_layer_norm",
    }
    names = {f"layers.*.{own}": f"layers.*.{key}" for own, key in layer.items()}
    names |= {"embed_norm": "layernorm_embedding", "norm": "layer_norm"}
    return [
        *(Stored(f"{s}.{own}", f"model.{s}.{key}") for s in _STACKS for own, key in names.items()),
        *(Stored(stack, f"model.{stack}") for stack in _STACKS),
    ]


_STACKS = ("encoder", "decoder")

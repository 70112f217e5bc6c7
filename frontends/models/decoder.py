"""A decoder of pre-norm layers with its language model head; families differ in options and layers.

Names of parameters as in the Hugging Face checkpoints of Llama, Mistral, Qwen and Mixtral.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from ...errors import Error
from ...weights import Ref, UnboundRef
from ..layers import Attention, Embedding, GatedMLP, Linear, RmsNorm, Rope
from ..layers.attention import Cache
from ..module import Module, ModuleList
from ..tensor import Tensor
from .config_reader import MOST_LAYERS, ConfigReader
from .family import Family, register
from .language_model import at_positions, layer_caches, results, signature
from .rope_config import read_rope

_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "max_position_embeddings",
)


@dataclass(frozen=True)
class DecoderConfig:
    """The sizes of a decoder, named as in config.json.

    `num_key_value_heads` None means num_attention_heads, `head_dim` None hidden_size /
    num_attention_heads, `sliding_window` 0 no window; `qk_norm` normalizes queries and keys.
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope: Rope = field(default_factory=Rope)
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int = 0
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise Error(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_attention_heads < 1 or self.kv_heads < 1:
            raise Error("num_attention_heads and num_key_value_heads must be at least 1")
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise Error(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                f"{self.num_attention_heads}; give head_dim"
            )
        if self.num_attention_heads % self.kv_heads:
            raise Error(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.kv_heads}"
            )

    @property
    def kv_heads(self) -> int:
        """The number of key and value heads."""
        heads = self.num_key_value_heads
        return self.num_attention_heads if heads is None else heads

    @property
    def head_size(self) -> int:
        """The number of features of a head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


Config = TypeVar("Config", bound=DecoderConfig)


@overload
def read_decoder(config: ConfigReader, **more: Any) -> DecoderConfig: ...
@overload
def read_decoder(config: ConfigReader, kind: type[Config], **more: Any) -> Config: ...
def read_decoder(
    config: ConfigReader,
    kind: type[DecoderConfig] = DecoderConfig,
    *,
    max_position_embeddings: int,
    num_key_value_heads: int | None = None,
    head_dim: int | None = None,
    rms_norm_eps: float = 1e-6,
    rope_theta: float = 10000.0,
    **more: Any,
) -> DecoderConfig:
    """The sizes that every decoder has, with a family's defaults, and `more` fields of `kind`."""
    heads = config.integer("num_attention_heads")
    hidden = config.integer("hidden_size")
    head_dim = config.integer("head_dim", head_dim)
    context = config.integer("max_position_embeddings", max_position_embeddings)
    return kind(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_hidden_layers=config.integer("num_hidden_layers", most=MOST_LAYERS),
        num_attention_heads=heads,
        num_key_value_heads=config.integer("num_key_value_heads", num_key_value_heads),
        head_dim=head_dim,
        hidden_act=config.word("hidden_act", "silu"),
        max_position_embeddings=context,
        rms_norm_eps=config.number("rms_norm_eps", rms_norm_eps),
        rope=read_rope(config, head_dim or hidden // max(1, heads), context, rope_theta),
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        **more,
    )


def require_full_attention(config: ConfigReader) -> None:
    """Raise an Error where a config (Qwen) limits the attention of some layers to a window."""
    for unused in ("sliding_window", "max_window_layers"):  # without use_sliding_window
        config.integer(unused, 0)
    if config.flag("use_sliding_window"):
        raise config.error("use_sliding_window", "irc supports no window in some layers only")
    if set(config.words("layer_types")) - {"full_attention"}:
        raise config.error("layer_types", "irc supports full_attention only")


def tied_embeddings(config: DecoderConfig) -> Mapping[str, Ref]:
    """The other name of a tied embedding table."""
    if not config.tie_word_embeddings:
        return {}
    return {"model.embed_tokens.weight": UnboundRef("lm_head.weight")}


class DecoderLayer(Module):
    """Attention and a feed-forward, each preceded by a norm and added to its input."""

    def __init__(self, config: Any, dtype: str) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RmsNorm(size, eps, dtype=dtype)
        self.self_attn = Attention(
            size,
            config.num_attention_heads,
            config.kv_heads,
            config.head_size,
            qkv_bias=config.qkv_bias,
            output_bias=config.output_bias,
            qk_norm=eps if config.qk_norm else None,
            rope=config.rope,
            window=config.sliding_window,
            dtype=dtype,
        )
        self.post_attention_layernorm = RmsNorm(size, eps, dtype=dtype)
        self.add_feed_forward(config, dtype)

    def add_feed_forward(self, config: Any, dtype: str) -> None:
        """Create the feed-forward, under its name in checkpoints."""
        self.mlp = GatedMLP(
            config.hidden_size, config.intermediate_size, config.hidden_act, config.mlp_bias, dtype
        )

    def feed_forward(self, x: Tensor) -> Tensor:
        """x [B, S, hidden_size] to the same."""
        return self.mlp(x)

    def forward(
        self, x: Tensor, positions: Tensor, past: Tensor, cache: Cache
    ) -> tuple[Tensor, Cache]:
        """x [B, S, hidden_size] to the same, and the cache after this call."""
        mixed, cache = self.self_attn(self.input_layernorm(x), positions, cache=cache, past=past)
        x = x + mixed
        return x + self.feed_forward(self.post_attention_layernorm(x)), cache


class Decoder(Module):
    """Embedding, layers and the last norm; the caller applies the norm."""

    def __init__(
        self, config: DecoderConfig, dtype: str, layer: Callable[[Any, str], Module]
    ) -> None:
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = ModuleList(layer(config, dtype) for _ in range(config.num_hidden_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)

    def forward(
        self, input_ids: Tensor, positions: Tensor, past: Tensor, caches: list[Cache]
    ) -> tuple[Tensor, list[Cache]]:
        """Ids [B, S] to hidden states [B, S, hidden_size], and the caches after this call."""
        x = self.embed_tokens(input_ids)
        updated: list[Cache] = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer(x, positions, past, cache)
            updated.append(cache)
        return x, updated


class CausalLM(Module):
    """A decoder with its language model head; its arguments are those of language_model.py."""

    def __init__(
        self,
        config: DecoderConfig,
        dtype: str = "f32",
        layer: Callable[[Any, str], Module] = DecoderLayer,
    ) -> None:
        self.model = Decoder(config, dtype, layer)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        past_lengths: Tensor,
        logit_positions: Tensor,
        **caches: Tensor,
    ) -> dict[str, Tensor]:
        """Logits f32 [B, T, vocab_size] and the caches after this call."""
        layers = layer_caches(caches, len(self.model.layers))
        hidden, layers = self.model(input_ids, positions, past_lengths, layers)
        # the norm works row by row, so it is applied to the requested rows only
        rows = self.model.norm(at_positions(hidden, logit_positions))
        return results(self.lm_head(rows).cast("f32"), layers)


def register_decoder(
    model_type: str,
    architectures: Sequence[str],
    read: Callable[[ConfigReader], Config],
    layer: Callable[[Config, str], Module] = DecoderLayer,
    alternatives: Callable[[Config], Mapping[str, Ref]] = tied_embeddings,
) -> Family[Config]:
    """Register the family whose models are a CausalLM with this `layer`."""

    def build(config: Config, dtype: str) -> CausalLM:
        return CausalLM(config, dtype, layer)

    return register(Family(model_type, architectures, read, build, signature, alternatives))

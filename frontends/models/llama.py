"""Llama, and the models that differ from it in biases and windows only (Mistral, Qwen2).

Touvron et al., 2023; names of parameters as in Hugging Face checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...errors import Error
from ..layers import Attention, Embedding, GatedMLP, Linear, RmsNorm, Rope
from ..layers.attention import Cache
from ..module import Module, ModuleList
from ..tensor import Tensor
from .language_model import at_positions, layer_caches, results


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a Llama; fields that a config.json has too are called as there.

    `sliding_window` 0 means none; `head_dim` and `num_key_value_heads` may be left out.
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
    sliding_window: int = 0
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
        for name in (*sizes, "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise Error(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.num_attention_heads < 1 or self.kv_heads < 1:
            raise Error("a Llama needs at least one attention head and one key and value head")
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise Error(
                f"hidden_size {self.hidden_size} is no multiple of num_attention_heads "
                f"{self.num_attention_heads}; give head_dim"
            )
        if self.num_attention_heads % self.kv_heads:
            raise Error(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.kv_heads}"
            )

    @property
    def kv_heads(self) -> int:
        """How many key and value heads there are."""
        heads = self.num_key_value_heads
        return self.num_attention_heads if heads is None else heads

    @property
    def head_size(self) -> int:
        """Features of one head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads


def attention_of(config: LlamaConfig, dtype: str) -> Attention:
    """The attention of one layer."""
    return Attention(
        config.hidden_size,
        config.num_attention_heads,
        config.kv_heads,
        config.head_size,
        qkv_bias=config.qkv_bias,
        output_bias=config.output_bias,
        rope=config.rope,
        window=config.sliding_window,
        dtype=dtype,
    )


class LlamaLayer(Module):
    """Attention and a gated MLP, each behind a norm and added to its input."""

    def __init__(self, config: LlamaConfig, dtype: str) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RmsNorm(size, eps, dtype=dtype)
        self.self_attn = attention_of(config, dtype)
        self.post_attention_layernorm = RmsNorm(size, eps, dtype=dtype)
        self.mlp = GatedMLP(
            size, config.intermediate_size, config.hidden_act, config.mlp_bias, dtype
        )

    def forward(
        self, x: Tensor, positions: Tensor, past: Tensor, cache: Cache
    ) -> tuple[Tensor, Cache]:
        """x [B, S, hidden_size] to the same, and the cache after this call."""
        mixed, cache = self.self_attn(self.input_layernorm(x), positions, cache=cache, past=past)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), cache


Layer = Callable[[Any, str], Module]  # from a config and a dtype; called as LlamaLayer


class LlamaDecoder(Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: LlamaConfig, dtype: str, layer: Layer) -> None:
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype)
        self.layers = ModuleList(layer(config, dtype) for _ in range(config.num_hidden_layers))
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)

    def forward(
        self, input_ids: Tensor, positions: Tensor, past: Tensor, caches: list[Cache]
    ) -> tuple[Tensor, list[Cache]]:
        """Ids [B, S] to hidden states [B, S, hidden_size], and the caches after this call."""
        x = self.embed_tokens(input_ids)
        new: list[Cache] = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer(x, positions, past, cache)
            new.append(cache)
        return x, new


class Llama(Module):
    """A Llama with its language model head, called as models/language_model.py says."""

    def __init__(self, config: LlamaConfig, dtype: str = "f32", layer: Layer = LlamaLayer) -> None:
        self.model = LlamaDecoder(config, dtype, layer)
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
        # the norm works row by row, so that only the rows that are wanted go through it
        wanted = self.model.norm(at_positions(hidden, logit_positions))
        return results(self.lm_head(wanted).cast("f32"), layers)

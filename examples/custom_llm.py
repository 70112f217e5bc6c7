"""A language model that irc does not ship, Persimmon, in one file.

irc compile persimmon-8b-base --load examples/custom_llm.py -o build/persimmon --mesh tp=2
irc generate build/persimmon --prompt "Once upon a time"

`register` makes the family known; everything else (checkpoint, sharding, quantization, engines,
generation) is irc's. Parameters are named as in the checkpoint, so that every weight is bound.
"""

from dataclasses import dataclass
from typing import Any

from irc.frontends import Module, ModuleList
from irc.frontends import functional as F
from irc.frontends.layers import Embedding, LayerNorm, Linear, Rope, activation
from irc.frontends.layers.attention import Cache
from irc.frontends.models.config_reader import ConfigReader
from irc.frontends.models.family import Family, register
from irc.frontends.models.language_model import at_positions, layer_caches, results, signature


@dataclass(frozen=True)
class Sizes:
    """The sizes in config.json; `kv_heads` and `head_size` are those of the caches."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    kv_heads: int
    max_position_embeddings: int
    eps: float
    act: str
    qk_norm: bool
    rope: Rope

    @property
    def head_size(self) -> int:
        """The number of features of a head."""
        return self.hidden_size // self.kv_heads


def read(config: ConfigReader) -> Sizes:
    """The sizes of a PersimmonConfig of transformers."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    context = config.integer("max_position_embeddings", 16384)
    if config.flag("tie_word_embeddings"):
        raise config.error("tie_word_embeddings", "this example has a head of its own")
    return Sizes(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_hidden_layers=config.integer("num_hidden_layers"),
        kv_heads=heads,
        max_position_embeddings=context,
        eps=config.number("layer_norm_eps", 1e-5),
        act=config.word("hidden_act", "relu2"),
        qk_norm=config.flag("qk_layernorm", True),
        rope=_rope(config, hidden // heads),
    )


def _rope(config: ConfigReader, head_size: int) -> Rope:
    """Rotation of the first features of a head."""
    rope = ConfigReader(config.inner("rope_parameters"), "config.json: rope_parameters")
    if rope.word("rope_type", "default") != "default":
        raise rope.error("rope_type", "this example has the default rope")
    fraction = rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 0.5))
    theta = rope.number("rope_theta", config.number("rope_theta", 10000.0))
    return Rope(theta, rotary_dim=int(head_size * fraction))


class PersimmonAttention(Module):
    """Query, key and value of a head are adjacent in one weight; the first two are normalized."""

    def __init__(self, sizes: Sizes, dtype: str) -> None:
        hidden = sizes.hidden_size
        self.query_key_value = Linear(hidden, 3 * hidden, dtype=dtype)
        self.dense = Linear(hidden, hidden, dtype=dtype)
        if sizes.qk_norm:
            self.q_layernorm = LayerNorm(sizes.head_size, sizes.eps, dtype=dtype)
            self.k_layernorm = LayerNorm(sizes.head_size, sizes.eps, dtype=dtype)
        self.rope, self.heads, self.size = sizes.rope, sizes.kv_heads, sizes.head_size
        self.qk_norm = sizes.qk_norm

    def forward(self, x: Any, positions: Any, past: Any, cache: Cache) -> Any:
        batch, tokens, _ = x.shape
        qkv = self.query_key_value(x).reshape(batch, tokens, self.heads, 3, self.size)
        q, k, v = (qkv[:, :, :, i] for i in range(3))
        if self.qk_norm:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        q, k, v = (x.reshape(batch, tokens, -1) for x in (q, k, v))
        q = self.rope(q, positions, self.size)
        k = self.rope(k, positions, self.size)
        keys = F.cache_update(cache.keys, k, past)
        values = F.cache_update(cache.values, v, past)
        mixed = F.attention(q, keys, values, past=past, head_dim=self.size, causal=True)
        return self.dense(mixed), Cache(keys, values)


class PersimmonMLP(Module):
    def __init__(self, sizes: Sizes, dtype: str) -> None:
        self.dense_h_to_4h = Linear(sizes.hidden_size, sizes.intermediate_size, dtype=dtype)
        self.dense_4h_to_h = Linear(sizes.intermediate_size, sizes.hidden_size, dtype=dtype)
        self.act = activation(sizes.act)

    def forward(self, x: Any) -> Any:
        return self.dense_4h_to_h(self.act(self.dense_h_to_4h(x)))


class PersimmonLayer(Module):
    def __init__(self, sizes: Sizes, dtype: str) -> None:
        self.input_layernorm = LayerNorm(sizes.hidden_size, sizes.eps, dtype=dtype)
        self.post_attention_layernorm = LayerNorm(sizes.hidden_size, sizes.eps, dtype=dtype)
        self.self_attn = PersimmonAttention(sizes, dtype)
        self.mlp = PersimmonMLP(sizes, dtype)

    def forward(self, x: Any, positions: Any, past: Any, cache: Cache) -> Any:
        mixed, cache = self.self_attn(self.input_layernorm(x), positions, past, cache)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class PersimmonModel(Module):
    def __init__(self, sizes: Sizes, dtype: str) -> None:
        self.embed_tokens = Embedding(sizes.vocab_size, sizes.hidden_size, dtype)
        self.layers = ModuleList(
            PersimmonLayer(sizes, dtype) for _ in range(sizes.num_hidden_layers)
        )
        self.final_layernorm = LayerNorm(sizes.hidden_size, sizes.eps, dtype=dtype)


class PersimmonForCausalLM(Module):
    def __init__(self, sizes: Sizes, dtype: str) -> None:
        self.model = PersimmonModel(sizes, dtype)
        self.lm_head = Linear(sizes.hidden_size, sizes.vocab_size, bias=False, dtype=dtype)

    def forward(
        self, input_ids: Any, positions: Any, past_lengths: Any, logit_positions: Any, **caches: Any
    ) -> Any:
        x = self.model.embed_tokens(input_ids)
        layers, kept = self.model.layers, list[Cache]()
        for layer, cache in zip(layers, layer_caches(caches, len(layers)), strict=True):
            x, cache = layer(x, positions, past_lengths, cache)
            kept.append(cache)
        x = self.model.final_layernorm(at_positions(x, logit_positions))
        return results(self.lm_head(x).cast("f32"), kept)


register(Family("persimmon", ["PersimmonForCausalLM"], read, PersimmonForCausalLM, signature))

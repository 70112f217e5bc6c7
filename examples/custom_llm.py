"""A language model that irc does not ship, GPT-NeoX (Pythia), in one file.

irc compile pythia-410m --load examples/custom_llm.py -o build/pythia --mesh tp=2
irc generate build/pythia --prompt "Once upon a time"

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
    parallel: bool
    rope: Rope

    @property
    def head_size(self) -> int:
        """The number of features of a head."""
        return self.hidden_size // self.kv_heads


def read(config: ConfigReader) -> Sizes:
    """The sizes of a GPTNeoXConfig of transformers."""
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    context = config.integer("max_position_embeddings", 2048)
    config.number("classifier_dropout", 0.0)  # of other heads
    if config.flag("tie_word_embeddings"):
        raise config.error("tie_word_embeddings", "this example has a head of its own")
    if not config.flag("attention_bias", True):
        raise config.error("attention_bias", "this example has biases")
    return Sizes(
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=config.integer("intermediate_size"),
        num_hidden_layers=config.integer("num_hidden_layers"),
        kv_heads=heads,
        max_position_embeddings=context,
        eps=config.number("layer_norm_eps", 1e-5),
        act=config.word("hidden_act", "gelu"),
        parallel=config.flag("use_parallel_residual", True),
        rope=_rope(config, hidden // heads),
    )


def _rope(config: ConfigReader, head_size: int) -> Rope:
    """Rotation of the first features of a head."""
    rope = ConfigReader(config.inner("rope_parameters"), "config.json: rope_parameters")
    if rope.word("rope_type", "default") != "default":
        raise rope.error("rope_type", "this example has the default rope")
    fraction = rope.number("partial_rotary_factor", config.number("rotary_pct", 0.25))
    theta = rope.number("rope_theta", config.number("rotary_emb_base", 10000.0))
    return Rope(theta, rotary_dim=int(head_size * fraction))


class NeoXAttention(Module):
    """Query, key and value of a head are adjacent in one weight."""

    def __init__(self, sizes: Sizes, dtype: str) -> None:
        hidden = sizes.hidden_size
        self.query_key_value = Linear(hidden, 3 * hidden, dtype=dtype)
        self.dense = Linear(hidden, hidden, dtype=dtype)
        self.rope, self.heads, self.size = sizes.rope, sizes.kv_heads, sizes.head_size

    def forward(self, x: Any, positions: Any, past: Any, cache: Cache) -> Any:
        batch, tokens, _ = x.shape
        qkv = self.query_key_value(x).reshape(batch, tokens, self.heads, 3, self.size)
        q, k, v = (qkv[:, :, :, i].reshape(batch, tokens, -1) for i in range(3))
        q = self.rope(q, positions, self.size)
        k = self.rope(k, positions, self.size)
        keys = F.cache_update(cache.keys, k, past)
        values = F.cache_update(cache.values, v, past)
        mixed = F.attention(q, keys, values, past=past, head_dim=self.size, causal=True)
        return self.dense(mixed), Cache(keys, values)


class NeoXMLP(Module):
    def __init__(self, sizes: Sizes, dtype: str) -> None:
        self.dense_h_to_4h = Linear(sizes.hidden_size, sizes.intermediate_size, dtype=dtype)
        self.dense_4h_to_h = Linear(sizes.intermediate_size, sizes.hidden_size, dtype=dtype)
        self.act = activation(sizes.act)

    def forward(self, x: Any) -> Any:
        return self.dense_4h_to_h(self.act(self.dense_h_to_4h(x)))


class NeoXLayer(Module):
    def __init__(self, sizes: Sizes, dtype: str) -> None:
        self.input_layernorm = LayerNorm(sizes.hidden_size, sizes.eps, dtype=dtype)
        self.post_attention_layernorm = LayerNorm(sizes.hidden_size, sizes.eps, dtype=dtype)
        self.attention = NeoXAttention(sizes, dtype)
        self.mlp = NeoXMLP(sizes, dtype)
        self.parallel = sizes.parallel

    def forward(self, x: Any, positions: Any, past: Any, cache: Cache) -> Any:
        mixed, cache = self.attention(self.input_layernorm(x), positions, past, cache)
        if self.parallel:
            return x + mixed + self.mlp(self.post_attention_layernorm(x)), cache
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class NeoXModel(Module):
    def __init__(self, sizes: Sizes, dtype: str) -> None:
        self.embed_in = Embedding(sizes.vocab_size, sizes.hidden_size, dtype)
        self.layers = ModuleList(NeoXLayer(sizes, dtype) for _ in range(sizes.num_hidden_layers))
        self.final_layer_norm = LayerNorm(sizes.hidden_size, sizes.eps, dtype=dtype)


class NeoXForCausalLM(Module):
    def __init__(self, sizes: Sizes, dtype: str) -> None:
        self.gpt_neox = NeoXModel(sizes, dtype)
        self.embed_out = Linear(sizes.hidden_size, sizes.vocab_size, bias=False, dtype=dtype)

    def forward(
        self, input_ids: Any, positions: Any, past_lengths: Any, logit_positions: Any, **caches: Any
    ) -> Any:
        x = self.gpt_neox.embed_in(input_ids)
        layers, kept = self.gpt_neox.layers, list[Cache]()
        for layer, cache in zip(layers, layer_caches(caches, len(layers)), strict=True):
            x, cache = layer(x, positions, past_lengths, cache)
            kept.append(cache)
        x = self.gpt_neox.final_layer_norm(at_positions(x, logit_positions))
        return results(self.embed_out(x).cast("f32"), kept)


register(Family("gpt_neox", ["GPTNeoXForCausalLM"], read, NeoXForCausalLM, signature))

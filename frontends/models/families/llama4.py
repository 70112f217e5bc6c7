"""Llama 4, its text: attention in chunks, layers without positions, experts of scaled inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ... import functional as F
from ...layers import Linear, Routing
from ...layers.attention import Cache
from ...layers.masks import chunk_mask
from ...layers.scores import attend
from ...module import Module
from ...tensor import Tensor
from ..config_reader import ConfigReader
from ..decoder import (
    Call,
    DecoderConfig,
    DecoderLayer,
    layer_count,
    read_decoder,
    register_decoder,
    tied_embeddings,
)
from ..mixture import joined_experts, read_mixture
from ..stored import Stored


@dataclass(frozen=True)
class Llama4Config(DecoderConfig):
    """A Llama 4. Options of a layer: `chunk` > 0, the number of positions whose tokens see each
    other; `unit_heads`, queries and keys are normalized, without weights, behind the rope;
    `growth`, with every `growth_step` positions queries grow by that times a logarithm."""

    chunk: int = 0
    unit_heads: bool = False
    growth: float = 0.0
    growth_step: int = 1


class Llama4Attention(Module):
    """Attention with the options of a layer."""

    def __init__(self, config: Llama4Config, dtype: str) -> None:
        hidden, size, bias = config.hidden_size, config.head_size, config.qkv_bias
        self.q_proj = Linear(hidden, config.num_attention_heads * size, bias, dtype)
        self.k_proj = Linear(hidden, config.kv_heads * size, bias, dtype)
        self.v_proj = Linear(hidden, config.kv_heads * size, bias, dtype)
        self.o_proj = Linear(config.num_attention_heads * size, hidden, bias, dtype)
        self.config = config

    def forward(self, x: Tensor, call: Call, cache: Cache) -> tuple[Tensor, Cache]:
        """x [B, S, hidden_size] to the same, and the cache after this call."""
        config, positions = self.config, call.positions
        assert positions is not None
        q, k = (self._placed(part(x), positions) for part in (self.q_proj, self.k_proj))
        if config.growth:
            steps = ((positions + 1) // config.growth_step).cast("f32").unsqueeze(2)
            q = (q.cast("f32") * (F.log(steps + 1.0) * config.growth + 1.0)).cast(q.dtype)
        keys = F.cache_update(cache.keys, k, call.past)
        values = F.cache_update(cache.values, self.v_proj(x), call.past)
        mask = chunk_mask(positions, keys.shape[2], config.chunk) if config.chunk else None
        mixed = attend(q, keys, values, config.head_size, past=call.past, mask=mask, causal=True)
        return self.o_proj(mixed), Cache(keys, values)

    def _placed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Queries or keys [B, S, heads*head_size], rotated and normalized as the layer says."""
        config, size = self.config, self.config.head_size
        x = x if config.rope is None else config.rope(x, positions, size)
        if not config.unit_heads:
            return x
        ones = F.full(1.0, shape=(size,), dtype=x.dtype)
        heads = x.reshape(*x.shape[:2], -1, size)
        return F.rms_norm(heads, ones, eps=config.norm_eps).reshape(*x.shape)


class Llama4Layer(DecoderLayer):
    """A layer with the attention of Llama 4."""

    def add_attention(self, config: Llama4Config, dtype: str) -> None:
        """Create the attention."""
        self.self_attn = Llama4Attention(config, dtype)

    def attend(
        self, x: Tensor, call: Call, states: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Attention of x [B, S, hidden_size] to the same, and the states after this call."""
        mixed, cache = self.self_attn(x, call, Cache(states["k"], states["v"]))
        return mixed, {"k": cache.keys, "v": cache.values}


def _read(config: ConfigReader) -> Llama4Config:
    config.ignore("for_llm_compressor")
    width, bias = config.integer("intermediate_size", 8192), config.flag("attention_bias")
    mixture = read_mixture(
        config,
        "intermediate_size",
        "num_local_experts",
        (16, 1),
        routing=Routing(normalize=False, scoring="sigmoid"),
        weigh_inputs=True,
        shared_size=width,
    )
    return read_decoder(
        config,
        Llama4Config,
        keys={"intermediate_size": "intermediate_size_mlp"},
        defaults={"head_dim": 128, "num_key_value_heads": 8, "norm_eps": 1e-5},
        rope_theta=500000.0,
        interleaved_rope=True,
        qkv_bias=bias,
        mixture=mixture,
        growth_step=config.integer("floor_scale", 8192),
        layers=_layers(config),
    )


def _layers(config: ConfigReader) -> tuple[Mapping[str, Any], ...]:
    """The options of every layer."""
    count, step = layer_count(config), config.integer("interleave_moe_layer_step", 1)
    every = max(1, config.integer("no_rope_layer_interval", 4))
    rotated = config.numbers("no_rope_layers") or [(i + 1) % every for i in range(count)]
    sparse = config.numbers("moe_layers") or range(step - 1, count, max(1, step))
    chunk, normed = config.integer("attention_chunk_size", 8192), config.flag("use_qk_norm", True)
    growth = config.number("attn_scale", 0.1) if config.flag("attn_temperature_tuning", True) else 0
    kinds = config.words("layer_types") or [
        "chunked_attention" if turns else "full_attention" for turns in rotated
    ]
    layers: list[Mapping[str, Any]] = []
    for i, (turns, kind) in enumerate(zip(rotated, kinds, strict=False)):
        options: dict[str, Any] = {"chunk": chunk if kind == "chunked_attention" else 0}
        options |= {"unit_heads": normed} if turns else {"rope": None, "growth": growth}
        layers.append(options if i in sparse else options | {"mixture": None})
    return tuple(layers)


def _stored(config: Llama4Config) -> Sequence[Stored]:
    assert config.mixture is not None
    own, stored = "model.layers.*.mlp", "model.layers.*.feed_forward"
    experts = joined_experts(config.mixture, transposed=True, stored="feed_forward")
    return [Stored(f"{own}.gate", f"{stored}.router"), *experts, Stored(own, stored)]


TEXT = register_decoder(
    "llama4_text", ("Llama4ForCausalLM",), _read, Llama4Layer, tied_embeddings, _stored
)
LLAMA4 = register_decoder(
    "llama4",
    ("Llama4ForConditionalGeneration",),
    _read,
    Llama4Layer,
    tied_embeddings,
    _stored,
    prefixes=("model.", "language_model.model.", "model.language_model."),
    unused=("*vision_model.*", "*multi_modal_projector.*"),
    inside="text_config",
)

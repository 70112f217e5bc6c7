"""gpt-oss: attention sinks, windows in every second layer, clamped experts. OpenAI, 2025."""

from __future__ import annotations

from collections.abc import Sequence

from ...layers import ClampedSwiGLU, Routing
from ..config_reader import ConfigReader
from ..decoder import (
    DecoderConfig,
    read_decoder,
    read_layer_types,
    register_decoder,
    tied_embeddings,
    window_types,
)
from ..mixture import joined_experts, read_mixture
from ..stored import Stored

_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "norm_eps": 1e-5,
    "max_position_embeddings": 131072,
}


def _read(config: ConfigReader) -> DecoderConfig:
    config.ignore("initial_context_length experts_per_token hidden_act")
    alpha, limit = config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0)
    mixture = read_mixture(
        config,
        "intermediate_size",
        routing=Routing(bias=True),
        act=ClampedSwiGLU(alpha, limit),
        bias=True,
    )
    types = window_types(config.integer("sliding_window", 128))
    return read_decoder(
        config,
        defaults=_DEFAULTS,
        rope_theta=150000.0,
        attention_bias=config.flag("attention_bias", True),
        attention={"sinks": True},
        mixture=mixture,
        layers=read_layer_types(config, types, period=2),
    )


def _stored(config: DecoderConfig) -> Sequence[Stored]:
    assert config.mixture is not None
    router = Stored("model.layers.*.mlp.gate", "model.layers.*.mlp.router")
    return [router, *joined_experts(config.mixture, transposed=True, interleaved=True)]


GPT_OSS = register_decoder(
    "gpt_oss", ("GptOssForCausalLM",), _read, alternatives=tied_embeddings, stored=_stored
)

"""Llama 4, its text: attention in chunks, layers without positions, experts of scaled inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...layers import QueryGrowth, Routing
from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_decoder, register_decoder, tied_embeddings
from ..family import register_inside
from ..mixture import joined_experts, read_mixture
from ..stored import Stored


def _read(config: ConfigReader) -> DecoderConfig:
    config.ignore("for_llm_compressor")
    width = config.integer("intermediate_size", 8192)
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
        keys={"intermediate_size": "intermediate_size_mlp"},
        defaults={"head_dim": 128, "num_key_value_heads": 8, "norm_eps": 1e-5},
        rope_theta=500000.0,
        interleaved_rope=True,
        attention_bias=config.flag("attention_bias"),
        mixture=mixture,
        layers=_layers(config),
    )


def _layers(config: ConfigReader) -> tuple[Mapping[str, Any], ...]:
    """The options of every layer."""
    count, step = config.layers(), config.integer("interleave_moe_layer_step", 1)
    every = max(1, config.integer("no_rope_layer_interval", 4))
    rotated = config.numbers("no_rope_layers") or [(i + 1) % every for i in range(count)]
    sparse = config.numbers("moe_layers") or range(step - 1, count, max(1, step))
    chunk, normed = config.integer("attention_chunk_size", 0), config.flag("use_qk_norm", True)
    growth = QueryGrowth(config.integer("floor_scale", 8192), config.number("attn_scale", 0.1), 1)
    is_tuned = config.flag("attn_temperature_tuning", True)
    kinds = config.words("layer_types") or [
        "chunked_attention" if turns else "full_attention" for turns in rotated
    ]
    layers: list[Mapping[str, Any]] = []
    for i, (turns, kind) in enumerate(zip(rotated[:count], kinds, strict=False)):
        attention: dict[str, Any] = {"chunk": chunk if kind == "chunked_attention" else 0}
        options: dict[str, Any] = {"attention": attention}
        if turns:
            options["qk_norm"] = "rotated" if normed else ""
        else:
            options["rope"], attention["growth"] = None, growth if is_tuned else None
        layers.append(options if i in sparse else options | {"mixture": None})
    return tuple(layers)


def _stored(config: DecoderConfig) -> Sequence[Stored]:
    assert config.mixture is not None
    own, stored = "model.layers.*.mlp", "model.layers.*.feed_forward"
    experts = joined_experts(config.mixture, transposed=True, stored="feed_forward")
    return [Stored(f"{own}.gate", f"{stored}.router"), *experts, Stored(own, stored)]


TEXT = register_decoder(
    "llama4_text", ("Llama4ForCausalLM",), _read, alternatives=tied_embeddings, stored=_stored
)
_OTHERS = "*vision_model.* *multi_modal_projector.*"
LLAMA4 = register_inside(TEXT, "llama4", "Llama4ForConditionalGeneration", _OTHERS)

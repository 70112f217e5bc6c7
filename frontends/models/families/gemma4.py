"""Gemma 4, its text: head sizes by layer, shared caches, an input for each layer. Gemma Team, 2026.

The last `num_kv_shared_layers` layers have no keys and values; they read the cache of the last
earlier layer of their type. Every layer also gets an embedding of the token of its own, mixed with
a projection of the common one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ....weights import Ref, UnboundRef
from ...layers import Cache, Embedding, Linear, activation
from ...module import Parameter
from ...tensor import Tensor
from ..config_reader import ConfigReader
from ..decoder import (
    Call,
    Decoder,
    DecoderConfig,
    DecoderLayer,
    make_norm,
    read_decoder,
    read_layer_types,
    register_decoder,
    tied_embeddings,
)
from ..family import register_inside
from ..language_model import States
from ..rope_config import read_rope
from .gemma2 import GEMMA_NORMS

_LOCAL, _FULL = "sliding_attention", "full_attention"
_LAYER_INPUTS = "layer_inputs"  # in the memory of a call: [B, S, layers, layer_input_size]


@dataclass(frozen=True)
class Gemma4Config(DecoderConfig):
    """The sizes of a Gemma 4; `layer_input_size` 0: layers have no inputs of their own."""

    layer_input_size: int = 0
    layer_input_vocabulary: int = 0
    # these are of one layer:
    index: int = 0
    layer_type: str = _FULL
    shares_cache: bool = False


class Gemma4Layer(DecoderLayer):
    """A layer whose cache others may read, with an input of its own and a scale."""

    def __init__(self, config: Gemma4Config, dtype: str) -> None:
        super().__init__(config, dtype)
        self.layer_scalar = Parameter((1,), dtype)
        self.config, size = config, config.layer_input_size
        if size:
            self.per_layer_input_gate = Linear(config.hidden_size, size, False, dtype)
            self.per_layer_projection = Linear(size, config.hidden_size, False, dtype)
            self.post_per_layer_input_norm = make_norm(config, dtype)
            self.act = activation(config.hidden_act)

    @staticmethod
    def states(config: Gemma4Config, dtype: str) -> States:
        """Keys and values, unless those of another layer are read."""
        return {} if config.shares_cache else DecoderLayer.states(config, dtype)

    def attend(
        self, x: Tensor, call: Call, states: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Attention of x [B, S, hidden_size] to the same, and the states after this call."""
        kind = self.config.layer_type
        if self.config.shares_cache:
            cache, past = call.memory[kind], call.past
            return self.self_attn(x, call.positions, cache=cache, past=past, is_ready=True)[0], {}
        mixed, states = super().attend(x, call, states)
        call.memory[kind] = Cache(states["k"], states["v"])
        return mixed, states

    def forward(
        self, x: Tensor, call: Call, states: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """x [B, S, hidden_size] to the same, and the states after this call."""
        x, states = super().forward(x, call, states)
        if self.config.layer_input_size:
            own = call.memory[_LAYER_INPUTS][:, :, self.config.index]
            gated = self.act(self.per_layer_input_gate(x)) * own
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return x * self.layer_scalar, states


class Gemma4Decoder(Decoder):
    """A decoder that leaves an input for each layer in the memory of the call."""

    def __init__(self, config: Gemma4Config, dtype: str, layer: Any) -> None:
        super().__init__(config, dtype, layer)
        if size := config.layer_input_size:
            width = config.num_hidden_layers * size
            self.embed_tokens_per_layer = Embedding(config.layer_input_vocabulary, width, dtype)
            self.per_layer_model_projection = Linear(config.hidden_size, width, False, dtype)
            self.per_layer_projection_norm = make_norm(config, dtype, size)

    def embed(self, inputs: Any, call: Call) -> Tensor:
        """Ids [B, S] to the input [B, S, hidden_size] of the first layer."""
        config, x = self.config, super().embed(inputs, call)
        if size := config.layer_input_size:
            shape = (*inputs.shape, config.num_hidden_layers, size)
            projected = self.per_layer_model_projection(x) * config.hidden_size**-0.5
            projected = self.per_layer_projection_norm(projected.reshape(*shape))
            tokens = self.embed_tokens_per_layer(inputs) * size**0.5
            call.memory[_LAYER_INPUTS] = (projected + tokens.reshape(*shape)) * 0.5**0.5
        return x


def _read(config: ConfigReader) -> Gemma4Config:
    config.require("enable_moe_block", False, "irc has no mixture of experts of Gemma 4")
    if config.word("use_bidirectional_attention", "vision") != "vision":
        raise config.error("use_bidirectional_attention", "irc computes causal attention of text")
    config.ignore("top_k_experts moe_intermediate_size num_experts")
    hidden_size = config.integer("hidden_size")
    defaults = {
        "hidden_act": "gelu_pytorch_tanh",
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    }
    sizes = read_decoder(
        config,
        Gemma4Config,
        keys={"hidden_act": "hidden_activation"},
        defaults=defaults,
        head_dim=config.integer("head_dim", 256),
        rope=None,
        block="sandwich",
        qk_norm="head",
        attention={"scale": 1.0, "value_norm": config.number("rms_norm_eps", 1e-6)},
        attention_bias=config.flag("attention_bias"),
        embedding_multiplier=max(hidden_size, 1) ** 0.5,
        round_embedding_multiplier=True,
        logits_softcap=config.number("final_logit_softcapping", 0.0),
        layer_input_size=config.integer("hidden_size_per_layer_input", 256),
        layer_input_vocabulary=config.integer("vocab_size_per_layer_input", 262144),
    )
    return replace(sizes, layers=tuple(_read_layers(config, sizes)))


def _read_layers(config: ConfigReader, sizes: Gemma4Config) -> Iterator[Mapping[str, Any]]:
    """The options of every layer."""
    count, shared = sizes.num_hidden_layers, config.integer("num_kv_shared_layers", 0)
    window, own = config.integer("sliding_window", 512), count - shared
    joined = {**sizes.attention, "keys_are_values": config.flag("attention_k_eq_v")}
    types = {
        _LOCAL: {"layer_type": _LOCAL, "sliding_window": window},
        _FULL: {"layer_type": _FULL, "attention": joined},
    }
    default = [_FULL if (i + 1) % 6 == 0 or i == count - 1 else _LOCAL for i in range(count)]
    layers = read_layer_types(config, types, default=default)
    names = [layer["layer_type"] for layer in layers]
    if len(names) != count or names[-1] != _FULL:
        raise config.error("layer_types", f"expected those of {count} layers, full_attention last")
    if not 0 <= shared < count or {*names[:own]} != {*names}:
        raise config.error("num_kv_shared_layers", "expected a layer of each type before these")
    stored = ConfigReader(config.inner("per_layer_config"), "config.json: per_layer_config")
    wide = sizes.intermediate_size * (2 if config.flag("use_double_wide_mlp") else 1)
    for i, layer in enumerate(layers):
        place = {"shares_cache": True, "intermediate_size": wide} if i >= own else {}
        yield {**layer, **place, "index": i, **_read_heads(config, sizes, i, layer, stored)}
    stored.finish("layers")


def _read_heads(
    config: ConfigReader,
    sizes: Gemma4Config,
    index: int,
    layer: Mapping[str, Any],
    stored: ConfigReader,
) -> dict[str, Any]:
    """The sizes of the heads of a layer, and their rope; `stored` are the sizes of some layers."""
    kind, head_dim, heads = layer["layer_type"], sizes.head_size, sizes.kv_heads
    full_size = config.integer("global_head_dim", 512)
    full_heads = config.integer("num_global_key_value_heads", heads)
    padded = str(index).zfill(len(str(sizes.num_hidden_layers - 1)))
    if own := stored.inner(str(index)) or stored.inner(padded):
        reader = ConfigReader(own, f"config.json: layer {index} in per_layer_config")
        head_dim = reader.integer("head_dim", head_dim)
        heads = reader.integer("num_key_value_heads", heads)
        reader.finish("a layer")
    elif kind == _FULL and not config.inner("per_layer_config"):
        head_dim, heads = full_size, full_heads if config.flag("attention_k_eq_v") else heads
    if kind not in config.inner("rope_parameters"):
        raise config.error("rope_parameters", f"expected the settings of {kind}")
    rope = read_rope(config, head_dim, sizes.max_position_embeddings, 1e4, layer_type=kind)
    return {"head_dim": head_dim, "num_key_value_heads": heads, "rope": rope}


def _alternatives(config: Gemma4Config) -> Mapping[str, Ref]:
    """The tied head, and keys and values that layers have without using them."""
    references = dict(tied_embeddings(config))
    for options in config.of_layers():
        if options.shares_cache:
            for name in ("k_proj", "v_proj", "k_norm"):
                key = f"model.layers.{options.index}.self_attn.{name}.weight"
                references[key] = UnboundRef(key)
    return references


TEXT = register_decoder(
    "gemma4_text",
    ("Gemma4ForCausalLM",),
    _read,
    Gemma4Layer,
    _alternatives,
    decoder=Gemma4Decoder,
    stored=GEMMA_NORMS,
)
_OTHERS = "*vision_tower.* *audio_tower.* *embed_vision.* *embed_audio.*"
GEMMA4 = register_inside(TEXT, "gemma4", "Gemma4ForConditionalGeneration", _OTHERS)

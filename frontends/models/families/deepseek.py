"""DeepSeek-V2 and V3: latent attention, groups of experts and shared ones. DeepSeek-AI, 2024."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...layers import LatentAttention, Rope, Routing
from ...tensor import Tensor
from ...trace import Spec
from ..config_reader import ConfigReader
from ..decoder import Call, DecoderConfig, DecoderLayer, read_decoder, register_decoder
from ..language_model import States
from ..mixture import SHARED_EXPERTS, read_first_dense, read_group_routing, read_mixture
from ..rope_config import read_rope


@dataclass(frozen=True)
class LatentConfig(DecoderConfig):
    """A decoder with latent attention, whose sizes are those of LatentAttention."""

    latent: Mapping[str, Any] | None = None


class LatentLayer(DecoderLayer):
    """A layer with latent attention."""

    @staticmethod
    def states(config: LatentConfig, dtype: str) -> States:
        """The compressed keys and values."""
        return {"k": Spec(dtype, ("B", 1, "C", config.head_size))}

    def add_attention(self, config: LatentConfig, dtype: str) -> None:
        """Create the attention."""
        sizes = config.latent or {}
        heads, bias = config.num_attention_heads, config.qkv_bias
        self.self_attn = LatentAttention(
            config.hidden_size, heads, rope=config.rope or Rope(), bias=bias, dtype=dtype, **sizes
        )

    def attend(
        self, x: Tensor, call: Call, states: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Attention of x [B, S, hidden_size] to the same, and the states after this call."""
        assert call.positions is not None
        mixed, cache = self.self_attn(x, call.positions, states["k"], call.past)
        return mixed, {"k": cache}


def _read(config: ConfigReader, routing: Routing, interleaved: bool = True) -> LatentConfig:
    config.ignore("head_dim num_key_value_heads num_nextn_predict_layers qk_head_dim topk_method")
    config.require("moe_layer_freq", 1, "irc reads experts in every layer behind the dense ones")
    keys = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "max_position_embeddings")
    rank, rotated, key_size, context = (config.integer(key) for key in keys)
    rope = replace(read_rope(config, rotated, context, 10000.0), interleaved=interleaved)
    scale = (key_size + rotated) ** -0.5
    if rope.mscale_all_dim and rope.factor > 1:
        scale *= (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1) ** 2
    latent = {
        "kv_rank": rank,
        "key_size": key_size,
        "rotated": rotated,
        "value_size": config.integer("v_head_dim"),
        "query_rank": config.integer("q_lora_rank", 0),
        "scale": scale,
    }
    return read_decoder(
        config,
        LatentConfig,
        num_key_value_heads=1,
        head_dim=rank + rotated,
        rope=rope,
        latent=latent,
        qkv_bias=config.flag("attention_bias"),
        mlp_bias=config.flag("mlp_bias"),
        mixture=read_mixture(config, count="n_routed_experts", routing=routing),
        layers=read_first_dense(config),
    )


def _read_v2(config: ConfigReader) -> LatentConfig:
    config.require("scoring_func", "softmax", "irc reads softmax in DeepSeek-V2")
    config.require("norm_topk_prob", False, "irc scales no weights of experts in DeepSeek-V2")
    routing = read_group_routing(config, 1)
    if config.word("topk_method", "greedy") == "greedy":
        routing = replace(routing, groups=1, chosen_groups=1)
    routing = replace(routing, normalize=False, scoring="softmax", correction=False, group_best=1)
    return _read(config, routing)


def _read_v3(config: ConfigReader) -> LatentConfig:
    config.require("scoring_func", "sigmoid", "irc reads sigmoid in DeepSeek-V3")
    return _read(config, read_group_routing(config), config.flag("rope_interleave", True))


V2 = register_decoder(
    "deepseek_v2", ("DeepseekV2ForCausalLM",), _read_v2, LatentLayer, stored=SHARED_EXPERTS
)
V3 = register_decoder(
    "deepseek_v3",
    ("DeepseekV3ForCausalLM",),
    _read_v3,
    LatentLayer,
    stored=SHARED_EXPERTS,
    unused=("model.layers.61.*",),  # predicts further tokens
)

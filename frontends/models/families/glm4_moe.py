"""GLM-4.5: experts chosen as in DeepSeek-V3. GLM-4.5 Team, 2025."""

from __future__ import annotations

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_decoder, register_decoder
from ..mixture import SHARED_EXPERTS, read_first_dense, read_group_routing, read_mixture


def _read(config: ConfigReader) -> DecoderConfig:
    config.ignore("num_nextn_predict_layers")
    routing = read_group_routing(config)
    return read_decoder(
        config,
        defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "norm_eps": 1e-5},
        rotary_fraction=0.5,
        qkv_bias=config.flag("attention_bias"),
        qk_norm="head" if config.flag("use_qk_norm") else "",
        mixture=read_mixture(config, count="n_routed_experts", routing=routing),
        layers=read_first_dense(config),
    )


GLM4_MOE = register_decoder(
    "glm4_moe",
    ("Glm4MoeForCausalLM",),
    _read,
    stored=SHARED_EXPERTS,
    unused=("model.layers.46.*", "model.layers.92.*"),  # predict further tokens
)

"""GPT-NeoX and Pythia: two norms side by side, rope of the first features. Black et al., 2022."""

from __future__ import annotations

from collections.abc import Sequence

from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_decoder, register_decoder
from ..stored import Stored, megatron_layers


def _read(config: ConfigReader) -> DecoderConfig:
    config.ignore("classifier_dropout")
    parallel = config.flag("use_parallel_residual", True)
    return read_decoder(
        config,
        keys={"norm_eps": "layer_norm_eps"},
        defaults={"hidden_act": "gelu", "norm_eps": 1e-5, "max_position_embeddings": 2048},
        rope_theta=config.number("rotary_emb_base", 10000.0),
        rotary_fraction=config.number("rotary_pct", 0.25),
        norm="layer",
        block="parallel_two_norms" if parallel else "pre",
        gated=False,
        attention_bias=config.flag("attention_bias", True),
        mlp_bias=True,
    )


def _stored(config: DecoderConfig) -> Sequence[Stored]:
    return [
        Stored("model.embed_tokens", "gpt_neox.embed_in"),
        Stored("model.norm", "gpt_neox.final_layer_norm"),
        Stored("lm_head", "embed_out"),
        *megatron_layers(config, "gpt_neox.layers.*.", "attention"),
    ]


GPT_NEOX = register_decoder("gpt_neox", ("GPTNeoXForCausalLM",), _read, stored=_stored)

"""GPT-J: attention and feed-forward of one norm, rope of the first features. Wang, 2021."""

from __future__ import annotations

from collections.abc import Sequence

from ...layers import Rope
from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, read_decoder, register_decoder
from ..stored import Stored, in_layers

_KEYS = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "norm_eps": "layer_norm_epsilon",
}
_NAMES = {
    "input_layernorm": "ln_1",
    "self_attn.o_proj": "attn.out_proj",
    "self_attn": "attn",
    "mlp.up_proj": "mlp.fc_in",
    "mlp.down_proj": "mlp.fc_out",
}


def _read(config: ConfigReader) -> DecoderConfig:
    summary = "type use_proj activation proj_to_labels first_dropout"  # of other heads
    config.ignore(" ".join(f"summary_{key}" for key in summary.split()))
    config.ignore("n_ctx attn_pdrop rotary scale_attn_weights gradient_checkpointing")
    defaults = {
        "hidden_act": "gelu_new",
        "norm_eps": 1e-5,
        "intermediate_size": 4 * config.integer("n_embd"),
    }
    return read_decoder(
        config,
        keys=_KEYS,
        defaults=defaults,
        norm="layer",
        block="parallel",
        gated=False,
        rope=Rope(rotary_dim=config.integer("rotary_dim", 64), interleaved=True),
        mlp_bias=True,
        head_bias=True,
    )


def _stored(config: DecoderConfig) -> Sequence[Stored]:
    return [
        Stored("model.embed_tokens", "transformer.wte"),
        Stored("model.norm", "transformer.ln_f"),
        *in_layers("transformer.h.*", _NAMES),
    ]


GPTJ = register_decoder("gptj", ("GPTJForCausalLM",), _read, stored=_stored)

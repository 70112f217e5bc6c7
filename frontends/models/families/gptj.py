"""GPT-J: attention and feed-forward of one norm, rope of the first features. Wang, 2021."""

from __future__ import annotations

from ...layers import Rope
from ..config_reader import ConfigReader
from ..decoder import DecoderConfig, register_decoder
from ..stored import Stored, renamed
from .gpt2 import read_gpt2

_NAMES = {
    "input_layernorm": "ln_1",
    "self_attn.o_proj": "attn.out_proj",
    "self_attn": "attn",
    "mlp.up_proj": "mlp.fc_in",
    "mlp.down_proj": "mlp.fc_out",
}
_STORED = [
    Stored("model.embed_tokens", "transformer.wte"),
    Stored("model.norm", "transformer.ln_f"),
    *renamed(_NAMES, "transformer.h.*."),
]


def _read(config: ConfigReader) -> DecoderConfig:
    config.ignore("rotary scale_attn_weights gradient_checkpointing")
    rope = Rope(rotary_dim=config.integer("rotary_dim", 64), interleaved=True)
    return read_gpt2(config, block="parallel", rope=rope, mlp_bias=True, head_bias=True)


GPTJ = register_decoder("gptj", ("GPTJForCausalLM",), _read, stored=_STORED)

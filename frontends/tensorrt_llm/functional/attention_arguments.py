"""Arguments of attention layers and functions that have no effect in irc, or are refused."""

from __future__ import annotations

from typing import Any

from ....errors import Error, did_you_mean
from ....source import here
from ..context import current_session
from ..tensor import Tensor

# about kernels, memory, and lengths that irc knows by other means
_IGNORED = (
    "host_context_lengths", "host_sink_token_length", "cache_indirection",
    "max_context_length", "sequence_length", "max_input_length", "cross_kv_length",
    "host_runtime_perf_knobs", "host_context_progress", "kv_cache_block_offsets",
    "host_kv_cache_block_offsets", "host_kv_cache_pool_pointers", "host_kv_cache_pool_mapping",
    "kv_cache_block_pointers", "host_kv_cache_block_pointers", "layer_idx_in_cache_pool",
    "kv_orig_quant_scale", "attention_output_sf_scale", "num_kv_heads_origin", "multi_block_mode",
    "enable_context_fmha", "dense_context_fmha", "remove_input_padding", "norm_before_bmm1",
    "long_rope_rotary_inv_freq", "rotary_embedding_short_m_scale", "rotary_embedding_long_m_scale",
    "max_lora_rank", "reorder", "use_implicit_relative_attention", "spec_decoding_params",
    "cp_rank", "cp_group",
)  # fmt: skip
_SPECULATION = "speculative decoding is not supported"
_PARTS = "give attention_mask with AttentionMaskType.custom_mask"
# name -> the value that is accepted, and what to do instead of others
_REFUSED: dict[str, tuple[Any, str]] = {
    "attention_packed_mask": (None, "give attention_mask, one number per query and key"),
    "attention_output_orig_quant_scale": (None, "quantize with a scheme of `irc compile`"),
    "spec_decoding_generation_lengths": (None, _SPECULATION),
    "spec_decoding_position_offsets": (None, _SPECULATION),
    "spec_decoding_packed_mask": (None, _SPECULATION),
    "spec_decoding_is_generation_length_variable": (False, _SPECULATION),
    "spec_decoding_max_generation_length": (1, _SPECULATION),
    "spec_decoding_use": (None, _SPECULATION),
    "medusa_packed_mask": (None, _SPECULATION),
    "medusa_position_offsets": (None, _SPECULATION),
    "is_mla_enabled_flag": (False, "multi-head latent attention is not supported"),
    "skip_attn": (None, "leave the layer out in Python"),
    "vision_start": (-1, _PARTS),
    "vision_length": (-1, _PARTS),
    "cp_size": (1, "use tensor parallelism, or `irc compile --mesh cp=N`"),
    "enable_qkv": (True, "attention always has the projection qkv"),
    "use_auto_parallel": (False, "write one rank, and let `irc compile` shard it"),
    "enable_pos_shift": (False, "positions of a cache do not move in irc"),
}


def check_others(function: str, others: dict[str, Any]) -> None:
    """Note arguments without effect; an Error for those that cannot be honoured, or unknown."""
    for name, value in others.items():
        if name in _REFUSED:
            neutral, advice = _REFUSED[name]
            if value is not None and (isinstance(value, Tensor) or value != neutral):
                raise Error(f"{function}: {name} is not supported; {advice}", loc=here())
        elif name not in _IGNORED:
            guess = did_you_mean(name, [*_IGNORED, *_REFUSED])
            raise Error(f"{function} has no argument {name!r}{guess}", loc=here())
        elif value is not None and "_block_" in name:
            note_paged(name)


def note_paged(name: str) -> None:
    """Note that something of paged caches has no effect."""
    current_session().note(
        f"{name} has no effect: irc's KV caches are contiguous, past_key_value_N"
    )

"""What the attention layers of a model share in one call: caches, lengths and masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ....errors import Error
from ....source import here
from ..functional.attention_arguments import note_paged
from ..tensor import Tensor

Caches = Sequence[Tensor | None]


@dataclass
class AttentionParams:
    """The lengths of the sequences of a call, i32 [B] each; the other fields have no effect.

    `context_lengths` are the lengths of the prompts, `encoder_input_lengths` those of the
    sequences that cross attention reads. irc computes the angles of rotary embeddings, so that
    the tables for them stay None.
    """

    sequence_length: Tensor | None = None
    context_lengths: Tensor | None = None
    host_context_lengths: Tensor | None = None
    max_context_length: int | None = None
    host_request_types: Tensor | None = None
    encoder_input_lengths: Tensor | None = None
    encoder_max_input_length: Any = None
    host_runtime_perf_knobs: Tensor | None = None
    host_context_progress: Tensor | None = None
    embed_positions: Any = field(default=None, init=False)
    rotary_inv_freq: Any = field(default=None, init=False)
    embed_positions_for_gpt_attention: Any = field(default=None, init=False)

    def fill_attention_const_params_for_rope(self, *tables: Any, **named: Any) -> AttentionParams:
        """Accepted, without effect."""
        return self

    fill_attention_const_params_for_long_rope = fill_attention_const_params_for_rope

    def is_valid(self, *conditions: Any, **named: Any) -> bool:
        """True: attention says itself what it lacks."""
        return True


@dataclass
class KeyValueCacheParams:
    """The KV caches of the layers, and how many tokens they hold, i32 [B].

    `past_key_value` has a cache [B, 2, kv, P, D] per layer. `host_max_attention_window_sizes` is
    a number, one per layer, or i32 [layers]. The fields of paged caches have no effect: irc's
    caches are contiguous.
    """

    past_key_value: Caches | None = None
    host_past_key_value_lengths: Tensor | None = None
    host_max_attention_window_sizes: Any = None
    host_sink_token_length: Tensor | None = None
    kv_cache_block_offsets: Any = None
    host_kv_cache_block_offsets: Any = None
    host_kv_cache_pool_pointers: Any = None
    host_kv_cache_pool_mapping: Any = None
    cache_indirection: Tensor | None = None
    past_key_value_length: Any = None
    cross_kv_cache_block_offsets: Any = None
    host_cross_kv_cache_block_offsets: Any = None
    host_cross_kv_cache_pool_pointers: Any = None
    host_cross_kv_cache_pool_mapping: Any = None
    kv_cache_block_pointers: Any = None
    host_kv_cache_block_pointers: Any = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if "_block_" in name and value is not None:
                note_paged(name)

    def get_first_past_key_value(self) -> Tensor | None:
        """The cache of the first layer, that of a layer in its own call."""
        return self.past_key_value[0] if self.past_key_value else None

    def fill_none_tensor_list(self, list_size: int) -> None:
        """Give every layer a cache that is None, unless there are caches."""
        if self.past_key_value is None:
            self.past_key_value = (None,) * list_size

    def is_valid(self, gpt_attention_plugin: Any) -> bool:
        """True: attention says itself what it lacks."""
        return True


@dataclass
class AttentionMaskParams:
    """The masks of a layer, [B, T] or [B, S, T]; packed masks are not supported."""

    self_attention_mask: Tensor | None = None
    self_attention_packed_mask: Tensor | None = None
    cross_attention_mask: Tensor | None = None
    cross_attention_packed_mask: Tensor | None = None


@dataclass
class BlockSparseAttnParams:
    """Blocks of AttentionMaskType.blocksparse; `irc.frontends.layers.BlockSparse` defines them."""

    block_size: int = 64
    homo_head_pattern: bool = False
    num_local_blocks: int = 16
    vertical_stride: int = 8


@dataclass
class MropeParams:
    """Angles of mrope: [cos, sin] per pair of the tokens of prompts, [B, N * D], and i32 [B, 1],
    what is added to the positions of later tokens."""

    mrope_rotary_cos_sin: Tensor | None = None
    mrope_position_deltas: Tensor | None = None


class SpecDecodingParams:
    """Refused where it has tensors: speculative decoding is not supported."""

    def __init__(
        self,
        spec_decoding_is_generation_length_variable: bool = False,
        spec_decoding_max_generation_length: int = 1,
        spec_decoding_generation_lengths: Tensor | None = None,
        spec_decoding_position_offsets: Tensor | None = None,
        spec_decoding_packed_mask: Tensor | None = None,
        spec_decoding_use: Tensor | None = None,
    ) -> None:
        tensors = (
            spec_decoding_generation_lengths,
            spec_decoding_position_offsets,
            spec_decoding_packed_mask,
        )
        if any(each is not None for each in tensors) or spec_decoding_max_generation_length > 1:
            raise Error(
                "speculative decoding is not supported; generate one token per call", loc=here()
            )

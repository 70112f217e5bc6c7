"""`BertAttention`: attention over whole sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..context import dialect
from ..functional.attention_arguments import check_others
from ..quantization import QuantMode
from ..tensor import Tensor, unwrap, wrap
from .attention_base import AttentionBase, local_heads
from .linear import refuse_lora


class BertAttention(AttentionBase):
    """Attention over whole sequences, without a cache: the rows see their first keys only.

    Weights and tensor parallelism are those of `Attention`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        max_position_embeddings: int = 1024,
        num_layers: int = 1,
        attention_head_size: int | None = None,
        num_kv_heads: int | None = None,
        q_scaling: float = 1.0,
        apply_query_key_layer_scaling: bool = False,
        bias: bool = True,
        dtype: Any = None,
        tp_group: Sequence[int] | None = None,
        tp_size: int = 1,
        tp_rank: int = 0,
        relative_attention: bool = False,
        max_distance: int = 0,
        num_buckets: int = 0,
        quant_mode: QuantMode | None = None,
        instance_id: int | None = None,
        **others: Any,
    ) -> None:
        check_others("BertAttention", others)
        heads = local_heads(
            hidden_size, num_attention_heads, num_kv_heads, attention_head_size, tp_rank, tp_size
        )
        self._build(hidden_size, heads, bias, bias, dtype, tp_group, instance_id)
        self._scale(q_scaling, num_layers if apply_query_key_layer_scaling else 1)
        self._relate(relative_attention, num_buckets, max_distance)
        self.max_position_embeddings = max_position_embeddings

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        input_lengths: Tensor | None = None,
        workspace: Tensor | None = None,
        max_input_length: Any = None,
        lora_layer_params: Any = None,
    ) -> Tensor:
        """hidden_states [B, S, hidden_size] to the same.

        `attention_mask` [B, S] hides keys where it is 0; in the versions up to 0.7.1 it is added to
        the scores [B, heads, S, S]. `input_lengths` i32 [B] hides keys behind the end of a row.
        """
        refuse_lora(lora_layer_params)
        rules = self._rules(bidirectional=True)
        q, k, v = self.heads.split(unwrap(self.qkv(hidden_states)))
        mask, lengths = unwrap(attention_mask), unwrap(input_lengths)
        seen = {"bias": mask} if dialect() == "A" else {"mask": mask}
        return self.dense(wrap(rules.attend(self.heads, q, k, v, lengths=lengths, **seen)))

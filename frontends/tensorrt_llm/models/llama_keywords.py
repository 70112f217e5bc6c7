"""LLaMA of dialect A: constructors that take sizes as keywords."""

from __future__ import annotations

from typing import Any

from ..context import current_session, signatures
from ..layers import AttentionParams, KeyValueCacheParams
from ..mapping import Mapping
from ..tensor import Tensor
from . import llama
from .decoder import finished, forward_arguments
from .generation_mixin import GenerationMixin

_MODEL = (
    "num_layers, num_heads, num_kv_heads, hidden_size, vocab_size, hidden_act, "
    "max_position_embeddings, dtype, mlp_hidden_size, position_embedding_type, rotary_base, "
    "rotary_scaling, mapping, use_auto_parallel, quant_mode, use_parallel_embedding, "
    "embedding_sharding_dim, rms_norm_eps, use_fused_mlp, attn_bias, mlp_bias, moe_config, "
    "use_prompt_tuning"
)
_LAYER = (
    "layer_id, hidden_size, num_attention_heads, num_kv_heads, max_position_embeddings, dtype, "
    "attention_mask_type, hidden_act, position_embedding_type, rotary_base, rotary_scaling, "
    "mlp_hidden_size, tp_group, tp_size, tp_rank, use_auto_parallel, quant_mode, rms_norm_eps, "
    "attn_bias, mlp_bias, use_fused_mlp, moe_config"
)
# The keyword of dialect A by the key of the config; others have the same name.
_KEYS = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "mlp_hidden_size": "intermediate_size",
    "rms_norm_eps": "norm_epsilon",
    "moe_config": "moe",
}
_UNUSED = ("use_auto_parallel", "attention_mask_type", "tp_group", "tp_size", "tp_rank")


def _config(**given: Any) -> llama.LLaMAConfig:
    """The config that keywords describe; rms_norm_eps is 1e-6 by default."""
    found = {_KEYS.get(name, name): v for name, v in given.items() if name not in _UNUSED}
    found = {name: value for name, value in found.items() if value is not None}
    found.setdefault("norm_epsilon", 1e-6)
    return llama.LLaMAConfig(**found)


class LLaMADecoderLayer(llama.LLaMADecoderLayer):
    """One layer; its mask is causal whatever `attention_mask_type` says."""

    @signatures(a=_LAYER, b=_LAYER)
    def __init__(self, layer_id: int, **sizes: Any) -> None:
        tp = sizes.get("tp_size", 1) if sizes.get("tp_group") is not None else 1
        mapping = current_session().mapping if tp > 1 else Mapping()
        if mapping is None or mapping.world_size < tp:  # an old script without a Mapping
            mapping = Mapping(tp, sizes.get("tp_rank", 0), tp_size=tp)
        super().__init__(_config(mapping=mapping, num_layers=1, **sizes), layer_id)


class LLaMAModel(llama.LLaMAModel):
    """Embedding, layers and norm of this pipeline stage."""

    @signatures(a=_MODEL, b=_MODEL)
    def __init__(self, **sizes: Any) -> None:
        super().__init__(_config(**sizes))


class LLaMAForCausalLM(llama.LLaMAModel, GenerationMixin):
    """The model with the head of the language model, which is on the last pipeline stage."""

    @signatures(
        a=_MODEL.replace("dtype, ", "dtype, logits_dtype, ", 1),
        b=_MODEL.replace("dtype, ", "dtype, logits_dtype, ", 1),
    )
    def __init__(self, **sizes: Any) -> None:
        super().__init__(_config(**sizes))
        head = llama.head(self.config)
        if head is not None:
            self.lm_head = head

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] (the old order)
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        last_token_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        kv_cache_params: KeyValueCacheParams | None = None,
        attention_params: AttentionParams | None = None,
        hidden_states: Tensor | None = None,
        all_reduce_workspace: Tensor | None = None,
        prompt_embedding_table: Tensor | None = None,
        prompt_tasks: Tensor | None = None,
        prompt_vocab_size: Tensor | None = None,
        lora_params: Any = None,
    ) -> Any:
        """Logits [B, V] of the last tokens ([B, S, V] of all without last_token_ids), or the hidden
        states for the next stage; with `use_cache` (the same, caches)."""
        found = super().forward(
            input_ids,
            position_ids,
            use_cache,
            attention_mask,
            kv_cache_params,
            attention_params,
            hidden_states,
            prompt_embedding_table=prompt_embedding_table,
            prompt_tasks=prompt_tasks,
            prompt_vocab_size=prompt_vocab_size,
        )
        return finished(self, found, last_token_ids, use_cache)

    def prepare_inputs(
        self,
        max_batch_size: int,
        max_input_len: int,
        max_new_tokens: int,
        use_cache: bool = True,
        max_beam_width: int = 1,
        max_num_tokens: int | None = None,
        prompt_embedding_table_size: int = 0,
        gather_context_logits: bool = False,
        gather_generation_logits: bool = False,
        lora_target_modules: Any = None,
    ) -> tuple[Any, ...]:
        """The arguments of `forward` in their order, as inputs of the network in progress."""
        found = self.prepare_basic_inputs(
            max_batch_size=max_batch_size,
            max_beam_width=max_beam_width,
            max_input_len=max_input_len,
            max_new_tokens=max_new_tokens,
            **self.config.input_sizes(),
            gather_context_logits=gather_context_logits,
            prompt_embedding_table_size=prompt_embedding_table_size,
            lora_target_modules=lora_target_modules,
        )
        given = list(forward_arguments(found, use_cache).values())
        return (*given[:8], None, *given[8:])  # the workspace of collectives, which irc allocates

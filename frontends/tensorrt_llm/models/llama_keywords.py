"""LLaMA of 0.5 to 0.7.1: constructors that take sizes as keywords, and make the config of them."""

from __future__ import annotations

from typing import Any

from ..context import current_session, signatures
from ..dtypes import str_dtype_to_trt
from ..enums import AttentionMaskType, PositionEmbeddingType
from ..layers import AttentionParams, KeyValueCacheParams, MoeConfig
from ..mapping import Mapping
from ..quantization import QuantMode
from ..tensor import Tensor
from . import llama
from .config import LLaMAConfig
from .decoder import PretrainedModel, mark_outputs

_MODEL = (
    "num_layers, num_heads, num_kv_heads, hidden_size, vocab_size, hidden_act, "
    "max_position_embeddings, dtype, mlp_hidden_size, position_embedding_type, rotary_base, "
    "rotary_scaling, mapping, quant_mode, use_parallel_embedding, embedding_sharding_dim, "
    "rms_norm_eps, use_fused_mlp, attn_bias, mlp_bias, moe_config, use_prompt_tuning"
)
_LAYER = (
    "layer_id, hidden_size, num_attention_heads, num_kv_heads, max_position_embeddings, dtype, "
    "attention_mask_type, hidden_act, position_embedding_type, rotary_base, rotary_scaling, "
    "mlp_hidden_size, tp_group, tp_size, tp_rank, quant_mode, rms_norm_eps, attn_bias, mlp_bias, "
    "use_fused_mlp, moe_config"
)
_CAUSAL_LM = _MODEL.replace("dtype, ", "dtype, logits_dtype, ", 1)
_ROPE = PositionEmbeddingType.rope_gpt_neox


def _config(
    num_heads: int,
    num_kv_heads: int | None,
    mlp_hidden_size: int | None,
    rms_norm_eps: float,
    moe_config: MoeConfig | None,
    quant_mode: QuantMode | None,
    **sizes: Any,
) -> LLaMAConfig:
    """The config that the keywords of a constructor describe."""
    return LLaMAConfig(
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads if num_kv_heads and num_kv_heads > 0 else num_heads,
        intermediate_size=mlp_hidden_size,
        norm_epsilon=rms_norm_eps,
        moe=moe_config,
        quant_mode=quant_mode or QuantMode(0),
        **{name: value for name, value in sizes.items() if value is not None},
    )


class LLaMADecoderLayer(llama.LLaMADecoderLayer):
    """One layer; its mask is causal whatever `attention_mask_type` says."""

    @signatures(a=_LAYER, b=_LAYER)
    def __init__(
        self,
        layer_id: int,
        hidden_size: int,
        num_attention_heads: int,
        num_kv_heads: int | None = None,
        max_position_embeddings: int = 2048,
        dtype: Any = None,
        attention_mask_type: AttentionMaskType = AttentionMaskType.causal,
        hidden_act: str = "silu",
        position_embedding_type: PositionEmbeddingType = _ROPE,
        rotary_base: float = 10000.0,
        rotary_scaling: Any = None,
        mlp_hidden_size: int | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        tp_rank: int = 0,
        quant_mode: QuantMode | None = None,
        rms_norm_eps: float = 1e-6,
        attn_bias: bool = False,
        mlp_bias: bool = False,
        use_fused_mlp: bool = False,
        moe_config: MoeConfig | None = None,
    ) -> None:
        size = tp_size if tp_group is not None else 1
        mapping = current_session().mapping if size > 1 else Mapping()
        if mapping is None or mapping.world_size < size:  # a script without a Mapping
            mapping = Mapping(size, tp_rank, tp_size=size)
        config = _config(
            num_attention_heads,
            num_kv_heads,
            mlp_hidden_size,
            rms_norm_eps,
            moe_config,
            quant_mode,
            num_hidden_layers=1,
            hidden_size=hidden_size,
            max_position_embeddings=max_position_embeddings,
            dtype=dtype,
            hidden_act=hidden_act,
            position_embedding_type=position_embedding_type,
            rotary_base=rotary_base,
            rotary_scaling=rotary_scaling,
            mapping=mapping,
            attn_bias=attn_bias,
            mlp_bias=mlp_bias,
            use_fused_mlp=use_fused_mlp,
        )
        super().__init__(config, layer_id)
        self.hidden_size, self.hidden_act, self.dtype = hidden_size, hidden_act, dtype
        self.num_attention_heads, self.num_kv_heads = num_attention_heads, num_kv_heads
        self.mlp_hidden_size = config.intermediate_size
        self.max_position_embeddings = max_position_embeddings
        self.position_embedding_type = position_embedding_type
        self.attention_mask_type = attention_mask_type
        self.tp_group, self.tp_size = tp_group, tp_size


class LLaMAModel(llama.LLaMAModel):
    """Embedding, layers and norm of this pipeline stage."""

    @signatures(a=_MODEL, b=_MODEL)
    def __init__(
        self,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int | None,
        hidden_size: int,
        vocab_size: int,
        hidden_act: str,
        max_position_embeddings: int,
        dtype: Any,
        mlp_hidden_size: int | None = None,
        position_embedding_type: PositionEmbeddingType = _ROPE,
        rotary_base: float = 10000.0,
        rotary_scaling: Any = None,
        mapping: Mapping | None = None,
        quant_mode: QuantMode | None = None,
        use_parallel_embedding: bool = False,
        embedding_sharding_dim: int = 0,
        rms_norm_eps: float = 1e-6,
        use_fused_mlp: bool = False,
        attn_bias: bool = False,
        mlp_bias: bool = False,
        moe_config: MoeConfig | None = None,
        use_prompt_tuning: bool = False,
        logits_dtype: Any = "float32",
    ) -> None:
        config = _config(
            num_heads,
            num_kv_heads,
            mlp_hidden_size,
            rms_norm_eps,
            moe_config,
            quant_mode,
            num_hidden_layers=num_layers,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            hidden_act=hidden_act,
            max_position_embeddings=max_position_embeddings,
            dtype=dtype,
            logits_dtype=logits_dtype,
            position_embedding_type=position_embedding_type,
            rotary_base=rotary_base,
            rotary_scaling=rotary_scaling,
            mapping=mapping,
            use_parallel_embedding=use_parallel_embedding,
            embedding_sharding_dim=embedding_sharding_dim,
            use_fused_mlp=use_fused_mlp,
            attn_bias=attn_bias,
            mlp_bias=mlp_bias,
            use_prompt_tuning=use_prompt_tuning,
        )
        super().__init__(config)


class LLaMAForCausalLM(LLaMAModel, PretrainedModel):
    """The model with the head of the language model, which is on the last pipeline stage."""

    dtype: Any = None

    @signatures(a=_CAUSAL_LM, b=_CAUSAL_LM)
    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        config: Any = self.config
        self.num_layers, self.num_heads = config.num_hidden_layers, config.num_attention_heads
        self.num_kv_heads, self.vocab_size = config.num_key_value_heads, config.vocab_size
        self.dtype, self.logits_dtype, self.kv_dtype = (
            str_dtype_to_trt(each) for each in (config.dtype, config.logits_dtype, config.kv_dtype)
        )
        self.quant_mode, self.moe_config = config.quant_mode, config.moe
        self.use_parallel_embedding = config.use_parallel_embedding
        self.embedding_sharding_dim = config.embedding_sharding_dim
        self.use_fused_mlp, self.tp_size = config.use_fused_mlp, config.mapping.tp_size
        head = llama.head(config)
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
        result = super().forward(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=use_cache,
            attention_mask=attention_mask,
            kv_cache_params=kv_cache_params,
            attention_params=attention_params,
            hidden_states=hidden_states,
            prompt_embedding_table=prompt_embedding_table,
            prompt_tasks=prompt_tasks,
            prompt_vocab_size=prompt_vocab_size,
            lora_params=lora_params,
        )
        states, presents = result if use_cache else (result, None)
        output = mark_outputs(self, states, presents, last_token_ids)
        return output if presents is None else (output, presents)

"""LLaMA of 0.5 to 0.7.1: constructors that take sizes as keywords, and make the config of them."""

from __future__ import annotations

from typing import Any

from ..api import api
from ..context import current_session
from ..dtypes import str_dtype_to_trt
from ..layers import AttentionParams, KeyValueCacheParams
from ..mapping import Mapping
from ..quantization import QuantMode
from ..tensor import Tensor
from .config import LLaMAConfig
from .decoder import PretrainedModel, mark_outputs
from .llama import Layer, Transformer, head

# The key of the config by the keyword of a constructor; others have the same name.
_KEYS = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "mlp_hidden_size": "intermediate_size",
    "rms_norm_eps": "norm_epsilon",
    "moe_config": "moe",
}


def _config(sizes: dict[str, Any]) -> LLaMAConfig:
    """The config that the keywords of a constructor describe."""
    keys = {_KEYS.get(name, name): value for name, value in sizes.items() if value is not None}
    if (keys.get("num_key_value_heads") or 0) <= 0:
        keys["num_key_value_heads"] = None
    keys.setdefault("quant_mode", QuantMode(0))
    return LLaMAConfig(**keys)


@api("models.llama.model.LLaMADecoderLayer", releases="-0.7")
class LLaMADecoderLayer(Layer):
    """One layer; its mask is causal whatever `attention_mask_type` says."""

    def __init__(
        self,
        layer_id: int,
        attention_mask_type: Any = None,
        tp_group: Any = None,
        tp_size: int = 1,
        tp_rank: int = 0,
        **sizes: Any,
    ) -> None:
        size = tp_size if tp_group is not None else 1
        mapping = current_session().mapping if size > 1 else Mapping()
        if mapping is None or mapping.world_size < size:  # a script without a Mapping
            mapping = Mapping(size, tp_rank, tp_size=size)
        super().__init__(_config({**sizes, "num_layers": 1, "mapping": mapping}), layer_id)

    def describe(self, config: LLaMAConfig) -> None:
        """Set the attributes that scripts read."""
        self.hidden_size, self.hidden_act = config.hidden_size, config.hidden_act
        self.num_attention_heads = config.num_attention_heads
        self.num_kv_heads, self.dtype = config.num_key_value_heads, str_dtype_to_trt(config.dtype)
        self.mlp_hidden_size = config.intermediate_size
        self.max_position_embeddings = config.max_position_embeddings
        self.position_embedding_type = config.position_embedding_type
        self.attention_mask_type = self.attention.attention_mask_type
        self.tp_group, self.tp_size = config.mapping.tp_group, config.mapping.tp_size


@api("models.llama.model.LLaMAModel", releases="-0.7")
class LLaMAModel(Transformer):
    """Embedding, layers and norm of this pipeline stage."""

    layer_class = LLaMADecoderLayer

    def __init__(self, **sizes: Any) -> None:
        super().__init__(_config(sizes))


@api("models.llama.model.LLaMAForCausalLM", releases="-0.7")
class LLaMAForCausalLM(LLaMAModel, PretrainedModel):
    """The model with the head of the language model, which is on the last pipeline stage."""

    dtype: Any = None

    def __init__(self, **sizes: Any) -> None:
        config = _config(sizes)
        Transformer.__init__(self, config)
        self.num_layers, self.num_heads = config.num_hidden_layers, config.num_attention_heads
        self.num_kv_heads, self.vocab_size = config.num_key_value_heads, config.vocab_size
        self.dtype, self.logits_dtype, self.kv_dtype = (
            str_dtype_to_trt(each) for each in (config.dtype, config.logits_dtype, config.kv_dtype)
        )
        self.quant_mode, self.moe_config = config.quant_mode, config.moe
        self.use_parallel_embedding = config.use_parallel_embedding
        self.embedding_sharding_dim = config.embedding_sharding_dim
        self.use_fused_mlp, self.tp_size = config.use_fused_mlp, config.mapping.tp_size
        if config.mapping.is_last_pp_rank():
            self.lm_head = head(config)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] (with last_token_ids)
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        last_token_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        kv_cache_params: KeyValueCacheParams | None = None,
        attention_params: AttentionParams | None = None,
        hidden_states: Tensor | None = None,
        prompt_embedding_table: Tensor | None = None,
        prompt_tasks: Tensor | None = None,
        prompt_vocab_size: Tensor | None = None,
    ) -> Any:
        """Logits [B, V] of the last tokens ([B, S, V] of all without last_token_ids), or the hidden
        states for the next stage; with `use_cache` (the same, caches)."""
        result = Transformer.forward(
            self,
            input_ids,
            position_ids,
            use_cache,
            attention_mask,
            kv_cache_params,
            attention_params,
            hidden_states,
            prompt_embedding_table,
            prompt_tasks,
            prompt_vocab_size,
        )
        states, presents = result if use_cache else (result, None)
        output = mark_outputs(self, states, presents, last_token_ids)
        return output if presents is None else (output, presents)

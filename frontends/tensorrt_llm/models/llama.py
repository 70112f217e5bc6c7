"""LLaMA, from a config (dialect B); `llama_keywords.py` has the constructors of dialect A."""

from __future__ import annotations

import os
from typing import Any, cast

from ....errors import Error
from ....source import here
from ..enums import AttentionMaskType
from ..layers import (
    MOE,
    Attention,
    AttentionParams,
    ColumnLinear,
    Embedding,
    FusedGatedMLP,
    GatedMLP,
    KeyValueCacheParams,
    MoeConfig,
    PromptTuningEmbedding,
    RmsNorm,
)
from ..layers.linear import refuse_lora
from ..mapping import Mapping
from ..module import Module
from ..tensor import Tensor
from .config import PretrainedConfig
from .decoder import DecoderLayerList, DecoderModelForCausalLM, from_stage_before

_GATED = {"silu": "swiglu", "gelu": "geglu"}  # the activations of experts, which have a gate


def pad_vocab_size(vocab_size: int, tp_size: int) -> int:
    """The next multiple of tp_size."""
    return -(-vocab_size // tp_size) * tp_size


class LLaMAConfig(PretrainedConfig):
    """The sizes of LLaMA, Mistral, Mixtral and Qwen2."""

    def __init__(
        self,
        *,
        mlp_bias: bool = False,
        attn_bias: bool = False,
        dense_bias: bool | None = None,
        rotary_base: float = 10000.0,
        rotary_scaling: dict[str, Any] | None = None,
        residual_mlp: bool = False,
        disable_weight_only_quant_plugin: bool = False,
        moe: Any = None,
        remove_duplicated_kv_heads: bool = False,
        use_prompt_tuning: bool = False,
        use_fused_mlp: bool = False,
        **more: Any,
    ) -> None:
        more.setdefault("architecture", "LlamaForCausalLM")
        more.setdefault("hidden_act", "silu")
        more.setdefault("position_embedding_type", "rope_gpt_neox")
        super().__init__(**more)
        if residual_mlp:
            raise Error("residual_mlp is not supported; write the layer in a script", loc=here())
        qwen2 = self.architecture in ("Qwen2ForCausalLM", "QWenForCausalLM")
        self.mlp_bias, self.attn_bias = mlp_bias, attn_bias or qwen2
        self.dense_bias = attn_bias if dense_bias is None else dense_bias
        self.rotary_base, self.rotary_scaling = rotary_base, rotary_scaling
        self.moe = (
            MoeConfig.from_dict(cast("Any", moe)) if isinstance(moe, dict) else moe or MoeConfig()
        )
        self.use_prompt_tuning, self.use_fused_mlp = use_prompt_tuning, use_fused_mlp

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "moe": self.moe.to_dict()}

    @classmethod
    def from_hugging_face(
        cls,
        folder: Any,
        dtype: Any = "auto",
        mapping: Mapping | None = None,
        quant_config: Any = None,
        **more: Any,
    ) -> LLaMAConfig:
        """The config of a Hugging Face checkpoint folder."""
        from .weights import read_llama

        return cls(**read_llama(folder, dtype), mapping=mapping, quantization=quant_config, **more)


class LLaMADecoderLayer(Module):
    """norm, attention, sum, norm, gated MLP or experts, sum."""

    def __init__(self, config: LLaMAConfig, layer_idx: int) -> None:
        mapping, dtype = config.mapping, config.dtype
        self.layer_idx, self.config = layer_idx, config
        group: dict[str, Any] = {"tp_group": mapping.tp_group, "tp_size": mapping.tp_size}
        self.input_layernorm = RmsNorm(config.hidden_size, eps=config.norm_epsilon, dtype=dtype)
        self.attention = Attention(
            local_layer_idx=_place(mapping.pp_layers(config.num_hidden_layers), layer_idx),
            hidden_size=config.hidden_size,
            attention_head_size=config.head_size,
            num_attention_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            max_position_embeddings=config.max_position_embeddings or 2048,
            dtype=dtype,
            attention_mask_type=AttentionMaskType.causal,
            bias=config.attn_bias,
            dense_bias=config.dense_bias,
            position_embedding_type=config.position_embedding_type,
            rotary_embedding_base=config.rotary_base,
            rotary_embedding_scaling=config.rotary_scaling,
            quant_mode=config.quant_mode,
            tp_rank=mapping.tp_rank,
            **group,
        )
        self.mlp = self._make_mlp(config, group)
        self.post_layernorm = RmsNorm(config.hidden_size, eps=config.norm_epsilon, dtype=dtype)

    def _make_mlp(self, config: LLaMAConfig, group: dict[str, Any]) -> Module:
        sizes: dict[str, Any] = {
            "hidden_size": config.hidden_size,
            "ffn_hidden_size": config.intermediate_size,
            "hidden_act": config.hidden_act,
            "dtype": config.dtype,
            "bias": config.mlp_bias,
            "quant_mode": config.quant_mode,
            **group,
        }
        if config.moe.has_moe():
            sizes["hidden_act"] = _GATED.get(config.hidden_act, config.hidden_act)
            return MOE(moe_config=config.moe, mapping=config.mapping, **sizes)
        return (FusedGatedMLP if config.use_fused_mlp else GatedMLP)(**sizes)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        use_cache: bool = False,
        kv_cache_params: KeyValueCacheParams | None = None,
        attention_params: AttentionParams | None = None,
        all_reduce_workspace: Tensor | None = None,
        lora_layer_params: Any = None,
        spec_decoding_params: Any = None,
        position_ids: Tensor | None = None,
    ) -> Any:
        """hidden_states [B, S, hidden] to the same; with `use_cache` (the same, the cache).

        `position_ids` [B, S] are those of the tokens, by default counted from the cache.
        """
        refuse_lora(lora_layer_params)
        residual = hidden_states
        normed = self.input_layernorm(hidden_states)
        if self.layer_idx == 0:
            self.register_network_output("norm0", normed)
        mixed = self.attention(
            normed,
            attention_mask=attention_mask,
            use_cache=use_cache,
            kv_cache_params=kv_cache_params,
            attention_params=attention_params,
            position_ids=position_ids,
            spec_decoding_params=spec_decoding_params,
        )
        mixed, present = mixed if use_cache else (mixed, None)
        hidden_states = residual + mixed
        normed = self.post_layernorm(hidden_states)
        changed = self.mlp(normed)
        if self.layer_idx == 0:
            for name, value in (("attn", mixed), ("norm1", normed), ("mlp", changed)):
                self.register_network_output(name, value)
        hidden_states = hidden_states + changed
        return (hidden_states, present) if use_cache else hidden_states


class LLaMAModel(Module):
    """Embedding on the first pipeline stage, layers, norm on the last."""

    def __init__(self, config: LLaMAConfig, layer: Any = LLaMADecoderLayer) -> None:
        mapping = config.mapping
        self.config = config
        if mapping.is_first_pp_rank():
            self.vocab_embedding = embedding(config)
        self.layers = DecoderLayerList(layer, config)
        if mapping.is_last_pp_rank():
            self.ln_f = RmsNorm(config.hidden_size, eps=config.norm_epsilon, dtype=config.dtype)

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
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
        """[B, S, hidden]; with `use_cache` (the same, caches)."""
        refuse_lora(lora_params)
        mapping = self.config.mapping
        prompt = (prompt_embedding_table, prompt_tasks, prompt_vocab_size)
        if mapping.is_first_pp_rank():
            given: list[Any] = [each for each in prompt if each is not None]
            x = self.vocab_embedding(input_ids, *given)
            self.register_network_output("embd", x)
        else:
            x = from_stage_before(mapping, hidden_states)
        found = self.layers(
            x,
            use_cache=use_cache,
            attention_mask=attention_mask,
            kv_cache_params=kv_cache_params,
            attention_params=attention_params,
            position_ids=position_ids,
        )
        hidden, presents = found if use_cache else (found, list[Any]())
        if mapping.is_last_pp_rank():
            hidden = self.ln_f(hidden)
        return (hidden, presents) if use_cache else hidden


def _place(layers: list[int], layer: int) -> int:
    """The place of a layer in its pipeline stage."""
    return layers.index(layer) if layer in layers else layer


def embedding(config: LLaMAConfig) -> Embedding:
    mapping, parallel = config.mapping, config.use_parallel_embedding
    cls = PromptTuningEmbedding if config.use_prompt_tuning else Embedding
    return cls(
        num_embeddings=config.vocab_size or 0,
        embedding_dim=config.hidden_size,
        dtype=config.dtype,
        tp_size=mapping.tp_size if parallel else 1,
        tp_group=mapping.tp_group if parallel else None,
        sharding_dim=config.embedding_sharding_dim,
        tp_rank=mapping.tp_rank,
    )


def head(config: LLaMAConfig) -> ColumnLinear | None:
    """The head of the language model, on the last pipeline stage."""
    mapping = config.mapping
    if not mapping.is_last_pp_rank():
        return None
    return ColumnLinear(
        config.hidden_size,
        pad_vocab_size(config.vocab_size or 0, mapping.tp_size),
        bias=False,
        dtype=config.dtype,
        tp_group=mapping.tp_group,
        tp_size=mapping.tp_size,
        gather_output=True,
    )


class LLaMAForCausalLM(DecoderModelForCausalLM):
    """LLaMA: `LLaMAForCausalLM(config)`."""

    config_class = LLaMAConfig

    def __init__(self, config: LLaMAConfig) -> None:
        super().__init__(config, LLaMAModel(config), head(config))

    @classmethod
    def check_folder(cls, folder: str | os.PathLike[str]) -> None:
        """An Error where config.json asks for more than this model computes."""
        from .weights import check_keys

        check_keys(folder)

    @classmethod
    def from_hugging_face(
        cls,
        hf_model_or_dir: Any,
        dtype: Any = "auto",
        mapping: Mapping | None = None,
        quant_config: Any = None,
        **more: Any,
    ) -> LLaMAForCausalLM:
        """The model of a Hugging Face checkpoint folder, whose weights refer to its files."""
        from .weights import bind_llama

        if not isinstance(hf_model_or_dir, (str, os.PathLike)):
            raise Error(
                "from_hugging_face: expected the folder of a checkpoint, found an object of "
                f"{type(hf_model_or_dir).__name__}; write the model with save_pretrained(DIR), and "
                "give DIR",
                loc=here(),
            )
        if quant_config is not None and quant_config.scheme() is not None:
            raise Error(
                "the weights of a Hugging Face folder are quantized by the build: give irc compile "
                f"--quantize {quant_config.scheme()}, and leave quant_config out",
                loc=here(),
            )
        folder = cast("str | os.PathLike[str]", hf_model_or_dir)
        model = cls(LLaMAConfig.from_hugging_face(folder, dtype, mapping, quant_config, **more))
        bind_llama(model, folder)
        return model

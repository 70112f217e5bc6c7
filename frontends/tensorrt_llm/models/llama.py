"""LLaMA: up to 0.7.1 of keywords, from which a config is made, and from 0.8 on of a config."""

from __future__ import annotations

from copy import copy
from typing import Any

from ..api import api
from ..context import current_session
from ..dtypes import data_type, numpy_to_torch
from ..enums import AttentionMaskType
from ..errors import ScriptError
from ..functional.collectives import recv, send
from ..layers import (
    MOE,
    Attention,
    ColumnLinear,
    Embedding,
    FusedGatedMLP,
    GatedMLP,
    PromptTuningEmbedding,
    RmsNorm,
)
from ..mapping import Mapping
from ..module import Module
from ..quantization import QuantMode
from ..tensor import Tensor
from ..utilities import pad_vocab_size
from .config import LLaMAConfig, PretrainedConfig
from .decoder import (
    DecoderLayerList,
    DecoderModelForCausalLM,
    PretrainedModel,
    mark_outputs,
    present,
)
from .weights import LlamaCheckpointMixin, Source, arrays_of, bind_llama, meta_folder

# The attribute that scripts read, and the keyword, of a key of the config.
_KEYWORDS = {
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "intermediate_size": "mlp_hidden_size",
    "norm_epsilon": "rms_norm_eps",
    "moe": "moe_config",
}
_DTYPES = ("dtype", "logits_dtype", "kv_dtype")
# What scripts read of layers and models.
_OF_LAYERS = """
    hidden_size hidden_act num_attention_heads num_kv_heads dtype mlp_hidden_size tp_group tp_size
    max_position_embeddings position_embedding_type
"""
_OF_MODELS = """
    num_layers num_heads num_kv_heads vocab_size dtype logits_dtype kv_dtype quant_mode moe_config
    use_parallel_embedding embedding_sharding_dim use_fused_mlp tp_size
"""


class Layer(Module):
    """norm, attention, sum, norm, gated MLP or experts, sum."""

    has_residual_mlp = False

    def __init__(self, config: PretrainedConfig, layer_idx: int) -> None:
        config = LLaMAConfig.of(config)
        mapping = config.mapping
        self.layer_idx, self.config, self.mapping = layer_idx, config, mapping
        layers = mapping.pp_layers(config.num_hidden_layers)
        self.local_layer_idx = layers.index(layer_idx) if layer_idx in layers else layer_idx
        self.is_last_local_layer = layer_idx == layers[-1]
        common: dict[str, Any] = {
            "hidden_size": config.hidden_size,
            "dtype": config.dtype,
            "quant_mode": config.quant_mode,
            "tp_group": mapping.tp_group,
            "tp_size": mapping.tp_size,
        }
        self.input_layernorm = norm(config)
        self.attention: Any = Attention(
            local_layer_idx=self.local_layer_idx,
            attention_head_size=config.head_size,
            num_attention_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            max_position_embeddings=config.max_position_embeddings or 2048,
            attention_mask_type=AttentionMaskType.causal,
            bias=config.attn_bias,
            dense_bias=config.dense_bias,
            position_embedding_type=config.position_embedding_type,
            rotary_embedding_base=config.rotary_base,
            rotary_embedding_scaling=config.rotary_scaling,
            tp_rank=mapping.tp_rank,
            **common,
        )
        kind: Any = FusedGatedMLP if config.use_fused_mlp else GatedMLP
        if config.moe.has_moe():
            kind, common = MOE, {**common, "moe_config": config.moe, "mapping": mapping}
        self.mlp = kind(
            ffn_hidden_size=config.intermediate_size,
            hidden_act=config.hidden_act,
            bias=config.mlp_bias,
            **common,
        )
        self.post_layernorm = norm(config)
        self.attention_mask_type = self.attention.attention_mask_type
        _describe(self, config, _OF_LAYERS)

    def forward(
        self,
        hidden_states: Tensor,
        use_cache: bool = False,
        position_ids: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """hidden_states [B, S, hidden] to the same; with `use_cache` (the same, the cache).

        `position_ids` [B, S] are those of the tokens, by default counted from the cache.
        """
        normed = self.input_layernorm(hidden_states)
        if isinstance(self.attention, Attention):  # that of the sources counts positions itself
            inputs["position_ids"] = position_ids
        mixed = self.attention(normed, use_cache=use_cache, **inputs)
        mixed, cache = mixed if use_cache else (mixed, None)
        hidden_states = hidden_states + mixed
        post = self.post_layernorm(hidden_states)
        changed = self.mlp(post)
        if self.layer_idx == 0:
            registered = {"norm0": normed, "attn": mixed, "norm1": post, "mlp": changed}
            for name, value in registered.items():
                self.register_network_output(name, value)
        hidden_states = hidden_states + changed
        return (hidden_states, cache) if use_cache else hidden_states


def _describe(part: Module, config: LLaMAConfig, names: str) -> None:
    """Set attributes of a layer or model; dtypes are those of TensorRT."""
    keys = {keyword: key for key, keyword in _KEYWORDS.items()}
    for name in names.split():
        owner = config.mapping if name in ("tp_group", "tp_size") else config
        value = getattr(owner, keys.get(name, name))
        setattr(part, name, data_type(value) if name in _DTYPES else value)


def norm(config: LLaMAConfig) -> RmsNorm:
    """An RMS norm of the hidden states."""
    return RmsNorm(config.hidden_size, eps=config.norm_epsilon, dtype=config.dtype)


class Transformer(Module):
    """Embedding on the first pipeline stage, layers, norm on the last."""

    def __init__(self, config: PretrainedConfig) -> None:
        config = LLaMAConfig.of(config)
        self.config, self.mapping, self.hidden_size = config, config.mapping, config.hidden_size
        self.use_prompt_tuning = config.use_prompt_tuning
        if self.mapping.is_first_pp_rank():
            self.vocab_embedding = embedding(config)
        self.layers = DecoderLayerList(Layer, config)
        if self.mapping.is_last_pp_rank():
            self.ln_f = norm(config)

    def forward(
        self,
        input_ids: Tensor | None = None,
        use_cache: bool = False,
        hidden_states: Tensor | None = None,
        prompt_embedding_table: Tensor | None = None,
        prompt_tasks: Tensor | None = None,
        prompt_vocab_size: Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """[B, S, hidden], also sent to the next pipeline stage; with `use_cache` (the same,
        caches)."""
        if self.mapping.is_first_pp_rank():
            prompt = (prompt_embedding_table, prompt_tasks, prompt_vocab_size)
            x = self.vocab_embedding(input_ids, *[part for part in prompt if part is not None])
            self.register_network_output("embd", x)
        else:
            if hidden_states is None:
                raise ScriptError("this pipeline stage needs the input hidden_states")
            x = recv(hidden_states, self.mapping.prev_pp_rank())
        result = self.layers(x, use_cache=use_cache, **inputs)
        states, caches = result if use_cache else (result, None)
        if self.mapping.is_last_pp_rank():
            states = self.ln_f(states)
        else:
            states = send(states, self.mapping.next_pp_rank())
        return (states, caches) if use_cache else states


def embedding(config: LLaMAConfig) -> Embedding:
    """The table of tokens."""
    mapping, parallel = config.mapping, config.use_parallel_embedding
    kind = PromptTuningEmbedding if config.use_prompt_tuning else Embedding
    return kind(
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


# -- 0.8 and later: of a config


@api("models.llama.model.LLaMADecoderLayer", releases="0.8-")
class LLaMADecoderLayer(Layer):
    """One layer of a config."""


@api("models.llama.model.LLaMAModel", releases="0.8-")
class LLaMAModel(Transformer):
    """The transformer of a config."""


@api("models.llama.model.LLaMAForCausalLM", releases="0.8-")
class LLaMAForCausalLM(LlamaCheckpointMixin, DecoderModelForCausalLM):
    """LLaMA: `LLaMAForCausalLM(config)`."""

    config_class = LLaMAConfig

    def __init__(self, config: PretrainedConfig) -> None:
        config = LLaMAConfig.of(config)
        self.quant_mode, self.mapping = config.quant_mode, config.mapping
        super().__init__(config, LLaMAModel(config), head(config))


@api("models.llama.convert.load_weights_from_hf_model")
@api("models.llama.convert.load_weights_from_hf_by_shard")
@api("models.llama.convert.load_weights_from_hf_safetensors")
@api("models.llama.convert.load_weights_from_meta_ckpt")
@api("models.llama.weight.load_from_hf_checkpoint")
@api("models.llama.weight.load_from_hf_llama")
@api("models.llama.weight.load_from_meta_llama")
def load_weights(
    config: Any = None,
    mapping: Mapping | None = None,
    hf_model: Source = None,
    model_dir: Source = None,
    hf_llama: Source = None,
    tensorrt_llm_llama: Any = None,
    meta_ckpt_dir: str | None = None,
) -> dict[str, Any]:
    """The tensors of one rank, of PyTorch, by the names of the parameters of LLaMAForCausalLM."""
    config = copy(config or tensorrt_llm_llama.config)
    config.mapping = mapping or config.mapping
    model = LLaMAForCausalLM(config)
    source = next((x for x in (hf_model, hf_llama, model_dir) if x is not None), None)
    bind_llama(model, source if meta_ckpt_dir is None else meta_folder(meta_ckpt_dir, config))
    return {name: numpy_to_torch(array.copy()) for name, array in arrays_of(model)}


# -- up to 0.7.1: of keywords


def _config(keywords: dict[str, Any]) -> LLaMAConfig:
    """The config that the keywords of a constructor describe."""
    keys: dict[str, Any] = {"dtype": "float32", "quant_mode": QuantMode(0), **present(keywords)}
    for key, keyword in _KEYWORDS.items():
        if keyword in keys:
            keys[key] = keys.pop(keyword)
    if keys.get("num_key_value_heads", 0) <= 0:
        keys["num_key_value_heads"] = None
    return LLaMAConfig(**keys)


@api("models.llama.model.LLaMADecoderLayer", releases="-0.7")
class LLaMADecoderLayerOfKeywords(Layer):
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


@api("models.llama.model.LLaMAModel", releases="-0.7")
class LLaMAModelOfKeywords(Transformer):
    """Embedding, layers and norm of this pipeline stage."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(_config(sizes))


@api("models.llama.model.LLaMAForCausalLM", releases="-0.7")
class LLaMAForCausalLMOfKeywords(LLaMAModelOfKeywords, PretrainedModel):
    """The model with the head of the language model, which is on the last pipeline stage."""

    dtype: Any = None

    def __init__(self, **sizes: Any) -> None:
        config = _config(sizes)
        Transformer.__init__(self, config)
        _describe(self, config, _OF_MODELS)
        if config.mapping.is_last_pp_rank():
            self.lm_head = head(config)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] (with last_token_ids)
        self, use_cache: bool = False, last_token_ids: Tensor | None = None, **inputs: Any
    ) -> Any:
        """Logits [B, V] of the last tokens ([B, S, V] of all without last_token_ids), or the hidden
        states for the next stage; with `use_cache` (the same, caches)."""
        result = Transformer.forward(self, use_cache=use_cache, **inputs)
        states, caches = result if use_cache else (result, None)
        output = mark_outputs(self, states, caches, last_token_ids)
        return output if caches is None else (output, caches)

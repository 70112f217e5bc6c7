"""LLaMA, made of a config (0.8 and later); `llama_keywords.py` has the constructors before."""

from __future__ import annotations

from copy import copy
from typing import Any, ClassVar

from ..api import api
from ..dtypes import numpy_to_torch
from ..enums import AttentionMaskType
from ..functional.collectives import send
from ..functional.shapes import concat
from ..layers import (
    MOE,
    Attention,
    AttentionParams,
    ColumnLinear,
    Embedding,
    FusedGatedMLP,
    GatedMLP,
    KeyValueCacheParams,
    PromptTuningEmbedding,
    RmsNorm,
)
from ..mapping import Mapping
from ..module import Module
from ..tensor import Tensor
from ..utilities import pad_vocab_size
from .config import LLaMAConfig, PretrainedConfig
from .decoder import DecoderLayerList, DecoderModelForCausalLM, from_stage_before
from .weights import LlamaCheckpointMixin, Source, arrays_of, bind_llama, meta_folder

_UNGATED = {"swiglu": "silu", "geglu": "gelu"}  # what a gated MLP applies to its gate


class Layer(Module):
    """norm, attention, sum, norm, gated MLP or experts, sum.

    With `residual_mlp` a second MLP is behind the attention, and the experts read what the
    attention reads.
    """

    def __init__(self, config: PretrainedConfig, layer_idx: int) -> None:
        config = LLaMAConfig.of(config)
        mapping, dtype = config.mapping, config.dtype
        self.layer_idx, self.config, self.mapping = layer_idx, config, mapping
        layers, index = mapping.pp_layers(config.num_hidden_layers), layer_idx
        index += config.layer_idx_offset
        self.local_layer_idx = layers.index(index) if index in layers else index
        self.is_last_local_layer = index == layers[-1]
        self.has_residual_mlp = config.residual_mlp
        if layer_idx > 0 or config.use_input_layernorm_in_first_layer:
            self.input_layernorm = self._norm()
        self.attention = Attention(
            local_layer_idx=self.local_layer_idx,
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
            q_scaling=1 / config.attention_multiplier,
            tp_group=mapping.tp_group,
            tp_size=mapping.tp_size,
            tp_rank=mapping.tp_rank,
        )
        if config.moe.has_moe():
            self.mlp: Any = MOE(
                moe_config=config.moe, mapping=mapping, **self._mlp_sizes(config.hidden_act)
            )
        else:
            made = FusedGatedMLP if config.use_fused_mlp else GatedMLP
            self.mlp = made(**self._mlp_sizes(config.hidden_act))
        self.post_layernorm = self._norm()
        if config.residual_mlp:
            self.residual_layernorm = self._norm()
            act = _UNGATED.get(config.hidden_act, config.hidden_act)
            sizes: dict[str, Any] = {**self._mlp_sizes(act)}
            sizes["ffn_hidden_size"] = config.hidden_size
            self.residual_mlp = GatedMLP(**sizes)
        self.describe(config)

    @classmethod
    def of(cls, config: LLaMAConfig, layer_idx: int) -> Layer:
        """The layer of a config, whatever the constructor of the class takes."""
        layer = cls.__new__(cls)
        Layer.__init__(layer, config, layer_idx)
        return layer

    def describe(self, config: LLaMAConfig) -> None:
        """Set the attributes that scripts of a release read."""

    def _norm(self) -> RmsNorm:
        config = self.config
        return RmsNorm(config.hidden_size, eps=config.norm_epsilon, dtype=config.dtype)

    def _mlp_sizes(self, hidden_act: str) -> dict[str, Any]:
        config = self.config
        return {
            "hidden_size": config.hidden_size,
            "ffn_hidden_size": config.intermediate_size,
            "hidden_act": hidden_act,
            "dtype": config.dtype,
            "bias": config.mlp_bias,
            "quant_mode": config.quant_mode,
            "tp_group": config.mapping.tp_group,
            "tp_size": config.mapping.tp_size,
        }

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        use_cache: bool = False,
        kv_cache_params: KeyValueCacheParams | None = None,
        attention_params: AttentionParams | None = None,
        position_ids: Tensor | None = None,
    ) -> Any:
        """hidden_states [B, S, hidden] to the same; with `use_cache` (the same, the cache).

        `position_ids` [B, S] are those of the tokens, by default counted from the cache.
        """
        grown = self.config.residual_multiplier
        residual = normed = hidden_states
        if self.layer_idx > 0 or self.config.use_input_layernorm_in_first_layer:
            normed = self.input_layernorm(hidden_states)
        mixed = self.attention(
            normed,
            attention_mask=attention_mask,
            use_cache=use_cache,
            kv_cache_params=kv_cache_params,
            attention_params=attention_params,
            position_ids=position_ids,
        )
        mixed, present = mixed if use_cache else (mixed, None)
        hidden_states = residual + (mixed if grown == 1 else mixed * grown)
        if self.has_residual_mlp:
            hidden_states = hidden_states + self.residual_mlp(
                self.residual_layernorm(hidden_states)
            )
            post = self.post_layernorm(residual)
        else:
            post = self.post_layernorm(hidden_states)
        changed = self.mlp(post)
        if self.layer_idx == 0:
            registered = {"norm0": normed, "attn": mixed, "norm1": post, "mlp": changed}
            for name, value in registered.items():
                self.register_network_output(name, value)
        hidden_states = hidden_states + (changed if grown == 1 else changed * grown)
        return (hidden_states, present) if use_cache else hidden_states


class Transformer(Module):
    """Embedding on the first pipeline stage, layers, norm on the last."""

    layer_class: ClassVar[type[Layer]] = Layer

    def __init__(self, config: PretrainedConfig) -> None:
        config = LLaMAConfig.of(config)
        self.config, self.mapping, self.hidden_size = config, config.mapping, config.hidden_size
        self.use_prompt_tuning = config.use_prompt_tuning
        if self.mapping.is_first_pp_rank():
            self.vocab_embedding = embedding(config)
        self.layers = DecoderLayerList(self.layer_class.of, config)
        if config.fc_after_embed:
            self.fc = _gathered(config, 2 * config.hidden_size, config.hidden_size, bias=True)
        if self.mapping.is_last_pp_rank():
            size, eps = config.hidden_size, config.norm_epsilon
            norm = RmsNorm(size, eps=eps, dtype=config.dtype) if config.use_last_layernorm else None
            self.ln_f = norm

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        attention_mask: Tensor | None = None,
        kv_cache_params: KeyValueCacheParams | None = None,
        attention_params: AttentionParams | None = None,
        hidden_states: Tensor | None = None,
        prompt_embedding_table: Tensor | None = None,
        prompt_tasks: Tensor | None = None,
        prompt_vocab_size: Tensor | None = None,
        hidden_states_for_embed: Tensor | None = None,
    ) -> Any:
        """[B, S, hidden], also sent to the next pipeline stage; with `use_cache` (the same,
        caches)."""
        mapping = self.mapping
        if mapping.is_first_pp_rank():
            prompt = (prompt_embedding_table, prompt_tasks, prompt_vocab_size)
            x = self.vocab_embedding(input_ids, *[each for each in prompt if each is not None])
            factor = self.config.embedding_multiplier
            x = x if factor == 1 else x * factor
            self.register_network_output("embd", x)
        else:
            x = from_stage_before(mapping, hidden_states)
        if hidden_states_for_embed is not None:
            x = self.fc(concat([x, hidden_states_for_embed], dim=-1))
        result = self.layers(
            x,
            use_cache=use_cache,
            attention_mask=attention_mask,
            kv_cache_params=kv_cache_params,
            attention_params=attention_params,
            position_ids=position_ids,
        )
        states, presents = result if use_cache else (result, None)
        if not mapping.is_last_pp_rank():
            states = send(states, mapping.next_pp_rank())
        elif self.ln_f is not None:
            states = self.ln_f(states)
        return (states, presents) if use_cache else states


def embedding(config: LLaMAConfig) -> Embedding:
    """The table of tokens."""
    mapping, parallel = config.mapping, config.use_parallel_embedding
    made = PromptTuningEmbedding if config.use_prompt_tuning else Embedding
    return made(
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
    if not config.mapping.is_last_pp_rank():
        return None
    rows = pad_vocab_size(config.vocab_size or 0, config.mapping.tp_size)
    return _gathered(config, config.hidden_size, rows, bias=False)


def _gathered(config: LLaMAConfig, inputs: int, outputs: int, bias: bool) -> ColumnLinear:
    """A layer whose outputs are sharded, and gathered."""
    mapping = config.mapping
    return ColumnLinear(
        inputs,
        outputs,
        bias=bias,
        dtype=config.dtype,
        tp_group=mapping.tp_group,
        tp_size=mapping.tp_size,
        gather_output=True,
    )


@api("models.llama.model.LLaMADecoderLayer", releases="0.8-")
class LLaMADecoderLayer(Layer):
    """One layer of a config."""


@api("models.llama.model.LLaMAModel", releases="0.8-")
class LLaMAModel(Transformer):
    """The transformer of a config."""

    layer_class = LLaMADecoderLayer


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

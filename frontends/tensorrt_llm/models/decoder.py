"""Language models made of a config: a transformer, and the head of the language model."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from inspect import signature
from typing import Any, ClassVar

from ..api import api, release
from ..context import current_network
from ..errors import ScriptError
from ..functional import gather_last_token_logits, tanh
from ..layers import (
    AttentionParams,
    Embedding,
    KeyValueCacheParams,
    LoraParams,
    PromptTuningEmbedding,
)
from ..layers.attention_params import refuse_lora
from ..layers.quantized import quantize
from ..module import Module, ModuleList
from ..tensor import Tensor
from .config import PretrainedConfig
from .generation_mixin import GenerationMixin
from .weights import CheckpointMixin

_LENGTHS = ("sequence_length", "context_lengths", "host_context_lengths", "host_request_types")
_CACHES = (
    "past_key_value",
    "host_past_key_value_lengths",
    "host_max_attention_window_sizes",
    "cache_indirection",
)
# Keys of Gemma 2, whose models make logits c * tanh(logits / c).
_OF_GEMMA2 = ("query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping")
# What transformers get even if it is None.
_ALWAYS = ("input_ids", "position_ids", "attention_mask", "kv_cache_params", "attention_params")


@api("models.modeling_utils.DecoderLayerList")
class DecoderLayerList(ModuleList):
    """The decoder layers of this pipeline stage; `cls` is called with the config and an index."""

    def __init__(self, cls: Any, config: PretrainedConfig) -> None:
        self.num_hidden_layers, self.quant_mode = config.num_hidden_layers, config.quant_mode
        self.layer_list = config.mapping.pp_layers(config.num_hidden_layers)
        super().__init__(cls(config, index) for index in self.layer_list)

    def forward(
        self,
        hidden_states: Tensor,
        use_cache: bool = False,
        kv_cache_params: KeyValueCacheParams | None = None,
        **inputs: Any,
    ) -> Any:
        """hidden_states [B, S, hidden] through all layers; with `use_cache` (the same, caches).

        Layers get the other inputs: masks and parameters of attention, and those that are not None.
        """
        inputs = present(inputs, "attention_mask", "attention_params")
        caches: list[Any] = []
        for layer, cache in zip(self, layer_caches(kv_cache_params, len(self)), strict=True):
            result = layer(hidden_states, use_cache=use_cache, kv_cache_params=cache, **inputs)
            hidden_states, new = result if use_cache else (result, None)
            caches.append(new)
        return (hidden_states, caches) if use_cache else hidden_states


def present(inputs: Mapping[str, Any], *always: str) -> dict[str, Any]:
    """The inputs that are not None, and some that are passed always."""
    return {name: x for name, x in inputs.items() if x is not None or name in always}


def layer_caches(params: KeyValueCacheParams | None, layers: int) -> list[Any]:
    """The parameters of every layer, each with its own cache and window."""
    if params is None:
        return [None] * layers
    caches = params.past_key_value or [None] * layers
    windows = params.host_max_attention_window_sizes
    if len(caches) != layers:
        raise ScriptError(f"expected a KV cache for each of {layers} layers, found {len(caches)}")
    of_layers = [copy(params) for _ in caches]
    for index, (own, cache) in enumerate(zip(of_layers, caches, strict=True)):
        own.past_key_value = [cache]
        if isinstance(windows, (list, tuple)) and len(windows) == layers:  # pyright: ignore[reportUnknownArgumentType]
            own.host_max_attention_window_sizes = windows[index]
    return of_layers


def last_token(hidden_states: Tensor, last_token_ids: Tensor | None) -> Tensor:
    """The rows whose logits are wanted; see `gather_last_token_logits`."""
    packed = hidden_states.type.ndim == 2 or current_network().plugin_config.remove_input_padding
    return gather_last_token_logits(hidden_states, last_token_ids, bool(packed))


def mark_outputs(
    model: Any, states: Tensor, presents: Any, last_token_ids: Tensor | None
) -> Tensor:
    """Mark the outputs of a stage, and return the first: `logits` of the last stage, which has
    `lm_head`, and hidden states of the others. `presents` are caches, or None."""
    config, mapping = model.config, model.config.mapping
    if mapping.is_last_pp_rank():
        result = model.lm_head(last_token(states, last_token_ids))
        scale = getattr(config, "output_multiplier_scale", 1.0)
        divisor = getattr(config, "mup_width_multiplier", None) or 1.0
        if scale != 1 or divisor != 1:
            result = result * (scale / divisor)
        cap = getattr(config, "final_logit_softcapping", None)
        if cap and all(hasattr(config, key) for key in _OF_GEMMA2):
            result = tanh(result * (1 / cap)) * cap
        result.mark_output("logits", config.logits_dtype)
    else:
        result = states
        result.mark_output("hidden_states_output", config.dtype)
    layers = mapping.pp_layers(config.num_hidden_layers)
    for index, present in zip(layers, presents, strict=True) if presents is not None else ():
        present.mark_output(f"present_key_value_{index}", config.kv_dtype)
    return result


def add_prompts(model: Any) -> None:
    """Let the embeddings of tokens read a prompt table as well."""
    for module in list(model.modules()):
        table = getattr(module, "vocab_embedding", None)
        if isinstance(table, Embedding) and not isinstance(table, PromptTuningEmbedding):
            module.vocab_embedding = PromptTuningEmbedding.of(table)


@api("models.modeling_utils.optimize_model")
def optimize_model(model: Any, use_prompt_tuning: bool = False) -> Any:
    """The model, whose embeddings read a prompt table where `use_prompt_tuning` says so."""
    if use_prompt_tuning:
        add_prompts(model)
    return model


@api("top_model_mixin.TopModelMixin")
class TopModelMixin(Module):
    """What models have beside the layers that they are made of."""

    @classmethod
    def from_hugging_face(cls, *folder: Any, **options: Any) -> Any:
        """Models that read Hugging Face folders override it."""
        raise ScriptError(
            f"{cls.__name__} does not read Hugging Face folders; set its parameters, or give irc "
            "compile the folder"
        )

    def use_lora(self, lora_config: Any) -> None:
        """An Error: adapters are added to the weights before."""
        refuse_lora(lora_config)

    def use_prompt_tuning(self) -> None:
        """Let the embeddings of tokens read a prompt table as well."""
        add_prompts(self)


class _WithEnd(type):
    """Calls `__post_init__` when the constructors of all subclasses have ended."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        model = super().__call__(*args, **kwargs)
        model.__post_init__()
        return model


@api("models.modeling_utils.PretrainedModel")
class PretrainedModel(CheckpointMixin, TopModelMixin, GenerationMixin, metaclass=_WithEnd):
    """A model made of a config, that loads checkpoints and makes its inputs."""

    config_class: ClassVar[type[PretrainedConfig]] = PretrainedConfig

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config

    def __post_init__(self) -> None:
        if release() < 8:
            self.check_config()
        quantize(self, self.config.quantization)

    def check_config(self, config: Any = None) -> None:
        """Models override it to set the keys that their configs may lack."""

    @property
    def dtype(self) -> str:
        """The dtype of activations."""
        return self.config.dtype

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> Any:
        """The model of a config, its parameters unset and its layers quantized."""
        return cls(config)

    def release(self) -> None:
        """Accepted, without effect: a model's memory is freed with it."""

    def prepare_inputs(
        self,
        max_input_len: int,
        use_cache: bool = True,
        prompt_embedding_table_size: int = 0,
        num_hidden_layers: int | None = None,
        **limits: Any,
    ) -> Any:
        """The arguments of `forward` by name (in order up to 0.7.1), as inputs of the network in
        progress."""
        if prompt_embedding_table_size:
            add_prompts(self)
        config, switches = self.config, current_network().plugin_config
        inputs = self.prepare_basic_inputs(
            max_input_len=max_input_len,
            num_kv_heads=config.num_key_value_heads,
            head_size=config.head_size,
            num_layers=num_hidden_layers or config.num_hidden_layers,
            kv_dtype=config.kv_dtype,
            dtype=config.dtype,
            hidden_size=config.hidden_size,
            mapping=config.mapping,
            remove_input_padding=bool(switches.remove_input_padding),
            use_gpt_attention_plugin=bool(switches.gpt_attention_plugin),
            use_cache=use_cache,
            prompt_embedding_table_size=prompt_embedding_table_size,
            **limits,
        )
        return forward_arguments(inputs, use_cache, max_input_len)


def forward_arguments(inputs: dict[str, Any], use_cache: bool, max_input_len: int) -> Any:
    """The arguments of `forward`, of the inputs of `prepare_basic_inputs`: a dict of those that
    are not left out, or up to 0.7.1 a tuple."""
    caches = {name: inputs[name] for name in _CACHES}
    lengths = {name: inputs[name] for name in _LENGTHS}
    first: dict[str, Any] = {
        "input_ids": inputs["input_ids"],
        "position_ids": inputs["position_ids"],
        "use_cache": use_cache,
        "last_token_ids": inputs["last_token_ids"],
        "attention_mask": inputs["attention_mask"],
        "kv_cache_params": KeyValueCacheParams(**caches),
        "attention_params": AttentionParams(max_context_length=max_input_len, **lengths),
    }
    others = {
        "hidden_states": inputs["hidden_states_input"],
        "prompt_embedding_table": inputs["prompt_embedding_table"],
        "prompt_tasks": inputs["tasks"],
        "prompt_vocab_size": inputs["prompt_vocab_size"],
    }
    if release() >= 8:
        return first | {name: value for name, value in others.items() if value is not None}
    first["kv_cache_params"].fill_none_tensor_list(len(inputs["past_key_value"]))
    states, *prompt = others.values()
    every = (*first.values(), states, None, *prompt, LoraParams())  # None: a workspace
    return every[: {5: 9, 6: 12}.get(release(), 13)]


@api("models.modeling_utils.DecoderModelForCausalLM")
class DecoderModelForCausalLM(PretrainedModel):
    """A transformer and the head of the language model, over pipeline stages.

    The first stage takes input_ids, others what the stage before sends, which the transformer
    receives; the transformer sends to the next one. The last stage has the output `logits`, f32
    unless `logits_dtype` says otherwise.
    """

    def __init__(self, config: PretrainedConfig, transformer: Any, lm_head: Any) -> None:
        super().__init__(config)
        self.transformer, self.lm_head = transformer, lm_head
        self.mup_width_multiplier = getattr(config, "mup_width_multiplier", None)
        self.position_embedding_type = config.position_embedding_type

    def forward(
        self,
        use_cache: bool = False,
        last_token_ids: Tensor | None = None,
        lora_params: Any = None,
        **inputs: Any,
    ) -> Any:
        """Logits [B, V] of the last tokens ([B, S, V] of all without last_token_ids), or the hidden
        states for the next stage; with `use_cache` (the same, caches). Of the last stage the hidden
        states follow (0.8 and later). The transformer gets the other inputs."""
        if "lora_params" in signature(self.transformer.forward).parameters:
            inputs["lora_params"] = lora_params  # they are off
        states = self.transformer(use_cache=use_cache, **present(inputs, *_ALWAYS))
        states, caches = states if use_cache else (states, None)
        result = mark_outputs(self, states, caches, last_token_ids)
        results = [result] if caches is None else [result, caches]
        if self.config.mapping.is_last_pp_rank() and release() >= 8:
            results.append(states)
        return results[0] if len(results) == 1 else tuple(results)

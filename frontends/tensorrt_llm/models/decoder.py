"""Language models of dialect B: a config, a transformer, and the head of the language model."""

from __future__ import annotations

import os
from collections.abc import Mapping as Table
from copy import copy
from typing import Any, ClassVar

from ....errors import Error, did_you_mean
from ....source import here
from ..functional.collectives import recv, send
from ..functional.indexing import gather_last_token_logits
from ..layers import AttentionParams, KeyValueCacheParams
from ..layers.quantized import quantize
from ..mapping import Mapping
from ..module import Module, ModuleList
from ..tensor import Tensor
from .config import PretrainedConfig
from .generation_mixin import GenerationMixin


class DecoderLayerList(ModuleList):
    """The decoder layers of this pipeline stage; `cls` is called with the config and an index."""

    def __init__(self, cls: Any, config: PretrainedConfig) -> None:
        self.layer_list = config.mapping.pp_layers(config.num_hidden_layers)
        super().__init__(cls(config, index) for index in self.layer_list)

    def forward(
        self,
        hidden_states: Tensor,
        use_cache: bool = False,
        attention_mask: Tensor | None = None,
        kv_cache_params: KeyValueCacheParams | None = None,
        attention_params: AttentionParams | None = None,
        **more: Any,
    ) -> Any:
        """hidden_states [B, S, hidden] through all layers; with `use_cache` (the same, caches)."""
        given = {name: value for name, value in more.items() if value is not None}
        presents: list[Any] = []
        caches = layer_caches(kv_cache_params, len(self))
        for layer, cache in zip(self, caches, strict=True):
            found = layer(
                hidden_states,
                use_cache=use_cache,
                attention_mask=attention_mask,
                kv_cache_params=cache,
                attention_params=attention_params,
                **given,
            )
            if use_cache:
                found, present = found
                presents.append(present)
            hidden_states = found
        return (hidden_states, presents) if use_cache else hidden_states


def layer_caches(params: KeyValueCacheParams | None, layers: int) -> list[Any]:
    """The parameters of every layer, each with its own cache."""
    if params is None:
        return [None] * layers
    caches = params.past_key_value
    if caches is None or len(caches) != layers:
        found = "none" if caches is None else len(caches)
        raise Error(f"expected a KV cache for each of {layers} layers, found {found}", loc=here())
    found = [copy(params) for _ in caches]
    for each, cache in zip(found, caches, strict=True):
        each.past_key_value = [cache]
    return found


def last_token(hidden_states: Tensor, last_token_ids: Tensor | None) -> Tensor:
    """The rows whose logits are wanted; see `gather_last_token_logits`."""
    packed = hidden_states.type.ndim == 2
    return gather_last_token_logits(hidden_states, last_token_ids, packed)


def from_stage_before(mapping: Mapping, hidden_states: Tensor | None) -> Tensor:
    """What the pipeline stage before sends."""
    if hidden_states is None:
        raise Error("this pipeline stage needs the input hidden_states", loc=here())
    return recv(hidden_states, mapping.prev_pp_rank())


def finished(model: Any, found: Any, last_token_ids: Tensor | None, use_cache: bool) -> Any:
    """The result of a model, whose last pipeline stage has `lm_head` and the output `logits`; the
    others send their hidden states to the next. `found` is what the layers give."""
    config, mapping = model.config, model.config.mapping
    hidden, presents = found if use_cache else (found, list[Any]())
    if mapping.is_last_pp_rank():
        hidden = model.lm_head(last_token(hidden, last_token_ids))
        hidden.mark_output("logits", config.logits_dtype)
    else:
        sent = send(hidden, mapping.next_pp_rank())
        sent.mark_output("hidden_states_output", config.dtype)
    if not use_cache:
        return hidden
    layers = mapping.pp_layers(config.num_hidden_layers)
    for index, present in zip(layers, presents, strict=True):
        present.mark_output(f"present_key_value_{index}", config.kv_dtype)
    return hidden, presents


class PretrainedModel(Module, GenerationMixin):
    """A model made of a config, that loads checkpoints and makes its inputs."""

    config_class: ClassVar[type[PretrainedConfig]] = PretrainedConfig

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config

    @property
    def dtype(self) -> str:
        """The dtype of activations."""
        return self.config.dtype

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> Any:
        """The model of a config, its parameters unset and its layers quantized."""
        return quantize(cls(config), config.quantization)

    @classmethod
    def check_folder(cls, folder: str | os.PathLike[str]) -> None:
        """Models override it to refuse checkpoint folders that ask for more than they compute."""

    @classmethod
    def from_checkpoint(
        cls,
        ckpt_dir: str | os.PathLike[str],
        rank: int | None = None,
        config: PretrainedConfig | None = None,
        **_: Any,
    ) -> Any:
        """The model of one rank of a checkpoint folder in TensorRT-LLM's form."""
        from .weights import load_rank

        if config is None:
            cls.check_folder(ckpt_dir)
        sizes: Any = config or cls.config_class.from_checkpoint(ckpt_dir)
        if rank is not None:
            sizes.set_rank(rank)
        model = cls.from_config(sizes)
        load_rank(model, ckpt_dir, sizes.mapping.rank)
        return model

    def load(self, weights: Table[str, Any], from_pruned: bool = False) -> None:
        """Set parameters by name; an Error lists those that are missing."""
        own = dict(self.named_parameters())
        missing = [n for n in own if n not in weights and own[n].bound is None]
        unknown = [name for name in weights if name not in own]
        if missing:
            listed = "\n".join(f"  {name}{did_you_mean(name, unknown)}" for name in missing)
            raise Error(f"expected a weight for every parameter, found none for\n{listed}")
        for name in own.keys() & weights.keys():
            if from_pruned:
                own[name].set_value_or_dummy(weights[name])
            else:
                own[name].value = weights[name]

    def prepare_inputs(
        self,
        max_batch_size: int,
        max_input_len: int,
        max_seq_len: int,
        max_num_tokens: int | None = None,
        use_cache: bool = True,
        max_beam_width: int = 1,
        opt_num_tokens: int | None = None,
        prompt_embedding_table_size: int = 0,
        position_encoding_2d: bool = False,
        max_draft_len: int = 0,
        *,
        gather_context_logits: bool = False,
        **more: Any,
    ) -> dict[str, Any]:
        """The arguments of `forward`, as inputs of the network in progress."""
        found = self.prepare_basic_inputs(
            max_batch_size=max_batch_size,
            max_beam_width=max_beam_width,
            max_input_len=max_input_len,
            max_seq_len=max_seq_len,
            **self.config.input_sizes(),
            gather_context_logits=gather_context_logits,
            prompt_embedding_table_size=prompt_embedding_table_size,
            position_encoding_2d=position_encoding_2d,
            max_draft_len=max_draft_len,
            **more,
        )
        return forward_arguments(found, use_cache)


def forward_arguments(found: dict[str, Any], use_cache: bool) -> dict[str, Any]:
    """The arguments of `forward` in their order, of the inputs of `prepare_basic_inputs`."""
    lengths = ["sequence_length", "context_lengths", "host_context_lengths", "host_request_types"]
    holds = ["host_past_key_value_lengths", "cache_indirection", "host_sink_token_length"]
    return {
        "input_ids": found["input_ids"],
        "position_ids": found["position_ids"],
        "use_cache": use_cache,
        "last_token_ids": found["last_token_ids"],
        "attention_mask": found.get("attention_mask"),
        "kv_cache_params": KeyValueCacheParams(
            past_key_value=found["past_key_value"],
            host_max_attention_window_sizes=found.get("host_max_attention_window_sizes"),
            **{name: found.get(name) for name in holds},
        ),
        "attention_params": AttentionParams(**{name: found.get(name) for name in lengths}),
        "hidden_states": found["hidden_states_input"],
        "prompt_embedding_table": found["prompt_embedding_table"],
        "prompt_tasks": found["tasks"],
        "prompt_vocab_size": found["prompt_vocab_size"],
    }


class DecoderModelForCausalLM(PretrainedModel):
    """A transformer and the head of the language model, over pipeline stages.

    The first stage takes input_ids, others what the stage before sends; the last one has the output
    `logits`, f32 unless `logits_dtype` says otherwise.
    """

    def __init__(self, config: PretrainedConfig, transformer: Any, lm_head: Any) -> None:
        super().__init__(config)
        self.transformer, self.lm_head = transformer, lm_head
        quantize(self, config.quantization)

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool = False,
        last_token_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        kv_cache_params: KeyValueCacheParams | None = None,
        attention_params: AttentionParams | None = None,
        mrope_params: Any = None,
        hidden_states: Tensor | None = None,
        prompt_embedding_table: Tensor | None = None,
        prompt_tasks: Tensor | None = None,
        prompt_vocab_size: Tensor | None = None,
        lora_params: Any = None,
        spec_decoding_params: Any = None,
        **more: Any,
    ) -> Any:
        """Logits [B, V] of the last tokens ([B, S, V] of all without last_token_ids), or the hidden
        states for the next stage; with `use_cache` (the same, caches)."""
        given = {
            "input_ids": input_ids,
            "position_ids": position_ids,
            "use_cache": use_cache,
            "attention_mask": attention_mask,
            "kv_cache_params": kv_cache_params,
            "attention_params": attention_params,
            "hidden_states": hidden_states,
        }
        prompt = {
            "prompt_embedding_table": prompt_embedding_table,
            "prompt_tasks": prompt_tasks,
            "prompt_vocab_size": prompt_vocab_size,
            "mrope_params": mrope_params,
            "lora_params": lora_params,
            "spec_decoding_params": spec_decoding_params,
        }
        given |= {name: value for name, value in {**prompt, **more}.items() if value is not None}
        found = self.transformer(**given)
        return finished(self, found, last_token_ids, use_cache)

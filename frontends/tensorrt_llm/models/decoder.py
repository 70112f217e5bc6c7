"""Language models made of a config: a transformer, the head of the language model, and inputs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping as Table
from copy import copy
from inspect import signature
from typing import Any, ClassVar

from ....ir.dims import symbol
from ..api import api, fields, release
from ..context import current_network, current_session
from ..dtypes import irc_dtype
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
from ..mapping import Mapping
from ..module import Module, ModuleList
from ..settings import KVCacheType
from ..tensor import Tensor
from .config import PretrainedConfig
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


def present(inputs: Table[str, Any], *always: str) -> dict[str, Any]:
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


Range = tuple[int, int, int]  # of a size: minimum, typical, maximum

# Inputs of adapters, paged caches and speculative decoding, which irc does not have.
_ABSENT = """
    all_reduce_workspace lora_ranks lora_weights_pointers spec_decoding_params mrope_params
    medusa_position_offsets medusa_packed_mask kv_cache_block_offsets host_kv_cache_block_offsets
    host_kv_cache_pool_pointers host_kv_cache_pool_mapping host_sink_token_length
    host_runtime_perf_knobs host_context_progress
"""
_MIXIN = "models.generation_mixin.GenerationMixin"
_BASIC, _ATTENTION = (f"{_MIXIN}.prepare_{kind}_inputs" for kind in ("basic", "attention"))
_ROWS = "batch_size_beam_width"  # the symbol of B
_HELD = ("sequence_length", "host_past_key_value_lengths")  # lengths of what caches hold
_OF_ROWS = (*_HELD, "context_lengths", "host_context_lengths", "host_request_types")
_PROMPT = ("prompt_embedding_table", "tasks", "prompt_vocab_size")


@api(_MIXIN)
class GenerationMixin:
    """Makes the inputs of a language model under the names of TensorRT-LLM's engines."""

    @staticmethod
    def get_transformer_layers(mapping: Mapping, num_layers: int) -> list[int]:
        """The layers of this pipeline stage."""
        return mapping.pp_layers(num_layers)

    def prepare_basic_inputs(
        self,
        max_batch_size: int,
        max_beam_width: int,
        max_input_len: int,
        use_cache: bool = True,
        **sizes: Any,
    ) -> dict[str, Any]:
        """The inputs by name; those that this rank or form of attention lacks are None.

        input_ids and position_ids i32 [B, S], last_token_ids i32 [B] unless
        `gather_context_logits`, hidden_states_input [B, S, hidden] behind the first pipeline stage,
        and those of `prepare_attention_inputs`. With `remove_input_padding` the tokens of all rows
        follow each other, [T] ([1, T] up to 0.7.1), and last_token_ids are the ends of the rows.
        """
        given = {**fields(_BASIC, every=True), **sizes}
        world: Mapping = given["mapping"] or current_session().mapping or Mapping()
        hidden = given["hidden_size"] or (given["num_heads"] or 0) * given["head_size"]
        kind = irc_dtype(given["kv_dtype"] if given["dtype"] is None else given["dtype"])
        rows = _rows(max_batch_size * max_beam_width, given["opt_batch_size"])
        dims: dict[str, Any] = {_ROWS: rows, "input_len": _range(max_input_len)}
        tasks: dict[str, Any] = {_ROWS: rows, "one": 1}
        if given["remove_input_padding"]:
            most = given["max_num_tokens"] or rows[2] * max_input_len
            dims = {"num_tokens": (1, min(most, given["opt_num_tokens"] or rows[2]), most)}
            dims = tasks = dims if release() >= 8 else {"one": 1, **dims}
        names = (*_PROMPT, "input_ids", "hidden_states_input", "last_token_ids")
        inputs: dict[str, Any] = dict.fromkeys(names)
        if world.is_first_pp_rank():
            inputs["input_ids"] = _input("input_ids", "i32", **dims)
        elif hidden:
            states = _input("hidden_states_input", kind, **dims, hidden_size=hidden)
            inputs["hidden_states_input"] = states
        else:
            raise ScriptError("a pipeline stage needs hidden_size, or num_heads")
        inputs["position_ids"] = _input("position_ids", "i32", **dims)
        all_tokens = given["gather_context_logits"] or given["gather_all_token_logits"]
        if world.is_last_pp_rank() and not all_tokens:
            inputs["last_token_ids"] = _input("last_token_ids", "i32", **{_ROWS: rows})
        if (prompts := given["prompt_embedding_table_size"]) and world.is_first_pp_rank():
            table = {"prompt_rows": _range(prompts), "hidden_size": hidden}
            inputs["prompt_embedding_table"] = _input("prompt_embedding_table", kind, **table)
            inputs["tasks"] = _input("tasks", "i32", **tasks)
            inputs["prompt_vocab_size"] = _input("prompt_vocab_size", "i32", one=1)
        taken = fields(_ATTENTION, every=True)
        return inputs | self.prepare_attention_inputs(
            max_batch_size=max_batch_size,
            max_beam_width=max_beam_width,
            max_input_len=max_input_len,
            use_cache=use_cache,
            **{name: value for name, value in sizes.items() if name in taken},
        )

    def prepare_attention_inputs(
        self, max_batch_size: int, max_beam_width: int, max_input_len: int, **sizes: Any
    ) -> dict[str, Any]:
        """The inputs of attention by name: caches and lengths.

        `past_key_value` has a KV cache `past_key_value_i` [B, 2, kv_heads, length, head_size] per
        layer of the stage, None for layers that are not in `attn_layer_idx`, and without caches.
        With the attention plugin caches have a capacity, `max_seq_len`, and lengths i32 [B] say
        what they hold; without it they hold every token, and attention_mask i32 [B, past + S] says
        which are padding. B is up to max_batch_size * max_beam_width.
        """
        given = {**fields(_ATTENTION, every=True), **sizes}
        world: Mapping = given["mapping"] or current_session().mapping or Mapping()
        total = given["max_seq_len"] or max_input_len + (given["max_new_tokens"] or 0)
        layers, stage = given["attn_layer_idx"], world.pp_layers(given["num_layers"])
        rows = _rows(max_batch_size * max_beam_width, given["opt_batch_size"])
        caching = given["use_cache"] and given["kv_cache_type"] != KVCacheType.DISABLED
        layers = list(range(given["num_layers"]) if layers is None else layers)
        every_layer = given["num_kv_heads_per_layer"] or [given["num_kv_heads"]] * len(layers)
        heads = dict(zip(layers, every_layer, strict=True))
        inputs: dict[str, Any] = dict.fromkeys(
            ("attention_mask", "cache_indirection", *_OF_ROWS, *_ABSENT.split())
        )
        if plugin := given["use_gpt_attention_plugin"]:
            length: dict[str, Any] = {"max_seq_len": (1, total, total)}
            names = _OF_ROWS if caching else _OF_ROWS[len(_HELD) :]
            inputs |= {name: _input(name, "i32", **{_ROWS: rows}) for name in names}
        else:
            length = {"past_key_len": (0, total, total)}
            keys = symbol("input_len") + (symbol("past_key_len") if caching else 0)
            shape = [symbol(_ROWS), keys]
            inputs["attention_mask"] = Tensor(name="attention_mask", dtype="i32", shape=shape)
        if plugin and caching:
            beams = {_ROWS: rows, "beam_width": max_beam_width, **length}
            inputs["cache_indirection"] = _input("cache_indirection", "i32", **beams)
        caches: list[Any] = [None] * len(stage)
        for place, layer in enumerate(stage if caching else ()):
            if count := -(-heads.get(layer, 0) // world.tp_size):
                shape = {_ROWS: rows, "kv": 2, f"heads_{count}": count, **length}
                shape["head_size"] = given["head_size"]
                name = f"past_key_value_{layer}"
                caches[place] = _input(name, irc_dtype(given["kv_dtype"]), **shape)
        # up to 0.7.1 lists of all layers, whose windows and blocks scripts take one by one
        nothing = [None] * len(stage) if release() < 8 else None
        lists = "kv_cache_block_pointers_list", "host_kv_cache_block_pointers_list"
        inputs |= dict.fromkeys((*lists, "host_max_attention_window_sizes"), nothing)
        return inputs | {"past_key_value": caches}


def _rows(most: int, typical: int | None) -> Range:
    """The range of B."""
    return 1, min(most, typical or (most + 2) // 2), most


def _range(most: int) -> Range:
    """The range up to a limit, whose middle is typical."""
    return 1, (most + 1) // 2, most


def _input(name: str, dtype: str, **dims: Any) -> Tensor:
    """The input of a name; a dim is a number, or the range of a symbol."""
    ranges = OrderedDict((key, [size]) for key, size in dims.items())
    shape = [size if isinstance(size, int) else -1 for size in dims.values()]
    return Tensor(name=name, dtype=dtype, shape=shape, dim_range=ranges)


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

"""`GenerationMixin`: the inputs of a language model, with the ranges of their sizes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ....ir.dims import symbol
from ..api import api, fields, release
from ..context import current_session
from ..dtypes import irc_dtype
from ..errors import ScriptError
from ..mapping import Mapping
from ..settings import KVCacheType
from ..tensor import Tensor

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
_LENGTHS = (*_HELD, "context_lengths", "host_context_lengths", "host_request_types")
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
            ("attention_mask", "cache_indirection", *_LENGTHS, *_ABSENT.split())
        )
        if plugin := given["use_gpt_attention_plugin"]:
            length: dict[str, Any] = {"max_seq_len": (1, total, total)}
            names = _LENGTHS if caching else _LENGTHS[len(_HELD) :]
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

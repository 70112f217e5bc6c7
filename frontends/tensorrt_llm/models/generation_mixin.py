"""`GenerationMixin`: the inputs of a language model, with the ranges of their sizes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ....errors import Error
from ....ir.dims import symbol
from ....source import here
from ..api import api, release
from ..context import current_session
from ..dtypes import irc_dtype
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
_ROWS = "batch_size_beam_width"  # the symbol of B
_HELD = ("sequence_length", "host_past_key_value_lengths")  # lengths of what caches hold
_LENGTHS = (*_HELD, "context_lengths", "host_context_lengths", "host_request_types")
_PROMPT = ("prompt_embedding_table", "tasks", "prompt_vocab_size")


@api("models.generation_mixin.GenerationMixin")
class GenerationMixin:
    """Makes the inputs of a language model under the names of TensorRT-LLM's engines."""

    @staticmethod
    def default_range(
        max_range: int, offset: int = 0, min_range: int = 1, opt_offset: int = 0
    ) -> list[int]:
        """[min, opt, max]: the middle is the optimum."""
        opt = (max_range + min_range + opt_offset) // 2
        return [min_range + offset, opt + offset, max_range + offset]

    @staticmethod
    def get_transformer_layers(mapping: Mapping, num_layers: int) -> list[int]:
        """The layers of this pipeline stage."""
        return mapping.pp_layers(num_layers)

    def prepare_basic_inputs(
        self,
        max_batch_size: int,
        max_beam_width: int,
        max_input_len: int,
        num_kv_heads: int,
        head_size: int,
        num_layers: int,
        kv_dtype: Any,
        max_seq_len: int | None = None,
        max_new_tokens: int = 0,
        remove_input_padding: bool = False,
        use_gpt_attention_plugin: Any = False,
        dtype: Any = None,
        hidden_size: int | None = None,
        num_heads: int | None = None,
        mapping: Mapping | None = None,
        kv_cache_type: Any = None,
        use_cache: bool = True,
        max_num_tokens: int | None = None,
        opt_num_tokens: int | None = None,
        opt_batch_size: int | None = None,
        gather_context_logits: bool = False,
        gather_all_token_logits: bool = False,
        prompt_embedding_table_size: int = 0,
    ) -> dict[str, Any]:
        """The inputs by name; those that this rank or form of attention lacks are None.

        input_ids and position_ids i32 [B, S], last_token_ids i32 [B] unless
        `gather_context_logits`, hidden_states_input [B, S, hidden] behind the first pipeline stage,
        and those of `prepare_attention_inputs`. With `remove_input_padding` the tokens of all rows
        follow each other, [T] ([1, T] up to 0.7.1), and last_token_ids are the ends of the rows.
        """
        world: Mapping = mapping or current_session().mapping or Mapping()
        hidden = hidden_size or (num_heads or 0) * head_size
        kind = irc_dtype(dtype if dtype is not None else kv_dtype)
        rows = _rows(max_batch_size * max_beam_width, opt_batch_size)
        dims: dict[str, Any] = {_ROWS: rows, "input_len": _range(max_input_len)}
        tasks: dict[str, Any] = {_ROWS: rows, "one": 1}
        if remove_input_padding:
            most = max_num_tokens or rows[2] * max_input_len
            dims = {"num_tokens": (1, min(most, opt_num_tokens or rows[2]), most)}
            dims = tasks = dims if release() >= 8 else {"one": 1, **dims}
        names = (*_ABSENT.split(), *_PROMPT, "input_ids", "hidden_states_input", "last_token_ids")
        inputs: dict[str, Any] = dict.fromkeys(names)
        if world.is_first_pp_rank():
            inputs["input_ids"] = _input("input_ids", "i32", **dims)
        elif hidden:
            states = _input("hidden_states_input", kind, **dims, hidden_size=hidden)
            inputs["hidden_states_input"] = states
        else:
            raise Error("a pipeline stage needs hidden_size, or num_heads", loc=here())
        inputs["position_ids"] = _input("position_ids", "i32", **dims)
        if world.is_last_pp_rank() and not gather_context_logits and not gather_all_token_logits:
            inputs["last_token_ids"] = _input("last_token_ids", "i32", **{_ROWS: rows})
        if prompt_embedding_table_size and world.is_first_pp_rank():
            sizes = {"prompt_rows": _range(prompt_embedding_table_size), "hidden_size": hidden}
            inputs["prompt_embedding_table"] = _input("prompt_embedding_table", kind, **sizes)
            inputs["tasks"] = _input("tasks", "i32", **tasks)
            inputs["prompt_vocab_size"] = _input("prompt_vocab_size", "i32", one=1)
        return inputs | self.prepare_attention_inputs(
            max_batch_size=max_batch_size,
            max_beam_width=max_beam_width,
            max_input_len=max_input_len,
            max_seq_len=max_seq_len or max_input_len + max_new_tokens,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            num_layers=num_layers,
            kv_dtype=kv_dtype,
            use_gpt_attention_plugin=use_gpt_attention_plugin,
            mapping=world,
            kv_cache_type=kv_cache_type,
            use_cache=use_cache,
            opt_batch_size=opt_batch_size,
        )

    def prepare_attention_inputs(
        self,
        max_batch_size: int,
        max_beam_width: int,
        max_input_len: int,
        num_kv_heads: int,
        head_size: int,
        num_layers: int,
        kv_dtype: Any,
        max_seq_len: int | None = None,
        max_new_tokens: int = 0,
        remove_input_padding: bool = False,
        use_gpt_attention_plugin: Any = False,
        mapping: Mapping | None = None,
        kv_cache_type: Any = None,
        use_cache: bool = True,
        opt_batch_size: int | None = None,
        attn_layer_idx: Any = None,
        num_kv_heads_per_layer: Any = None,
    ) -> dict[str, Any]:
        """The inputs of attention by name: caches and lengths.

        `past_key_value` has a KV cache `past_key_value_i` [B, 2, kv_heads, length, head_size] per
        layer of the stage, None for layers that are not in `attn_layer_idx`, and without caches.
        With the attention plugin caches have a capacity, `max_seq_len`, and lengths i32 [B] say
        what they hold; without it they hold every token, and attention_mask i32 [B, past + S] says
        which are padding. B is up to max_batch_size * max_beam_width.
        """
        world: Mapping = mapping or current_session().mapping or Mapping()
        total, stage = max_seq_len or max_input_len + max_new_tokens, world.pp_layers(num_layers)
        rows = _rows(max_batch_size * max_beam_width, opt_batch_size)
        caching = use_cache and kv_cache_type != KVCacheType.DISABLED
        own = list(range(num_layers)) if attn_layer_idx is None else list(attn_layer_idx)
        heads = dict(zip(own, num_kv_heads_per_layer or [num_kv_heads] * len(own), strict=True))
        inputs: dict[str, Any] = dict.fromkeys(("attention_mask", "cache_indirection", *_LENGTHS))
        if use_gpt_attention_plugin:
            length: dict[str, Any] = {"max_seq_len": (1, total, total)}
            names = _LENGTHS if caching else _LENGTHS[len(_HELD) :]
            inputs |= {name: _input(name, "i32", **{_ROWS: rows}) for name in names}
        else:
            length = {"past_key_len": (0, total, total)}
            keys = symbol("input_len") + (symbol("past_key_len") if caching else 0)
            shape = [symbol(_ROWS), keys]
            inputs["attention_mask"] = Tensor(name="attention_mask", dtype="i32", shape=shape)
        if use_gpt_attention_plugin and caching:
            sizes = {_ROWS: rows, "beam_width": max_beam_width, **length}
            inputs["cache_indirection"] = _input("cache_indirection", "i32", **sizes)
        caches: list[Any] = [None] * len(stage)
        for place, layer in enumerate(stage if caching else ()):
            if count := -(-heads.get(layer, 0) // world.tp_size):
                sizes = {_ROWS: rows, "kv": 2, f"heads_{count}": count}
                sizes |= {**length, "head_size": head_size}
                name = f"past_key_value_{layer}"
                caches[place] = _input(name, irc_dtype(kv_dtype), **sizes)
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

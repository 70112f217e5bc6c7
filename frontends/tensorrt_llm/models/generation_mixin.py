"""`GenerationMixin`: the inputs of a language model, with the ranges of their sizes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

from ....errors import Error
from ....ir.dims import symbol
from ....source import here
from ..api import api, release
from ..context import current_session
from ..dtypes import irc_dtype
from ..mapping import Mapping
from ..settings import KVCacheType
from ..tensor import Tensor

Range = tuple[int, int, int]

# What inputs of adapters, paged caches and speculative decoding, which irc does not have, give.
_ABSENT = """
    all_reduce_workspace lora_ranks lora_weights_pointers spec_decoding_params mrope_params
    medusa_position_offsets medusa_packed_mask kv_cache_block_offsets host_kv_cache_block_offsets
    host_kv_cache_pool_pointers host_kv_cache_pool_mapping host_sink_token_length
    host_runtime_perf_knobs host_context_progress
"""
_LENGTHS = """
    sequence_length host_past_key_value_lengths context_lengths host_context_lengths
    host_request_types
"""


class Sizes(NamedTuple):
    """The ranges (min, opt, max) of the symbols of a language model's inputs."""

    batch: Range
    tokens: Range  # of one call, per row
    packed: Range  # of one call, of all rows
    total: Range  # of the caches

    @classmethod
    def of(
        cls,
        rows: int,
        tokens: int,
        total: int,
        packed: int | None = None,
        opt_packed: int | None = None,
        opt_rows: int | None = None,
    ) -> Sizes:
        """The ranges of a build with these limits."""
        most = packed or rows * tokens
        return cls(
            (1, min(rows, opt_rows or (rows + 2) // 2), rows),
            (1, (tokens + 1) // 2, tokens),
            (1, min(most, opt_packed or rows), most),
            (1, total, total),
        )


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
        rows, total = max_batch_size * max_beam_width, max_seq_len or max_input_len + max_new_tokens
        limits = (max_num_tokens, opt_num_tokens, opt_batch_size)
        maker = _Inputs(
            Sizes.of(rows, max_input_len, total, *limits),
            irc_dtype(dtype if dtype is not None else kv_dtype),
            remove_input_padding,
        )
        inputs = dict.fromkeys(_ABSENT.split()) | maker.tokens(world, hidden)
        is_last = world.is_last_pp_rank()
        gathers_all = gather_context_logits or gather_all_token_logits or not is_last
        inputs["last_token_ids"] = None if gathers_all else maker.vector("last_token_ids")
        inputs |= maker.prompt_table(prompt_embedding_table_size, hidden, world)
        return inputs | self.prepare_attention_inputs(
            max_batch_size=max_batch_size,
            max_beam_width=max_beam_width,
            max_input_len=max_input_len,
            max_seq_len=total,
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
        rows, total = max_batch_size * max_beam_width, max_seq_len or max_input_len + max_new_tokens
        sizes = Sizes.of(rows, max_input_len, total, opt_rows=opt_batch_size)
        own = list(range(num_layers)) if attn_layer_idx is None else list(attn_layer_idx)
        counts = dict(zip(own, num_kv_heads_per_layer or [num_kv_heads] * len(own), strict=True))
        if not use_cache or kv_cache_type == KVCacheType.DISABLED:
            counts = {}
        heads = [-(-counts.get(i, 0) // world.tp_size) for i in world.pp_layers(num_layers)]
        maker = _Inputs(sizes, irc_dtype(kv_dtype))
        plugin = bool(use_gpt_attention_plugin)
        inputs = dict.fromkeys(("attention_mask", "cache_indirection", *_LENGTHS.split()))
        inputs |= (
            maker.lengths(max_beam_width, bool(counts)) if plugin else maker.mask(bool(counts))
        )
        first = world.pp_layers(num_layers)[0]
        inputs["past_key_value"] = [
            maker.cache(first + i, count, head_size, plugin) if count else None
            for i, count in enumerate(heads)
        ]
        # up to 0.7.1 lists of all layers, whose windows and blocks scripts take one by one
        nothing = [None] * len(heads) if release() < 8 else None
        inputs["host_max_attention_window_sizes"] = nothing
        inputs["kv_cache_block_pointers_list"] = nothing
        return inputs | {"host_kv_cache_block_pointers_list": nothing}


class _Inputs:
    """Declares inputs in the network in progress; `packed` ones have the tokens of all rows."""

    def __init__(self, sizes: Sizes, dtype: str, packed: bool = False) -> None:
        self.sizes, self.dtype = sizes, dtype
        self.dims: dict[str, Any] = {"batch_size": sizes.batch, "input_len": sizes.tokens}
        if packed:
            self.dims = {"num_tokens": sizes.packed}
            self.dims = {"one": 1, **self.dims} if release() < 8 else self.dims
        self.packed = packed

    def make(self, name: str, dtype: str, **dims: Any) -> Tensor:
        """The input of a name; a dim is a number, or the range of a symbol."""
        shape = [size if isinstance(size, int) else -1 for size in dims.values()]
        return Tensor(
            name=name,
            dtype=dtype,
            shape=shape,
            dim_range=OrderedDict((key, [size]) for key, size in dims.items()),
        )

    def vector(self, name: str) -> Tensor:
        """i32 [B]."""
        return self.make(name, "i32", batch_size=self.sizes.batch)

    def tokens(self, mapping: Mapping, hidden: int) -> dict[str, Any]:
        """input_ids, or what the stage before sends, and position_ids."""
        inputs: dict[str, Any] = {"input_ids": None, "hidden_states_input": None}
        if mapping.is_first_pp_rank():
            inputs["input_ids"] = self.make("input_ids", "i32", **self.dims)
        else:
            if not hidden:
                raise Error("a pipeline stage needs hidden_size, or num_heads", loc=here())
            inputs["hidden_states_input"] = self.make(
                "hidden_states_input", self.dtype, **self.dims, hidden_size=hidden
            )
        inputs["position_ids"] = self.make("position_ids", "i32", **self.dims)
        return inputs

    def cache(self, layer: int, heads: int, head_size: int, plugin: bool) -> Tensor:
        """The cache of a layer: of a capacity with the plugin, else of all tokens before."""
        least, typical, most = self.sizes.total
        length = (
            {"max_seq_len": self.sizes.total}
            if plugin
            else {"past_key_len": (least - 1, typical, most)}
        )
        dims: dict[str, Any] = {
            "batch_size": self.sizes.batch,
            "kv": 2,
            f"num_heads_{heads}": heads,
        }
        return self.make(
            f"past_key_value_{layer}", self.dtype, **dims, **length, head_size=head_size
        )

    def mask(self, caching: bool) -> dict[str, Any]:
        """attention_mask i32 [B, past + S]."""
        keys = symbol("past_key_len") + symbol("input_len") if caching else symbol("input_len")
        shape = [symbol("batch_size"), keys]
        return {"attention_mask": Tensor(name="attention_mask", dtype="i32", shape=shape)}

    def lengths(self, beams: int, caching: bool) -> dict[str, Any]:
        """What caches of a capacity hold, and what the attention plugin takes besides."""
        held = ("sequence_length", "host_past_key_value_lengths")
        names = [name for name in _LENGTHS.split() if caching or name not in held]
        inputs: dict[str, Any] = {name: self.vector(name) for name in names}
        if caching:
            inputs["cache_indirection"] = self.make(
                "cache_indirection",
                "i32",
                batch_size=self.sizes.batch,
                beam_width=beams,
                max_seq_len=self.sizes.total,
            )
        return inputs

    def prompt_table(self, rows: int, hidden: int, mapping: Mapping) -> dict[str, Any]:
        """The table of prompt tuning, with the task of every row, or of every packed token."""
        names = ("prompt_embedding_table", "tasks", "prompt_vocab_size")
        if not rows or not mapping.is_first_pp_rank():
            return dict.fromkeys(names)
        table = self.make(
            names[0], self.dtype, prompt_rows=(1, max(1, rows // 2), rows), hidden_size=hidden
        )
        dims = self.dims if self.packed else {"batch_size": self.sizes.batch, "one": 1}
        tasks = self.make(names[1], "i32", **dims)
        return dict(zip(names, (table, tasks, self.make(names[2], "i32", one=1)), strict=True))

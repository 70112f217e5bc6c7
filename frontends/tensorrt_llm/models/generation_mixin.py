"""`GenerationMixin`: the inputs of a language model, with the ranges of their sizes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

from ....errors import Error
from ....ir.dims import symbol
from ....source import here
from ..context import current_network, current_session, signatures
from ..dtypes import irc_dtype
from ..mapping import Mapping
from ..tensor import Tensor

Range = tuple[int, int, int]

# Arguments that old scripts give and that change nothing here.
_WITHOUT_EFFECT = """
    use_gemm_plugin use_custom_all_reduce paged_kv_cache kv_cache_type tokens_per_block
    remove_input_padding max_num_tokens opt_num_tokens num_heads enable_two_optimization_profiles
    enable_ctx_gen_opt_profiles multiple_profiles streamingllm use_lora_plugin lora_target_modules
    gather_generation_logits hidden_size_per_head opt_batch_size
    speculative_decoding_draft_tokens_external spec_decoding_is_generation_length_variable
    gpt_attention_plugin gemm_plugin use_cache pp_reduce_scatter
"""
_UNSUPPORTED = {
    "max_draft_len": "speculative decoding is not supported; compile the base model",
    "position_encoding_2d": "positions of two dimensions are not supported",
    "mrope_rotary_cos_sin_size": "positions of several dimensions are not supported",
}


class Sizes(NamedTuple):
    """The ranges (min, opt, max) of the symbols of a language model's inputs."""

    batch: Range
    tokens: Range  # of one call
    total: Range  # of the caches

    @classmethod
    def of(cls, batch: int, beams: int, tokens: int, total: int) -> Sizes:
        """The ranges of a build with these limits."""
        rows = batch * beams
        return cls(
            (1, (rows + 2) // 2 if rows > 1 else 1, rows),
            (1, (tokens + 1) // 2, tokens),
            (1, total, total),
        )


class GenerationMixin:
    """Makes the inputs of a language model under the names of TensorRT-LLM's engines."""

    @staticmethod
    def default_range(
        max_range: int, offset: int = 0, min_range: int = 1, opt_offset: int = 0
    ) -> list[int]:
        """[min, opt, max]: the middle is the optimum."""
        opt = (max_range + min_range + opt_offset) // 2
        return [min_range + offset, opt + offset, max_range + offset]

    @signatures(
        a="max_batch_size, max_beam_width, max_input_len, max_new_tokens, num_kv_heads, head_size, "
        "num_layers, kv_dtype, remove_input_padding, use_gpt_attention_plugin",
        b="max_batch_size, max_beam_width, max_input_len, max_seq_len",
    )
    def prepare_basic_inputs(
        self,
        max_batch_size: int,
        max_beam_width: int,
        max_input_len: int,
        max_seq_len: int | None = None,
        max_new_tokens: int | None = None,
        num_kv_heads: int | None = None,
        head_size: int | None = None,
        num_layers: int | None = None,
        kv_dtype: Any = None,
        use_gpt_attention_plugin: bool | None = None,
        gather_context_logits: bool = False,
        dtype: Any = None,
        hidden_size: int | None = None,
        num_heads: int | None = None,
        mapping: Mapping | None = None,
        prompt_embedding_table_size: int = 0,
        **more: Any,
    ) -> dict[str, Any]:
        """The inputs by name; those that this rank or form of attention lacks are None.

        input_ids and position_ids i32 [B, S], last_token_ids i32 [B] unless
        `gather_context_logits`, hidden_states_input [B, S, hidden] behind the first pipeline stage,
        and a KV cache `past_key_value_i` [B, 2, kv_heads, length, head_size] per layer of the
        stage. With the attention plugin caches have a capacity, `max_seq_len`, and lengths say
        what they hold; without it they hold every token, and attention_mask i32 [B, past + S] says
        which are padding. B is up to max_batch_size * max_beam_width.
        """
        _check(more)
        world: Mapping = mapping or current_session().mapping or Mapping()
        if num_layers is None or num_kv_heads is None or head_size is None:
            raise Error(
                "prepare_basic_inputs: expected num_layers, num_kv_heads and head_size", loc=here()
            )
        total = max_seq_len or max_input_len + (max_new_tokens or 0)
        sizes = Sizes.of(max_batch_size, max_beam_width, max_input_len, total)
        plugin = use_gpt_attention_plugin
        if plugin is None:
            plugin = bool(current_network().plugin_config.gpt_attention_plugin)
        maker = _Inputs(sizes, irc_dtype(dtype or kv_dtype or "float16"))
        found = maker.tokens(world, hidden_size or (num_heads or 0) * head_size)
        found["last_token_ids"] = (
            None
            if gather_context_logits or not world.is_last_pp_rank()
            else maker.vector("last_token_ids")
        )
        heads = -(-num_kv_heads // world.tp_size)
        layers = world.pp_layers(num_layers)
        kind = irc_dtype(kv_dtype) if kv_dtype is not None else maker.dtype
        found |= maker.caches(layers, heads, head_size, kind, plugin)
        found |= maker.lengths(num_layers, max_beam_width) if plugin else maker.mask()
        found |= maker.prompt_table(prompt_embedding_table_size, hidden_size, world)
        return found


def _check(more: dict[str, Any]) -> None:
    """An Error about arguments that are unknown or ask for what irc does not have."""
    for name, value in more.items():
        if name in _UNSUPPORTED and value:
            raise Error(f"prepare_basic_inputs: {name}={value}: {_UNSUPPORTED[name]}", loc=here())
        if name not in _WITHOUT_EFFECT.split() and name not in _UNSUPPORTED and value:
            current_session().note(f"prepare_basic_inputs: {name} has no effect")


class _Inputs:
    """Declares inputs in the network in progress."""

    def __init__(self, sizes: Sizes, dtype: str) -> None:
        self.sizes, self.dtype = sizes, dtype

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
        dims: dict[str, Any] = {"batch_size": self.sizes.batch, "input_len": self.sizes.tokens}
        found: dict[str, Any] = {"input_ids": None, "hidden_states_input": None}
        if mapping.is_first_pp_rank():
            found["input_ids"] = self.make("input_ids", "i32", **dims)
        else:
            if not hidden:
                raise Error("a pipeline stage needs hidden_size, or num_heads", loc=here())
            found["hidden_states_input"] = self.make(
                "hidden_states_input", self.dtype, **dims, hidden_size=hidden
            )
        found["position_ids"] = self.make("position_ids", "i32", **dims)
        return found

    def caches(
        self, layers: list[int], heads: int, head_size: int, dtype: str, plugin: bool
    ) -> dict[str, Any]:
        """A cache per layer: of a capacity with the plugin, else of all tokens before."""
        past = self.sizes.total if plugin else (0, self.sizes.total[1], self.sizes.total[2])
        length = {"max_seq_len" if plugin else "past_key_len": past}
        dims: dict[str, Any] = {"batch_size": self.sizes.batch, "kv": 2, "num_heads": heads}
        tensors = [
            self.make(f"past_key_value_{i}", dtype, **dims, **length, head_size=head_size)
            for i in layers
        ]
        return {"past_key_value": tensors}

    def mask(self) -> dict[str, Any]:
        """attention_mask i32 [B, past + S]."""
        shape = [symbol("batch_size"), symbol("past_key_len") + symbol("input_len")]
        return {"attention_mask": Tensor(name="attention_mask", dtype="i32", shape=shape)}

    def lengths(self, layers: int, beams: int) -> dict[str, Any]:
        """What caches of a capacity hold, and what the attention plugin takes besides."""
        names = (
            "sequence_length",
            "host_past_key_value_lengths",
            "context_lengths",
            "host_context_lengths",
            "host_request_types",
        )
        found: dict[str, Any] = {name: self.vector(name) for name in names}
        # as an input it would need a mask of all queries and keys in every call
        found["host_max_attention_window_sizes"] = None
        found["host_sink_token_length"] = self.make("host_sink_token_length", "i32", scalar=1)
        found["cache_indirection"] = self.make(
            "cache_indirection",
            "i32",
            batch_size=self.sizes.batch,
            beam_width=beams,
            max_seq_len=self.sizes.total,
        )
        return found

    def prompt_table(self, rows: int, hidden: int | None, mapping: Mapping) -> dict[str, Any]:
        """The table of prompt tuning, with the task of every row."""
        names = ("prompt_embedding_table", "tasks", "prompt_vocab_size")
        if not rows or not mapping.is_first_pp_rank():
            return dict.fromkeys(names)
        table = self.make(
            names[0], self.dtype, prompt_rows=(1, max(1, rows // 2), rows), hidden_size=hidden
        )
        tasks = self.make(names[1], "i32", batch_size=self.sizes.batch, one=1)
        return dict(zip(names, (table, tasks, self.make(names[2], "i32", one=1)), strict=True))

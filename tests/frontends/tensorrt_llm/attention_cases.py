"""Attention layers of the dialect with weights drawn at random, run call by call on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from irc.frontends.tensorrt_llm.context import Dialect
from irc.frontends.tensorrt_llm.enums import AttentionMaskType, PositionEmbeddingType
from irc.frontends.tensorrt_llm.layers.attention import Attention
from irc.frontends.tensorrt_llm.layers.attention_parameters import (
    AttentionParams,
    KeyValueCacheParams,
)
from irc.frontends.tensorrt_llm.mapping import Mapping
from irc.frontends.tensorrt_llm.network import default_net
from irc.frontends.tensorrt_llm.tensor import Tensor
from irc.ir.dtypes import dtype_of
from tests.frontends.tensorrt_llm.attention_oracle import Array, Oracle
from tests.frontends.tensorrt_llm.traced import run

any_attention: Any = Attention


@dataclass
class Case:
    """A layer and its oracle. `settings` are arguments of `Attention`, `call` gives arguments of a
    call for the positions [first, last), as arrays, by the names of `forward`."""

    oracle: Oracle
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    call: Any = None
    window: Any = None
    dialect: Dialect = "B"
    by_head: bool = False

    @property
    def hidden(self) -> int:
        return self.oracle.o.shape[0]

    def layer(self, mapping: Mapping) -> Any:
        """The layer of one rank, with its part of the weights."""
        o, tp = self.oracle, mapping.tp_size
        settings = {
            "hidden_size": self.hidden,
            "num_attention_heads": o.heads,
            "num_kv_heads": o.kv,
            "attention_head_size": o.width,
            "attention_mask_type": AttentionMaskType.from_string(o.mask),
            "position_embedding_type": PositionEmbeddingType.from_string(o.position),
            "bias": o.bias is not None,
            "dense_bias": o.o_bias is not None,
            "dtype": "float32",
            "tp_group": mapping.tp_group,
            "tp_size": tp,
            "tp_rank": mapping.tp_rank,
        }
        layer = any_attention(**{**settings, **self.settings})
        layer.qkv.weight.value = self.of_rank(o.qkv, mapping)
        if o.bias is not None:
            ends = np.cumsum([w.shape[0] for w in o.qkv])[:-1]
            layer.qkv.bias.value = self.of_rank(tuple(np.split(o.bias, ends)), mapping)
        layer.dense.weight.value = np.split(o.o, tp, 1)[mapping.tp_rank].astype(np.float32)
        if o.o_bias is not None:
            layer.dense.bias.value = o.o_bias.astype(np.float32)
        table = o.more.get("table")
        if table is not None and table.ndim == 2:
            layer.rel_attn_table.value = np.split(table, tp)[mapping.tp_rank].astype(np.float32)
        elif table is not None:
            own = np.split(table, tp)[mapping.tp_rank].astype(np.float32)
            layer.set_rel_attn_table(table.shape[1] - 1, own)
        return layer

    def of_rank(self, parts: tuple[Array, ...], mapping: Mapping) -> Array:
        """The rows of queries, keys and values of one rank's heads."""
        o, tp, rank = self.oracle, mapping.tp_size, mapping.tp_rank
        queries = np.split(parts[0], tp)[rank]
        first = rank * o.kv // tp  # of the key-value heads, each on tp // kv ranks
        count = max(o.kv // tp, 1)
        rows = slice(first * o.width, (first + count) * o.width)
        own = [queries, parts[1][rows], parts[2][rows]]
        if self.by_head:
            heads = [each.reshape(count, o.width, *each.shape[1:]) for each in own]
            return np.stack(heads, 1).reshape(-1, *own[0].shape[1:]).astype(np.float32)
        return np.concatenate(own).astype(np.float32)

    def arguments(self, first: int, last: int) -> dict[str, Array]:
        return {} if self.call is None else self.call(first, last)

    # -- runs

    def whole(self, x: Array, tp: int, plugin: bool = False, **lengths: Array) -> Array:
        """The result without a cache."""
        given = {"x": x.astype(np.float32), **self.arguments(0, x.shape[1]), **lengths}

        def build(mapping: Mapping) -> None:
            default_net().plugin_config.set_gpt_attention_plugin("float32" if plugin else None)
            inputs = made(given)
            params = AttentionParams(**{name: inputs.pop(name) for name in lengths})
            caches = KeyValueCacheParams(host_max_attention_window_sizes=self.window)
            out = self.layer(mapping)(
                inputs.pop("x"), attention_params=params, kv_cache_params=caches, **inputs
            )
            out.mark_output("out")

        return run(build, given, tp, dialect=self.dialect)["out"]

    def grown(self, x: Array, tp: int, ends: list[int]) -> Array:
        """The result of calls up to each of `ends`, with a cache that grows."""
        heads = max(self.oracle.kv // tp, 1) * tp
        past = np.zeros((len(x), 2, heads, 0, self.oracle.width), np.float32)
        outs: list[Array] = []
        for first, last in zip([0, *ends], ends, strict=False):
            given = {"x": x[:, first:last].astype(np.float32), **self.arguments(first, last)}

            def build(mapping: Mapping, given: Any = given, past: Array = past) -> None:
                default_net().plugin_config.set_gpt_attention_plugin(None)
                inputs = made(given)
                cache = cache_input(past, mapping)
                params = KeyValueCacheParams([cache], host_max_attention_window_sizes=self.window)
                out, present = self.layer(mapping)(
                    inputs.pop("x"), use_cache=True, kv_cache_params=params, **inputs
                )
                out.mark_output("out")
                present.mark_output("present_key_value_0")

            found = run(build, {**given, "past_key_value_0": past}, tp, dialect=self.dialect)
            past = found["present_key_value_0"]
            outs.append(found["out"])
        assert past.shape[3] == ends[-1]
        return np.concatenate(outs, 1)

    def written(
        self, x: Array, tp: int, prompt: int, last: int, prompts: Array, capacity: int
    ) -> list[Array]:
        """The valid results per row, with a cache of a capacity; prompts have unequal lengths."""
        batch = len(x)
        heads = max(self.oracle.kv // tp, 1) * tp
        cache = np.full((batch, 2, heads, capacity, self.oracle.width), np.nan, np.float32)
        cache[:] = 7.0  # what is not filled must not count
        filled = np.zeros(batch, np.int32)
        rows: list[list[Array]] = [[] for _ in range(batch)]
        while filled.max() < last:
            tokens = prompt if not filled.any() else 1
            starts = filled
            index = starts[:, None] + np.arange(tokens)
            pieces = np.take_along_axis(x, np.minimum(index, x.shape[1] - 1)[..., None], 1)
            given: dict[str, Any] = {
                "x": pieces.astype(np.float32),
                "past_key_value_0": cache,
                "host_past_key_value_lengths": starts,
                "context_lengths": prompts,
                **(self.call(index, None) if self.call is not None else {}),
            }
            found = run(
                lambda mapping, given=given: self.capacity_step(mapping, given),
                given,
                tp,
                dialect=self.dialect,
            )
            cache = found["present_key_value_0"]
            counts = prompts if not filled.any() else np.ones(batch, np.int32)
            for row in range(batch):
                rows[row] += list(found["out"][row, : counts[row]])
            filled = (filled + counts).astype(np.int32)
        return [np.stack(row) for row in rows]

    def capacity_step(self, mapping: Mapping, given: dict[str, Any]) -> None:
        """One call over a cache of a capacity."""
        default_net().plugin_config.set_gpt_attention_plugin("float32")
        rest = {n: a for n, a in given.items() if n != "past_key_value_0"}
        inputs = made(rest)
        cache = cache_input(given["past_key_value_0"], mapping)
        lengths = inputs.pop("host_past_key_value_lengths")
        params = AttentionParams(context_lengths=inputs.pop("context_lengths"))
        out, present = self.layer(mapping)(
            inputs.pop("x"),
            use_cache=True,
            kv_cache_params=KeyValueCacheParams(
                [cache],
                host_past_key_value_lengths=lengths,
                host_max_attention_window_sizes=self.window,
            ),
            attention_params=params,
            **inputs,
        )
        out.mark_output("out")
        present.mark_output("present_key_value_0")


def made(given: dict[str, Array]) -> dict[str, Any]:
    """An input per array."""
    return {n: Tensor(name=n, dtype=dtype_of(a), shape=a.shape) for n, a in given.items()}


def cache_input(past: Array, mapping: Mapping) -> Tensor:
    """The cache of one rank."""
    batch, two, heads, length, width = past.shape
    shape = (batch, two, heads // mapping.tp_size, length, width)
    return Tensor(name="past_key_value_0", dtype="float32", shape=shape)

"""Attention layers of TensorRT-LLM with weights drawn at random, run call by call on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import irc
from irc.frontends.tensorrt_llm.context import new_session
from irc.frontends.tensorrt_llm.enums import AttentionMaskType, PositionEmbeddingType
from irc.frontends.tensorrt_llm.layers.attention import Attention
from irc.frontends.tensorrt_llm.layers.attention_params import AttentionParams, KeyValueCacheParams
from irc.frontends.tensorrt_llm.mapping import Mapping
from irc.frontends.tensorrt_llm.network import default_net
from irc.frontends.tensorrt_llm.tensor import Tensor
from irc.ir.dtypes import dtype_of
from tests.frontends.attention_oracle import Array, Oracle
from tests.frontends.tensorrt_llm.worlds import run, trace, used

any_attention: Any = Attention


@dataclass
class Case:
    """A layer and its oracle. `settings` are arguments of `Attention`, `call` gives arguments of a
    call for the positions [first, last), as arrays, by the names of `forward`."""

    oracle: Oracle
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    call: Any = None
    window: Any = None
    version: str = "0.16"
    by_head: bool = False

    @property
    def hidden(self) -> int:
        return self.oracle.o.shape[0]

    def layer(self, mapping: Mapping) -> Any:
        """The layer of one rank, with its part of the weights."""
        o, tp = self.oracle, mapping.tp_size
        settings = {
            "hidden_size": self.hidden, "num_attention_heads": o.heads, "num_kv_heads": o.kv,
            "attention_head_size": o.width,
            "attention_mask_type": AttentionMaskType.from_string(o.mask),
            "position_embedding_type": PositionEmbeddingType.from_string(o.position),
            "bias": o.bias is not None, "dense_bias": o.o_bias is not None, "dtype": "float32",
            "tp_group": mapping.tp_group, "tp_size": tp, "tp_rank": mapping.tp_rank,
        }  # fmt: skip
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

    @property
    def windows(self) -> dict[str, Array]:
        """The window, where it is an input of the network."""
        return {"window": self.window} if isinstance(self.window, np.ndarray) else {}

    def arguments(self, first: int, last: int) -> dict[str, Array]:
        return {} if self.call is None else self.call(first, last)

    # -- runs

    def whole(self, x: Array, tp: int, plugin: bool = False, **lengths: Array) -> Array:
        """The result without a cache."""
        given = {
            "x": x.astype(np.float32), **self.arguments(0, x.shape[1]), **lengths, **self.windows,
        }  # fmt: skip

        def build(mapping: Mapping) -> None:
            default_net().plugin_config.set_gpt_attention_plugin("float32" if plugin else None)
            inputs = made(given)
            params = AttentionParams(**{name: inputs.pop(name) for name in lengths})
            caches = KeyValueCacheParams(
                host_max_attention_window_sizes=inputs.pop("window", self.window)
            )
            out = self.layer(mapping)(
                inputs.pop("x"), attention_params=params, kv_cache_params=caches, **inputs
            )
            out.mark_output("out")

        return run(build, given, tp, version=self.version)["out"]

    def grown(self, x: Array, tp: int, ends: list[int]) -> Array:
        """The result of calls up to each of `ends`, with a cache that grows."""
        step = self.engine(tp, plugin=False)
        past = self.cache(len(x), tp, 0)
        outs: list[Array] = []
        for first, last in zip([0, *ends], ends, strict=False):
            given = {"x": x[:, first:last], **self.arguments(first, last)}
            found = step({**given, "past_key_value_0": past})
            past = found["present_key_value_0"]
            outs.append(found["out"])
        assert past.shape[3] == ends[-1]
        return np.concatenate(outs, 1)

    def written(
        self, x: Array, tp: int, prompt: int, last: int, prompts: Array, capacity: int
    ) -> list[Array]:
        """The valid results per row, with a cache of a capacity; prompts have unequal lengths."""
        step = self.engine(tp, plugin=True)
        cache = self.cache(len(x), tp, capacity)
        filled = np.zeros(len(x), np.int32)
        rows: list[list[Array]] = [[] for _ in x]
        while filled.max() < last:
            counts = np.ones(len(x), np.int32) if filled.any() else prompts
            index = filled[:, None] + np.arange(1 if filled.any() else prompt)
            given = {
                "x": np.take_along_axis(x, np.minimum(index, x.shape[1] - 1)[..., None], 1),
                "past_key_value_0": cache,
                "host_past_key_value_lengths": filled,
                "context_lengths": prompts,
                **(self.call(index, None) if self.call is not None else {}),
                **self.windows,
            }
            found = step(given)
            cache = found["present_key_value_0"]
            for row, count in enumerate(counts):
                rows[row] += list(found["out"][row, :count])
            filled = (filled + counts).astype(np.int32)
        return [np.stack(row) for row in rows]

    def cache(self, batch: int, tp: int, length: int) -> Array:
        """A cache of all ranks; what is not filled must not count."""
        heads = max(self.oracle.kv // tp, 1) * tp
        return np.full((batch, 2, heads, length, self.oracle.width), 7.0, np.float32)

    def engine(self, tp: int, plugin: bool) -> Callable[[dict[str, Array]], dict[str, Array]]:
        """Runs calls of one module of dynamic sizes, for prompts and single tokens alike."""
        made_of: list[Any] = []  # the module, and the session that holds its weights

        def step(given: dict[str, Array]) -> dict[str, Array]:
            given = given | {"x": given["x"].astype(np.float32)}
            if not made_of:
                with new_session(self.version) as session:
                    module = trace(lambda mapping: self.call_of(mapping, given, plugin), tp)
                    made_of[:] = [module, session]
            return irc.evaluate(made_of[0], used(made_of[0], given))

        return step

    def call_of(self, mapping: Mapping, given: dict[str, Array], plugin: bool) -> None:
        """The network of one call with a cache."""
        default_net().plugin_config.set_gpt_attention_plugin("float32" if plugin else None)
        past = np.split(given["past_key_value_0"], mapping.tp_size, axis=2)[mapping.tp_rank]
        inputs = made({**given, "past_key_value_0": past}, dynamic=True)
        out, present = self.layer(mapping)(
            inputs.pop("x"),
            use_cache=True,
            kv_cache_params=KeyValueCacheParams(
                past_key_value=[inputs.pop("past_key_value_0")],
                host_past_key_value_lengths=inputs.pop("host_past_key_value_lengths", None),
                host_max_attention_window_sizes=inputs.pop("window", self.window),
            ),
            attention_params=AttentionParams(context_lengths=inputs.pop("context_lengths", None)),
            **inputs,
        )
        out.mark_output("out")
        present.mark_output("present_key_value_0")


BATCH, QUERIES = ("batch", (1, 2, 4)), ("tokens", (1, 3, 8))
KEYS, HELD = ("keys", (1, 4, 16)), ("held", (0, 3, 16))
# the dynamic sizes of inputs, None for others
SIZES: dict[str, tuple[tuple[Any, ...], ...]] = {
    "x": ((BATCH, QUERIES, None),),
    "attention_mask": ((BATCH, KEYS), (BATCH, QUERIES, KEYS)),
    "context_lengths": ((BATCH,),),
    "host_past_key_value_lengths": ((BATCH,),),
    "past_key_value_0": ((("rows", BATCH[1]), None, None, HELD, None),),
}


def made(given: dict[str, Array], dynamic: bool = False) -> dict[str, Any]:
    """An input per array, with the dynamic sizes of SIZES if `dynamic`."""
    found: dict[str, Any] = {}
    for name, array in given.items():
        static = (None,) * array.ndim
        forms = SIZES.get(name, ()) if dynamic else ()
        rows = next((form for form in forms if len(form) == array.ndim), static)
        found[name] = Tensor(
            name=name,
            dtype=dtype_of(array),
            shape=[n if row is None else -1 for n, row in zip(array.shape, rows, strict=True)],
            dim_range=dict(
                (f"size_{i}", [size]) if row is None else (row[0], [row[1]])
                for i, (size, row) in enumerate(zip(array.shape, rows, strict=True))
            ),
        )
    return found

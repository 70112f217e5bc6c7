"""`Attention` of TensorRT-LLM on 1, 2 and 4 ranks against the definitions, call by call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from irc.errors import Error
from irc.frontends.tensorrt_llm.context import new_session
from irc.frontends.tensorrt_llm.functional import gpt_attention
from irc.frontends.tensorrt_llm.layers import BlockSparseAttnParams, KeyValueCacheParams
from irc.frontends.tensorrt_llm.layers.quantize import quantize_model
from irc.frontends.tensorrt_llm.mapping import Mapping
from irc.frontends.tensorrt_llm.module import ModuleList
from irc.frontends.tensorrt_llm.network import default_net
from irc.frontends.tensorrt_llm.quantization import QuantMode
from irc.frontends.tensorrt_llm.tensor import Tensor
from tests.fresh import fresh
from tests.frontends.attention_oracle import Array, Oracle
from tests.frontends.tensorrt_llm.attention_cases import Case, made
from tests.frontends.tensorrt_llm.traced import run, trace

RANDOM = fresh(0)
any_blocks: Any = BlockSparseAttnParams
HIDDEN, WIDTH, TOKENS = 10, 8, 5
PROMPTS = np.array([3, 2], np.int32)


def oracle(
    heads: int = 4, kv: int = 2, biases: bool = False, hidden: int = HIDDEN, **more: Any
) -> Oracle:
    """A layer with weights drawn at random."""

    def drawn(*shape: int) -> Array:
        return RANDOM.normal(size=shape) / np.sqrt(shape[-1])

    sizes = (heads * WIDTH, kv * WIDTH, kv * WIDTH)
    known = {name: more.pop(name) for name in ("mask", "position", "prompts") if name in more}
    return Oracle(
        heads,
        kv,
        WIDTH,
        (drawn(sizes[0], hidden), drawn(sizes[1], hidden), drawn(sizes[2], hidden)),
        drawn(hidden, sizes[0]),
        bias=drawn(sum(sizes)) if biases else None,
        o_bias=drawn(hidden) if biases else None,
        more=more,
        **known,
    )


def tokens() -> Array:
    return RANDOM.normal(size=(2, TOKENS, HIDDEN))


def close(found: Array, wanted: Array) -> None:
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_path_is_attention(tp: int, heads: int, kv: int) -> None:
    """Without a cache, with one that grows, and with one of a capacity."""
    case = Case(oracle(heads, kv, biases=True, position="rope_gpt_neox"))
    x = tokens()
    wanted = case.oracle(x)
    for plugin in (False, True):
        close(case.whole(x, tp, plugin), wanted)
    close(case.grown(x, tp, [3, 4, 5]), wanted)
    rows = case.written(x, tp, 3, TOKENS, PROMPTS, 7)
    for row, (found, prompt) in enumerate(zip(rows, PROMPTS, strict=True)):
        assert len(found) == TOKENS - 3 + prompt
        close(found, wanted[row, : len(found)])


@pytest.mark.parametrize("alike", [False, True])
def test_blocks_by_the_heads_of_all_ranks(alike: bool) -> None:
    """More heads than the stride, on four ranks."""
    params = any_blocks(1, alike, 1, 3)
    found = oracle(8, 4, mask="blocksparse", blocks=(1, 1, 3, alike))
    x = tokens()
    close(Case(found, {"block_sparse_params": params}).whole(x, 4), found(x))


def test_quantize_model_quantizes_caches_and_other_caches_are_refused() -> None:
    found, x = oracle(4, 2), tokens()

    def build(mapping: Mapping, dtype: str, heads: int, mode: QuantMode) -> None:
        default_net().plugin_config.set_gpt_attention_plugin(None)
        layer = Case(found).layer(mapping)
        holder = ModuleList([layer])
        quantize_model(holder, mode)
        if mode:
            layer.kv_cache_scaling_factor.value = np.full(1, 0.05, np.float32)
        past = Tensor(name="past_key_value_0", dtype=dtype, shape=(2, 2, heads, 0, WIDTH))
        inputs = made({"x": x.astype(np.float32)})
        params = KeyValueCacheParams(past_key_value=[past])
        out, present = layer(inputs["x"], use_cache=True, kv_cache_params=params)
        out.mark_output("out")
        present.mark_output("present_key_value_0")

    mode, none = QuantMode.INT8_KV_CACHE, QuantMode(0)
    with new_session():
        module = trace(lambda mapping: build(mapping, "int8", 2, mode))
    assert module.main.returned[1].type.dtype == "i8"
    for dtype, heads, given in (("float32", 2, mode), ("int8", 2, none), ("float32", 4, none)):
        with new_session(), pytest.raises(Error, match=r"expected a KV cache .* 2, length, 8\]"):
            trace(lambda mapping, row=(dtype, heads, given): build(mapping, *row))


def test_a_script_with_a_forward_of_its_own() -> None:
    """Its calls of gpt_attention take the attributes of the layer."""
    found = oracle(4, 2, position="rope_gptj", percentage=0.5, base=50.0)
    settings = {"rotary_embedding_percentage": 0.5, "rotary_embedding_base": 50.0}
    x = tokens()
    given = {"x": x.astype(np.float32)}

    def build(mapping: Mapping) -> None:
        layer = Case(found, settings).layer(mapping)
        context, _ = gpt_attention(
            qkv=layer.qkv(made(given)["x"]),
            num_heads=layer.num_attention_heads,
            num_kv_heads=layer.num_attention_kv_heads,
            hidden_size_per_head=layer.attention_head_size,
            q_scaling=layer.q_scaling,
            rotary_embedding_dim=layer.rotary_embedding_dim,
            rotary_embedding_base=layer.rotary_embedding_base,
            rotary_embedding_scale_type=layer.rotary_embedding_scale_type,
            rotary_embedding_scale=layer.rotary_embedding_scale,
            rotary_embedding_max_positions=layer.max_position_embeddings,
            position_embedding_type=layer.position_embedding_type,
            mask_type=layer.attention_mask_type,
            tp_size=layer.tp_size,
            tp_rank=layer.tp_rank,
        )
        layer.dense(context).mark_output("out")

    close(run(build, given, 2)["out"], found(x))

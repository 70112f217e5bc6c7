"""`Attention` of TensorRT-LLM on 1, 2 and 4 ranks, its caches, and cross attention."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from irc.errors import Error
from irc.frontends.tensorrt_llm.context import new_session
from irc.frontends.tensorrt_llm.dtypes import irc_dtype
from irc.frontends.tensorrt_llm.functional import gpt_attention
from irc.frontends.tensorrt_llm.layers import BlockSparseAttnParams, KeyValueCacheParams
from irc.frontends.tensorrt_llm.layers.quantized import quantize_model
from irc.frontends.tensorrt_llm.mapping import Mapping
from irc.frontends.tensorrt_llm.module import ModuleList
from irc.frontends.tensorrt_llm.network import default_net
from irc.frontends.tensorrt_llm.quantization import QuantMode
from irc.frontends.tensorrt_llm.tensor import Tensor
from irc.ir.dtypes import numpy_dtype
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


# -- cross attention, and caches of codes


@pytest.mark.parametrize("plugin", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_cross_attention(tp: int, plugin: bool) -> None:
    found = oracle(4, 2, mask="causal", position="learned_absolute", prompts=PROMPTS)
    x, source = tokens()[:, :2], tokens()
    hidden = (np.arange(TOKENS) < PROMPTS[:, None]).astype(np.int32)
    given = {
        "x": x.astype(np.float32),
        "source": source.astype(np.float32),
        "mask": np.repeat(hidden[:, None], 2, 1),
    }

    def build(mapping: Mapping) -> None:
        default_net().plugin_config.set_gpt_attention_plugin("float32" if plugin else None)
        inputs = made(given)
        layer = Case(found, {"cross_attention": True}).layer(mapping)
        out, cache = layer(
            inputs["x"], encoder_output=inputs["source"], attention_mask=inputs["mask"],
            use_cache=True, cross_kv_cache_gen=np.array([True]),
        )  # fmt: skip
        out.mark_output("out")
        cache.mark_output("present_key_value_0")

    outs = run(build, given, tp)
    close(outs["out"], found(x, source))
    keys = source @ found.qkv[1].T
    close(
        outs["present_key_value_0"][:, 0], keys.reshape(2, TOKENS, 2, WIDTH).transpose(0, 2, 1, 3)
    )


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("kind", ["grown", "plugin", "cross"])
def test_caches_of_codes(kind: str, dtype: str) -> None:
    """Keys and values are the nearest codes, and attention is that of the codes."""
    mode = QuantMode.INT8_KV_CACHE if dtype == "int8" else QuantMode.FP8_KV_CACHE
    found, x = oracle(4, 2), tokens()
    exact = np.stack([(x @ w.T).reshape(2, TOKENS, 2, WIDTH) for w in found.qkv[1:]], 1)
    scale = np.float32(np.abs(exact).max() / 100)

    def build(mapping: Mapping) -> None:
        default_net().plugin_config.set_gpt_attention_plugin(
            "float32" if kind == "plugin" else None
        )
        inputs = made({name: each for name, each in given.items() if name != "past_key_value_0"})
        settings = {"quant_mode": mode, "cross_attention": kind == "cross"}
        layer = Case(found, settings).layer(mapping)
        layer.kv_cache_scaling_factor.value = np.array([scale])
        if kind == "cross":
            call = {"encoder_output": inputs["x"]}
        else:
            past = Tensor(name="past_key_value_0", dtype=dtype, shape=(2, 2, 2, length, WIDTH))
            params = KeyValueCacheParams(
                past_key_value=[past], host_past_key_value_lengths=inputs["filled"]
            )
            call = {"kv_cache_params": params}
        out, present = layer(inputs["x"], use_cache=True, **call)
        out.mark_output("out")
        present.mark_output("present_key_value_0")

    length = TOKENS if kind == "plugin" else 0
    past = np.zeros((2, 2, 2, length, WIDTH), numpy_dtype(irc_dtype(dtype)))
    given = {"x": x.astype(np.float32)}
    if kind != "cross":
        given |= {"filled": np.zeros(2, np.int32), "past_key_value_0": past}
    outs = run(build, given)
    assert outs["present_key_value_0"].dtype == past.dtype
    codes = outs["present_key_value_0"].astype(np.float64).swapaxes(2, 3)
    # half a step of int8 is 1/2; of e4m3 1/16 of the number, and 2^-10 near 0
    half = 0.5 if dtype == "int8" else np.maximum(np.abs(exact / scale) / 16, 2**-10)
    assert (np.abs(codes - exact / scale) <= half + 1e-4).all()
    kept = (codes * scale).reshape(2, 2, TOKENS, -1)
    rows = np.concatenate([x @ found.qkv[0].T, kept[:, 0], kept[:, 1]], -1)
    parts = np.split(np.eye(rows.shape[-1]), [4 * WIDTH, 6 * WIDTH])
    wanted = replace(found, qkv=parts)
    close(outs["out"], wanted(rows, rows if kind == "cross" else None))

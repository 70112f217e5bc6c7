"""Cross attention of TensorRT-LLM, and KV caches that hold codes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from irc.frontends.tensorrt_llm.dtypes import irc_dtype
from irc.frontends.tensorrt_llm.layers.attention_params import KeyValueCacheParams
from irc.frontends.tensorrt_llm.mapping import Mapping
from irc.frontends.tensorrt_llm.network import default_net
from irc.frontends.tensorrt_llm.quantization import QuantMode
from irc.frontends.tensorrt_llm.tensor import Tensor
from irc.ir.dtypes import numpy_dtype
from tests.frontends.tensorrt_llm.attention_cases import Case, made
from tests.frontends.tensorrt_llm.test_attention_layer import (
    PROMPTS,
    TOKENS,
    WIDTH,
    close,
    oracle,
    tokens,
)
from tests.frontends.tensorrt_llm.traced import run


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

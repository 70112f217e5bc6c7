"""Options of the attention layers against their definitions, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from irc import ops
from irc.errors import Error
from irc.frontends.tensorrt_llm.context import new_session
from irc.frontends.tensorrt_llm.enums import LayerNormType, PositionEmbeddingType
from irc.frontends.tensorrt_llm.functional import expand_mask
from irc.frontends.tensorrt_llm.layers import Attention, BertAttention
from irc.frontends.tensorrt_llm.layers.attention_params import (
    KeyValueCacheParams,
    MropeParams,
    SpecDecodingParams,
)
from irc.frontends.tensorrt_llm.mapping import Mapping
from irc.frontends.tensorrt_llm.network import default_net
from irc.frontends.tensorrt_llm.tensor import Tensor
from tests.frontends.attention_oracle import Array, inverse
from tests.frontends.tensorrt_llm.attention_cases import Case, made
from tests.frontends.tensorrt_llm.test_attention_layer import (
    HIDDEN,
    PROMPTS,
    RANDOM,
    TOKENS,
    WIDTH,
    close,
    oracle,
    tokens,
)
from tests.frontends.tensorrt_llm.traced import run, trace

any_attention: Any = Attention
any_bert: Any = BertAttention
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def llama3_frequencies() -> Array:
    found = inverse(WIDTH)
    turns = 64 * found / (2 * np.pi)
    blend = np.clip((turns - 1) / 3, 0, 1)
    return found * blend + found / 4 * (1 - blend)


def dynamic_frequencies() -> Array:
    """The NTK base of five tokens, where three positions were trained."""
    base = 1e4 * (2.0 * TOKENS / 3 - 1.0) ** (WIDTH / (WIDTH - 2))
    return inverse(WIDTH, base)


# the arguments of Attention, and what the definition needs
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "clip_qkv": ({"clip_qkv": 0.4}, {"clip_qkv": 0.4}),
    "q_scaling": ({"q_scaling": 0.5}, {"q_scaling": 0.5}),
    "layers": (
        {"q_scaling": 2.0, "apply_query_key_layer_scaling": True, "num_layers": 3},
        {"q_scaling": 6.0},
    ),
    "tanh": ({"max_attn_value": 0.7}, {"max_attn_value": 0.7}),
    "logn": ({"use_logn_scaling": True, "max_seqlen_for_logn_scaling": 3}, {"logn": 3}),
    "linear": (
        {"rotary_embedding_scaling": {"type": "linear", "factor": 4.0}},
        {"position": "rope_gpt_neox", "frequencies": inverse(WIDTH) / 4},
    ),
    "llama3": (
        {"rotary_embedding_scaling": LLAMA3},
        {"position": "rope_gpt_neox", "frequencies": llama3_frequencies()},
    ),
    "explicit relative biases": (
        {"relative_attention": True},
        {"table": RANDOM.normal(size=(4, 9, 9))},
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_options(tp: int, name: str) -> None:
    settings, more = OPTIONS[name]
    found = oracle(4, 2, biases=True, **more)
    case, x = Case(found, settings), tokens()
    wanted = found(x)
    close(case.grown(x, tp, [3, 4, TOKENS]), wanted)
    rows = case.written(x, tp, 3, TOKENS, PROMPTS, 7)
    for row, each in enumerate(rows):
        close(each, wanted[row, : len(each)])


def test_dynamic_scaling_counts_the_tokens_of_the_call() -> None:
    settings = {
        "rotary_embedding_scaling": {"type": "dynamic", "factor": 2.0},
        "max_position_embeddings": 3,
    }
    found = oracle(4, 2, position="rope_gpt_neox", frequencies=dynamic_frequencies())
    x = tokens()
    for plugin in (False, True):
        close(Case(found, settings).whole(x, 2, plugin), found(x))


@pytest.mark.parametrize("kind", ["LayerNorm", "RmsNorm"])
@pytest.mark.parametrize("kv", [2, 4])
def test_norms_of_queries_and_keys(kv: int, kind: str) -> None:
    """With as many key-value heads as heads, the features of a head follow each other in qkv."""
    scales = {name: RANDOM.normal(size=WIDTH) for name in ("q", "k")}

    def norm(x: Array, name: str) -> Array:
        centred = x - x.mean(-1, keepdims=True) if kind == "LayerNorm" else x
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-3) * scales[name]

    class Normed(Case):
        def layer(self, mapping: Mapping) -> Any:
            layer = super().layer(mapping)
            for name, scale in scales.items():
                own = getattr(layer, f"{name}_layernorm")
                own.weight.value = scale.astype(np.float32)
                if kind == "LayerNorm":
                    own.bias.value = np.zeros(WIDTH, np.float32)
            return layer

    settings: dict[str, Any] = {"qk_layernorm": True, "eps": 1e-3}
    settings["layernorm_type"] = LayerNormType[kind]
    found = oracle(4, kv, position="rope_gpt_neox", norm=norm)
    x, source = tokens(), tokens()
    close(Normed(found, settings, by_head=kv == 4).whole(x, 2), found(x))
    given = {"encoder_output": source.astype(np.float32)}
    crossed = Normed(found, settings | {"cross_attention": True}, lambda *_: given)
    crossed.by_head = kv == 4
    close(crossed.whole(x[:, :3], 2), found(x[:, :3], source))


@pytest.mark.parametrize("mask", ["left", "right", "both"])
def test_padding_masks_of_the_path_without_plugin(mask: str) -> None:
    hidden = np.ones((2, TOKENS), np.int32)
    if mask != "left":
        hidden[0, 3:] = 0
    if mask != "right":
        hidden[1, :2] = 0
    found, x = oracle(4, 2, key_mask=hidden), tokens()
    case = Case(found, call=lambda first, last: {"attention_mask": hidden[:, :last]})
    close(case.grown(x, 2, [4, TOKENS]), found(x))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("relative", [False, True])
def test_bert_attention(tp: int, relative: bool) -> None:
    more: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    if relative:
        more = {"table": RANDOM.normal(size=(4, 8)), "max_distance": 9, "bidirectional": True}
        settings = {"relative_attention": True, "num_buckets": 8, "max_distance": 9}
    found = oracle(4, 2, biases=True, mask="padding", prompts=PROMPTS, **more)
    source, x = Case(found, {}), tokens()

    def build(mapping: Mapping) -> None:
        inputs = made(given)
        layer = any_bert(
            HIDDEN, 4, attention_head_size=WIDTH, num_kv_heads=2, dtype="float32",
            tp_group=mapping.tp_group, tp_size=tp, tp_rank=mapping.tp_rank, **settings,
        )  # fmt: skip
        taken = Case(source.oracle, {"relative_attention": relative, "num_buckets": 8} | settings)
        other = taken.layer(mapping)
        layer.qkv, layer.dense = other.qkv, other.dense
        if relative:
            layer.rel_attn_table = other.rel_attn_table
        layer(inputs["x"], input_lengths=inputs["lengths"]).mark_output("by_length")
        layer(inputs["x"], attention_mask=inputs["mask"]).mark_output("by_mask")

    lengths = (np.arange(TOKENS) < PROMPTS[:, None]).astype(np.int32)
    given = {"x": x.astype(np.float32), "lengths": PROMPTS, "mask": lengths}
    outs = run(build, given, tp)
    close(outs["by_length"], found(x))
    close(outs["by_mask"], found(x))


def test_dynamic_sizes_need_no_mask_of_all_positions() -> None:
    """The causal mask of 2^17 positions is no constant, in either path."""
    for plugin in (False, True):

        def build(mapping: Mapping, plugin: bool = plugin) -> None:
            default_net().plugin_config.set_gpt_attention_plugin("float32" if plugin else None)
            sizes = {"batch": [(1, 2, 8)], "tokens": [(1, 64, 1 << 17)], "hidden": [HIDDEN]}
            x = Tensor(name="x", dtype="float32", shape=(-1, -1, HIDDEN), dim_range=sizes)
            held = {"batch": [(1, 2, 8)], "two": [2], "heads": [2], "past": [(0, 64, 1 << 17)]}
            past = Tensor(
                name="past_key_value_0", dtype="float32", shape=(-1, 2, 2, -1, WIDTH),
                dim_range=held | {"width": [WIDTH]},
            )  # fmt: skip
            filled = Tensor(
                name="filled", dtype="int32", shape=(-1,), dim_range={"batch": [(1, 2, 8)]}
            )
            case = Case(oracle(4, 2, position="rope_gpt_neox"))
            case.settings["max_position_embeddings"] = 1 << 17
            params = KeyValueCacheParams(past_key_value=[past], host_past_key_value_lengths=filled)
            out, present = case.layer(mapping)(x, use_cache=True, kv_cache_params=params)
            out.mark_output("out")
            present.mark_output("present_key_value_0")

        with new_session():
            module = trace(build)
        assert {weight.type.ndim for weight in module.weights.values()} == {2}
        alias = {str(r.name): r.alias for r in module.main.results}["present_key_value_0"]
        assert alias == ("past_key_value_0" if plugin else None)
        assert [op.causal for op in module.ops() if isinstance(op, ops.Attention)] == [True]
        assert any(isinstance(op, ops.CacheUpdate) for op in module.ops()) == plugin


def test_positional_arguments_of_0_7() -> None:
    with new_session("0.7"):
        layer = any_attention(24, 4, 2, 64, use_int8_kv_cache=True)
    assert layer.kv_quant_orig_scale is not None and layer.kv_cache_scaling_factor is None
    assert (layer.hidden_size, layer.heads.query_heads, layer.heads.kv_heads) == (24, 4, 2)
    assert layer.max_position_embeddings == 64
    with new_session("0.5"), pytest.raises(Error, match="takes 25 positional arguments"):
        any_attention(*range(26))
    with new_session("0.16"), pytest.raises(Error, match="takes 0 positional arguments"):
        any_attention(3, 24, 4)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_kv_heads": 3}, "divide 8 heads, .* found 3"),
    (
        {"num_kv_heads": 4, "tp_size": 8, "num_attention_heads": 12},
        "12 heads are no multiple of 8 ranks",
    ),
    ({"num_kv_heads": 2, "tp_size": 3, "num_attention_heads": 6}, "a multiple or a divisor"),
    ({"num_kv_heads": 0}, "divide 8 heads, .* found 0"),
    ({"hidden_size": 20}, "hidden_size=20 is no multiple of num_attention_heads=8; give"),
    ({"cp_size": 2}, "cp_size is not supported"),
    ({"tp_size": 2}, "tp_size=2 needs a tp_group"),
    ({"inner_layernorm": True}, "inner_layernorm is not supported"),
    ({"qk_layernorm": True, "layernorm_type": LayerNormType.GroupNorm}, "LayerNorm or RmsNorm"),
    ({"position_embedding_type": "yarn"}, "yarn positions need a rotary_scaling"),
    ({"position_embedding_type": "long_rope"}, "long_rope needs rope_scaling_short_factors"),
    ({"rotary_embedding_scaling": {"factor": 2.0}, "position_embedding_type": "rope_gptj"}, "type"),
    *(
        (
            {"rotary_embedding_scaling": {"type": kind}, "position_embedding_type": "rope_gptj"},
            "rotary_scaling lacks the key factor",
        )
        for kind in ("linear", "dynamic")
    ),
    ({"position_embedding_type": "chatglm"}, "chatglm positions are not supported"),
    ({"position_embedding_type": "mrope"}, "mrope positions, .* are not supported"),
    ({"rope_scaling_short_mscale": 1.5}, "rope_scaling_short_mscale is not supported"),
    ({"skip_cross_kv": True}, "skip_cross_kv is not supported"),
    ({"qk_layernorm": True, "layernorm_share": False}, "one norm for all heads"),
    ({"enable_qkv": False}, "always has the projection qkv"),
    ({"hidden_sizes": 3}, "has no argument 'hidden_sizes'"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 8, **settings}
    if "position_embedding_type" in given:
        name = given["position_embedding_type"]
        given["position_embedding_type"] = PositionEmbeddingType.from_string(name)
    with pytest.raises(Error, match=message):
        any_attention(**given)


def test_inputs_that_are_refused() -> None:
    x = tokens().astype(np.float32)

    def build(mapping: Mapping, **call: Any) -> None:
        inputs = made({"x": x, "extra": np.ones(2, np.int32)})
        layer = Case(oracle(4, 2)).layer(mapping)
        more = {
            name: inputs["extra"] if value == "extra" else value for name, value in call.items()
        }
        layer(inputs["x"], **more).mark_output("out")

    cases = {
        "attention_packed_mask has the bits of attention_mask": {"attention_packed_mask": "extra"},
        "skip_attn is not supported": {"skip_attn": "extra"},
        "position_embedding is not supported": {"position_embedding": "extra"},
        "merge the adapters": {"lora_layer_params": 1},
    }
    for message, call in cases.items():
        with new_session(), pytest.raises(Error, match=message):
            trace(lambda mapping, call=call: build(mapping, **call))
    crossed = Case(oracle(4, 2), {"cross_attention": True})
    with new_session(), pytest.raises(Error, match="cross attention needs encoder_output"):
        crossed.whole(tokens(), 1)
    with new_session(), pytest.raises(Error, match="speculative decoding is not supported"):
        SpecDecodingParams(spec_decoding_max_generation_length=4)
    with new_session(), pytest.raises(Error, match=r"\(mrope\) are not supported"):
        MropeParams(mrope_position_deltas=np.zeros((1, 1), np.int32))


@pytest.mark.parametrize(
    "window", [2, [9, 2], np.array([2], np.int32)], ids=["number", "list", "input"]
)
@pytest.mark.parametrize("mask", ["causal", "sliding_window_causal"])
def test_windows(mask: str, window: Any) -> None:
    """host_max_attention_window_sizes limits causal attention, with a cache and without."""
    found, x = oracle(4, 2, mask="sliding_window_causal", window=2), tokens()
    wanted = found(x)
    found.mask = mask
    case = Case(found, {"local_layer_idx": 1}, window=window)
    close(case.whole(x, 2), wanted)
    for row, each in enumerate(case.written(x, 2, 3, TOKENS, PROMPTS, 7)):
        close(each, wanted[row, : len(each)])


def test_sliding_windows_need_a_window() -> None:
    with new_session(), pytest.raises(Error, match="needs its window"):
        Case(oracle(4, 2, mask="sliding_window_causal")).whole(tokens(), 1)


@pytest.mark.parametrize("hidden", [-10000.0, -np.inf])
def test_masks_up_to_0_7_are_added_to_the_scores_of_bert(hidden: float) -> None:
    seen = np.arange(TOKENS) < PROMPTS[:, None]
    found, x = oracle(4, 2, mask="padding", prompts=PROMPTS), tokens()

    def build(mapping: Mapping) -> None:
        inputs = made(given)
        layer = any_bert(
            HIDDEN, 4, attention_head_size=WIDTH, num_kv_heads=2, bias=False, dtype="float32",
            tp_group=mapping.tp_group, tp_size=2, tp_rank=mapping.tp_rank,
        )  # fmt: skip
        other = Case(found).layer(mapping)
        layer.qkv, layer.dense = other.qkv, other.dense
        layer(inputs["x"], attention_mask=inputs["bias"]).mark_output("by_bias")
        layer(inputs["x"], attention_mask=expand_mask(inputs["seen"], None)).mark_output("expanded")

    bias = np.where(seen, 0, hidden).astype(np.float32)[:, None, None]
    given = {"x": x.astype(np.float32), "bias": bias, "seen": seen.astype(np.int32)}
    outs = run(build, given, 2, version="0.7")
    close(outs["by_bias"], found(x))
    close(outs["expanded"], found(x))


def test_cross_attention_up_to_0_7_sees_all_keys_whatever_the_mask_of_the_decoder() -> None:
    found, x, source = oracle(4, 2), tokens()[:, :2], tokens()
    given = {
        "encoder_output": source.astype(np.float32),
        "attention_mask": np.eye(2, dtype=np.int32),
    }
    crossed = Case(found, {"cross_attention": True}, lambda *_: given, version="0.7")
    close(crossed.whole(x, 2), found(x, source))

"""Mask types, positions and options of attention layers against their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from irc import ops
from irc.errors import Error
from irc.frontends.tensorrt_llm.context import new_session
from irc.frontends.tensorrt_llm.enums import AttentionMaskType, LayerNormType, PositionEmbeddingType
from irc.frontends.tensorrt_llm.functional import expand_mask
from irc.frontends.tensorrt_llm.layers import Attention, BertAttention
from irc.frontends.tensorrt_llm.layers.attention_params import (
    AttentionParams,
    BlockSparseAttnParams,
    KeyValueCacheParams,
    MropeParams,
    SpecDecodingParams,
)
from irc.frontends.tensorrt_llm.mapping import Mapping
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


# -- mask types and positions

any_blocks: Any = BlockSparseAttnParams
FIRST = 3  # tokens of the first call
CUSTOM = np.tril(RANDOM.integers(0, 2, size=(2, TOKENS, TOKENS)))
CUSTOM[:, np.arange(TOKENS), np.arange(TOKENS)] = 1
FACTORS = RANDOM.uniform(1, 3, size=4)
TABLE = RANDOM.normal(size=(4, 6))

YARN = {
    "type": "yarn",
    "factor": 4.0,
    "beta_fast": 2.0,
    "beta_slow": 0.25,
    "original_max_position_embeddings": 16,
    "mscale": 2.0,
    "mscale_all_dim": 0.5,
}

YARN_FACTOR = (0.2 * np.log(4) + 1) / (0.05 * np.log(4) + 1)  # by mscale and mscale_all_dim


def yarn_frequencies(width: int, base: float) -> Array:
    """Pairs that turn more than beta_fast times in 16 positions stay, those below beta_slow are
    slowed by 4, and a ramp is between."""
    ends = [np.log(16 / (2 * np.pi * turns)) / np.log(base) * width / 2 for turns in (2.0, 0.25)]
    low, high = max(np.floor(ends[0]), 0), min(np.ceil(ends[1]), width - 1)
    slowed = np.clip((np.arange(width // 2) - low) / (high - low), 0, 1)
    return inverse(width, base) * (slowed / 4 + 1 - slowed)


# the arguments of Attention, and what the definition needs
POSITIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "learned_absolute": ({}, {}),
    "rope_gptj": ({"rotary_embedding_percentage": 0.5}, {"percentage": 0.5}),
    "rope_gpt_neox": ({"rotary_embedding_base": 100.0}, {"base": 100.0}),
    "long_rope": (
        {
            "rope_scaling_short_factors": (1.0, 1.0, 1.0, 1.0),
            "rope_scaling_long_factors": tuple(FACTORS),
            "original_max_position_embeddings": 2,
            "max_position_embeddings": 8,
        },
        {"frequencies": inverse(8) / FACTORS, "factor": np.sqrt(1 + np.log(4) / np.log(2))},
    ),
    "alibi": ({"alibi_bias_max": 4}, {"alibi_bias_max": 4}),
    "alibi_with_scale": ({}, {}),
    "relative": (
        {
            "relative_attention": True,
            "num_buckets": 6,
            "max_distance": 9,
            "use_implicit_relative_attention": True,
        },
        {"table": TABLE, "max_distance": 9},
    ),
    "yarn": (
        {"rotary_embedding_scaling": YARN, "rotary_embedding_base": 10.0},
        {"frequencies": yarn_frequencies(8, 10.0), "factor": YARN_FACTOR},
    ),
}
MASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "padding": ({}, {}),
    "causal": ({}, {}),
    "sliding_window_causal": ({}, {"window": 2}),
    "bidirectional": ({}, {"prompts": np.full(2, FIRST, np.int32)}),
    "bidirectionalglm": ({}, {"prompts": np.full(2, FIRST, np.int32)}),
    "blocksparse": (
        {"block_sparse_params": any_blocks(2, False, 1, 3)},
        {"blocks": (2, 1, 3, False)},
    ),
    "custom_mask": ({}, {"custom": CUSTOM}),
}


def custom_rows(index: Any, last: int | None) -> Array:
    """The mask [B, queries, keys] of a call."""
    if last is not None:
        return CUSTOM[:, index:last, :last].astype(np.int32)
    places = np.minimum(index, TOKENS - 1)[..., None]
    return np.take_along_axis(CUSTOM, places, 1).astype(np.int32)


def case(mask: str, position: str) -> Case:
    """A layer with this mask type and these positions."""
    (settings, more), (more_settings, extra) = POSITIONS[position], MASKS[mask]
    return Case(
        oracle(4, 2, mask=mask, position=position, **more, **extra),
        settings | more_settings,
        lambda i, last: {"attention_mask": custom_rows(i, last)} if mask == "custom_mask" else {},
        window=2 if mask == "sliding_window_causal" else None,
    )


KINDS = [("causal", position) for position in POSITIONS]
KINDS += [(mask, "rope_gptj") for mask in MASKS if mask != "causal"] + [("bidirectional", "alibi")]


@pytest.mark.parametrize(("mask", "position"), KINDS)
def test_mask_and_positions(mask: str, position: str) -> None:
    made, x = case(mask, position), tokens()
    ends = [FIRST, 4, TOKENS]
    found = made.grown(x, 2, ends)
    for row in range(2):
        close(found[row], made.oracle.by_calls(x, row, ends))
    if "prompts" in MASKS[mask][1]:
        made.oracle.prompts = PROMPTS
    rows = made.written(x, 2, FIRST, TOKENS, PROMPTS, 7)
    for row, (found, prompt) in enumerate(zip(rows, PROMPTS, strict=True)):
        ends = list(range(prompt, prompt + 3))
        close(found, made.oracle.by_calls(x, row, ends))
    if mask in ("padding", "bidirectional", "bidirectionalglm"):
        made.oracle.prompts = PROMPTS
    wanted = made.oracle(x)
    close(made.whole(x, 2, plugin=True, context_lengths=PROMPTS), wanted)


def test_no_other_mask_types_and_positions_exist() -> None:
    refused = {"chatglm", "mrope"}
    assert [*POSITIONS] == [x for x in PositionEmbeddingType.choices() if x not in refused]
    assert [*MASKS] == AttentionMaskType.choices()


# -- options

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


def bert(case: Case, mapping: Mapping) -> Any:
    """The BertAttention with the weights of a case."""
    other = case.layer(mapping)
    layer = any_bert(
        HIDDEN, 4, attention_head_size=WIDTH, num_kv_heads=2, bias=case.oracle.bias is not None,
        dtype="float32", tp_group=mapping.tp_group, tp_size=mapping.tp_size,
        tp_rank=mapping.tp_rank, **case.settings,
    )  # fmt: skip
    layer.qkv, layer.dense, layer.rel_attn_table = other.qkv, other.dense, other.rel_attn_table
    return layer


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("relative", [False, True])
def test_bert_attention(tp: int, relative: bool) -> None:
    more = {"table": RANDOM.normal(size=(4, 8)), "max_distance": 9, "bidirectional": True}
    found = oracle(4, 2, biases=True, mask="padding", prompts=PROMPTS, **more if relative else {})
    settings = {"relative_attention": True, "num_buckets": 8, "max_distance": 9}
    case, x = Case(found, settings if relative else {}), tokens()

    def build(mapping: Mapping) -> None:
        inputs, layer = made(given), bert(case, mapping)
        layer(inputs["x"], input_lengths=inputs["lengths"]).mark_output("by_length")
        layer(inputs["x"], attention_mask=inputs["mask"]).mark_output("by_mask")

    seen = (np.arange(TOKENS) < PROMPTS[:, None]).astype(np.int32)
    given = {"x": x.astype(np.float32), "lengths": PROMPTS, "mask": seen}
    outs = run(build, given, tp)
    close(outs["by_length"], found(x))
    close(outs["by_mask"], found(x))


@pytest.mark.parametrize("hidden", [-10000.0, -np.inf])
def test_masks_up_to_0_7_are_added_to_the_scores_of_bert(hidden: float) -> None:
    seen = np.arange(TOKENS) < PROMPTS[:, None]
    found, x = oracle(4, 2, mask="padding", prompts=PROMPTS), tokens()

    def build(mapping: Mapping) -> None:
        inputs, layer = made(given), bert(Case(found), mapping)
        layer(inputs["x"], attention_mask=inputs["bias"]).mark_output("by_bias")
        layer(inputs["x"], attention_mask=expand_mask(inputs["seen"], None)).mark_output("expanded")

    bias = np.where(seen, 0, hidden).astype(np.float32)[:, None, None]
    given = {"x": x.astype(np.float32), "bias": bias, "seen": seen.astype(np.int32)}
    outs = run(build, given, 2, version="0.7")
    close(outs["by_bias"], found(x))
    close(outs["expanded"], found(x))


@pytest.mark.parametrize("plugin", [False, True])
def test_the_causal_mask_of_all_positions_is_no_constant(plugin: bool) -> None:
    case = Case(oracle(4, 2, position="rope_gpt_neox"), {"max_position_embeddings": 1 << 17})
    given = {"x": tokens(), "past_key_value_0": case.cache(2, 1, 7)}
    given |= {"host_past_key_value_lengths": np.zeros(2, np.int32)} if plugin else {}
    with new_session():
        module = trace(lambda mapping: case.call_of(mapping, given, plugin))
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


def test_cross_attention_up_to_0_7_sees_all_keys_whatever_the_mask_of_the_decoder() -> None:
    found, x, source = oracle(4, 2), tokens()[:, :2], tokens()
    given = {
        "encoder_output": source.astype(np.float32),
        "attention_mask": np.eye(2, dtype=np.int32),
    }
    crossed = Case(found, {"cross_attention": True}, lambda *_: given, version="0.7")
    close(crossed.whole(x, 2), found(x, source))


def test_parameters_of_a_call_hold_what_layers_of_a_script_may_read() -> None:
    with new_session():
        params: Any = AttentionParams(encoder_max_input_length=7, host_context_lengths=3)
        caches: Any = KeyValueCacheParams(kv_cache_block_offsets=5)
    assert (params.encoder_max_input_length, params.host_context_lengths) == (7, 3)
    assert caches.kv_cache_block_offsets == 5 and caches.host_kv_cache_block_offsets is None

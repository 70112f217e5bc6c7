"""`Attention` of TensorRT-LLM on 1, 2 and 4 ranks: masks, positions, options, caches, crossing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from irc import ops
from irc.errors import Error
from irc.frontends.tensorrt_llm import layers
from irc.frontends.tensorrt_llm.context import new_session
from irc.frontends.tensorrt_llm.dtypes import irc_dtype
from irc.frontends.tensorrt_llm.enums import AttentionMaskType, LayerNormType, PositionEmbeddingType
from irc.frontends.tensorrt_llm.functional import expand_mask, gpt_attention
from irc.frontends.tensorrt_llm.layers.quantized import quantize_model
from irc.frontends.tensorrt_llm.mapping import Mapping
from irc.frontends.tensorrt_llm.module import ModuleList
from irc.frontends.tensorrt_llm.network import default_net
from irc.frontends.tensorrt_llm.quantization import QuantMode
from irc.frontends.tensorrt_llm.tensor import Tensor
from irc.ir.dtypes import numpy_dtype
from tests.fresh import fresh
from tests.frontends.attention_oracle import Array, Oracle, inverse
from tests.frontends.tensorrt_llm.attention_cases import Case, made
from tests.frontends.tensorrt_llm.worlds import parallel, run, trace

RANDOM = fresh(0)
A: Any = layers
HIDDEN, WIDTH, TOKENS = 10, 8, 5
PROMPTS = np.array([3, 2], np.int32)


def oracle(
    heads: int = 4, kv: int = 2, biases: bool = False, hidden: int = HIDDEN, **more: Any
) -> Oracle:
    """A layer with weights drawn at random."""

    def drawn(*shape: int) -> Array:
        return RANDOM.normal(size=shape) / np.sqrt(shape[-1])

    sizes = (heads * WIDTH, kv * WIDTH, kv * WIDTH)
    fields = {name: more.pop(name) for name in ("mask", "position", "prompts") if name in more}
    weights: Any = tuple(drawn(size, hidden) for size in sizes)
    output = drawn(hidden, sizes[0])
    if biases:
        fields |= {"bias": drawn(sum(sizes)), "o_bias": drawn(hidden)}
    return Oracle(heads, kv, WIDTH, weights, output, more=more, **fields)


def tokens() -> Array:
    return RANDOM.normal(size=(2, TOKENS, HIDDEN))


def close(outputs: Array, wanted: Array) -> None:
    np.testing.assert_allclose(outputs, wanted, rtol=1e-3, atol=1e-4)


def close_rows(rows: list[Array], wanted: Any) -> None:
    """Rows whose prompts have unequal lengths; `wanted` has them whole."""
    for outputs, prompt, row in zip(rows, PROMPTS, wanted, strict=True):
        assert len(outputs) == TOKENS - 3 + prompt
        close(outputs, row[: len(outputs)])


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
    close_rows(case.written(x, tp, 3, TOKENS, PROMPTS, 7), wanted)


@pytest.mark.parametrize("alike", [False, True])
def test_blocks_by_the_heads_of_all_ranks(alike: bool) -> None:
    """More heads than the stride, on four ranks."""
    params = A.BlockSparseAttnParams(1, alike, 1, 3)
    definition = oracle(8, 4, mask="blocksparse", blocks=(1, 1, 3, alike))
    x = tokens()
    close(Case(definition, {"block_sparse_params": params}).whole(x, 4), definition(x))


def test_quantize_model_quantizes_caches_and_other_caches_are_refused() -> None:
    definition, x = oracle(4, 2), tokens()

    def build(mapping: Mapping, dtype: str, heads: int, mode: QuantMode) -> None:
        default_net().plugin_config.set_gpt_attention_plugin(None)
        layer = Case(definition).layer(mapping)
        holder = ModuleList([layer])
        quantize_model(holder, mode)
        if mode:
            layer.kv_cache_scaling_factor.value = np.full(1, 0.05, np.float32)
        past = Tensor(name="past_key_value_0", dtype=dtype, shape=(2, 2, heads, 0, WIDTH))
        inputs = made({"x": x.astype(np.float32)})
        params = A.KeyValueCacheParams(past_key_value=[past])
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
    definition = oracle(4, 2, position="rope_gptj", percentage=0.5, base=50.0)
    settings = {"rotary_embedding_percentage": 0.5, "rotary_embedding_base": 50.0}
    x = tokens()
    given = {"x": x.astype(np.float32)}

    def build(mapping: Mapping) -> None:
        layer = Case(definition, settings).layer(mapping)
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

    close(run(build, given, 2)["out"], definition(x))


# -- cross attention, and caches of codes


@pytest.mark.parametrize("plugin", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
def test_cross_attention(tp: int, plugin: bool) -> None:
    definition = oracle(4, 2, mask="causal", position="learned_absolute", prompts=PROMPTS)
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
        layer = Case(definition, {"cross_attention": True}).layer(mapping)
        out, cache = layer(
            inputs["x"], encoder_output=inputs["source"], attention_mask=inputs["mask"],
            use_cache=True, cross_kv_cache_gen=np.array([True]),
        )  # fmt: skip
        out.mark_output("out")
        cache.mark_output("present_key_value_0")

    outs = run(build, given, tp)
    close(outs["out"], definition(x, source))
    keys = source @ definition.qkv[1].T
    close(
        outs["present_key_value_0"][:, 0], keys.reshape(2, TOKENS, 2, WIDTH).transpose(0, 2, 1, 3)
    )


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
@pytest.mark.parametrize("kind", ["grown", "plugin", "cross"])
def test_caches_of_codes(kind: str, dtype: str) -> None:
    """Keys and values are the nearest codes, and attention is that of the codes."""
    mode = QuantMode.INT8_KV_CACHE if dtype == "int8" else QuantMode.FP8_KV_CACHE
    definition, x = oracle(4, 2), tokens()
    exact = np.stack([(x @ w.T).reshape(2, TOKENS, 2, WIDTH) for w in definition.qkv[1:]], 1)
    scale = np.float32(np.abs(exact).max() / 100)

    def build(mapping: Mapping) -> None:
        default_net().plugin_config.set_gpt_attention_plugin(
            "float32" if kind == "plugin" else None
        )
        inputs = made({n: array for n, array in given.items() if n != "past_key_value_0"})
        settings = {"quant_mode": mode, "cross_attention": kind == "cross"}
        layer = Case(definition, settings).layer(mapping)
        layer.kv_cache_scaling_factor.value = np.array([scale])
        if kind == "cross":
            call = {"encoder_output": inputs["x"]}
        else:
            past = Tensor(name="past_key_value_0", dtype=dtype, shape=(2, 2, 2, length, WIDTH))
            params = A.KeyValueCacheParams(
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
    rows = np.concatenate([x @ definition.qkv[0].T, kept[:, 0], kept[:, 1]], -1)
    parts = np.split(np.eye(rows.shape[-1]), [4 * WIDTH, 6 * WIDTH])
    wanted = replace(definition, qkv=parts)
    close(outs["out"], wanted(rows, rows if kind == "cross" else None))


LLAMA3 = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def llama3_frequencies() -> Array:
    turns = 64 * inverse(WIDTH) / (2 * np.pi)
    blend = np.clip((turns - 1) / 3, 0, 1)
    return inverse(WIDTH) * (blend + (1 - blend) / 4)


# -- mask types and positions

FIRST = 3  # tokens of the first call
CUSTOM = np.tril(RANDOM.integers(0, 2, size=(2, TOKENS, TOKENS)))
CUSTOM[:, np.arange(TOKENS), np.arange(TOKENS)] = 1
FACTORS = RANDOM.uniform(1, 3, size=4)
TABLE = RANDOM.normal(size=(4, 6))
RELATIVE: dict[str, Any] = {"relative_attention": True}

YARN = {
    "type": "yarn", "factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.25, "mscale": 2.0,
    "mscale_all_dim": 0.5, "original_max_position_embeddings": 16,
}  # fmt: skip
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
            "rope_scaling_short_factors": (1.0,) * 4, "rope_scaling_long_factors": tuple(FACTORS),
            "original_max_position_embeddings": 2, "max_position_embeddings": 8,
        },
        {"frequencies": inverse(8) / FACTORS, "factor": np.sqrt(1 + np.log(4) / np.log(2))},
    ),
    "alibi": ({"alibi_bias_max": 4}, {"alibi_bias_max": 4}),
    "alibi_with_scale": ({}, {}),
    "relative": (
        {"num_buckets": 6, "max_distance": 9, **RELATIVE, "use_implicit_relative_attention": True},
        {"table": TABLE, "max_distance": 9},
    ),
    "yarn": (
        {"rotary_embedding_scaling": YARN, "rotary_embedding_base": 10.0},
        {"frequencies": yarn_frequencies(8, 10.0), "factor": YARN_FACTOR},
    ),
}  # fmt: skip
MASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "padding": ({}, {}),
    "causal": ({}, {}),
    "sliding_window_causal": ({}, {"window": 2}),
    "bidirectional": ({}, {"prompts": np.full(2, FIRST, np.int32)}),
    "bidirectionalglm": ({}, {"prompts": np.full(2, FIRST, np.int32)}),
    "blocksparse": (
        {"block_sparse_params": A.BlockSparseAttnParams(2, False, 1, 3)},
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
    layer, x, ends = case(mask, position), tokens(), [FIRST, 4, TOKENS]
    for row, outputs in enumerate(layer.grown(x, 2, ends)):
        close(outputs, layer.oracle.by_calls(x, row, ends))
    if "prompts" in MASKS[mask][1]:
        layer.oracle.prompts = PROMPTS
    steps = [[*range(prompt, prompt + 3)] for prompt in PROMPTS]
    wanted = [layer.oracle.by_calls(x, row, ends) for row, ends in enumerate(steps)]
    close_rows(layer.written(x, 2, FIRST, TOKENS, PROMPTS, 7), wanted)
    if mask in ("padding", "bidirectional", "bidirectionalglm"):
        layer.oracle.prompts = PROMPTS
    close(layer.whole(x, 2, plugin=True, context_lengths=PROMPTS), layer.oracle(x))


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
    "explicit relative biases": (RELATIVE, {"table": RANDOM.normal(size=(4, 9, 9))}),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_options(tp: int, name: str) -> None:
    (settings, more), x = OPTIONS[name], tokens()
    case = Case(oracle(4, 2, biases=True, **more), settings)
    close(case.grown(x, tp, [3, 4, TOKENS]), case.oracle(x))
    close_rows(case.written(x, tp, 3, TOKENS, PROMPTS, 7), case.oracle(x))


def test_dynamic_scaling_counts_the_tokens_of_the_call() -> None:
    """The NTK base of five tokens, where three positions were trained."""
    frequencies = inverse(WIDTH, 1e4 * (2.0 * TOKENS / 3 - 1.0) ** (WIDTH / (WIDTH - 2)))
    definition = oracle(4, 2, position="rope_gpt_neox", frequencies=frequencies)
    settings: dict[str, Any] = {"rotary_embedding_scaling": {"type": "dynamic", "factor": 2.0}}
    case, x = Case(definition, settings | {"max_position_embeddings": 3}), tokens()
    for plugin in (False, True):
        close(case.whole(x, 2, plugin), definition(x))


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
    definition = oracle(4, kv, position="rope_gpt_neox", norm=norm)
    x, source = tokens(), tokens()
    close(Normed(definition, settings, by_head=kv == 4).whole(x, 2), definition(x))
    given = {"encoder_output": source.astype(np.float32)}
    crossed = Normed(definition, settings | {"cross_attention": True}, lambda *_: given)
    crossed.by_head = kv == 4
    close(crossed.whole(x[:, :3], 2), definition(x[:, :3], source))


@pytest.mark.parametrize("mask", ["left", "right", "both"])
def test_padding_masks_of_the_path_without_plugin(mask: str) -> None:
    hidden = np.ones((2, TOKENS), np.int32)
    if mask != "left":
        hidden[0, 3:] = 0
    if mask != "right":
        hidden[1, :2] = 0
    definition, x = oracle(4, 2, key_mask=hidden), tokens()
    case = Case(definition, call=lambda first, last: {"attention_mask": hidden[:, :last]})
    close(case.grown(x, 2, [4, TOKENS]), definition(x))


def bert(case: Case, mapping: Mapping) -> Any:
    """The BertAttention with the weights of a case."""
    other = case.layer(mapping)
    sizes = {"attention_head_size": WIDTH, "num_kv_heads": 2, "tp_rank": mapping.tp_rank}
    bias = case.oracle.bias is not None
    layer = A.BertAttention(HIDDEN, 4, bias=bias, **sizes, **parallel(mapping), **case.settings)
    layer.qkv, layer.dense, layer.rel_attn_table = other.qkv, other.dense, other.rel_attn_table
    return layer


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("relative", [False, True])
def test_bert_attention(tp: int, relative: bool) -> None:
    more = {"table": RANDOM.normal(size=(4, 8)), "max_distance": 9, "bidirectional": True}
    definition = oracle(
        4, 2, biases=True, mask="padding", prompts=PROMPTS, **more if relative else {}
    )
    settings = {"relative_attention": True, "num_buckets": 8, "max_distance": 9}
    case, x = Case(definition, settings if relative else {}), tokens()

    def build(mapping: Mapping) -> None:
        inputs, layer = made(given), bert(case, mapping)
        layer(inputs["x"], input_lengths=inputs["lengths"]).mark_output("by_length")
        layer(inputs["x"], attention_mask=inputs["mask"]).mark_output("by_mask")

    seen = (np.arange(TOKENS) < PROMPTS[:, None]).astype(np.int32)
    given = {"x": x.astype(np.float32), "lengths": PROMPTS, "mask": seen}
    outs = run(build, given, tp)
    close(outs["by_length"], definition(x))
    close(outs["by_mask"], definition(x))


@pytest.mark.parametrize("hidden", [-10000.0, -np.inf])
def test_masks_up_to_0_7_are_added_to_the_scores_of_bert(hidden: float) -> None:
    seen = np.arange(TOKENS) < PROMPTS[:, None]
    definition, x = oracle(4, 2, mask="padding", prompts=PROMPTS), tokens()

    def build(mapping: Mapping) -> None:
        inputs, layer = made(given), bert(Case(definition), mapping)
        layer(inputs["x"], attention_mask=inputs["bias"]).mark_output("by_bias")
        layer(inputs["x"], attention_mask=expand_mask(inputs["seen"], None)).mark_output("expanded")

    bias = np.where(seen, 0, hidden).astype(np.float32)[:, None, None]
    given = {"x": x.astype(np.float32), "bias": bias, "seen": seen.astype(np.int32)}
    outs = run(build, given, 2, version="0.7")
    close(outs["by_bias"], definition(x))
    close(outs["expanded"], definition(x))


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


def test_the_scale_of_a_cache_has_another_name_in_0_7() -> None:
    with new_session("0.7"):
        layer = A.Attention(24, 4, 2, 64, use_int8_kv_cache=True)
    assert layer.kv_quant_orig_scale is not None and layer.kv_cache_scaling_factor is None


GPTJ = {"position_embedding_type": "rope_gptj"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"num_kv_heads": 3}, "divide 8 heads, .* found 3"),
    (
        {"num_kv_heads": 4, "tp_size": 8, "num_attention_heads": 12},
        "12 heads are not a multiple of 8",
    ),
    ({"num_kv_heads": 2, "tp_size": 3, "num_attention_heads": 6}, "a multiple or a divisor"),
    ({"num_kv_heads": 0}, "divide 8 heads, .* found 0"),
    ({"hidden_size": 20}, "hidden_size=20 is not a multiple of num_attention_heads=8; give"),
    ({"tp_size": 2}, "tp_size=2 needs a tp_group"),
    ({"qk_layernorm": True, "layernorm_type": LayerNormType.GroupNorm}, "LayerNorm or RmsNorm"),
    ({"position_embedding_type": "yarn"}, "yarn positions need a rotary_scaling"),
    ({"position_embedding_type": "long_rope"}, "long_rope needs rope_scaling_short_factors"),
    ({"rotary_embedding_scaling": {"factor": 2.0}, **GPTJ}, "expected the key 'type'"),
    ({"rotary_embedding_scaling": {"type": "linear"}, **GPTJ}, "lacks the key factor"),
    ({"rotary_embedding_scaling": {"type": "dynamic"}, **GPTJ}, "lacks the key factor"),
    ({"position_embedding_type": "chatglm"}, "chatglm positions are not supported"),
    ({"position_embedding_type": "mrope"}, "mrope positions, .* are not supported"),
    ({"qk_layernorm": True, "layernorm_share": False}, "one norm for all heads"),
    ({"enable_qkv": False}, "always has the projection qkv"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"hidden_size": 24, "num_attention_heads": 8, **settings}
    if "position_embedding_type" in given:
        name = given["position_embedding_type"]
        given["position_embedding_type"] = PositionEmbeddingType.from_string(name)
    with pytest.raises(Error, match=message):
        A.Attention(**given)


def test_inputs_that_are_refused() -> None:
    x = tokens().astype(np.float32)

    def build(mapping: Mapping) -> None:
        inputs = made({"x": x, "bits": np.ones(2, np.int32)})
        Case(oracle(4, 2)).layer(mapping)(inputs["x"], attention_packed_mask=inputs["bits"])

    with new_session(), pytest.raises(Error, match="has the bits of attention_mask"):
        trace(build)
    crossed = Case(oracle(4, 2), {"cross_attention": True})
    with new_session(), pytest.raises(Error, match="cross attention needs encoder_output"):
        crossed.whole(tokens(), 1)
    with new_session(), pytest.raises(Error, match="speculative decoding is not supported"):
        A.SpecDecodingParams(spec_decoding_max_generation_length=4)
    with new_session(), pytest.raises(Error, match=r"\(mrope\) are not supported"):
        A.MropeParams(mrope_position_deltas=np.zeros((1, 1), np.int32))


@pytest.mark.parametrize(
    "window", [2, [9, 2], np.array([2], np.int32)], ids=["number", "list", "input"]
)
@pytest.mark.parametrize("mask", ["causal", "sliding_window_causal"])
def test_windows(mask: str, window: Any) -> None:
    """host_max_attention_window_sizes limits causal attention, with a cache and without."""
    definition, x = oracle(4, 2, mask="sliding_window_causal", window=2), tokens()
    wanted = definition(x)
    definition.mask = mask
    case = Case(definition, {"local_layer_idx": 1}, window=window)
    close(case.whole(x, 2), wanted)
    close_rows(case.written(x, 2, 3, TOKENS, PROMPTS, 7), wanted)


def test_sliding_windows_need_a_window() -> None:
    with new_session(), pytest.raises(Error, match="needs its window"):
        Case(oracle(4, 2, mask="sliding_window_causal")).whole(tokens(), 1)


def test_cross_attention_up_to_0_7_sees_all_keys_whatever_the_mask_of_the_decoder() -> None:
    definition, x, source = oracle(4, 2), tokens()[:, :2], tokens()
    mask = np.eye(2, dtype=np.int32)
    given = {"encoder_output": source.astype(np.float32), "attention_mask": mask}
    crossed = Case(definition, {"cross_attention": True}, lambda *_: given, version="0.7")
    close(crossed.whole(x, 2), definition(x, source))


def test_parameters_of_a_call_hold_what_layers_of_a_script_may_read() -> None:
    with new_session():
        params = A.AttentionParams(encoder_max_input_length=7, host_context_lengths=3)
        caches = A.KeyValueCacheParams(kv_cache_block_offsets=5)
    assert (params.encoder_max_input_length, params.host_context_lengths) == (7, 3)
    assert caches.kv_cache_block_offsets == 5 and caches.host_kv_cache_block_offsets is None

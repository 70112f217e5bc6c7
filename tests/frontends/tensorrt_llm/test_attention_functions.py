"""`gpt_attention`, `bert_attention` and the functions of positions against the definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from irc.errors import Error
from irc.frontends.tensorrt_llm.context import current_session, new_session
from irc.frontends.tensorrt_llm.enums import (
    AttentionMaskType,
    PositionEmbeddingType,
    RotaryScalingType,
)
from irc.frontends.tensorrt_llm.functional import (
    RopeEmbeddingUtils,
    bert_attention,
    constant,
    generate_alibi_biases,
    generate_alibi_slopes,
    gpt_attention,
)
from irc.frontends.tensorrt_llm.mapping import Mapping
from irc.frontends.tensorrt_llm.module import Parameter
from tests.frontends.attention_oracle import Array, Oracle, inverse, slopes_of
from tests.frontends.tensorrt_llm.test_attention_layer import (
    LLAMA3,
    PROMPTS,
    RANDOM,
    TOKENS,
    WIDTH,
    close,
    llama3_frequencies,
)
from tests.frontends.tensorrt_llm.worlds import every_rank

HEADS, KV = 4, 2
FEATURES = (HEADS + 2 * KV) * WIDTH
any_gpt: Any = gpt_attention
Kinds = PositionEmbeddingType
Utils = RopeEmbeddingUtils


def attended(qkv: Array, position: str = "learned_absolute", **more: Any) -> Array:
    """What queries, keys and values [B, S, features] give by the definition."""
    q, k, v = np.split(np.eye(FEATURES), [HEADS * WIDTH, (HEADS + KV) * WIDTH])
    fields = {name: more.pop(name) for name in ("mask", "prompts") if name in more}
    sizes = HEADS, KV, WIDTH, (q, k, v), np.eye(HEADS * WIDTH)
    return Oracle(*sizes, position=position, more=more, **fields)(qkv)


def computed(qkv: Array, inputs: dict[str, Array] | None = None, /, **arguments: Any) -> Array:
    """The context of one call; `inputs` become tensors, and arguments of gpt_attention."""
    given = {"qkv": qkv.astype(np.float32), **(inputs or {})}

    def build(mapping: Mapping, **tensors: Any) -> Any:
        settings = {n: a() if callable(a) else a for n, a in arguments.items()}
        context, present = any_gpt(
            num_heads=HEADS, num_kv_heads=KV, hidden_size_per_head=WIDTH, **tensors, **settings
        )
        assert present is not None and present.shape == (2, 2, KV, TOKENS, WIDTH)
        return context

    return every_rank(build, given)[0][0]


def drawn() -> Array:
    return RANDOM.normal(size=(2, TOKENS, FEATURES))


ROTARY: dict[str, Any] = {
    "position_embedding_type": Kinds.rope_gpt_neox,
    "rotary_embedding_dim": WIDTH,
}


def tables(scaling: dict[str, Any] | None, **more: Any) -> tuple[Array, Array]:
    kind = RotaryScalingType.from_string((scaling or {}).get("rope_type", "none"))
    return Utils.create_sinusoidal_positions_for_attention_plugin(
        16,
        WIDTH,
        scale=float((scaling or {}).get("factor", 1.0)),
        scale_type=kind,  # pyright: ignore[reportArgumentType]
        rope_scaling_config=scaling,
        **more,
    )


def test_rotation_by_numbers_and_by_tables() -> None:
    qkv = drawn()
    for kind, dim in ((Kinds.rope_gpt_neox, WIDTH), (Kinds.rope_gptj, WIDTH // 2)):
        rotary: dict[str, Any] = {"position_embedding_type": kind, "rotary_embedding_dim": dim}
        context = computed(qkv, **rotary, rotary_embedding_base=100.0)
        close(context, attended(qkv, kind.name, base=100.0, percentage=dim / WIDTH))
    linear: dict[str, Any] = {"rotary_embedding_scale_type": RotaryScalingType.linear}
    wanted = attended(qkv, "rope_gpt_neox", frequencies=inverse(WIDTH) / 4)
    close(computed(qkv, **ROTARY, **linear, rotary_embedding_scale=4), wanted)
    wanted = attended(qkv, "rope_gpt_neox", frequencies=llama3_frequencies())
    frequencies, sines = tables(LLAMA3)
    close(frequencies, llama3_frequencies())
    llama3: dict[str, Any] = {"rotary_embedding_scale_type": RotaryScalingType.llama3}
    close(computed(qkv, rotary_cos_sin=lambda: constant(sines), **ROTARY, **llama3), wanted)
    close(computed(qkv, rotary_inv_freq=lambda: constant(frequencies), **ROTARY, **llama3), wanted)
    with pytest.raises(Error, match="llama3 of rope_gpt_neox needs rotary_cos_sin"):
        computed(qkv, **ROTARY, **llama3)


def test_biases_of_scores() -> None:
    qkv = drawn()
    slopes = RANDOM.uniform(size=HEADS)
    table, square = RANDOM.normal(size=(HEADS, 8)), RANDOM.normal(size=(HEADS, 9, 9))
    away = np.arange(TOKENS) - np.arange(TOKENS)[:, None]
    wanted = attended(qkv, table=slopes[:, None, None] * away)
    own = slopes.astype(np.float32).reshape(1, HEADS, 1, 1)
    close(computed(qkv, alibi_slopes=lambda: Parameter(own).value), wanted)
    given = {"relative_attention_bias": table.astype(np.float32)}
    close(computed(qkv, given, max_distance=9), attended(qkv, table=table, max_distance=9))
    given = {"relative_attention_bias": square.astype(np.float32)}
    close(computed(qkv, given), attended(qkv, table=square))


def test_other_numbers_of_gpt_attention() -> None:
    qkv = drawn()
    bias = RANDOM.normal(size=FEATURES).astype(np.float32)
    close(computed(qkv, {"qkv_bias": bias}), attended(qkv + bias))
    close(computed(qkv, q_scaling=2.0), attended(qkv, q_scaling=2.0))
    close(computed(qkv, qk_tanh_scale=0.5), attended(qkv, max_attn_value=0.5))
    close(computed(qkv, attn_logit_softcapping_scale=0.5), attended(qkv, max_attn_value=0.5))
    context = computed(qkv, {"context_lengths": PROMPTS}, mask_type=AttentionMaskType.padding)
    close(context, attended(qkv, mask="padding", prompts=PROMPTS))
    sparse = {"block_size": 2, "num_local_blocks": 1, "vertical_stride": 3}
    sparse |= {"homo_head_pattern": True}
    blocks = {f"block_sparse_{name}": value for name, value in sparse.items()}
    context = computed(qkv, mask_type=AttentionMaskType.blocksparse, **blocks)
    close(context, attended(qkv, mask="blocksparse", blocks=(2, 1, 3, True)))
    hidden = np.tril(RANDOM.integers(0, 2, size=(2, TOKENS, TOKENS))).astype(np.int32)
    context = computed(qkv, {"attention_mask": hidden}, mask_type=AttentionMaskType.custom_mask)
    close(context, attended(qkv, mask="custom_mask", custom=hidden))
    prompt = {  # whose cache is empty, whatever length a script gives
        "past_key_value": np.zeros((2, 2, KV, TOKENS, WIDTH), np.float32),
        "host_past_key_value_lengths": np.full(2, TOKENS, np.int32),
        "host_request_types": np.zeros(2, np.int32),
    }
    close(computed(qkv, prompt, **ROTARY), attended(qkv, "rope_gpt_neox"))


def test_bert_attention_sees_both_directions() -> None:
    qkv, table = RANDOM.normal(size=(2, TOKENS, 3 * HEADS * WIDTH)), RANDOM.normal(size=(HEADS, 8))
    inputs = {"qkv": qkv.astype(np.float32), "lengths": PROMPTS, "table": table.astype(np.float32)}

    def build(mapping: Mapping, qkv: Any, lengths: Any, table: Any) -> Any:
        return (
            bert_attention(qkv, lengths, HEADS, WIDTH, 2.0),
            bert_attention(qkv, lengths, HEADS, WIDTH, 2.0, True, table, 9),
        )

    size = HEADS * WIDTH
    q, k, v = np.split(np.eye(3 * size), 3)
    sizes = HEADS, HEADS, WIDTH, (q, k, v), np.eye(size)
    relative = {"table": table, "max_distance": 9, "bidirectional": True}
    for context, more in zip(every_rank(build, inputs)[0], ({}, relative), strict=True):
        more |= {"q_scaling": 2.0}
        close(context, Oracle(*sizes, mask="padding", prompts=PROMPTS, more=more)(qkv))


def test_arguments_that_gpt_attention_ignores_or_refuses() -> None:
    qkv = drawn()
    with new_session():
        plain = computed(qkv)
    offsets = np.zeros((2, 3), np.int32)
    close(computed(qkv, {"kv_cache_block_offsets": offsets}, max_context_length=4), plain)
    close(computed(qkv, {"attention_mask": np.zeros((2, TOKENS), np.int32)}), plain)
    with new_session():
        build = {"num_heads": 1, "num_kv_heads": 1, "hidden_size_per_head": 8}
        with pytest.raises(Error, match="gpt_attention needs qkv"):
            any_gpt(host_request_types=None, **build)
        assert not current_session().notes
    past = np.zeros((2, 2, KV, 9, WIDTH), np.float32)
    with pytest.raises(Error, match="a KV cache needs host_past_key_value_lengths"):
        computed(qkv, {"past_key_value": past}, **ROTARY)
    with pytest.raises(Error, match="alibi needs alibi_slopes"):
        computed(qkv, position_embedding_type=Kinds.alibi)
    with pytest.raises(Error, match="spec_decoding_packed_mask is not supported"):
        computed(qkv, {"spec_decoding_packed_mask": np.ones(1, np.int32)})
    with pytest.raises(Error, match=r"expected queries, keys and values \[batch, tokens, 64\]"):
        computed(qkv[..., 1:])


# -- functions of positions


@pytest.mark.parametrize("version", ["0.7", "0.16"])
def test_slopes_and_biases_of_alibi(version: Any) -> None:
    def build(mapping: Mapping, x: Any) -> Any:
        place: Any = (2, mapping.tp_rank, 0.5)
        types: Any = () if version == "0.16" else ("float32",)
        slopes = generate_alibi_slopes(6, *types, *place, alibi_bias_max=4)
        assert isinstance(slopes, np.ndarray) == (version == "0.16")
        slopes = Parameter(slopes).value if version == "0.16" else slopes
        return generate_alibi_biases(slopes, 5)

    ranks = every_rank(build, {"x": np.zeros(1, np.float32)}, 2, version=version)
    wanted = np.array(slopes_of(6, 4)).reshape(2, 1, 3, 1, 1) * 0.5 * np.arange(5)
    for (biases,), expected in zip(ranks, wanted, strict=True):
        close(biases, expected)

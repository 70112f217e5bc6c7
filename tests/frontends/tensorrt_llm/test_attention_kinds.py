"""Every mask type, and every kind of positions, on two ranks and in every path."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from irc.frontends.tensorrt_llm.enums import AttentionMaskType, PositionEmbeddingType
from irc.frontends.tensorrt_llm.layers import BlockSparseAttnParams
from tests.frontends.attention_oracle import Array, inverse
from tests.frontends.tensorrt_llm.attention_cases import Case
from tests.frontends.tensorrt_llm.test_attention_layer import PROMPTS, RANDOM, close, oracle, tokens

any_blocks: Any = BlockSparseAttnParams
TOKENS, FIRST = 5, 3  # tokens of all calls, and of the first one
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

"""Every mask type with every kind of positions, on two ranks and in every path.

`coverage.md` has the table of what is tested here; `pytest --update` writes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irc.frontends import tensorrt_llm
from irc.frontends.tensorrt_llm.enums import AttentionMaskType, PositionEmbeddingType
from irc.frontends.tensorrt_llm.layers import BlockSparseAttnParams
from tests.frontends.attention_oracle import Array, inverse
from tests.frontends.tensorrt_llm.attention_cases import Case
from tests.frontends.tensorrt_llm.test_attention_layer import PROMPTS, RANDOM, close, oracle, tokens

TOKENS, FIRST = 5, 3  # tokens of all calls, and of the first one
CUSTOM = np.tril(RANDOM.integers(0, 2, size=(2, TOKENS, TOKENS)))
CUSTOM[:, np.arange(TOKENS), np.arange(TOKENS)] = 1
ROWS = np.stack([np.tile(np.arange(TOKENS), (2, 1)), RANDOM.integers(0, 9, size=(2, TOKENS))], 1)
DIMENSIONS = RANDOM.integers(0, 9, size=(3, 2, TOKENS))
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
    "chatglm": (
        {"rotary_embedding_base": 100.0},
        {"positions": ROWS, "frequencies": inverse(4, 100.0)},
    ),
    "yarn": (
        {"rotary_embedding_scaling": YARN, "rotary_embedding_base": 10.0},
        {"frequencies": yarn_frequencies(8, 10.0), "factor": YARN_FACTOR},
    ),
    "mrope": (
        {"rotary_embedding_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}},
        {"positions": DIMENSIONS, "sections": [2, 1, 1]},
    ),
}
MASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "padding": ({}, {}),
    "causal": ({}, {}),
    "sliding_window_causal": ({}, {"window": 2}),
    "bidirectional": ({}, {"prompts": np.full(2, FIRST, np.int32)}),
    "bidirectionalglm": ({}, {"prompts": np.full(2, FIRST, np.int32)}),
    "blocksparse": (
        {"block_sparse_params": BlockSparseAttnParams(2, False, 1, 3)},
        {"blocks": (2, 1, 3, False)},
    ),
    "custom_mask": ({}, {"custom": CUSTOM}),
}


def of_tokens(array: Array, index: Any, last: int | None) -> Array:
    """What array [..., B, S] or [B, 2, S] has for the tokens [index, last), or `index` [B, S]."""
    if last is not None:
        return array[..., index:last].astype(np.int32)
    places = np.minimum(index, TOKENS - 1)
    places = places[:, None] if array.shape[0] == 2 else places[None]
    return np.take_along_axis(array, places, -1).astype(np.int32)


def custom_rows(index: Any, last: int | None) -> Array:
    """The mask [B, queries, keys] of a call."""
    if last is not None:
        return CUSTOM[:, index:last, :last].astype(np.int32)
    places = np.minimum(index, TOKENS - 1)[..., None]
    return np.take_along_axis(CUSTOM, places, 1).astype(np.int32)


def case(mask: str, position: str) -> Case:
    """A layer with this mask type and these positions."""
    (settings, more), (more_settings, extra) = POSITIONS[position], MASKS[mask]
    by_head = position == "chatglm"
    given: dict[str, Any] = {"mask": mask, "position": position, **more, **extra}
    calls: dict[str, Any] = {}
    if position == "chatglm":
        calls["position_embedding"] = lambda i, last: of_tokens(ROWS, i, last)
    if position == "mrope":
        calls["position_ids"] = lambda i, last: of_tokens(DIMENSIONS, i, last)
    if mask == "custom_mask":
        calls["attention_mask"] = custom_rows
    return Case(
        oracle(4, 4 if by_head else 2, **given),
        settings | more_settings,
        lambda i, last: {name: make(i, last) for name, make in calls.items()},
        window=2 if mask == "sliding_window_causal" else None,
        by_head=by_head,
    )


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("mask", MASKS)
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


def table() -> str:
    """The table of coverage.md."""
    lines = [
        "| positions | " + " | ".join(f"`{name}`" for name in MASKS) + " |",
        "| --- |" + " --- |" * len(MASKS),
    ]
    lines += [f"| `{position}` |" + " yes |" * len(MASKS) for position in POSITIONS]
    return "\n".join(lines)


def test_the_table_of_coverage_is_current(request: pytest.FixtureRequest) -> None:
    assert list(POSITIONS) == PositionEmbeddingType.choices()
    assert list(MASKS) == AttentionMaskType.choices()
    file = Path(tensorrt_llm.__file__).parent / "coverage.md"
    text = file.read_text(encoding="utf-8")
    before, _, rest = text.partition("<!-- attention -->\n")
    _, end, after = rest.partition("<!-- end of attention -->")
    wanted = f"{before}<!-- attention -->\n{table()}\n{end}{after}"
    if request.config.getoption("--update"):
        file.write_text(wanted, encoding="utf-8")
    assert text == wanted, "run pytest --update on this file"

"""`Attention` of the dialect on 1, 2 and 4 ranks against the definitions, call by call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.fresh import fresh
from tests.frontends.tensorrt_llm.attention_cases import Case
from tests.frontends.tensorrt_llm.attention_oracle import Array, Oracle

RANDOM = fresh(0)
HIDDEN, WIDTH, TOKENS = 10, 8, 5
PROMPTS = np.array([3, 2], np.int32)


def oracle(heads: int = 4, kv: int = 2, biases: bool = False, **more: Any) -> Oracle:
    """A layer with weights drawn at random."""

    def drawn(*shape: int) -> Array:
        return RANDOM.normal(size=shape) / np.sqrt(shape[-1])

    sizes = (heads * WIDTH, kv * WIDTH, kv * WIDTH)
    known = {name: more.pop(name) for name in ("mask", "position", "prompts") if name in more}
    return Oracle(
        heads,
        kv,
        WIDTH,
        (drawn(sizes[0], HIDDEN), drawn(sizes[1], HIDDEN), drawn(sizes[2], HIDDEN)),
        drawn(HIDDEN, sizes[0]),
        bias=drawn(sum(sizes)) if biases else None,
        o_bias=drawn(HIDDEN) if biases else None,
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

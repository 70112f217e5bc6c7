"""What `sample` draws: the tokens and probabilities of transformers, and Philox's numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from irc.ops.sample import distances, kept_tokens, random_bits, weights
from tests.fresh import fresh
from tests.ops.compare import apply

DRAWS = 50_000
WARPERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_p": 0.8},
    {"top_p": 0.99, "temperature": 3.0},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"temperature": 1.7, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.5, "top_k": 9, "top_p": 0.6},
]


def operands(rows: int, **settings: Any) -> list[Any]:
    """The operands behind the logits, the same ones for every row but for the position."""
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 3}
    kinds = (np.float32, np.int32, np.float32, np.float32, np.int64)
    values = {**defaults, **settings}.values()
    found = [np.full(rows, value, kind) for value, kind in zip(values, kinds, strict=True)]
    return [*found, np.arange(rows, dtype=np.int32)]


def probabilities(logits: np.ndarray, **settings: Any) -> np.ndarray:
    """Of each token of one row, by the weights of those that are kept."""
    temperature, *limits, _, _ = operands(1, **settings)
    far = distances(logits[None], temperature)
    found = np.where(kept_tokens(far, *limits), weights(far), 0)[0]
    return found / found.sum()


def of_transformers(logits: np.ndarray, **settings: Any) -> np.ndarray:
    """The same after the warpers of transformers."""
    torch: Any = pytest.importorskip("torch")
    library: Any = pytest.importorskip("transformers")
    names = ("Temperature", "TopK", "TopP", "MinP")
    scores = torch.from_numpy(logits.astype(np.float64)[None])
    for name, value in zip(names, ("temperature", "top_k", "top_p", "min_p"), strict=True):
        if value in settings:
            scores = getattr(library, f"{name}LogitsWarper")(settings[value])(None, scores)
    return torch.softmax(scores, -1)[0].numpy()


@pytest.mark.parametrize("size", [40, 5000])
@pytest.mark.parametrize("settings", WARPERS)
def test_kept_tokens_and_probabilities_are_those_of_transformers(
    settings: dict[str, Any], size: int
) -> None:
    logits = (fresh(size).standard_normal(size) * 2).astype(np.float32)
    found, wanted = probabilities(logits, **settings), of_transformers(logits, **settings)
    assert not found[wanted == 0].any()
    # the smallest weight is 2**-31 of the largest
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=float(wanted.max()) * 2**-31)


@pytest.mark.parametrize("settings", WARPERS)
def test_drawn_tokens_have_these_probabilities(settings: dict[str, Any]) -> None:
    logits = fresh(40).standard_normal(40).astype(np.float32)
    wanted = probabilities(logits, **settings) * DRAWS
    drawn = apply("sample", np.tile(logits, (DRAWS, 1)), *operands(DRAWS, **settings))
    counts = np.bincount(drawn, minlength=40)
    kept = wanted > 0
    assert not counts[~kept].any()
    freedom = max(1, int(kept.sum()) - 1)
    statistic = ((counts[kept] - wanted[kept]) ** 2 / wanted[kept]).sum()
    # Wilson and Hilferty (1931): a cube root of chi-square is about normal; 6 sigma: 1e-9
    normal = (statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))
    assert normal / (2 / (9 * freedom)) ** 0.5 < 6


def test_random_numbers() -> None:
    """The first known answer of the authors' library, and different ones for other numbers."""
    assert random_bits(0, 0) == 0xE169C58D_6627E8D5
    numbers = {random_bits(1 << i, 0) for i in range(64)} | {random_bits(0, -1), random_bits(-1, 0)}
    numbers |= {random_bits(0, 1 << i) for i in range(64)}
    assert len(numbers) == 130
    ones = sum(number.bit_count() for number in numbers) / 130
    assert 28 < ones < 36


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}])
def test_the_first_of_the_likeliest(settings: dict[str, Any]) -> None:
    logits = fresh().standard_normal((9, 40)).astype(np.float32)
    logits[0, [5, 7]] = 9 if "top_p" not in settings else (9, 8)
    found = apply("sample", logits, *operands(9, **settings))
    np.testing.assert_array_equal(found, logits.argmax(-1))


def test_logits_that_are_no_numbers() -> None:
    logits = np.zeros((4, 5), np.float32)
    logits[0], logits[1] = np.nan, -np.inf
    logits[2, 1:3] = np.nan, np.inf
    logits[3, 2:] = np.nan, -np.inf, np.nan
    found = apply("sample", np.repeat(logits, 200, axis=0), *operands(800)).reshape(4, 200)
    kept = [set(row.tolist()) for row in found]
    assert kept == [{*range(5)}, {*range(5)}, {2}, {0, 1}]

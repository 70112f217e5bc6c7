"""Sampling: the tokens that may follow, their probabilities, and the one that is drawn."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np

from .rules import sound
from .settings import GenerationSettings

Array: TypeAlias = np.ndarray[Any, Any]
_COLDEST = 1e-30  # smaller temperatures are 0 in f32
_FEW = 256  # candidates that are sorted


def random_of_row(seed: int, row: int) -> np.random.Generator:
    """The random numbers of a row of a batch, whatever the other rows are."""
    return np.random.default_rng([seed % 2**64, row])


def draw(
    scores: Array, settings: GenerationSettings, random: np.random.Generator, fallback: int = 0
) -> int:
    """The next token by its score [V], for one random number.

    The smallest of equally likely ones where the most likely is taken; `fallback` where all scores
    are -inf. NaN counts as the least likely.
    """
    best = int(scores.argmax())  # the first NaN where there is one
    if not np.isfinite(scores[best]):
        if scores[best] == -np.inf:
            return fallback
        scores = sound(scores)
        best = int(scores.argmax())
        if scores[best] == np.inf:
            return best
    if settings.is_greedy:
        return best
    tokens, chances = candidates(scores, settings)
    sums = np.cumsum(chances, dtype=np.float64)
    place = int(np.searchsorted(sums, random.random() * float(sums[-1]), side="right"))
    place = min(place, len(chances) - 1)
    return place if tokens is None else int(tokens[place])


def candidates(scores: Array, settings: GenerationSettings) -> tuple[Array | None, Array]:
    """The tokens that may be drawn, ascending (None: all), and their probabilities, not of sum 1.

    top-k keeps tokens as likely as the k-th, too. top-p (Holtzman et al., 2020), min-p (Nguyen et
    al., 2024) and typical-p (Meister et al., 2023) look at what the ones before them left. The
    whole vocabulary is never sorted.
    """
    tokens: Array | None = None
    if scores.dtype.itemsize < 4:
        scores = scores.astype(np.float32)
    if 0 < settings.top_k < len(scores):
        least = np.partition(scores, -settings.top_k)[-settings.top_k]
        tokens = np.flatnonzero(scores >= least)
        scores = scores[tokens]
    shifted = (scores - scores.max()) / max(settings.temperature or 1, _COLDEST)
    chances = np.exp(shifted)
    for keep in (_top_p, _min_p, _typical_p):
        places = keep(shifted, chances, settings)
        if places is not None:
            tokens = places if tokens is None else tokens[places]
            shifted, chances = shifted[places], chances[places]
    return tokens, chances


def _top_p(shifted: Array, chances: Array, settings: GenerationSettings) -> Array | None:
    if settings.top_p >= 1:
        return None
    # all tokens below this chance have less than 1 - top_p together
    least = (1 - settings.top_p) * chances.sum(dtype=np.float64) / len(chances)
    likely = np.flatnonzero(chances >= min(least, chances.max()))
    wanted = settings.top_p * chances.sum(dtype=np.float64)
    return likely[_fewest(-shifted[likely], chances[likely], wanted)]


def _min_p(shifted: Array, chances: Array, settings: GenerationSettings) -> Array | None:
    return np.flatnonzero(chances >= settings.min_p) if settings.min_p > 0 else None  # of 1


def _typical_p(shifted: Array, chances: Array, settings: GenerationSettings) -> Array | None:
    if settings.typical_p >= 1:
        return None
    total, has_chance = chances.sum(dtype=np.float64), chances > 0
    surprise = np.log(total) - shifted
    entropy = (chances[has_chance] * surprise[has_chance]).sum(dtype=np.float64) / total
    return _fewest(np.abs(surprise - entropy), chances, settings.typical_p * total)


def _fewest(keys: Array, chances: Array, wanted: float) -> Array:
    """The places, ascending, of the smallest keys whose chances reach `wanted`, at least one.

    The keys are halved by a partition until few are left to sort.
    """
    kept, rest = list[Array](), np.arange(len(keys))
    while len(rest) > _FEW:
        order = rest[np.argpartition(keys[rest], len(rest) // 2)]
        first, rest = order[: len(rest) // 2], order[len(rest) // 2 :]
        total = chances[first].sum(dtype=np.float64)
        if total >= wanted:
            rest = first
        else:
            kept.append(first)
            wanted -= total
    order = rest[np.argsort(keys[rest], kind="stable")]
    before = np.cumsum(chances[order], dtype=np.float64) - chances[order]
    return np.sort(np.concatenate([*kept, order[: max(1, np.count_nonzero(before < wanted))]]))


def log_probabilities(logits: Array) -> Array:
    """f64 [..., V]: the logarithms of the probabilities."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def log_probability_of(
    logits: Array, token: int, best: int = 0
) -> tuple[float, list[tuple[int, float]]]:
    """The log-probability of a token by logits [V], and the `best` tokens with theirs."""
    if not np.isfinite(top := logits.max()):
        logits = sound(logits)
        top = logits.max()
    total = float(top) + math.log(np.exp(logits - top).sum(dtype=np.float64))
    count = min(best, len(logits))
    first = np.argpartition(logits, -count)[-count:] if count else np.zeros(0, np.int64)
    first = first[np.lexsort((first, -logits[first]))]
    chances = [(int(place), float(logits[place]) - total) for place in first]
    return float(logits[token]) - total, chances

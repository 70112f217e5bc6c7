"""Sampling: logits adjusted by penalties and constraints, and the token that is drawn from them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ..errors import Error

Array: TypeAlias = np.ndarray[Any, Any]
Words: TypeAlias = Sequence[Sequence[int]]  # token sequences


@dataclass(frozen=True)
class Sampling:
    """How the next token of one row is chosen.

    `top_k` most likely tokens are kept, and of these the fewest whose probability reaches `top_p`;
    0 means no limit, and the most likely token is taken where both are 0. `min_length` is the
    fewest new tokens, an end token included. Penalties count the tokens of prompt and answer.
    """

    temperature: float = 1.0
    top_k: int = 1
    top_p: float = 0.0
    min_length: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0

    def __post_init__(self) -> None:
        self._check("temperature", self.temperature > 0, "more than 0")
        self._check("top_k", self.top_k >= 0, "0 (no limit) or more")
        self._check("top_p", 0 <= self.top_p <= 1, "from 0 (no limit) to 1")
        self._check("repetition_penalty", self.repetition_penalty > 0, "more than 0")
        for name in ("min_length", "no_repeat_ngram_size"):
            self._check(name, getattr(self, name) >= 0, "0 or more")

    def _check(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise Error(f"{name} is {getattr(self, name)}; expected {expected}")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.top_k == 1 or (self.top_k == 0 and self.top_p == 0)


GREEDY = Sampling()


def random_of_row(seed: int, row: int) -> np.random.Generator:
    """The random numbers of a row of a batch, whatever the other rows are."""
    return np.random.default_rng([seed % 2**64, row])


def adjusted(
    logits: Array,
    sampling: Sampling,
    tokens: Sequence[int],
    prompt: int,
    ends: Collection[int] = (),
    bad: Words = (),
) -> Array:
    """f64 [V]: the logits of the token after `tokens`, of which the first `prompt` are the prompt.

    The last token of a sequence in `bad` that would be complete gets -inf, as do end tokens
    before `min_length`, and tokens that would repeat an n-gram.
    """
    logits = logits.astype(np.float64) / sampling.temperature
    seen, counts = np.unique(np.asarray(tokens, np.int64), return_counts=True)
    seen, counts = seen[(in_vocabulary := seen < len(logits))], counts[in_vocabulary]
    if sampling.repetition_penalty != 1:
        chosen, penalty = logits[seen], sampling.repetition_penalty
        logits[seen] = np.where(chosen > 0, chosen / penalty, chosen * penalty)
    logits[seen] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    forbidden = {word[-1] for word in bad if word and _ends_with(tokens, word[:-1])}
    if len(tokens) + 1 - prompt < sampling.min_length:
        forbidden |= set(ends)
    if sampling.no_repeat_ngram_size:
        forbidden |= _repeats(tokens, sampling.no_repeat_ngram_size)
    logits[[token for token in forbidden if 0 <= token < len(logits)]] = -np.inf
    return logits


def draw(logits: Array, sampling: Sampling, random: np.random.Generator) -> int:
    """The next token; of equally likely ones the smallest is kept first."""
    if sampling.is_greedy or not np.isfinite(logits.max()):
        return int(logits.argmax())
    order = np.argsort(-logits, kind="stable")[: sampling.top_k or None]
    chances = np.exp(logits[order] - logits[order[0]])
    chances /= chances.sum()
    if 0 < sampling.top_p < 1:
        before = np.cumsum(chances) - chances
        chances = np.where(before < sampling.top_p, chances, 0)
    return int(order[random.choice(len(order), p=chances / chances.sum())])


def log_probabilities(logits: Array) -> Array:
    """f64 [..., V]: the logarithms of the probabilities."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def ends_with_any(tokens: Sequence[int], words: Words) -> bool:
    """Whether `tokens` end with one of the sequences."""
    return any(len(word) > 0 and _ends_with(tokens, word) for word in words)


def _ends_with(tokens: Sequence[int], word: Sequence[int]) -> bool:
    return len(word) <= len(tokens) and list(tokens[len(tokens) - len(word) :]) == list(word)


def _repeats(tokens: Sequence[int], size: int) -> set[int]:
    """The tokens that would repeat an n-gram of `size` tokens."""
    last = list(tokens[len(tokens) - size + 1 :]) if size > 1 else []
    starts = range(len(tokens) - size + 1)
    return {tokens[at + size - 1] for at in starts if list(tokens[at : at + size - 1]) == last}

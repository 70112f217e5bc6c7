"""`DecodingRules`: how the logits of one prompt are changed before a token is chosen."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .checkpoint_settings import CheckpointSettings
from .settings import GenerationSettings

if TYPE_CHECKING:
    from .constraints import Constraint

Array: TypeAlias = np.ndarray[Any, Any]
Words: TypeAlias = Sequence[Sequence[int]]  # token sequences
_LEAST = -1e30  # what a logit that is not a number counts as


class History:
    """The tokens of a sequence, the first `prompt` of them the prompt, and what repeats in them."""

    def __init__(self, tokens: Sequence[int], prompt: int, rules: DecodingRules) -> None:
        self.prompt, self._ngram = prompt, rules.settings.no_repeat_ngram_size
        self._tracks = rules.penalizes or self._ngram > 0
        self._counted = 0 if rules.counts_prompt else prompt
        self.tokens = [] if self._tracks else list(tokens)
        self.seen: dict[int, int] = {}  # how often each token occurs where penalties count it
        self._following: dict[tuple[int, ...], list[int]] = {}  # the last tokens of n-grams
        for token in tokens if self._tracks else ():
            self.append(token)

    def append(self, token: int) -> None:
        """Add a token."""
        counts = len(self.tokens) >= self._counted
        self.tokens.append(token)
        if not self._tracks:
            return
        self.seen[token] = self.seen.get(token, 0) + counts
        if 0 < self._ngram <= len(self.tokens):
            ngram = tuple(self.tokens[-self._ngram :])
            self._following.setdefault(ngram[:-1], []).append(token)

    @property
    def new(self) -> int:
        """The number of new tokens."""
        return len(self.tokens) - self.prompt

    def repeats(self) -> Sequence[int]:
        """The tokens that would repeat an n-gram."""
        last = tuple(self.tokens[len(self.tokens) - self._ngram + 1 :]) if self._ngram > 1 else ()
        return self._following.get(last, ())


@dataclass(frozen=True)
class DecodingRules:
    """What holds for one prompt: how tokens are chosen, which end it, and which are forbidden.

    At most `limit` tokens are added. `ends` and token sequences of `stop` end the text, those of
    `bad` never occur, nor does what a `constraint` leaves out. Penalties by presence and frequency
    count new tokens, or all where `counts_prompt` is set. With `scored`, or `logprobs` of the
    settings, the log-probabilities of new tokens are kept.
    """

    settings: GenerationSettings
    limit: int
    ends: Collection[int] = ()
    stop: Words = ()
    bad: Words = ()
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    constraint: Constraint | None = None
    counts_prompt: bool = False
    scored: bool = True

    def is_end(self, new: Sequence[int]) -> bool:
        """Whether new tokens end a sequence."""
        return new[-1] in self.ends or any(word and _ends_with(new, word) for word in self.stop)

    @cached_property
    def is_plain(self) -> bool:
        """Whether logits never change."""
        s, tokens = self.settings, self.checkpoint
        changes = (s.no_repeat_ngram_size, s.min_new_tokens, s.min_length, self._bad)
        changes += (tokens.suppress_tokens, tokens.begin_suppress_tokens)
        needs = (self.constraint, tokens.forced_bos_token_id)
        is_forced = tokens.forced_eos_token_ids or any(need is not None for need in needs)
        return not (self.penalizes or is_forced or any(changes))

    @cached_property
    def penalizes(self) -> bool:
        """Whether logits depend on how often tokens occur."""
        settings = self.settings
        penalties = (settings.presence_penalty, settings.frequency_penalty)
        return settings.repetition_penalty != 1 or any(penalties)

    @cached_property
    def _bad(self) -> list[Sequence[int]]:
        """Bad words; an end token alone is none (as in transformers)."""
        words = [*self.bad, *self.checkpoint.bad_words_ids]
        return [word for word in words if word and not (len(word) == 1 and word[0] in self.ends)]

    def adjusted(self, logits: Array, history: History) -> Array:
        """The logits [V] of the token after the history, f64 where they change; -inf: forbidden.

        The order is that of transformers. NaN counts as the least likely, and where no logit is
        above -inf, all count as equal.
        """
        if self.is_plain:
            return logits
        scores = sound(logits)
        if self.penalizes:
            self._penalize(scores, history)
        self._forbid(scores, self._forbidden(history))
        forced = self._forced(history)
        if forced:
            scores[:] = -np.inf
            scores[[token for token in forced if token < len(scores)]] = 0
        self._forbid(scores, self.checkpoint.suppress_tokens)
        has_begin = history.prompt <= 1 and self.checkpoint.forced_bos_token_id is not None
        if history.new == has_begin:
            self._forbid(scores, self.checkpoint.begin_suppress_tokens)
        return scores

    def _penalize(self, scores: Array, history: History) -> None:
        settings = self.settings
        tokens = np.fromiter(history.seen.keys(), np.int64, len(history.seen))
        counts = np.fromiter(history.seen.values(), np.int64, len(history.seen))
        if tokens.size and tokens.max() >= len(scores):  # rows of a prompt table
            tokens, counts = tokens[(inside := tokens < len(scores))], counts[inside]
        if (penalty := settings.repetition_penalty) != 1:
            chosen = scores[tokens]
            scores[tokens] = np.where(chosen > 0, chosen / penalty, chosen * penalty)
        scores[tokens] -= settings.presence_penalty * (counts > 0)
        scores[tokens] -= settings.frequency_penalty * counts

    def _forbidden(self, history: History) -> Iterator[int]:
        if self.settings.no_repeat_ngram_size:
            yield from history.repeats()
        for word in self._bad:
            if len(word) == 1 or _ends_with(history.tokens, word[:-1]):
                yield word[-1]
        if history.new < self.settings.least(history.prompt):
            yield from self.ends

    def _forced(self, history: History) -> Sequence[int]:
        """The tokens of which one must follow; none: any."""
        checkpoint = self.checkpoint
        if checkpoint.forced_eos_token_ids and history.new + 1 == self.limit:
            return checkpoint.forced_eos_token_ids
        forced = checkpoint.forced_bos_token_id
        return () if forced is None or len(history.tokens) != 1 else (forced,)

    @staticmethod
    def _forbid(scores: Array, tokens: Collection[int] | Iterator[int]) -> None:
        if places := [token for token in tokens if 0 <= token < len(scores)]:
            scores[places] = -np.inf


def sound(logits: Array) -> Array:
    """f64 copy of logits in which no number is NaN, and some is above -inf."""
    scores = logits.astype(np.float64)
    highest = scores.max()
    if np.isnan(highest):
        scores[np.isnan(scores)] = _LEAST
    elif highest == -np.inf:
        scores[:] = 0
    return scores


def _ends_with(tokens: Sequence[int], word: Sequence[int]) -> bool:
    begin = len(tokens) - len(word)
    return begin >= 0 and list(tokens[begin:]) == list(word)

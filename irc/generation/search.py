"""How one prompt is continued: by drawn tokens (`Sampled`), or by beam search (`Beams`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .sampling import Sampling, Words, adjusted, draw, ends_with_any, log_probabilities

Array: TypeAlias = np.ndarray[Any, Any]


class Hypothesis(NamedTuple):
    """A sequence with the log-probabilities of its new tokens; `score` ranks it."""

    tokens: list[int]
    log_probs: list[float]
    score: float = 0.0


@dataclass(frozen=True)
class DecodingRules:
    """What holds for one prompt: how tokens are chosen, which end it, and which are forbidden."""

    sampling: Sampling
    limit: int  # of new tokens
    ends: Collection[int] = ()
    stop: Words = ()
    bad: Words = ()

    def adjusted(self, logits: Array, tokens: Sequence[int], prompt: int) -> Array:
        """The logits after `tokens`, of which the first `prompt` are the prompt."""
        return adjusted(logits, self.sampling, tokens, prompt, self.ends, self.bad)

    def is_end(self, new: Sequence[int]) -> bool:
        """Whether new tokens end a sequence."""
        return new[-1] in self.ends or ends_with_any(new, self.stop)


class Sampled:
    """One token at a time, drawn by `random`; the most likely one where the rules say so."""

    width = 1

    def __init__(
        self, prompt: Sequence[int], rules: DecodingRules, random: np.random.Generator
    ) -> None:
        self.prompt, self.rules, self.random = len(prompt), rules, random
        self.results = [Hypothesis(list(prompt), [])]
        self.done = rules.limit == 0

    def advance(self, logits: Array) -> list[int]:
        """One token from logits [1, V]; [0], the beam that it continues."""
        ((tokens, log_probs, _),) = self.results
        scores = self.rules.adjusted(logits[0], tokens, self.prompt)
        token = draw(scores, self.rules.sampling, self.random)
        chance = float(log_probabilities(logits[0])[token])
        self.results = [Hypothesis([*tokens, token], [*log_probs, chance])]
        new = self.results[0].tokens[self.prompt :]
        self.done = self.rules.is_end(new) or len(new) == self.rules.limit
        return [0]

    @property
    def sequences(self) -> list[list[int]]:
        """The tokens so far."""
        return [self.results[0].tokens]


class Beams:
    """The running beams of a prompt and its finished sequences, best first in `results`.

    A sequence ends with an end token or a stop word. Its score is the sum of its log-probabilities
    over its new tokens to the power `length_penalty`. The search is over when there are `width`
    finished sequences and, unless `early` is set, no running beam can do better.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        rules: DecodingRules,
        width: int,
        length_penalty: float = 1.0,
        early: bool = True,
    ) -> None:
        self.prompt, self.rules, self.width = len(prompt), rules, width
        self.length_penalty, self.early = length_penalty, early
        self.running = [Hypothesis(list(prompt), [])]
        self.finished: list[Hypothesis] = []
        self.done = rules.limit == 0

    def advance(self, logits: Array) -> list[int]:
        """One token for every beam; returns the beam that each of `width` beams continues."""
        candidates = self._candidates(logits)
        running: list[tuple[int, Hypothesis]] = []
        for rank, (origin, candidate) in enumerate(candidates):
            if self.rules.is_end(candidate.tokens[self.prompt :]):
                if rank < self.width:
                    self._finish(candidate)
            elif len(running) < self.width:
                running.append((origin, candidate))
        order = [origin for origin, _ in running]
        self.running = [candidate for _, candidate in running]
        self.done = self._is_done()
        return order + [0] * (self.width - len(order))

    @property
    def sequences(self) -> list[list[int]]:
        """The tokens so far of `width` running beams, of which the next logits are."""
        running = [beam.tokens for beam in self.running or self.results]
        return running + running[:1] * (self.width - len(running))

    @property
    def results(self) -> list[Hypothesis]:
        """The best `width` sequences, those that run counted as they are."""
        hypotheses = self.finished + [self._scored(beam) for beam in self.running if not self.done]
        hypotheses = hypotheses or [self._scored(beam) for beam in self.running]
        best = sorted(hypotheses, key=lambda beam: -beam.score)[: self.width]
        return best + best[-1:] * (self.width - len(best))

    def _candidates(self, logits: Array) -> list[tuple[int, Hypothesis]]:
        scores: list[Array] = []
        for row, beam in zip(logits, self.running, strict=False):
            adjusted = self.rules.adjusted(row, beam.tokens, self.prompt)
            scores.append(beam.score + log_probabilities(adjusted))
        every, ends = np.stack(scores), 1 + len(self.rules.stop)  # candidates that end a beam
        best = np.argsort(-every, axis=None, kind="stable")[: (1 + ends) * self.width]
        kept: list[tuple[int, Hypothesis]] = []
        for at in best.tolist():
            origin, token = divmod(int(at), every.shape[1])
            beam, total = self.running[origin], float(every[origin, token])
            if np.isfinite(total):
                probs = [*beam.log_probs, total - beam.score]
                kept.append((origin, Hypothesis([*beam.tokens, token], probs, total)))
        return kept

    def _scored(self, beam: Hypothesis) -> Hypothesis:
        length = max(len(beam.log_probs), 1)
        return beam._replace(score=beam.score / length**self.length_penalty)

    def _finish(self, beam: Hypothesis) -> None:
        self.finished.append(self._scored(beam))
        self.finished.sort(key=lambda beam: -beam.score)
        del self.finished[self.width :]

    def _is_done(self) -> bool:
        if not self.running:
            return True
        if len(self.running[0].log_probs) == self.rules.limit:
            for beam in self.running:
                self._finish(beam)
            return True
        if len(self.finished) < self.width:
            return False
        return self.early or self._scored(self.running[0]).score <= self.finished[-1].score

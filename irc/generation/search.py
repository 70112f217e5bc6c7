"""How one prompt is continued: by drawn tokens (`Sampled`), or by beam search (`Beams`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from .rules import DecodingRules, History
from .sampling import draw, log_probabilities, log_probability_of
from .tokenizer import TextStream

Array: TypeAlias = np.ndarray[Any, Any]
Finish: TypeAlias = Literal["end", "stop", "length", ""]  # "": it goes on
Best: TypeAlias = list[tuple[int, float]]  # tokens with their log-probabilities, the best first


class Hypothesis(NamedTuple):
    """A sequence with the log-probabilities of its new tokens; `score` ranks it."""

    tokens: list[int]
    log_probs: list[float]
    score: float = 0.0


@dataclass(frozen=True)
class Completion:
    """One answer: its new tokens, an end token included, and their text without stop strings.

    Where they are asked for, `log_probs` are those of the model for each token, and `best` has the
    most likely tokens at each place. `score` ranks the answers of beams.
    """

    tokens: list[int]
    text: str
    finish: Finish
    log_probs: list[float]
    best: list[Best]
    score: float = 0.0


class Sampled:
    """One token at a time, drawn by `random`; the most likely one where the rules say so.

    `finish` says why it is `done`. With a `stream`, `text` is what the last token completed, which
    is never the beginning of a stop string; `finish_text` gives the rest at the end.
    """

    width = 1

    def __init__(
        self,
        prompt: Sequence[int],
        rules: DecodingRules,
        random: np.random.Generator,
        stream: TextStream | None = None,
    ) -> None:
        self.prompt, self.rules, self.random = len(prompt), rules, random
        self.text, self.best, self.log_probs = "", list[Best](), list[float]()
        self.finish: Finish = "length" if rules.limit == 0 else ""
        self._history, self._stream = History(prompt, len(prompt), rules), stream
        self._texts: list[str] = []
        self._keeps = rules.scored or rules.settings.logprobs > 0

    @property
    def done(self) -> bool:
        """Whether no token follows."""
        return self.finish != ""

    @property
    def sequences(self) -> list[list[int]]:
        """The tokens so far."""
        return [self._history.tokens]

    @property
    def results(self) -> list[Hypothesis]:
        """The sequence so far; log-probabilities are those of the model itself."""
        return [Hypothesis(self._history.tokens, self.log_probs)]

    @property
    def is_plain(self) -> bool:
        """Whether it only takes the most likely tokens, as `add` does without logits."""
        return self.rules.is_plain and self.rules.settings.is_greedy and not self._keeps

    def advance(self, logits: Array) -> list[int]:
        """One token from logits [1, V]; [0], the row that it continues."""
        rules = self.rules
        scores = rules.adjusted(logits[0], self._history)
        if rules.constraint is not None:
            rules.constraint.mask(scores)
        token = draw(scores, rules.settings, self.random, min(rules.ends, default=0))
        self.add(token)
        if self._keeps:
            log_prob, best = log_probability_of(logits[0], token, rules.settings.logprobs)
            self.log_probs.append(log_prob)
            self.best.append(best)
        return [0]

    def add(self, token: int) -> None:
        """A token that another has chosen."""
        rules, history, stream, self.text = self.rules, self._history, self._stream, ""
        history.append(token)
        if rules.constraint is not None:
            rules.constraint.accept(token)
        if token in rules.ends:
            self.finish = "end"
            return
        if stream is not None:
            self.text = stream.add(token)
            self._texts.append(self.text)
        if (
            (stream is not None and stream.stopped)
            or (rules.stop and rules.is_end(history.tokens[self.prompt :]))
            or (rules.constraint is not None and rules.constraint.is_complete)
        ):
            self.finish = "stop"
        elif history.new >= rules.limit:
            self.finish = "length"

    def finish_text(self) -> str:
        """The text that was held back."""
        rest = "" if self._stream is None else self._stream.finish()
        self._texts.append(rest)
        return rest

    def answers(self) -> list[Completion]:
        """The answer, after `finish_text`; `stop` where something else has stopped it."""
        new, text = self._history.tokens[self.prompt :], "".join(self._texts)
        return [Completion(new, text, self.finish or "stop", self.log_probs, self.best)]


class Beams:
    """The running beams of a prompt and its finished sequences, best first in `results`.

    A sequence ends with an end token or a stop string. Its score is the sum of its
    log-probabilities over its new tokens to the power `length_penalty`; as in transformers,
    penalties change the log-probabilities. Groups of beams are searched one after the other, the
    later ones away from the tokens of the earlier (Vijayakumar et al., 2016). `decode` gives the
    text of new tokens.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        rules: DecodingRules,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self.prompt, self.rules, self.decode = len(prompt), rules, decode
        self.settings = rules.settings
        self.width, count = self.settings.num_beams, self.settings.num_beam_groups
        self._groups = [_Group(prompt, self, self.width // count) for _ in range(count)]

    def advance(self, logits: Array) -> list[int]:
        """One token for every beam; returns the beam that each of `width` beams continues."""
        order: list[int] = []
        chosen = np.zeros(logits.shape[-1])  # how many beams of earlier groups chose a token
        for group in self._groups:
            first, size = len(order), group.size
            if group.done:
                order += range(first, first + size)
                continue
            penalties = self.settings.diversity_penalty * chosen
            order += [first + at for at in group.advance(logits[first : first + size], penalties)]
            np.add.at(chosen, group.chosen, 1)
        return order

    @property
    def done(self) -> bool:
        """Whether no group goes on."""
        return all(group.done for group in self._groups)

    def answers(self) -> list[Completion]:
        """The best `num_return_sequences` answers."""
        return [self._answer(beam) for beam in self.results[: self.settings.num_return_sequences]]

    def _answer(self, beam: Hypothesis) -> Completion:
        new, finish = beam.tokens[self.prompt :], "stop"
        has_end = bool(new) and new[-1] in self.rules.ends
        text = "" if self.decode is None else self.decode(new[:-1] if has_end else new)
        places = [place for stop in self.settings.stop if (place := text.find(stop)) >= 0]
        if has_end or (len(new) >= self.rules.limit and not places):
            finish = "end" if has_end else "length"
        text = text[: min(places, default=len(text))]
        return Completion(new, text, finish, beam.log_probs, [], beam.score)

    @property
    def sequences(self) -> list[list[int]]:
        """The tokens so far of `width` running beams, of which the next logits are."""
        return [tokens for group in self._groups for tokens in group.sequences]

    @property
    def results(self) -> list[Hypothesis]:
        """The best `width` sequences, those that run counted as they are."""
        hypotheses = [beam for group in self._groups for beam in group.results]
        return sorted(hypotheses, key=lambda beam: -beam.score)

    def ends(self, tokens: Sequence[int]) -> bool:
        """Whether a sequence ends with its last token."""
        rules, new = self.rules, tokens[self.prompt :]
        if len(new) >= rules.limit or rules.is_end(new):
            return True
        text = self.decode(new) if self.decode is not None and self.settings.stop else ""
        return any(stop in text for stop in self.settings.stop)


class _Group:
    """`size` beams that are searched together."""

    def __init__(self, prompt: Sequence[int], beams: Beams, size: int) -> None:
        self.beams, self.size = beams, size
        self.running = [Hypothesis(list(prompt), [])]
        self.finished: list[Hypothesis] = []
        self.chosen: list[int] = []  # the last tokens of the best candidates
        self.done = beams.rules.limit == 0

    def advance(self, logits: Array, penalties: Array) -> list[int]:
        """One token for every beam by logits [size, V]; returns the beam that each continues."""
        running: list[tuple[int, Hypothesis]] = []
        candidates = self._candidates(logits, penalties)
        self.chosen = [beam.tokens[-1] for _, beam in candidates[: self.size]]
        for rank, (origin, beam) in enumerate(candidates):
            if self.beams.ends(beam.tokens):
                if rank < self.size:
                    self._finish(beam)
            elif len(running) < self.size:
                running.append((origin, beam))
        order = [origin for origin, _ in running]
        self.done = not running
        if running:
            self.running = [beam for _, beam in running]
            self.done = self._is_done()
        return order + [0] * (self.size - len(order))

    @property
    def sequences(self) -> list[list[int]]:
        running = [beam.tokens for beam in self.running]
        return running + running[:1] * (self.size - len(running))

    @property
    def results(self) -> list[Hypothesis]:
        beams = list(self.finished)
        if not (self.done and beams):
            beams += map(self._scored, self.running)
        best = sorted(beams, key=lambda beam: -beam.score)[: self.size]
        return best + best[-1:] * (self.size - len(best))

    def _candidates(self, logits: Array, penalties: Array) -> list[tuple[int, Hypothesis]]:
        """The best continuations, more than those that may end, with the beams they continue."""
        beams, rules = self.beams, self.beams.rules
        scores: list[Array] = []
        chances = [log_probabilities(row) for row in logits[: len(self.running)]]
        for row, beam in zip(chances, self.running, strict=True):
            if not rules.is_plain:
                row = rules.adjusted(row, History(beam.tokens, beams.prompt, rules))
            scores.append(beam.score + row - penalties)
        every = np.stack(scores)
        count = min(max(2, 1 + len(rules.ends)) * self.size, every.size)
        best = np.argpartition(-every, count - 1, axis=None)[:count]
        best = best[np.lexsort((best, -every.reshape(-1)[best]))]
        kept: list[tuple[int, Hypothesis]] = []
        for place in best.tolist():
            origin, token = divmod(int(place), every.shape[1])
            total = float(every[origin, token])
            if np.isfinite(total):
                beam = self.running[origin]
                probs = [*beam.log_probs, float(chances[origin][token])]
                kept.append((origin, Hypothesis([*beam.tokens, token], probs, total)))
        return kept

    def _scored(self, beam: Hypothesis) -> Hypothesis:
        return beam._replace(score=self._score(beam.score, len(beam.log_probs)))

    def _score(self, total: float, length: int) -> float:
        return total / max(length, 1) ** self.beams.settings.length_penalty

    def _finish(self, beam: Hypothesis) -> None:
        self.finished.append(self._scored(beam))
        self.finished.sort(key=lambda beam: -beam.score)
        del self.finished[self.size :]

    def _is_done(self) -> bool:
        """Whether no running beam can be among the results, or may by `early_stopping`."""
        settings = self.beams.settings
        if len(self.finished) < self.size:
            return False
        if settings.early_stopping is True:
            return True
        best, length = self.running[0], len(self.running[0].log_probs)
        if settings.early_stopping == "never" and settings.length_penalty > 0:
            length = self.beams.rules.limit
        return self._score(best.score, length) <= self.finished[-1].score

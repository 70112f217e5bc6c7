"""`Speculation`: guesses the next tokens, and computes the logits of all of them in one call.

A token is still chosen from the logits of the model after the tokens before it. A guess that is not
chosen costs time only, so that greedy tokens and the distribution of sampled ones stay the same
(Leviathan et al., 2023, for guesses that are certain).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..errors import Error
from .inputs import cache_range, multiple_of, rounded, vocabulary
from .rows import Rows, has_engine_tensors
from .settings import GenerationSettings

if TYPE_CHECKING:
    from .model import Model

Array: TypeAlias = np.ndarray[Any, Any]
Sequences: TypeAlias = Sequence[list[int]]

_NGRAM = 2  # tokens that have to repeat, as in transformers; else one
_DRAFT_TOKENS = 5  # that a draft model guesses


class PromptLookup:
    """Guesses up to `count` tokens: those that followed where the last ones first occurred."""

    def __init__(self, count: int) -> None:
        self.count = count

    def begin(self, rows: int, slots: int) -> None:
        """Begin a batch, of which nothing is kept."""

    def guess(self, sequences: Sequences, room: int) -> list[list[int]]:
        """The tokens after the first two, else the first one, that are equal to the last."""
        return [_followed(np.asarray(tokens), min(room, self.count)) for tokens in sequences]


def _followed(tokens: Array, count: int) -> list[int]:
    for size in range(min(_NGRAM, len(tokens) - 1), 0, -1):
        windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], size)
        places = np.flatnonzero((windows == tokens[-size:]).all(-1))
        if places.size:
            return tokens[places[0] + size :][:count].tolist()
    return []


class DraftModel:
    """Guesses up to `count` tokens: the most likely ones for another model."""

    def __init__(self, model: Model, count: int) -> None:
        self.program, self.dims, self.count = model.program, model.dims, count

    def begin(self, rows: int, slots: int) -> None:
        """Begin a batch of so many rows, which may have up to `slots` tokens."""
        slots = rounded(slots, cache_range(self.program.ports, self.dims))
        self._rows = Rows.empty(self.program, self.dims, rows, slots)
        _check(self._rows)
        self._fed: list[list[int]] = [[]] * rows

    def guess(self, sequences: Sequences, room: int) -> list[list[int]]:
        """The tokens after each sequence; none where its own caches are full."""
        rows, drafts = self._rows, [list[int]() for _ in sequences]
        past = [_common(fed, tokens) for fed, tokens in zip(self._fed, sequences, strict=True)]
        rest = [tokens[begin:] for begin, tokens in zip(past, sequences, strict=True)]
        longest = max(past) + max(map(len, rest)) + rows.multiple - 1
        count = min(room, self.count, _room(rows, longest))
        if count < 1:
            return drafts
        rows.past = np.array(past)
        for _ in range(count):
            rest = [[int(token)] for token in rows.next_tokens(rest)]
            for draft, last in zip(drafts, rest, strict=True):
                draft += last
        self._fed = [[*tokens, *d[:-1]] for tokens, d in zip(sequences, drafts, strict=True)]
        return drafts


def _common(fed: Sequence[int], tokens: Sequence[int]) -> int:
    """How many tokens two sequences begin with together, the last of `tokens` apart."""
    pairs = enumerate(zip(fed, tokens[:-1], strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(fed), len(tokens) - 1))


class Speculation:
    """Stands between a batch and its rows: steps without a call where the guesses were right.

    Each row accepts its own number of guesses. `calls` counts those of the program.
    """

    def __init__(self, rows: Rows, drafter: Drafter) -> None:
        _check(rows)
        self.rows, self.drafter, self.calls = rows, drafter, 0
        self._begins: list[int] = []  # tokens that were not guessed
        self._fed: list[list[int]] = []  # these and the guesses
        self._logits: list[Array] = []  # [1 + guesses, V]
        drafter.begin(rows.count, rows.slots)

    def step(self, sequences: Sequences, running: Sequence[bool]) -> tuple[Array, list[bool]]:
        """The logits [rows, V] after sequences whose last token is not in its row yet.

        Also which of the running rows have them. The others wait until none has, which takes the
        next call.
        """
        every = zip(running, self._fed, sequences, strict=False)
        ready = [runs and fed[: len(tokens)] == tokens for runs, fed, tokens in every]
        if not any(ready):
            self._call(sequences, running)
            ready = list(running)
        every = zip(self._logits, self._begins, sequences, strict=True)
        logits = [rows[min(len(tokens) - n, len(rows) - 1)] for rows, n, tokens in every]
        return np.stack(logits), ready

    def _call(self, sequences: Sequences, running: Sequence[bool]) -> None:
        pairs = zip(sequences, running, strict=True)
        sequences = [tokens if runs else tokens[:1] for tokens, runs in pairs]  # needs no capacity
        self._begins = [len(tokens) for tokens in sequences]
        self.rows.past = np.array(self._begins) - 1
        drafts = self.drafter.guess(sequences, _room(self.rows, max(self._begins)))
        drafts = [draft if runs else [] for draft, runs in zip(drafts, running, strict=True)]
        self._fed = [[*tokens, *draft] for tokens, draft in zip(sequences, drafts, strict=True)]
        pairs = zip(self._fed, self._begins, strict=True)
        self._logits = self.rows.step_all([fed[begin - 1 :] for fed, begin in pairs])
        self.calls += 1


Drafter: TypeAlias = PromptLookup | DraftModel


def _room(rows: Rows, longest: int) -> int:
    """The guesses that a call and the caches take behind the last token of a sequence."""
    room = (rows.slots - longest + 1) // rows.multiple * rows.multiple
    for port in rows.inputs:
        symbol = multiple_of(port.shape[-1]) if port.shape else None
        if port.name in ("input_ids", "logit_positions") and symbol and symbol[0] in rows.dims:
            room = min(room, int(rows.dims[symbol[0]][2]) * symbol[1])
    return max(room - 1, 0)


def _check(rows: Rows) -> None:
    if not rows.can_roll_back or has_engine_tensors(rows.program.ports):
        raise Error(
            "this model takes no guessed tokens: wrong ones could not be forgotten, because of a "
            "state of a recurrence or growing caches; leave out prompt_lookup_num_tokens and draft"
        )


def drafter_of(settings: GenerationSettings, model: Model, draft: Model | None) -> Drafter | None:
    """What guesses tokens for a model: `draft`, or the text itself; None where nothing does."""
    count = settings.prompt_lookup_num_tokens
    if draft is None:
        return PromptLookup(count) if count else None
    if count or settings.num_beams > 1:
        raise Error("a draft model needs prompt_lookup_num_tokens=0 and num_beams=1")
    sizes = vocabulary(model.program.ports), vocabulary(draft.program.ports)
    if sizes[0] != sizes[1]:
        raise Error(
            f"the draft model has {sizes[1]} tokens, but the model has {sizes[0]}; give a draft "
            "model with the same vocabulary"
        )
    return DraftModel(draft, _DRAFT_TOKENS)

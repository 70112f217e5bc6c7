"""`Decoding`: continues the prompts of a batch, by sampling or beam search, with hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..backends.base import Program
from ..errors import Error
from .inputs import cache_range, check_prompt, rounded, vocabulary
from .rows import Rows, check_language_model
from .search import Beams, Hypothesis, Sampled

Array: TypeAlias = np.ndarray[Any, Any]
Tokens: TypeAlias = list[list[int]]
# (step, tokens so far [rows, width], logits of the next ones [rows, V]) -> logits to choose from
Processor: TypeAlias = Callable[[int, Array, Array], Array]
# (step, the tokens so far, the logits that they were chosen from) -> whether decoding ends
Criteria: TypeAlias = Callable[[int, Array, Array], bool]


class Decoding:
    """The prompts of a batch with their continuations so far, which `steps` makes longer.

    `searches` say how each prompt is continued; all have one width. `extra` are inputs of the
    program by name. Logits of tokens from `tokens` on are ignored: they are padding of a sharded
    table. The hooks see every row of the batch, as many for each prompt as it has beams. Arrays of
    tokens have `fill` behind a sequence, up to `width` at least.
    """

    def __init__(
        self,
        program: Program,
        dims: Mapping[str, Any],
        searches: Sequence[Sampled | Beams],
        extra: Mapping[str, Array] | None = None,
        tokens: int | None = None,
        processor: Processor | None = None,
        criteria: Criteria | None = None,
        fill: int = 0,
        width: int = 0,
    ) -> None:
        self.searches, self.tokens = searches, tokens
        self.processor, self.criteria = processor, criteria
        self.fill, self.longest = fill, width
        self.prompt_logits: list[Array] | None = None
        self.logits = np.zeros((0, 0))  # [rows, V], from which the last tokens were chosen
        self.width = searches[0].width
        limit = max(search.rules.limit for search in searches)
        ports, prompts = program.ports, [search.results[0].tokens for search in searches]
        check_language_model(ports, caches=limit > 1)
        size = vocabulary(ports)
        if size is not None:  # the rows of a prompt table have the ids behind the vocabulary
            size += len((extra or {}).get("prompt_embedding_table", ()))
        for prompt in prompts:
            check_prompt(prompt, size)
        longest, limits = max(map(len, prompts)) + limit, cache_range(ports.states, dims)
        if limits[1] and longest > limits[1]:
            raise Error(
                f"prompt and new tokens are {longest}, but the caches of this model hold "
                f"{limits[1]}; ask for fewer, or compile with a larger --dims C=min:typical:max "
                "(max_seq_len of a build script)"
            )
        slots = rounded(longest, limits)
        self.rows = Rows(program, dims, prompts, slots, extra, movable=self.width > 1)

    def steps(self) -> Iterator[int]:
        """Decode; yields the number of each step, from 0, when it has added a token."""
        if all(search.done for search in self.searches):
            return
        width, step = self.width, 0
        logits = self.rows.start().repeat(width, 0)
        self.prompt_logits = self.rows.logits_of_tokens()
        if width > 1:
            self.rows.select([row for row in range(self.rows.count) for _ in range(width)])
        while True:
            self.logits = logits[:, : self.tokens]
            if self.processor is not None:
                self.logits = self.processor(step, self._so_far(), self.logits)
            order: list[int] = []
            for first, search in zip(range(0, len(logits), width), self.searches, strict=True):
                part = self.logits[first : first + width]
                origin = range(width) if search.done else search.advance(part)
                order += [first + at for at in origin]
            yield step
            if all(search.done for search in self.searches):
                return
            if self.criteria is not None and self.criteria(step, self._so_far(), self.logits):
                return
            step += 1
            if width > 1:
                self.rows.select(order)
            logits = self.rows.step([tokens[-1:] for tokens in self.sequences()])

    @property
    def results(self) -> list[list[Hypothesis]]:
        """The continuations of each prompt so far, best first."""
        return [search.results for search in self.searches]

    def _so_far(self) -> Array:
        return filled(self.sequences(), self.longest, self.fill, np.int32)

    def arrays(self) -> dict[str, Array]:
        """The continuations so far as arrays [prompts, beams], and [prompts, beams, width or more].

        `output_ids` with `fill` behind, `sequence_lengths`, the `log_probs` of the new tokens with
        zeros behind, and their sums `cum_log_probs`.
        """
        rows = [result for results in self.results for result in results]
        limit = max(search.rules.limit for search in self.searches)
        arrays = {
            "output_ids": filled(
                [result.tokens for result in rows], self.longest, self.fill, np.int32
            ),
            "sequence_lengths": np.array([len(result.tokens) for result in rows], np.int32),
            "log_probs": filled([result.log_probs for result in rows], limit, 0, np.float32),
            "cum_log_probs": np.array([sum(result.log_probs) for result in rows], np.float32),
        }
        shape = (len(self.searches), self.width)
        return {name: array.reshape(shape + array.shape[1:]) for name, array in arrays.items()}

    def sequences(self) -> Tokens:
        """The tokens of every row so far."""
        return [tokens for search in self.searches for tokens in search.sequences]


def filled(rows: Sequence[Sequence[Any]], width: int, fill: Any, dtype: Any) -> Array:
    """[rows, width or more] of lists of any lengths, with `fill` behind."""
    longest = max([width, *map(len, rows)])
    return np.array([[*row, *[fill] * (longest - len(row))] for row in rows], dtype)

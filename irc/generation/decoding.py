"""`Decoding`: continues the prompts of a batch, by sampling or beam search, with hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from ..backends.base import Ports, Program
from ..errors import Error
from ..ir.core import Module
from ..ir.dims import DimLike
from .inputs import cache_range, check_prompt, multiple_of, rounded, vocabulary
from .rows import Rows, check_language_model, has_engine_tensors, row_dim
from .search import Beams, Hypothesis, Sampled
from .speculation import Drafter, Speculation

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
    tokens have `fill` behind a sequence, up to `width` at least. `module` gives the module of the
    program, whose rope may depend on the length of a prompt in pieces. A `drafter` guesses tokens;
    `ready` says which searches had one in the last step.
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
        module: Callable[[], Module] | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.searches, self.tokens = searches, tokens
        self.processor, self.criteria = processor, criteria
        self.fill, self.longest = fill, width
        self.prompt_logits: list[Array] | None = None
        self.logits = np.zeros((0, 0))  # [rows, V], from which the last tokens were chosen
        self.width = searches[0].width
        ports, prompts = program.ports, [search.sequences[0] for search in searches]
        check_language_model(ports, caches=max(search.rules.limit for search in searches) > 1)
        size = vocabulary(ports)
        if size is not None:  # the rows of a prompt table have the ids behind the vocabulary
            size += len((extra or {}).get("prompt_embedding_table", ()))
        for prompt in prompts:
            check_prompt(prompt, size)
        pads = -len(prompts) % multiple_of_ids(ports, 0)  # copies of the last prompt
        order = [*range(len(prompts)), *[len(prompts) - 1] * pads]
        longest = max(len(search.sequences[0]) + search.rules.limit for search in searches)
        multiple = multiple_of_ids(ports, 1)
        slots = rounded(-(-longest // multiple) * multiple, cache_range(ports, dims))
        arrays, prompts = entries(ports, extra or {}, order), [prompts[at] for at in order]
        self.rows = Rows(program, dims, prompts, slots, arrays, self.width, module)
        self.ready = [True] * len(searches)
        self.speculation = None if drafter is None else Speculation(self.rows, drafter)

    def steps(self) -> Iterator[int]:
        """Decode; yields the number of each step, from 0, when it has added a token."""
        if all(search.done for search in self.searches):
            return
        hooks = (self.processor, self.criteria, self.tokens, self.speculation)
        if all(hook is None for hook in hooks):
            searches = [s for s in self.searches if isinstance(s, Sampled) and s.is_plain]
            if len(searches) == len(self.searches):
                yield from self._most_likely(searches)
                return
        yield from self._advance()

    def _most_likely(self, searches: Sequence[Sampled]) -> Iterator[int]:
        """`steps` where each token is the most likely one, which the program may return."""
        rows, step = self.rows, 0
        tokens = rows.next_tokens(rows.prompts)
        ahead: Iterator[Array] | None = None
        while True:
            for search, token in zip(searches, tokens.tolist(), strict=False):
                if not search.done:
                    search.add(token)
            yield step
            if all(search.done for search in searches):
                return
            if step == 0 and len(searches) == 1:
                ahead = rows.ahead(int(tokens[0]), searches[0].rules.limit - 1)
            step += 1
            tokens = next(ahead) if ahead is not None else rows.next_tokens(self._last())

    def _advance(self) -> Iterator[int]:
        """`steps` where the searches choose by logits."""
        width, step, count = self.width, 0, self.width * len(self.searches)
        logits = self.rows.start()
        of_rows = self.rows.logits_of_tokens()
        if of_rows is not None:
            stride = width if self.rows.together else 1
            self.prompt_logits = of_rows[::stride][: len(self.searches)]
        while True:
            self.logits = logits[:count, : self.tokens]
            if self.processor is not None:
                self.logits = self.processor(step, self._so_far(), self.logits)
            order: list[int] = []
            for at, (search, ready) in enumerate(zip(self.searches, self.ready, strict=True)):
                first = at * width
                part = self.logits[first : first + width]
                origin = range(width) if search.done or not ready else search.advance(part)
                order += [first + at for at in origin]
            yield step
            if all(search.done for search in self.searches):
                return
            if self.criteria is not None and self.criteria(step, self._so_far(), self.logits):
                return
            step += 1
            if width > 1:
                self.rows.copy(order, range(len(order)))
            if self.speculation is None:
                logits = self.rows.step(self._last())
            else:
                running = [not search.done for search in self.searches]
                pads = self.rows.count - count
                sequences = self.sequences() + self.sequences()[-1:] * pads
                logits, ready = self.speculation.step(sequences, running + [False] * pads)
                self.ready = ready[: len(running)]

    def _last(self) -> Tokens:
        """The last token of every row, and of rows that fill the batch."""
        done = [search.done for search in self.searches]
        if any(done):
            self._make_room(np.repeat(done, self.width))
        tokens = [tokens[-1:] for tokens in self.sequences()]
        return tokens + tokens[-1:] * (self.rows.count - len(tokens))

    def _make_room(self, done: Array) -> None:
        """Let rows that are done forget tokens where their caches are full."""
        rows, past = self.rows, self.rows.past[: len(done)]
        full = np.flatnonzero(done & (past + rows.multiple > rows.slots))
        if full.size and not rows.together:
            rows.clear(full.tolist())
        elif full.size and rows.can_roll_back:
            shorter = rows.past.copy()
            shorter[full] -= rows.multiple
            rows.past = shorter

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


def room(ports: Ports, dims: Mapping[str, Any], prompt: int) -> int:
    """The most new tokens that the caches of a model hold after a prompt of so many tokens."""
    check_language_model(ports, caches=False)
    step, (_, most) = multiple_of_ids(ports, 1), cache_range(ports, dims)
    if not most:
        return 2**31
    if prompt > most:
        raise Error(
            f"the prompt has {prompt} tokens, but the cache of this model holds {most}; "
            "shorten it, or compile with a larger --dims C=min:typical:max"
        )
    return max(1, most - step + 2 - prompt)  # the last token needs no place


def multiple_of_ids(ports: Ports, at: int) -> int:
    """Of what the rows (`at` 0) or tokens (1) of a call are a multiple."""
    multiple = multiple_of(_dims_of_ids(ports)[at])
    if multiple is None and not has_engine_tensors(ports):
        dim, what = _dims_of_ids(ports)[at], ("rows", "tokens")[at]
        raise Error(f"this model takes exactly {dim} {what} per call; use irc run")
    return 1 if multiple is None else multiple[1]


def most_rows(ports: Ports, dims: Mapping[str, Any]) -> int:
    """The most rows of a call."""
    multiple = multiple_of(_dims_of_ids(ports)[0])
    if multiple is None or multiple[0] not in dims:
        return 2**31
    return int(dims[multiple[0]][2]) * multiple[1]


def entries(ports: Ports, extra: Mapping[str, object], order: Sequence[int]) -> dict[str, Array]:
    """Further inputs with the entries of these prompts, where they have one for each prompt."""
    arrays = {name: np.asarray(value) for name, value in extra.items()}
    for port in ports.inputs:
        array = arrays.get(port.name)
        if array is not None and array.ndim and port.shape[:1] == _dims_of_ids(ports)[:1]:
            arrays[port.name] = array[[at for at in order if at < len(array)]]
    return arrays


def _dims_of_ids(ports: Ports) -> tuple[DimLike, DimLike]:
    """The dimensions of the rows and the tokens of a call."""
    (ids,) = [port for port in ports.inputs if port.name == "input_ids"]
    return row_dim(ids, ports.inputs)[1], ids.shape[-1]

"""Runs of a loaded model that are timed: prefill and decode of a language model, or whole runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from .decoding import multiple_of_ids
from .greedy import greedy
from .inputs import Arrays, cache_range, rounded, sizes_of_shapes
from .model import Model
from .rows import Rows

RUNS, FIRST = 20, 2  # runs by default; those before, which are not counted


@dataclass(frozen=True)
class Phase:
    """The seconds of each run, and what a run computes: `work` in a unit, at the sizes of symbols.

    `past` is the number of tokens in the caches before. `windows` are the begin and the end of
    each run in ns of time.time_ns, behind one that is not counted; none where runs follow each
    other without a pause.
    """

    name: str
    seconds: Sequence[float]
    work: int
    unit: str
    sizes: Mapping[str, int] = field(default_factory=dict[str, int])
    past: int = 0
    windows: Sequence[tuple[int, int]] = ()


def phases(
    model: Model,
    inputs: Arrays,
    runs: int = RUNS,
    *,
    given: bool = False,
    steps: bool = False,
    sizes: Mapping[str, int] | None = None,
) -> list[Phase]:
    """A language model has two phases, unless its inputs are `given`; others have one.

    With `steps` they are single calls of the program, over all rows of the tokens if `sizes` are
    asked for; otherwise generation of one row, as irc generate does.
    """
    program = model.program
    if given or "input_ids" not in inputs or not program.ports.states:
        lengths = {len(array) if array.ndim else 1 for array in inputs.values()}
        rows, unit = (lengths.pop(), "rows") if len(lengths) == 1 else (1, "calls")
        shapes = {name: array.shape for name, array in inputs.items()}
        bound = sizes_of_shapes(program.ports.inputs, shapes, model.dims)
        return [_phase("run", runs, lambda: model.run(inputs), rows, unit, bound)]
    tokens = inputs["input_ids"].tolist()
    if not steps:
        return _generation(model, tokens[0], runs)
    return _steps(
        model, tokens if sizes else tokens[: multiple_of_ids(program.ports, 0)], runs, sizes
    )


def _generation(model: Model, prompt: Sequence[int], runs: int) -> list[Phase]:
    """Prefill of one row of tokens, and decode of one token after them."""
    program, dims, steps = model.program, model.dims, FIRST + runs
    prefills = [greedy(program, prompt, 1, dims=dims).prefill_seconds for _ in range(steps)]
    at: list[float] = []  # when each token was there
    capacity = cache_range(program.ports, dims)[1] or len(prompt) + steps
    before = prompt[: max(capacity - steps, 1)]
    greedy(program, before, steps + 1, dims=dims, emit=lambda _: at.append(time.perf_counter()))
    timed = [Phase("prefill", prefills[FIRST:], len(prompt), "tokens")]
    decodes: list[float] = np.diff(at)[FIRST:].tolist()  # none where the cache is that small
    return [*timed, Phase("decode", decodes, 1, "tokens")] if decodes else timed


def _steps(
    model: Model, tokens: Sequence[Sequence[int]], runs: int, sizes: Mapping[str, int] | None
) -> list[Phase]:
    """Prefill of rows of tokens, and decode of one token after each; the same again in each run,
    but for a model with fixed states, which decodes the next ones."""
    length = len(tokens[0])
    slots = rounded(length + FIRST + runs, cache_range(model.program.ports, model.dims))
    slots = (sizes or {}).get("C", slots)
    rows = Rows(model.program, model.dims, tokens, slots, module=model.module)

    def phase(name: str, past: int, fed: Sequence[Sequence[int]]) -> Phase:
        def begin() -> None:
            if rows.can_roll_back:
                rows.past = np.full(rows.count, past, np.int32)
            elif not past:
                rows.clear(range(rows.count))

        width = -(-len(fed[0]) // rows.multiple) * rows.multiple
        shape = (1, np.size(fed))[-len(rows.ids.shape) :] if rows.packed else (rows.count, width)
        bound = sizes_of_shapes([rows.ids], {"input_ids": shape}, rows.dims)
        bound |= rows.sizes
        work = np.size(fed)
        return _phase(name, runs, lambda: rows.next_tokens(fed), work, "tokens", bound, past, begin)

    past, room = length, FIRST + runs
    if rows.can_roll_back:
        past, room = min(length, slots - rows.multiple), 1
    timed = [phase("prefill", 0, tokens)]
    if past < 1 or past + room * rows.multiple > slots:
        return timed
    return [*timed, phase("decode", past, [row[-1:] for row in tokens])]


def _phase(
    name: str,
    runs: int,
    work: Callable[[], object],
    count: int,
    unit: str,
    sizes: Mapping[str, int],
    past: int = 0,
    begin: Callable[[], object] = lambda: None,
) -> Phase:
    """The phase whose runs are calls of `work`; `begin` is called before each, and not timed."""
    windows: list[tuple[int, int]] = []
    for _ in range(FIRST + runs):
        begin()
        began = time.time_ns()
        work()
        windows.append((began, time.time_ns()))
    seconds = [(end - began) / 1e9 for began, end in windows[FIRST:]]
    return Phase(name, seconds, count, unit, sizes, past, windows[FIRST - 1 :])

"""Times an artifact: the prefill and decode steps of a language model, or the runs of another."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..report import table
from .arguments import runtime_options
from .arrays import given_inputs
from .console import Progress, print_json
from .ranks import of_rank, shared

if TYPE_CHECKING:
    from ..backends.ranks.communicator import Communicator
    from ..generation.model import Model
    from .arrays import Arrays

RUNS, FIRST = 20, 2  # runs by default; those before, which are not counted
_PERCENTILES = (50, 90, 99)


def time_artifact(args: Namespace, communicator: Communicator | None) -> int:
    """Load, run, and print latencies and throughput per phase; all ranks run, rank 0 prints."""
    from ..driver import open_model

    inputs = shared(communicator, lambda: given_inputs(args))
    with Progress() as progress:
        progress(f"loading {args.source}")
        options = runtime_options(args) | of_rank(communicator)
        model = open_model(args.artifact or args.source, args.backend, **options)
        progress(f"timing {args.source}")
        phases = _phases(model, inputs, args.runs or RUNS, args.inputs is not None)
    found = [_facts(phase) for phase in phases]
    if args.json:
        print_json({"artifact": args.source, "phases": found})
        return 0
    columns = [*(f"p{each}" for each in _PERCENTILES), "mean", "throughput"]
    print(table(map(_cells, found), ["milliseconds", "runs", *columns]))
    return 0


class _Phase(NamedTuple):
    """The seconds of each run, and what a run computes."""

    name: str
    seconds: list[float]
    work: int
    unit: str


def _phases(model: Model, inputs: Arrays, runs: int, given: bool) -> list[_Phase]:
    """A language model has two phases, unless its inputs are given; others have one."""
    if not given and "input_ids" in inputs and model.program.ports.states:
        return _generation(model, inputs["input_ids"][0].tolist(), runs)
    lengths = {len(array) if array.ndim else 1 for array in inputs.values()}
    rows, unit = (lengths.pop(), "rows") if len(lengths) == 1 else (1, "calls")
    return [_Phase("run", _seconds(runs, lambda: model.run(inputs)), rows, unit)]


def _generation(model: Model, prompt: list[int], runs: int) -> list[_Phase]:
    """Prefill of one row of tokens, and decode of one token after them, as irc generate does."""
    from ..generation.greedy import greedy
    from ..generation.inputs import cache_range

    program, dims, steps = model.program, model.dims, FIRST + runs
    prefills = [greedy(program, prompt, 1, dims=dims).prefill_seconds for _ in range(steps)]
    at: list[float] = []  # when each token was there
    capacity = cache_range(program.ports.states, dims)[1] or len(prompt) + steps
    before = prompt[: max(capacity - steps, 1)]
    greedy(program, before, steps + 1, dims=dims, emit=lambda _: at.append(time.perf_counter()))
    found = [_Phase("prefill", prefills[FIRST:], len(prompt), "tokens")]
    decodes: list[float] = np.diff(at)[FIRST:].tolist()  # none where the cache is that small
    return [*found, _Phase("decode", decodes, 1, "tokens")] if decodes else found


def _seconds(runs: int, work: Callable[[], object]) -> list[float]:
    """The seconds of each run, after the first ones."""
    found: list[float] = []
    for _ in range(FIRST + runs):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return found[FIRST:]


def _facts(phase: _Phase) -> dict[str, Any]:
    mean = float(np.mean(phase.seconds))
    return {
        "phase": phase.name,
        "runs": len(phase.seconds),
        **{f"p{p}_ms": float(np.percentile(phase.seconds, p)) * 1e3 for p in _PERCENTILES},
        "mean_ms": mean * 1e3,
        "per_run": phase.work,
        "unit": phase.unit,
        "per_second": phase.work / mean,
    }


def _cells(found: dict[str, Any]) -> list[str]:
    times = [found[f"p{each}_ms"] for each in _PERCENTILES] + [found["mean_ms"]]
    count, unit = found["per_run"], found["unit"]
    what = f"{found['phase']} of {count} {unit.removesuffix('s') if count == 1 else unit}"
    rate = f"{found['per_second']:,.1f} {found['unit']}/s"
    return [what, str(found["runs"]), *(f"{each:.2f}" for each in times), rate]

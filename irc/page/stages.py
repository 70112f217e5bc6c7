"""What the ranks of each stage run and hold: steps with expected times, memory by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..analysis.memory import Buffer, buffers_of, memory
from ..analysis.sizes import LocalSizes, typical_sizes
from ..analysis.stages import stages_of
from ..analysis.steps import Step
from ..backends import get
from ..backends.cuda.plan.arena import Lifetime, place
from ..ir.core import Module
from ..text.printer import names_of
from .fold import Folder, rounded, topology


def stages(
    module: Module, backend: str, folder: Folder, measured: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """The stages that a backend runs; `measured` are times of values, in microseconds."""
    if not module.functions:
        return []
    sizes = LocalSizes(module.mesh, typical_sizes(module))
    chosen, facts_of_stages = get(backend), list[dict[str, Any]]()
    commands, device = chosen.commands, topology().device if chosen.rank_is_process else None
    steps, planned = commands.steps(module, sizes, topology()), commands.buffers(module, sizes)
    for stage in stages_of(module):
        function, own = stage.function, [s for s in steps if s.rank == stage.ranks[0]]
        index = {name: i for i, name in enumerate(names_of(function).values())}
        buffers = planned.get(function.name) or _placed(buffers_of(function, sizes))
        facts = {
            "function": function.name,
            "ranks": stage.ranks,
            "memory": vars(memory([function], sizes, device)),
            "steps": [_step(step, index, folder, measured or {}) for step in own],
            "unit": "step" if function.name in planned else "operation",
        }
        facts_of_stages.append(facts | _memory(buffers, len(own), index, folder))
    return facts_of_stages


def _memory(
    buffers: Sequence[Buffer], steps: int, index: Mapping[str, int], folder: Folder
) -> dict[str, Any]:
    """Where values lie from step to step, and those at the step that needs most memory."""
    live = [0] * max([steps, *(each.last + 1 for each in buffers)])
    for each in buffers:
        for step in range(each.first, each.last + 1):
            live[step] += each.nbytes
    peak = max(range(len(live)), key=live.__getitem__, default=0)
    held = [i for i, each in enumerate(buffers) if each.first <= peak <= each.last]
    places = [
        [
            index[b.name] if b.name in index else -1 - folder.strings(b.name),
            *(b.first, b.last, b.offset, b.nbytes),
        ]
        for b in buffers
    ]
    return {
        "places": places,
        "count": len(live),
        "size": max((each.offset + each.nbytes for each in buffers), default=0),
        "peak": peak,
        "live": sorted(held, key=lambda i: -buffers[i].nbytes),
    }


def _step(
    step: Step, index: Mapping[str, int], folder: Folder, measured: Mapping[str, float]
) -> list[Any]:
    """Name, values, expected time, bytes, kernel and measured time; -1 where there is none."""
    name, kernel = folder.strings(step.name), -1
    if step.source:
        kernel = folder.kernels((name, folder.strings(step.source)))
    values = [index[each] for each in step.values if each in index]
    times = [measured[each] for each in step.values if each in measured]
    figures = rounded(step.us), round(step.nbytes), kernel
    return [name, values, *figures, rounded(sum(times)) if times else -1]


def _placed(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Buffers with the offsets that the backend cuda would give them."""
    lives = {str(i): Lifetime(b.first, b.last, b.nbytes) for i, b in enumerate(buffers)}
    offsets = place(lives)
    return [replace(b, offset=offsets[str(i)]) for i, b in enumerate(buffers)]

"""`verify_plan`: checks that a plan reads what was written, and writes nothing that is in use."""

from __future__ import annotations

from itertools import pairwise

from irc.backends.cuda.plan.core import ALIGNMENT, Argument, Buffer, Launch, Plan, Step
from irc.errors import Error

MOST_THREADS = 1024
MOST_BLOCKS = (2**31 - 1, 65535, 65535)


def verify_plan(plan: Plan) -> None:
    """Raise an Error that names the step and what is wrong with it."""
    for name in plan.results:
        if name not in plan.buffers or plan.buffers[name].place not in ("output", "state"):
            raise Error(f"@{plan.function} returns {name}, which is neither an output nor a state")
    lives = _lifetimes(plan)
    for number, step in enumerate(plan.steps):
        _check(plan, number, step)
    _check_overlaps(plan, lives)


def _where(plan: Plan, number: int) -> str:
    step = plan.steps[number]
    what = step.kernel if isinstance(step, Launch) else f"{step.library}.{step.function}"
    return f"step {number} of @{plan.function} ({what})"


def _check(plan: Plan, number: int, step: Step) -> None:
    where = _where(plan, number)
    for each in _pointers(step):
        buffer = plan.buffers[each.buffer]
        if each.written and buffer.place in ("input", "weight"):
            raise Error(f"{where}: it writes {buffer.name}, which is one of the {buffer.place}s")
        if buffer.offset % ALIGNMENT:
            raise Error(f"{where}: {buffer.name} is not aligned to {ALIGNMENT} bytes")
    if not isinstance(step, Launch):
        return
    if step.kernel not in plan.kernels:
        raise Error(f"{where}: the plan has no such kernel")
    if not 0 < step.block <= MOST_THREADS:
        raise Error(f"{where}: a block of {step.block} threads; 1 to {MOST_THREADS} are possible")
    for size, most in zip(step.grid, MOST_BLOCKS, strict=True):
        if not 0 < size <= most:
            raise Error(f"{where}: the grid is {step.grid}; the most is {MOST_BLOCKS}")
    if step.grid[0] % step.cluster:
        raise Error(
            f"{where}: {step.grid[0]} blocks are not a multiple of {step.cluster}, a cluster"
        )
    written = {a.buffer for each in plan.steps for a in _pointers(each) if a.written}
    pointers = _pointers(step)
    for at in step.early:
        name = pointers[at].buffer
        if name in written and plan.buffers[name].place != "state":
            raise Error(f"{where}: {pointers[at].buffer} is written, so it is not constant")
    if step.programmatic and (not number or not isinstance(plan.steps[number - 1], Launch)):
        raise Error(f"{where}: only a launch behind another one may start early")


def _pointers(step: Step) -> list[Argument]:
    return [each for each in step.arguments if isinstance(each, Argument)]


def _lifetimes(plan: Plan) -> dict[str, tuple[int, int]]:
    """The first and last step of every buffer in the arena."""
    found: dict[str, tuple[int, int]] = {}
    for number, step in enumerate(plan.steps):
        for each in _pointers(step):
            if each.buffer not in plan.buffers:
                raise Error(f"{_where(plan, number)}: there is no buffer {each.buffer}")
            buffer = plan.buffers[each.buffer]
            if buffer.place != "arena" or not buffer.nbytes:  # nothing writes an empty value
                continue
            if each.buffer not in found and not _writes(step, each.buffer):
                raise Error(f"{_where(plan, number)}: {each.buffer} is read before it is written")
            found[each.buffer] = found.get(each.buffer, (number, number))[0], number
    return found


def _writes(step: Step, buffer: str) -> bool:
    return any(each.written and each.buffer == buffer for each in _pointers(step))


def _check_overlaps(plan: Plan, lives: dict[str, tuple[int, int]]) -> None:
    """Buffers alive at one step lie apart: sorted by offset, each ends before the next."""
    alive: dict[int, list[Buffer]] = {}
    for name, (first, last) in lives.items():
        for step in range(first, last + 1):
            alive.setdefault(step, []).append(plan.buffers[name])
    for number, buffers in alive.items():
        buffers = sorted((b for b in buffers if b.nbytes), key=lambda b: b.offset)
        for a, b in pairwise(buffers):
            if a.offset + a.nbytes > b.offset:
                raise Error(f"{_where(plan, number)}: {a.name} and {b.name} overlap")

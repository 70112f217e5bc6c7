"""Blocks of tensors in order, of which threads compute the next ones ahead."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from itertools import product as combinations
from math import prod
from typing import TypeVar

from .pieces import Range

MOST_THREADS = 32  # each holds a block and what it is computed from
ROWS = 128  # blocks that have as many rows hold a multiple of them, so complete blocks of codes

T = TypeVar("T")


def regions(shape: Sequence[int], limit: int, even: bool = False) -> Iterator[list[Range]]:
    """Regions of about `limit` elements that cover a shape in row-major order.

    With `even`, all but the last have an even number of elements.
    """
    if not shape:
        yield []
        return
    cut = next((i for i in range(len(shape)) if prod(shape[i + 1 :]) <= limit), len(shape) - 1)
    while even and cut and prod(shape[cut:]) % 2:
        cut -= 1
    inside = max(1, prod(shape[cut + 1 :]))
    step = max(1, limit // inside)
    if step > ROWS:
        step -= step % ROWS
    elif even and inside % 2:
        step += step % 2
    inner = [(0, size) for size in shape[cut + 1 :]]
    for place in combinations(*map(range, shape[:cut])):
        for begin in range(0, shape[cut], step):
            here = (begin, min(begin + step, shape[cut]))
            yield [*[(i, i + 1) for i in place], here, *inner]


def ahead(tasks: Iterable[Callable[[], T]]) -> Iterator[T]:
    """The results of tasks in order; the next tasks run meanwhile, one per core."""
    left, threads = iter(tasks), min(_cores(), MOST_THREADS)
    first = list(islice(left, 2))
    if len(first) < 2 or threads == 1:
        yield from (task() for task in chain(first, left))
        return
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for task in chain(first, left):
                waiting.append(pool.submit(task))
                if len(waiting) > threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _cores() -> int:
    """The CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1

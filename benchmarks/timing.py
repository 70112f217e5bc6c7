"""Shared by the IR benchmarks: time one step, and check that the work was done."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def timed(seconds: dict[str, float], step: str, run: Callable[[], T]) -> T:
    """Run one step and record its seconds."""
    gc.collect()
    start = time.perf_counter()
    result = run()
    seconds[step] = time.perf_counter() - start
    return result


def check(fused: int, blocks: int) -> None:
    """Raise unless every block was fused."""
    if fused != blocks:
        raise RuntimeError(f"{fused} of {blocks} blocks were fused")

"""How long work on a GPU takes: torch, CUDA graphs, events, medians."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import torch


def graph_us(work: Callable[[], Any], stream: torch.cuda.Stream, launches: int = 15) -> float:
    """Median microseconds of a graph of what `work` enqueues on a stream; all data is kept."""
    with torch.cuda.stream(stream):
        kept = [work()]
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            kept.append(work())
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(launches + 1)]
        for _ in range(3):
            graph.replay()
        marks[0].record(stream)
        for mark in marks[1:]:
            graph.replay()
            mark.record(stream)
        stream.synchronize()
    return median(1e3 * begin.elapsed_time(end) for begin, end in pairwise(marks))

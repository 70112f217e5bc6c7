"""Processes, ranks and times of benchmarks and GPU tests.

    mpiexec -n 4 python -m benchmarks.process MODULE ARGUMENTS...

calls `MODULE.run(communicator, arguments)` on every rank; `start_ranks` starts such a command.
"""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from irc.backends.ranks.launch import find_launched_rank, find_mpiexec, supervise

ROOT = Path(__file__).resolve().parents[1]
T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """One finished process. `peak_mb` is the largest resident set of it and its children, in MB;
    `cpu_seconds` is the time that all its threads computed."""

    seconds: float
    peak_mb: float
    output: str
    cpu_seconds: float


def measure(command: Sequence[str], environment: dict[str, str] | None = None) -> Run:
    """Run `command`; raise with its output if it fails."""
    with tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | (environment or {})
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read().decode(errors="replace")
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{text[-3000:]}")
    cpu = usage.ru_utime + usage.ru_stime
    return Run(seconds, usage.ru_maxrss * 1024 / 1e6, text, cpu)


def python(module: str, *arguments: str | Path, interpreter: str = sys.executable) -> list[str]:
    """The command that runs a module with an interpreter, by default this one."""
    return [interpreter, "-m", module, *map(str, arguments)]


def timed(seconds: dict[str, float], step: str, run: Callable[[], T]) -> T:
    """Run one step and record its seconds."""
    gc.collect()
    start = time.perf_counter()
    result = run()
    seconds[step] = time.perf_counter() - start
    return result


def graph_us(work: Callable[[], Any], stream: Any, launches: int = 15) -> float:
    """Median microseconds of a CUDA graph of what `work` enqueues on a stream of torch; all data is
    kept."""
    import torch  # pyright: ignore[reportMissingImports]

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


def exchange(kind: str, group: Any, source: Any, target: Any, stream: int) -> None:
    """Enqueue a collective of an NCCL group on tensors of torch."""
    dtype = {"torch.float32": "f32", "torch.bfloat16": "bf16"}[str(source.dtype)]
    reduce_op = "sum" if "reduce" in kind else "none"
    launch = group.bind(kind, dtype, source.numel(), reduce_op)
    launch(source.data_ptr(), target.data_ptr(), stream)


def start_ranks(ranks: int, module: str, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
    """Start so many ranks; `options` are those of Popen."""
    rank = [sys.executable, "-m", "benchmarks.process", module, *arguments]
    return subprocess.Popen([find_mpiexec(), "-n", str(ranks), *rank], cwd=ROOT, **options)


def run_ranks(ranks: int, module: str, *arguments: str, seconds: float = 900.0) -> None:
    """Run so many ranks to their end; SystemExit where they fail or take longer."""
    process = start_ranks(ranks, module, *arguments)
    try:
        if process.wait(seconds):
            raise SystemExit(f"the ranks of {module} failed")
    finally:
        process.kill()


def main() -> None:
    """Be one rank; a failure here ends all ranks."""
    rank = find_launched_rank()
    if rank is None:
        sys.exit(__doc__)
    supervise(rank)
    from irc.backends.ranks.mpi import MpiCommunicator

    communicator = MpiCommunicator()
    try:
        importlib.import_module(sys.argv[1]).run(communicator, sys.argv[2:])
        communicator.close()
    except BaseException as error:
        if communicator.watcher.failure is None:
            traceback.print_exc()
        communicator.watcher.fail_here(str(error))
        communicator.watcher.end_process(1)


if __name__ == "__main__":
    main()

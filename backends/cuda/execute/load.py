"""Loads an artifact of plans: the program of which this process runs one rank."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from irc.backends.base import Arrays
from irc.backends.cuda import tuning
from irc.backends.cuda.codegen.streaming.choices import Target, use
from irc.backends.cuda.device import FAILED
from irc.backends.cuda.driver import Array
from irc.backends.cuda.execute.ahead import Ahead, can_follow
from irc.backends.cuda.execute.compile import Compiler, default_folder
from irc.backends.cuda.execute.gpu import (
    RankGpu,
    check_options,
    check_ranks,
    gpu_of_rank,
    open_driver,
)
from irc.backends.cuda.execute.launch import CudaKernels, Kernels
from irc.backends.cuda.execute.memory import DeviceArray, check_room
from irc.backends.cuda.execute.program import GpuProgram, GpuStream
from irc.backends.cuda.execute.rank import CudaRank
from irc.backends.cuda.execute.steps import Products
from irc.backends.cuda.execute.stream import RankStream
from irc.backends.cuda.facts import TEXT, facts_of_rank, sharding_facts
from irc.backends.cuda.group import TIMEOUT
from irc.backends.cuda.runtime import block_limits
from irc.backends.ranks.communicator import Communicator
from irc.backends.ranks.ports import ShardedPorts, Sizes
from irc.errors import Error
from irc.ir.core import Module
from irc.text import parse_module

OPTIONS = (
    *("communicator", "device", "fused", "gpu", "graphs", "programmatic", "stepwise"),
    "timeout",
)
STEPWISE = "IRC_CUDA_STEPWISE"  # the environment variable that sets this option
_INSTEAD = "a program of plans needs one. The same module compiled with --backend onnx runs on CPU"


class CudaGpu(RankGpu):
    """A GPU with NCCL, the kernels on it, and its library of products."""

    kernels: Kernels

    def products(self, rank: CudaRank, host: Communicator | None) -> Products:
        """The library of products; `host`: the ranks that make the same calls."""
        from irc.backends.cuda.execute.products import TimedProducts

        return TimedProducts(self.driver, rank.stream, host)


def open_gpu(local_rank: int, timeout: float) -> CudaGpu:
    """The GPU with the number of a local rank."""
    gpu = CudaGpu(open_driver(local_rank, _INSTEAD), timeout)
    capability = gpu.driver.gpu.capability
    use(Target(capability, *block_limits()))
    tuning.use_for(gpu.driver.gpu)
    gpu.kernels = CudaKernels(capability, Compiler(capability, default_folder()))
    return gpu


class CudaProgram(GpuProgram[CudaRank]):
    """A program of plans, of which this process runs one rank."""

    def open(self, sizes: Mapping[str, int]) -> CudaStream:
        """A stream whose states are zeros; `sizes` has the symbols in their shapes."""
        check_room(self.rank.driver, self.rank.caches(sizes), sizes)
        return CudaStream(self, RankStream(self.rank, sizes))

    def gather(
        self, names: Iterable[str], found: Mapping[str, DeviceArray], sizes: Sizes, full: Sizes
    ) -> Arrays:
        """As of GpuProgram; an Error of the GPU says how to find its kernel."""
        with _hinted():
            return super().gather(names, found, sizes, full)


@contextmanager
def _hinted() -> Generator[None]:
    try:
        yield
    except Error as error:
        if FAILED not in error.message:
            raise
        hint = f"run it again with {STEPWISE}=1, which names the kernel and its line"
        raise type(error)(f"{error.message}; {hint}") from error


class CudaStream(GpuStream):
    """One conversation, which may also run ahead of its caller."""

    _program: CudaProgram

    def follow(
        self,
        inputs: Mapping[str, Array],
        fed: Mapping[str, str],
        advanced: Sequence[str],
        count: int,
    ) -> Iterator[Arrays] | None:
        """The outputs of `count` steps, of which the first takes `inputs`.

        Then each input of `fed` is the result that it names, of the step before, and those of
        `advanced` grow by one. Where the caller stops before the end, the states are one step
        further than the last outputs. None where the results do not fit the inputs.
        """
        program = self._program
        shards, sizes = program.plain_shards(inputs)
        if not can_follow(program.ports, sizes, fed, advanced) or any(
            program.sharding.results[name].is_sharded for name in fed.values()
        ):
            return None
        ahead = Ahead(program, self._stream, fed, advanced)
        return _each(ahead.outputs(shards, sizes, count))

    def times(self, inputs: Mapping[str, Array], count: int) -> list[float]:
        """Milliseconds of each of `count` steps over the same inputs, which follow each other
        without the host; two steps in front of them are not counted."""
        shards, sizes = self._program.plain_shards(inputs)
        stream = self._program.rank.stream
        self._stream.step(shards, sizes)
        self._stream.again()
        events = [stream.event()]
        for _ in range(count):
            self._stream.again()
            events.append(stream.event())
        stream.wait()
        return [before.ms_until(after) for before, after in pairwise(events)]


def _each(outputs: Iterator[Arrays]) -> Iterator[Arrays]:
    with _hinted():
        yield from outputs


def load(folder: Path, facts: Mapping[str, Any], **options: Any) -> CudaProgram:
    """The program of an artifact.

    Options: `communicator`, of the ranks of the run, required for several; `device`, the number of
    the GPU (default: the local rank); `fused=False` plans without kernels for several operations;
    `graphs=False` uses no CUDA graphs; `programmatic=False` lets
    no kernel start before the one in front of it has ended; `stepwise=True` waits after every
    launch, so that an error names its kernel; `timeout`, the seconds that work with collectives may
    take (7); `gpu`, a function from a local rank to a CudaGpu.
    """
    check_options(options, OPTIONS, "a program of the backend cuda")
    path = folder / TEXT
    module = parse_module(path.read_text(encoding="utf-8"), str(path))
    return program_of(module, Path(facts["base"]) if facts.get("base") else folder, **options)


def program_of(module: Module, base: Path, **options: Any) -> CudaProgram:
    """The program of a localized module, its checkpoint files below `base`; options of `load`."""
    from irc.backends.cuda.plan.build import Planner

    host = check_ranks(f"@{module.name}", module.mesh.ranks, options.get("communicator"))
    number = 0 if host is None else host.rank
    own, facts = facts_of_rank(module, number), sharding_facts(module)
    fused = options.get("fused", True)
    planner = Planner(module, own.stage.function, number, fused=fused)
    timeout = options.get("timeout") or TIMEOUT
    with gpu_of_rank(options, host, lambda device: open_gpu(device, timeout)) as gpu:
        if host is not None:
            tuning.use(tuning.agreed(tuning.used(), host))
        alike = host if len(facts["stages"]) == 1 else None
        rank = CudaRank(
            own,
            planner,
            base,
            gpu,
            gpu.kernels,
            lambda rank: gpu.products(rank, alike),
            host,
            early=options.get("programmatic", True),
            graphs=options.get("graphs", True),
            stepwise=options.get("stepwise", bool(os.environ.get(STEPWISE))),
        )
        return CudaProgram(ShardedPorts(facts), rank)

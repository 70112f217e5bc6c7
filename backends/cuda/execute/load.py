"""Loads an artifact of plans: the program of which this process runs one rank."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import irc
from irc.analysis.topology_file import default_topology
from irc.backends.base import Arrays
from irc.backends.cuda.device import FAILED
from irc.backends.cuda.driver import Array, Event, Stream
from irc.backends.cuda.execute.compile import Compiler, default_folder, nvrtc_version
from irc.backends.cuda.execute.cublaslt import CublasLt, library_version
from irc.backends.cuda.execute.execution import Record
from irc.backends.cuda.execute.feed import FeedbackLoop, can_follow
from irc.backends.cuda.execute.gpu import (
    RankGpu,
    check_options,
    check_ranks,
    gathered,
    gpu_of_rank,
    open_driver,
)
from irc.backends.cuda.execute.launch import Kernels
from irc.backends.cuda.execute.program import GpuProgram, GpuStream
from irc.backends.cuda.execute.rank import CudaRank
from irc.backends.cuda.execute.stream import RankStream
from irc.backends.cuda.facts import TEXT, facts_of_rank, sharding_facts
from irc.backends.cuda.group import TIMEOUT
from irc.backends.cuda.plan import Plan
from irc.backends.cuda.plan.build import Planner
from irc.backends.cuda.plan.described import described
from irc.backends.cuda.plan.regime import Target
from irc.backends.cuda.runtime import block_limits
from irc.backends.cuda.tuning import FILE, Choices, read_choices
from irc.backends.ranks.ports import ShardedPorts
from irc.backends.recorder import Event as Recorded
from irc.backends.recorder import Recorder
from irc.errors import Error
from irc.ir.core import Module
from irc.text import parse_module

OPTIONS = (
    *("communicator", "device", "fused", "gpu", "graphs", "locked", "programmatic", "recorder"),
    *("stepwise", "timeout"),
)
STEPWISE = "IRC_CUDA_STEPWISE"  # the environment variable that sets this option
_INSTEAD = "a program of plans needs one. The same module compiled with --backend onnx runs on CPU"


class CudaGpu(RankGpu):
    """A GPU with NCCL, the kernels on it, and its library of products."""

    kernels: Kernels
    target: Target

    def products(self, algorithms: Mapping[str, str], locked: bool) -> CublasLt:
        """The library of products, see CublasLt."""
        return CublasLt(self.driver, algorithms, locked)

    def versions(self) -> dict[str, str]:
        """The versions of what decides which bits are computed."""
        versions = {"irc": irc.__version__, "NVRTC": "{}.{}".format(*nvrtc_version())}
        with suppress(Error):  # a program without products needs no cuBLASLt
            versions["cuBLASLt"] = library_version()
        return versions


def open_gpu(local_rank: int, timeout: float) -> CudaGpu:
    """The GPU with the number of a local rank."""
    gpu = CudaGpu(open_driver(local_rank, _INSTEAD), timeout)
    capability = gpu.driver.gpu.capability
    gpu.target = Target(capability, *block_limits())
    gpu.kernels = Kernels(capability, Compiler(capability, default_folder()))
    return gpu


class CudaProgram(GpuProgram[CudaRank]):
    """A program of plans, of which this process runs one rank."""

    def open(self, sizes: Mapping[str, int]) -> CudaStream:
        """A stream whose states are zeros; `sizes` has the symbols in their shapes."""
        return CudaStream(self, RankStream(self.rank, sizes), sizes)

    def wait(self, done: Stream | Event) -> None:
        """As of GpuProgram; an Error of the GPU says how to find its kernel."""
        try:
            super().wait(done)
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
        further than the last outputs. None where the results do not fit the inputs, or are sharded.
        """
        program = self._program
        shards, sizes = program.plain_shards(inputs)
        if (
            self.rows.chosen(sizes, 0) is not None
            or not can_follow(program.ports, sizes, fed, advanced)
            or any(program.sharding.results[name].is_sharded for name in self._names)
        ):
            return None
        loop = FeedbackLoop(program, self._stream, fed, advanced, owner=self)
        return loop.outputs(shards, sizes, count)

    def times(self, inputs: Mapping[str, Array], count: int) -> list[float]:
        """Milliseconds of each of `count` steps over the same inputs, which follow each other
        without the host; two steps in front of them are not counted."""
        shards, sizes = self._program.plain_shards(inputs)
        stream = self._program.rank.stream
        self._stream.step(shards, sizes, self.rows.chosen(sizes, 0))
        self._stream.again()
        events = [stream.event()]
        for _ in range(count):
            self._stream.again()
            events.append(stream.event())
        stream.wait()
        return [before.ms_until(after) for before, after in pairwise(events)]


def load(folder: Path, facts: Mapping[str, Any], **options: Any) -> CudaProgram:
    """The program of an artifact.

    Options: `communicator`, of the ranks of the run, required for several; `device`, the number of
    the GPU (default: the local rank); `fused=False` plans without kernels for several operations;
    `graphs=False` uses no CUDA graphs; `locked=True` raises an Error where the bits would depend on
    more than the artifact: on another GPU or version than its choices are for, or on a kernel or
    algorithm without a choice; `programmatic=False` lets no kernel start before the one in front of
    it has ended, nor does a `recorder`, which gets the times of the steps of CUDA graphs;
    `stepwise=True` waits after every launch, so that an error names its kernel; `timeout`, the
    seconds in which the GPU of some rank must get on (7); `gpu`, a function from a local rank to a
    CudaGpu.
    """
    check_options(options, OPTIONS, "a program of the backend cuda")
    path = folder / TEXT
    module = parse_module(path.read_text(encoding="utf-8"), str(path))
    base = Path(facts["base"]) if facts.get("base") else folder
    return program_of(module, base, read_choices(folder), **options)


def recording(recorder: Recorder | None, planner: Planner) -> Record | None:
    """What adds the steps of a run to a recorder, by the names of the module's text."""
    if recorder is None:
        return None
    topology = default_topology()

    def record(plan: Plan, began: int, us: Sequence[float]) -> None:
        for step, each in zip(described(planner, plan, topology), us, strict=False):
            value = step.values[0] if step.values else ""
            recorder.events.append(Recorded(planner.rank, step.name, value, began, each))
            began += int(1e3 * each)

    return record


def _kind_of(gpu: CudaGpu) -> str:
    """What decides how a GPU rounds."""
    return json.dumps([str(gpu.driver.gpu), str(gpu.target), gpu.versions()])


def program_of(
    module: Module, base: Path, choices: Choices | None = None, **options: Any
) -> CudaProgram:
    """The program of a localized module, its checkpoint files below `base`; options of `load`.

    `choices`: by default those of irc for the GPU of this rank.
    """
    host = check_ranks(f"@{module.name}", module.mesh.ranks, options.get("communicator"))
    number = 0 if host is None else host.rank
    own, facts = facts_of_rank(module, number), sharding_facts(module)
    locked: bool = options.get("locked", False)
    timeout = options.get("timeout") or TIMEOUT
    with gpu_of_rank(options, host, lambda device: open_gpu(device, timeout)) as gpu:
        if host is not None:
            host.agree(FILE, "" if choices is None else choices.text())
        if locked and choices is not None:
            choices.check(gpu.driver.gpu, gpu.target, gpu.versions())
        chosen = (choices or Choices(gpu.target)).on(gpu.driver.gpu, gpu.target)
        fused: bool = options.get("fused", True)
        planner = Planner(module, own.stage.function, number, fused, chosen.device)
        if locked:
            planner.check = chosen.check_plan
        rank = CudaRank(
            own,
            planner,
            base,
            gpu,
            gpu.kernels,
            lambda: gpu.products(chosen.products, locked),
            host,
            early=options.get("programmatic", True) and options.get("recorder") is None,
            graphs=options.get("graphs", True),
            stepwise=options.get("stepwise", bool(os.environ.get(STEPWISE))),
            record=recording(options.get("recorder"), planner),
            alike=host is not None and len({*gathered(host, _kind_of(gpu))}) == 1,
        )
        return CudaProgram(ShardedPorts(facts), rank)

"""Loads an artifact of engines on the GPU of this rank, and tests it before it is used."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from irc.backends.cuda.driver import Driver
from irc.backends.cuda.execute.gpu import (
    RankGpu,
    check_options,
    check_ranks,
    gpu_of_rank,
    open_driver,
)
from irc.backends.cuda.execute.program import GpuProgram
from irc.backends.cuda.group import TIMEOUT
from irc.backends.cuda.group import Library as Nccl
from irc.backends.ranks.ports import ShardedPorts
from irc.backends.tensorrt import plugins
from irc.backends.tensorrt.builder.library import Library, find
from irc.backends.tensorrt.runtime.plan import RankPlan
from irc.backends.tensorrt.runtime.rank import EngineRank
from irc.backends.tensorrt.runtime.selftest import self_test
from irc.errors import printable

OPTIONS = ("communicator", "device", "gpu", "graphs", "plugins", "self_test", "timeout")
_INSTEAD = "engines need one. The same artifact compiled with --backend onnx runs on CPU"


class EngineGpu(RankGpu):
    """One GPU, TensorRT or TensorRT-RTX, and NCCL."""

    def __init__(
        self, driver: Driver, library: Library, timeout: float = TIMEOUT, nccl: Nccl | None = None
    ) -> None:
        super().__init__(driver, timeout, nccl)
        self.library = library


def load(folder: Path, facts: Mapping[str, Any], **options: Any) -> GpuProgram[EngineRank]:
    """The program of an artifact, of which this process runs one rank.

    Options: `communicator`, of the ranks of the run, required for several; `device`, the number of
    the GPU (default: the local rank); `graphs=False` uses no CUDA graphs; `self_test=False` skips
    the self-test; `timeout`, the seconds in which the GPU of some rank must get on (7); `plugins`,
    files that register plugins; `gpu`, a function from a local rank to an EngineGpu.
    """
    check_options(options, OPTIONS, "a program of TensorRT")
    host = check_ranks(folder, len(facts["ranks"]), options.get("communicator"))
    plugins.load(options.get("plugins") or ())
    plugins.require(facts.get("plugins") or {})
    plan = RankPlan.of_facts(folder, facts, 0 if host is None else host.rank)

    def open_gpu(device: int) -> EngineGpu:
        library = find(plan.target.flavour)
        return EngineGpu(open_driver(device, _INSTEAD), library, options.get("timeout") or TIMEOUT)

    with gpu_of_rank(options, host, open_gpu) as gpu:
        rank = EngineRank(plan, gpu, gpu.library, host, options.get("graphs", True), _warn)
        program = GpuProgram(ShardedPorts(facts), rank)
        if options.get("self_test", True):
            self_test(program, facts.get("self_test"))
        return program


def _warn(text: str) -> None:
    print(f"warning: {printable(text)}", file=sys.stderr, flush=True)

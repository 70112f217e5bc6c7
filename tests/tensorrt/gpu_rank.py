"""One rank of an artifact on a real GPU, whose engine numpy computes: a process of its own.

`benchmarks.process` calls `run`. The tokens that a rank generates go into FOLDER/tokens{RANK}.json.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from irc.backends.cuda.device import CudaDriver, CudaStream
from irc.backends.cuda.driver import Gpu
from irc.backends.cuda.group import Group
from irc.backends.ranks.communicator import Communicator
from irc.backends.tensorrt.builder.library import Library
from irc.backends.tensorrt.runtime.load import EngineGpu, load
from irc.ir.dtypes import numpy_dtype
from tests.tensorrt.fake_gpu import Array
from tests.tensorrt.runtime_engine import Artifact, FakeTensorRT
from tests.tensorrt.runtime_world import VERSION

FACTS = "facts.json"
SECONDS = 10.0  # that a step may take: engines in numpy are slow


class Memory:
    """A GPU's memory for an engine in numpy, which waits for every copy."""

    def __init__(self, stream: CudaStream) -> None:
        self._stream = stream

    def read(self, address: int, shape: Sequence[int], dtype: str) -> Array:
        array = np.empty(tuple(shape), numpy_dtype(dtype))
        self._stream.download(array, address)
        self._stream.wait()
        return array

    def write(self, address: int, array: Array, dtype: str) -> None:
        host = np.ascontiguousarray(array.astype(numpy_dtype(dtype), copy=False))
        self._stream.upload(address, host)
        self._stream.wait()


class CudaDevice:
    """See Device: a real GPU, on which an engine runs at once, when its stream has reached it."""

    def __init__(self, driver: CudaDriver) -> None:
        self.driver, self.groups, self._stream = driver, driver.groups, driver.stream()
        self.memory = Memory(self._stream)

    def enqueue(self, work: Callable[[], None], stream: int, *call: Any) -> None:
        CudaStream(self.groups, stream).wait()
        work()

    def meet(self, group: Group, array: Array) -> list[Array]:
        """The arrays of all ranks of a group, over NCCL."""
        array, driver, stream = np.ascontiguousarray(array), self.driver, self._stream
        source = driver.allocate(array.nbytes)
        target = driver.allocate(array.nbytes * group.ranks)
        every = np.empty((group.ranks, *array.shape), array.dtype)
        stream.upload(source, array)
        group.bind("all_gather", "u8", array.nbytes)(source, target, stream.handle)
        stream.download(every, target)
        stream.wait()
        driver.free(source)
        driver.free(target)
        return [every[rank] for rank in range(group.ranks)]


def half_gpu(artifact: Artifact, rank: int) -> EngineGpu:
    """A real GPU with NCCL, whose engines numpy computes."""
    driver = CudaDriver(rank)
    driver.gpu = Gpu(driver.gpu.name, 89, driver.gpu.uuid, driver.gpu.memory)
    trt = FakeTensorRT(artifact, rank, CudaDevice(driver))
    trt.can_capture = False
    return EngineGpu(driver, Library("tensorrt-rtx", trt, VERSION), SECONDS)


def run(host: Communicator, arguments: Sequence[str]) -> None:
    """Generate on one rank."""
    from tests.tensorrt.test_runtime import continued

    folder = Path(arguments[0])
    facts: dict[str, Any] = json.loads((folder / FACTS).read_text())
    artifact = Artifact(folder, facts)
    program: Any = load(folder, facts, communicator=host, gpu=lambda rank: half_gpu(artifact, rank))
    tokens = continued(program, facts).tokens
    (folder / f"tokens{host.rank}.json").write_text(json.dumps(tokens))
    program.close()

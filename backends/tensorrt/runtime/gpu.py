"""The driver that is CUDA and NCCL, on one GPU; the engines are TensorRT's (engine.py)."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from irc.backends.cuda import group as nccl
from irc.backends.cuda import watch
from irc.backends.cuda.runtime import Stream, call, device_count, use_device
from irc.backends.tensorrt.builder.library import find
from irc.backends.tensorrt.plugins import communicators
from irc.backends.tensorrt.runtime.driver import Array, Gpu
from irc.backends.tensorrt.runtime.engine import GpuEngine, read_engine
from irc.backends.tensorrt.target import Flavour
from irc.errors import Error


class GpuDriver:
    """See Driver. `number`: of the rank on its host, which takes the GPU of that number.

    `timeout`: for how many seconds other ranks are waited for.
    """

    def __init__(self, flavour: Flavour, number: int, timeout: float) -> None:
        self._found = find(flavour)
        self.library = tuple(int(part) for part in self._found.version.split(".")[:4])
        index = _number(number)
        _check_cuda()
        self.gpu = _open_gpu(index)
        self._timeout = timeout
        self.groups: list[GpuGroup] = []

    def allocate(self, size: int) -> int:
        """See Driver."""
        try:
            return int(call("cudaMalloc", size))
        except Error as error:
            free = self.free_memory()
            raise Error(
                f"{self.gpu.name} has no {size / 1e9:.3f} GB left ({free / 1e9:.3f} GB are free): "
                f"{error.message}; compile with smaller --dims, or for more ranks"
            ) from error

    def free(self, address: int) -> None:
        """See Driver."""
        call("cudaFree", address)

    def free_memory(self) -> int:
        """See Driver."""
        return int(call("cudaMemGetInfo")[0])

    def pinned(self, size: int) -> Array:
        """See Driver."""
        address = int(call("cudaHostAlloc", size, 0))
        memory = (ctypes.c_uint8 * size).from_address(address)
        weakref.finalize(memory, _free_host, address).atexit = False
        return np.frombuffer(memoryview(memory), np.uint8)

    def stream(self) -> GpuStream:
        """See Driver."""
        return GpuStream(self.groups, self._timeout)

    def engine(self, path: Path) -> GpuEngine:
        """See Driver."""
        return read_engine(self._found, path)

    def group_name(self) -> bytes:
        """See Driver."""
        return nccl.unique_id()

    def group(self, name: bytes, rank: int, ranks: int, label: str) -> GpuGroup:
        """See Driver."""
        group = GpuGroup(name, rank, ranks, label=label, timeout=self._timeout)
        self.groups.append(group)
        return group

    def register(self, key: str, rank: int, group: Any) -> None:
        """See Driver."""
        communicators.register(key, rank, group)

    def close(self) -> None:
        """See Driver."""
        self.groups.clear()
        communicators.clear()


class GpuGroup(nccl.Group):
    """A group of NCCL that also sends bytes from one rank to another."""

    @property
    def pointer(self) -> int:
        """The address of NCCL's communicator."""
        return int(self._communicator.handle)

    def send(self, address: int, size: int, to: int, stream: int) -> None:
        """See the runtime's Group."""
        self._move(self._library.send, address, size, to, stream)

    def receive(self, address: int, size: int, source: int, stream: int) -> None:
        """See the runtime's Group."""
        self._move(self._library.recv, address, size, source, stream)

    def _move(self, function: Any, address: int, size: int, other: int, stream: int) -> None:
        self.check()
        if not size:
            return
        try:
            function(address, size, _UINT8, other, self._communicator, stream)
        except Exception as error:
            raise self._refused(f"handing values over with rank {other}", error) from error
        self._settle(f"handing values over with rank {other}", self.timeout)

    def abort(self) -> None:
        """See the runtime's Group."""
        self.end("it was given up, as another rank has failed")


_UINT8 = 1  # ncclDataType_t


class GpuStream(Stream):
    """See the runtime's Stream. Waiting ends where one of `groups` lost a rank."""

    def __init__(self, groups: list[GpuGroup], timeout: float) -> None:
        from cuda.bindings import runtime

        super().__init__()
        self.handle = int(self.handle)  # as NCCL takes it
        self._groups, self._timeout = groups, timeout
        kinds = runtime.cudaMemcpyKind
        self._up, self._down = kinds.cudaMemcpyHostToDevice, kinds.cudaMemcpyDeviceToHost
        self._across = kinds.cudaMemcpyDeviceToDevice

    def upload(self, address: int, host: Array) -> None:
        """See the runtime's Stream."""
        if host.nbytes:
            source = host.ctypes.data
            call("cudaMemcpyAsync", address, source, host.nbytes, self._up, self.handle)

    def download(self, host: Array, address: int) -> None:
        """See the runtime's Stream."""
        if host.nbytes:
            target = host.ctypes.data
            call("cudaMemcpyAsync", target, address, host.nbytes, self._down, self.handle)

    def copy(self, target: int, source: int, size: int) -> None:
        """See the runtime's Stream."""
        if size:
            call("cudaMemcpyAsync", target, source, size, self._across, self.handle)

    def zero(self, address: int, size: int) -> None:
        """See the runtime's Stream."""
        if size:
            call("cudaMemsetAsync", address, 0, size, self.handle)

    def event(self) -> GpuEvent:
        """See the runtime's Stream."""
        return GpuEvent(self)

    def wait(self) -> None:
        """See the runtime's Stream."""
        if self._groups:
            watch.wait(int(self.handle), self._groups, "the step", self._timeout)
        else:
            super().wait()

    def capture(self, work: Callable[[], None]) -> Any:
        """See the runtime's Stream."""
        return self.graph(work)

    def launch(self, graph: Any) -> None:
        """See the runtime's Stream."""
        call("cudaGraphLaunch", graph, self.handle)


class GpuEvent:
    """See the runtime's Event."""

    def __init__(self, stream: Stream) -> None:
        self._event = call("cudaEventCreate")
        weakref.finalize(self, call, "cudaEventDestroy", self._event).atexit = False
        call("cudaEventRecord", self._event, stream.handle)

    def wait(self) -> None:
        """See the runtime's Event."""
        call("cudaEventSynchronize", self._event)


def _check_cuda() -> None:
    try:
        from cuda.bindings import runtime  # noqa: F401
    except ImportError as error:
        raise Error(
            f"the package cuda-python is not installed ({error}); "
            "pip install 'irc-compiler[cuda]' brings it and NCCL"
        ) from None


def _number(number: int) -> int:
    """Which GPU the rank of a number on its host takes; a process that sees one GPU takes that."""
    count = device_count()
    if not count:
        raise Error(
            "the NVIDIA driver finds no GPU here; engines run on one. The same artifact compiled "
            "with --backend onnx runs on CPU"
        )
    index = 0 if count == 1 else number  # Slurm may show every process only its own
    if index >= count:
        raise Error(
            f"rank number {number} of this host needs GPU {index}, and there are {count}; start at "
            f"most {count} ranks per host"
        )
    return index


def _open_gpu(index: int) -> Gpu:
    """A GPU, made the one of this thread."""
    name = use_device(index)
    facts = call("cudaGetDeviceProperties", index)
    capability = 10 * int(facts.major) + int(facts.minor)
    return Gpu(name, capability, bytes(facts.uuid.bytes).hex(), int(facts.totalGlobalMem))


def _free_host(address: int) -> None:
    call("cudaFreeHost", address)

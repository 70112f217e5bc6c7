"""The CUDA calls that irc makes: devices, memory, a stream, graphs, times between events."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from irc.errors import Error

Array = np.ndarray
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*, cuda.h


def device_count() -> int:
    """How many GPUs the driver offers; 0 where there is no driver."""
    with suppress(OSError):
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        if driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
            return count.value
    return 0


def capability(index: int = 0) -> int | None:
    """The compute capability of a GPU, 90 for sm_90; None where it is not there."""
    if device_count() <= index:
        return None
    driver, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
    if driver.cuDeviceGet(ctypes.byref(device), index) != 0:
        return None
    found: list[int] = []
    for attribute in (_MAJOR, _MINOR):
        value = ctypes.c_int(0)
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) != 0:
            return None
        found.append(value.value)
    return 10 * found[0] + found[1]


def call(function: str, *arguments: Any) -> Any:
    """One function of the CUDA runtime: its result, or an Error with what CUDA says."""
    from cuda.bindings import runtime

    status, *results = getattr(runtime, function)(*arguments)
    if int(status):
        _, text = runtime.cudaGetErrorString(status)
        words = text.decode() if isinstance(text, bytes) else str(text)
        raise Error(f"{function} failed: {words}")
    return results[0] if len(results) == 1 else tuple(results)


def use_device(index: int) -> str:
    """Make a GPU the one of this thread; returns its name."""
    call("cudaSetDevice", index)
    name = call("cudaGetDeviceProperties", index).name
    return name.decode() if isinstance(name, bytes) else str(name)


class DeviceArray:
    """An array in the memory of the current GPU, which other packages read through DLPack."""

    def __init__(self, host: Array) -> None:
        import cuda.core as core

        self.shape, self.dtype, self.nbytes = host.shape, host.dtype, host.nbytes
        self.pointer = int(call("cudaMalloc", max(1, host.nbytes)))
        memory = core.Buffer.from_handle(self.pointer, max(1, host.nbytes))
        view = core.utils.StridedMemoryView
        self._view = view.from_buffer(memory, self.shape, dtype=self.dtype)
        self.write(host)

    def __dlpack__(self, **options: Any) -> Any:
        return self._view.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._view.__dlpack_device__()

    def write(self, host: Array) -> None:
        """Copy from the host."""
        self._copy(self.pointer, host.ctypes.data, "cudaMemcpyHostToDevice")

    def read(self) -> Array:
        """A copy on the host."""
        host = np.empty(self.shape, self.dtype)
        self._copy(host.ctypes.data, self.pointer, "cudaMemcpyDeviceToHost")
        return host

    def _copy(self, target: int, source: int, kind: str) -> None:
        from cuda.bindings import runtime

        call("cudaMemcpy", target, source, self.nbytes, getattr(runtime.cudaMemcpyKind, kind))

    def free(self) -> None:
        """Give the memory back."""
        call("cudaFree", self.pointer)


class Stream:
    """A stream of the current GPU."""

    def __init__(self) -> None:
        self.handle = call("cudaStreamCreate")

    def __int__(self) -> int:
        return int(self.handle)

    def wait(self) -> None:
        """Wait until all work is done."""
        call("cudaStreamSynchronize", self.handle)

    def graph(self, work: Callable[[], None]) -> Any:
        """What `work` enqueues on this stream, as a graph that can be launched."""
        from cuda.bindings import runtime

        mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        call("cudaStreamBeginCapture", self.handle, mode)
        try:
            work()
        finally:
            graph = call("cudaStreamEndCapture", self.handle)
        launchable = call("cudaGraphInstantiate", graph, 0)
        call("cudaGraphDestroy", graph)
        return launchable

    def drop(self, graph: Any) -> None:
        """Give up a graph."""
        call("cudaGraphExecDestroy", graph)

    def median_us(self, graph: Any, launches: int, warm: int = 3) -> float:
        """The median time of a launch in microseconds; the launches follow without a pause."""
        for _ in range(warm):
            call("cudaGraphLaunch", graph, self.handle)
        events = [call("cudaEventCreate") for _ in range(launches + 1)]
        call("cudaEventRecord", events[0], self.handle)
        for event in events[1:]:
            call("cudaGraphLaunch", graph, self.handle)
            call("cudaEventRecord", event, self.handle)
        self.wait()
        pairs = pairwise(events)
        times = [1e3 * call("cudaEventElapsedTime", begin, end) for begin, end in pairs]
        for event in events:
            call("cudaEventDestroy", event)
        return median(times)

"""The CUDA runtime and driver on host memory, under the real classes of device.py and launch.py.

Copies happen at once, and kernels do nothing. What is acquired counts until it is released.
"""

# pyright: reportAttributeAccessIssue=false, reportMissingImports=false

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from cuda.bindings import driver, runtime

from irc.backends.cuda.device import CudaDriver
from irc.backends.cuda.execute.compile import Key, key_of
from irc.backends.cuda.execute.launch import Kernels
from irc.backends.cuda.execute.load import CudaGpu
from irc.backends.cuda.plan.regime import Target
from tests.tensorrt.fake_gpu import SOON
from tests.tensorrt.fake_nccl import Comm, FakeNccl

# what acquires a handle, and what releases it
PAIRS = {
    "cudaMalloc": "cudaFree",
    "cudaHostAlloc": "cudaFreeHost",
    "cudaStreamCreate": "cudaStreamDestroy",
    "cudaEventCreate": "cudaEventDestroy",
    "cudaIpcOpenMemHandle": "cudaIpcCloseMemHandle",
    "cudaGraphInstantiate": "cudaGraphExecDestroy",
    "cudaStreamEndCapture": "cudaGraphDestroy",
    "cuModuleLoadData": "cuModuleUnload",
}
_NOTHING = (
    *("cudaStreamSynchronize", "cudaStreamBeginCapture", "cudaGraphLaunch"),
    *("cudaEventRecord", "cudaEventRecordWithFlags", "cudaEventQuery", "cudaEventSynchronize"),
    *("cuFuncSetAttribute", "cuLaunchKernelEx"),
)
_NEVER = ("cudaStreamQuery", "cudaGetErrorString", "cuGetErrorString")  # fail, nor count


class FakeApi:
    """`calls`: the names of the functions that the thread of each GPU called; `fail`: (GPU, number)
    of the call that fails; `held`: kinds and numbers of what is not released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: dict[int, list[str]] = {}
        self.fail: tuple[int, int] | None = None
        self._handles: dict[int, tuple[str, Any]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()  # the garbage collector may release while one acquires
        self._thread = threading.local()
        functions: dict[str, Callable[..., Any]] = dict.fromkeys(_NOTHING, lambda *args: ())
        for acquire, release in PAIRS.items():
            functions[acquire] = lambda *args, kind=acquire: (self._acquire(kind, *args),)
            functions[release] = lambda handle, kind=acquire: self._release(kind, handle)
        functions |= {
            "cudaSetDevice": self._set_device,
            "cudaGetDeviceProperties": lambda index: (self._properties(index),),
            "cudaMemGetInfo": lambda: (1 << 40, 1 << 40),
            "cudaIpcGetMemHandle": lambda address: (_handle_of(address),),
            "cudaMemcpyAsync": lambda to, source, size, *rest: ctypes.memmove(to, source, size),
            "cudaMemsetAsync": lambda to, value, size, *rest: ctypes.memset(to, value, size),
            **dict.fromkeys(_NEVER, lambda *args: (b"the fake fails",)),
            "cudaStreamQuery": lambda stream: (),
            "cuModuleGetFunction": lambda module, name: (module,),
            "cuFuncGetAttribute": lambda attribute, function: (0,),
        }
        for name, function in functions.items():
            module, statuses = (runtime, runtime.cudaError_t)
            if name.startswith("cuda"):
                good, bad = statuses.cudaSuccess, statuses.cudaErrorUnknown
            else:
                module, statuses = (driver, driver.CUresult)
                good, bad = statuses.CUDA_SUCCESS, statuses.CUDA_ERROR_UNKNOWN
            monkeypatch.setattr(module, name, self._counted(name, function, good, bad))

    @property
    def held(self) -> Counter[str]:
        return Counter(kind for kind, _ in self._handles.values())

    def _counted(self, name: str, function: Callable[..., Any], good: Any, bad: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if name not in (*PAIRS.values(), *_NEVER):
                device = getattr(self._thread, "device", 0)
                calls = self.calls.setdefault(device, [])
                calls.append(name)
                if self.fail == (device, len(calls) - 1):
                    return (bad, None)
            results = function(*arguments)
            return (good, *results) if isinstance(results, tuple) else (good,)

        return call

    def _set_device(self, index: int) -> None:
        self._thread.device = index

    @staticmethod
    def _properties(index: int) -> Any:
        uuid = SimpleNamespace(bytes=bytes([index] * 16))
        return SimpleNamespace(name="Fake", major=9, minor=0, uuid=uuid, totalGlobalMem=1 << 40)

    def _acquire(self, kind: str, *arguments: Any) -> int:
        with self._lock:
            handle, block = next(self._numbers), None
            if kind in ("cudaMalloc", "cudaHostAlloc"):
                block = np.empty(arguments[0] + 255, np.uint8)
                handle = -(-block.ctypes.data // 256) * 256
            elif kind == "cudaIpcOpenMemHandle":
                handle = int.from_bytes(ctypes.string_at(arguments[0].getPtr(), 64), "little")
                self._handles[-handle] = kind, None
                return handle
            self._handles[handle] = kind, block
            return handle

    def _release(self, kind: str, handle: int) -> None:
        with self._lock:
            handle = -handle if kind == "cudaIpcOpenMemHandle" else int(handle)
            assert self._handles.pop(handle)[0] == kind


def _handle_of(address: int) -> Any:
    handle = runtime.cudaIpcMemHandle_t()
    ctypes.memmove(handle.getPtr(), address.to_bytes(64, "little"), 64)
    return handle


class Nccl(FakeNccl):
    """NCCL that communicates nothing. `open`: the number of communicators."""

    @property
    def open(self) -> int:
        ended = sum(call.split()[0] in ("abort", "destroy") for call in self.calls)
        return sum(len(world) for world in self.worlds.values()) - ended

    def _enqueue(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *arguments: Any
    ) -> None:
        """Nothing moves."""

    def comm_get_async_error(self, comm: Comm) -> int:
        return comm.state


class Images:
    """See Compiler: no kernel is compiled."""

    def images(self, kernels: Any) -> dict[Key, bytes]:
        return {key_of(kernel): b"image" for kernel in kernels}


def open_gpu(nccl: FakeNccl, index: int) -> CudaGpu:
    """A CudaGpu of the fake functions."""
    gpu = CudaGpu(CudaDriver(index), SOON, nccl)
    images: Any = Images()
    gpu.kernels, gpu.target = Kernels(90, images), Target()
    gpu.products = lambda algorithms, locked: MagicMock()  # computes nothing
    return gpu

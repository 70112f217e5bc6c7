"""One GPU by cuda-python: its memory, streams and graphs."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from irc.errors import Error, installs

from .driver import Array, Gpu, LaunchNorm
from .group import Group
from .runtime import call, failure, use_device
from .watch import Marks, wait

if TYPE_CHECKING:
    from irc.backends.cuda.execute.launch import Kernels

_HANDLE = 64  # bytes of cudaIpcMemHandle_t
FAILED = "the GPU failed"  # how messages begin about work that was enqueued before


class CudaDriver:
    """The GPU `index`, which becomes the current one of this thread.

    One thread at a time uses it; another calls `make_current` first. `groups`: those whose
    collectives may be on its streams; `marks`: those of the stream of a rank that has groups.
    """

    marks: Marks | None = None

    def __init__(self, index: int) -> None:
        _check_package()
        name = use_device(index)
        facts = call("cudaGetDeviceProperties", index)
        capability = 10 * int(facts.major) + int(facts.minor)
        self.gpu = Gpu(name, capability, bytes(facts.uuid.bytes).hex(), int(facts.totalGlobalMem))
        self.groups: list[Group] = []
        from cuda.bindings import runtime

        self._index = index
        self._memset, self._success = runtime.cudaMemsetAsync, runtime.cudaError_t.cudaSuccess
        self._kept: list[int] = []  # addresses of memory of one size
        self._kept_size, self._keeps = 0, True

    def make_current(self) -> None:
        """Let this thread use the GPU."""
        call("cudaSetDevice", self._index)

    def allocate(self, size: int) -> int:
        """The address of device memory, a multiple of 256; an Error if too little is free."""
        size = max(1, size)
        if self._kept and size == self._kept_size:
            return self._kept.pop()
        try:
            return self._allocate(size)
        except Error as error:
            if self._kept:
                self._free_kept()
                return self.allocate(size)
            free = self.free_memory()
            raise Error(
                f"{self.gpu.name} has no {size / 1e9:.3f} GB left ({free / 1e9:.3f} GB are free): "
                f"{error.message}; compile with smaller --dims, or for more ranks"
            ) from error

    def _allocate(self, size: int) -> int:
        return int(call("cudaMalloc", size))

    def free(self, address: int) -> None:
        """Free memory that `allocate` returned; waits for the GPU."""
        call("cudaFree", address)

    def keep(self, address: int, size: int) -> None:
        """Free memory, or keep it for the next `allocate` of its size; nothing uses it any more.

        What is kept has one size, and is freed where memory is short.
        """
        if not self._keeps:
            self.free(address)
            return
        if size != self._kept_size:
            self._free_kept()
        self._kept_size = size
        self._kept.append(address)

    def _free_kept(self) -> None:
        while self._kept:
            self.free(self._kept.pop())

    def close(self) -> None:
        """Free what is kept, and keep nothing from now on; unload the kernels of plugins."""
        self._keeps = False
        self._free_kept()
        if "_kernels" in vars(self):
            self._kernels.close()

    def share(self, address: int) -> bytes:
        """A handle by which another process of this host opens memory of `allocate`."""
        return ctypes.string_at(call("cudaIpcGetMemHandle", address).getPtr(), _HANDLE)

    def open_shared(self, handle: bytes) -> int:
        """The address here of memory that another process shares, also of another GPU."""
        from cuda.bindings import runtime

        own = runtime.cudaIpcMemHandle_t()
        ctypes.memmove(own.getPtr(), handle, _HANDLE)
        return int(call("cudaIpcOpenMemHandle", own, runtime.cudaIpcMemLazyEnablePeerAccess))

    def close_shared(self, address: int) -> None:
        """Release memory that `open_shared` returned."""
        call("cudaIpcCloseMemHandle", address)

    def free_memory(self) -> int:
        """The number of bytes that `allocate` could return."""
        return self._free_memory() + len(self._kept) * self._kept_size

    def _free_memory(self) -> int:
        return int(call("cudaMemGetInfo")[0])

    def pinned(self, size: int) -> Array:
        """Page-locked host memory, u8[size]."""
        address = int(call("cudaHostAlloc", size, 0))
        memory = (ctypes.c_uint8 * size).from_address(address)
        weakref.finalize(memory, call, "cudaFreeHost", address).atexit = False
        return np.frombuffer(memoryview(memory), np.uint8)

    def zero(self, address: int, size: int, stream: int) -> None:
        """Enqueue filling bytes with zeros."""
        (status,) = self._memset(address, 0, size, stream)
        if status != self._success:
            raise failure("cudaMemsetAsync", status)

    def add_rms_norm(
        self, dtype: str, weight_dtype: str, rows: int, columns: int, eps: float, offset: float
    ) -> LaunchNorm:
        """launch(x, residual, weight, normed, total, stream): see norm.py."""
        from .norm import add_rms_norm

        return add_rms_norm(self._kernels, dtype, weight_dtype, rows, columns, eps, offset)

    @cached_property
    def _kernels(self) -> Kernels:
        from irc.backends.cuda.execute.compile import Compiler, default_folder
        from irc.backends.cuda.execute.launch import Kernels

        capability = self.gpu.capability
        return Kernels(capability, Compiler(capability, default_folder()))

    def stream(self) -> CudaStream:
        """A new stream."""
        return CudaStream(self.groups)


class CudaStream:
    """A CUDA stream. `groups` are those of the driver; `handle`: of an existing stream."""

    def __init__(self, groups: Sequence[Group] = (), handle: int | None = None) -> None:
        from cuda.bindings import runtime

        self.handle = int(call("cudaStreamCreate")) if handle is None else handle
        self._groups = groups
        self._query, kinds = runtime.cudaStreamQuery, runtime.cudaMemcpyKind
        self._up, self._down = kinds.cudaMemcpyHostToDevice, kinds.cudaMemcpyDeviceToHost
        self._within = kinds.cudaMemcpyDeviceToDevice
        self._mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal

    def close(self) -> None:
        """Destroy the stream; nothing runs on it any more."""
        call("cudaStreamDestroy", self.handle)
        self.handle = 0

    def upload(self, address: int, host: Array) -> None:
        """Copy contiguous host memory to the GPU; it must not change until the copy is done."""
        self._copy(address, host.ctypes.data, host.nbytes, self._up)

    def download(self, host: Array, address: int) -> None:
        """Copy from the GPU into contiguous host memory."""
        self._copy(host.ctypes.data, address, host.nbytes, self._down)

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy bytes within the GPU."""
        self._copy(target, source, size, self._within)

    def _copy(self, target: int, source: int, size: int, kind: Any) -> None:
        if size:
            call("cudaMemcpyAsync", target, source, size, kind, self.handle)

    def event(self, inside: bool = False) -> CudaEvent:
        """The place after everything enqueued so far; `inside`: also in a graph under capture."""
        return CudaEvent(self.handle, inside, self._groups)

    def is_done(self) -> bool:
        """Whether everything enqueued is done; an Error where the GPU has failed."""
        return _is_done(self._query, self.handle)

    def wait(self, what: str = "the step") -> None:
        """Wait until everything is done; a PeerError where a rank of a group is lost.

        `what` names the work in messages.
        """
        _wait(self, self._groups, what, "cudaStreamSynchronize", self.handle)

    def capture(self, work: Callable[[], None]) -> Any:
        """A graph of what `work` enqueues here; an Error where something cannot be captured.

        No garbage is collected meanwhile: closing a conversation waits, which ends a capture.
        """
        call("cudaStreamBeginCapture", self.handle, self._mode)
        collects = gc.isenabled()
        gc.disable()
        try:
            work()
        except BaseException:
            with suppress(Error):  # it says less
                call("cudaGraphDestroy", call("cudaStreamEndCapture", self.handle))
            raise
        finally:
            if collects:
                gc.enable()
        graph = call("cudaStreamEndCapture", self.handle)
        try:
            return call("cudaGraphInstantiate", graph, 0)
        finally:
            call("cudaGraphDestroy", graph)

    def launch(self, graph: Any) -> None:
        """Enqueue a graph."""
        call("cudaGraphLaunch", graph, self.handle)

    def drop(self, graph: Any) -> None:
        """Destroy a graph."""
        call("cudaGraphExecDestroy", graph)


class CudaEvent:
    """A place in a stream; `groups` as of it."""

    def __init__(self, stream: int, inside: bool = False, groups: Sequence[Group] = ()) -> None:
        from cuda.bindings import runtime

        self._groups, self._query = groups, runtime.cudaEventQuery
        self._event = call("cudaEventCreate")
        weakref.finalize(self, call, "cudaEventDestroy", self._event).atexit = False
        if inside:
            call("cudaEventRecordWithFlags", self._event, stream, 1)  # cudaEventRecordExternal
        else:
            call("cudaEventRecord", self._event, stream)

    def wait(self) -> None:
        """Wait until the stream has reached this place, as for the stream."""
        _wait(self, self._groups, "the step", "cudaEventSynchronize", self._event)

    def is_done(self) -> bool:
        """Whether the stream has reached this place; an Error where the GPU has failed."""
        return _is_done(self._query, self._event)

    def ms_until(self, later: CudaEvent) -> float:
        """Milliseconds from this event to a later one of the same GPU; both are done."""
        return float(call("cudaEventElapsedTime", self._event, later._event))


def _is_done(query: Callable[[Any], Any], handle: Any) -> bool:
    """What a query of CUDA finds; an Error where the GPU has failed."""
    from cuda.bindings import runtime

    (status,) = query(handle)
    if status in (runtime.cudaError_t.cudaSuccess, runtime.cudaError_t.cudaErrorNotReady):
        return status == runtime.cudaError_t.cudaSuccess
    raise Error(f"{FAILED}: {status.name}")


def _wait(
    place: CudaStream | CudaEvent, groups: Sequence[Group], what: str, function: str, handle: Any
) -> None:
    """Wait by a function of CUDA, which must not block where another rank may be lost."""
    if groups:
        wait(place, groups, what)
        return
    try:
        call(function, handle)
    except Error as error:
        raise Error(f"{FAILED}: {error.message}") from error


def _check_package() -> None:
    try:
        from cuda.bindings import runtime  # noqa: F401
    except ImportError as error:
        raise Error(
            f"the package cuda-python is not installed ({error}); {installs('cuda')} brings it"
        ) from None

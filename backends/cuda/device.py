"""One GPU by cuda-python: its memory, streams and graphs."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from irc.errors import Error, installs

from .driver import Array, Gpu, LaunchNorm
from .group import Group
from .runtime import call, use_device
from .watch import wait

if TYPE_CHECKING:
    from irc.backends.cuda.execute.launch import Kernels

FAILED = "the GPU failed"  # how messages begin about work that was enqueued before


class CudaDriver:
    """One GPU, used by one thread, whose current one becomes the GPU `index`.

    `groups`: those whose collectives may be on its streams.
    """

    def __init__(self, index: int) -> None:
        _check_package()
        name = use_device(index)
        facts = call("cudaGetDeviceProperties", index)
        capability = 10 * int(facts.major) + int(facts.minor)
        self.gpu = Gpu(name, capability, bytes(facts.uuid.bytes).hex(), int(facts.totalGlobalMem))
        self.groups: list[Group] = []
        from cuda.bindings import runtime

        self._memset, self._success = runtime.cudaMemsetAsync, runtime.cudaError_t.cudaSuccess

    def allocate(self, size: int) -> int:
        """The address of new device memory, a multiple of 256; an Error if too little is free."""
        try:
            return int(call("cudaMalloc", max(1, size)))
        except Error as error:
            free = self.free_memory()
            raise Error(
                f"{self.gpu.name} has no {size / 1e9:.3f} GB left ({free / 1e9:.3f} GB are free): "
                f"{error.message}; compile with smaller --dims, or for more ranks"
            ) from error

    def free(self, address: int) -> None:
        """Free memory that `allocate` returned; waits for the GPU."""
        call("cudaFree", address)

    def share(self, address: int) -> bytes:
        """A handle by which another process of this host opens memory of `allocate`."""
        return bytes(call("cudaIpcGetMemHandle", address).reserved)

    def open_shared(self, handle: bytes) -> int:
        """The address here of memory that another process shares, also of another GPU."""
        from cuda.bindings import runtime

        words = runtime.cudaIpcMemHandle_t()
        words.reserved = handle
        return int(call("cudaIpcOpenMemHandle", words, runtime.cudaIpcMemLazyEnablePeerAccess))

    def close_shared(self, address: int) -> None:
        """Release memory that `open_shared` returned."""
        call("cudaIpcCloseMemHandle", address)

    def free_memory(self) -> int:
        """The number of free bytes of the GPU."""
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
            raise Error(f"cudaMemsetAsync of {size} bytes failed: {status.name}")

    def add_rms_norm(
        self, dtype: str, weight_dtype: str, rows: int, columns: int, eps: float, offset: float
    ) -> LaunchNorm:
        """launch(total, residual, weight, normed, stream): see norm.py."""
        from .norm import add_rms_norm

        return add_rms_norm(self._kernels, dtype, weight_dtype, rows, columns, eps, offset)

    @cached_property
    def _kernels(self) -> Kernels:
        from irc.backends.cuda.execute.compile import Compiler, default_folder
        from irc.backends.cuda.execute.launch import CudaKernels

        capability = self.gpu.capability
        return CudaKernels(capability, Compiler(capability, default_folder()))

    def stream(self) -> CudaStream:
        """A new stream."""
        return CudaStream(self.groups)


class CudaStream:
    """A CUDA stream. `groups` are those of the driver; `handle`: of an existing stream."""

    def __init__(self, groups: Sequence[Group] = (), handle: int | None = None) -> None:
        from cuda.bindings import runtime

        self.handle = int(call("cudaStreamCreate")) if handle is None else handle
        self._groups = groups
        self._query, errors = runtime.cudaStreamQuery, runtime.cudaError_t
        self._success, self._not_ready = errors.cudaSuccess, errors.cudaErrorNotReady
        kinds = runtime.cudaMemcpyKind
        self._up, self._down = kinds.cudaMemcpyHostToDevice, kinds.cudaMemcpyDeviceToHost
        self._within = kinds.cudaMemcpyDeviceToDevice
        self._mode = runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal

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

    def event(self) -> CudaEvent:
        """The place after everything enqueued so far."""
        return CudaEvent(self.handle)

    def is_done(self) -> bool:
        """Whether everything enqueued is done; an Error where the GPU has failed."""
        (status,) = self._query(self.handle)
        if status in (self._success, self._not_ready):
            return status == self._success
        raise Error(f"{FAILED}: {status.name}")

    def wait(self, what: str = "the step") -> None:
        """Wait until everything is done; a PeerError where a rank of a group is lost.

        `what` names the work in messages.
        """
        if self._groups:
            wait(self, self._groups, what)
        else:
            try:
                call("cudaStreamSynchronize", self.handle)
            except Error as error:
                raise Error(f"{FAILED}: {error.message}") from error

    def capture(self, work: Callable[[], None]) -> Any:
        """A graph of what `work` enqueues here; an Error where something cannot be captured."""
        call("cudaStreamBeginCapture", self.handle, self._mode)
        try:
            work()
        except BaseException:
            with suppress(Error):  # it says less
                call("cudaGraphDestroy", call("cudaStreamEndCapture", self.handle))
            raise
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
    """A place in a stream."""

    def __init__(self, stream: int) -> None:
        self._event = call("cudaEventCreate")
        weakref.finalize(self, call, "cudaEventDestroy", self._event).atexit = False
        call("cudaEventRecord", self._event, stream)

    def wait(self) -> None:
        """Wait until the stream has reached this place."""
        try:
            call("cudaEventSynchronize", self._event)
        except Error as error:
            raise Error(f"{FAILED}: {error.message}") from error

    def is_done(self) -> bool:
        """Whether the stream has reached this place; an Error where the GPU has failed."""
        from cuda.bindings import runtime

        (status,) = runtime.cudaEventQuery(self._event)
        errors = runtime.cudaError_t
        if status in (errors.cudaSuccess, errors.cudaErrorNotReady):
            return status == errors.cudaSuccess
        raise Error(f"{FAILED}: {status.name}")

    def ms_until(self, later: CudaEvent) -> float:
        """Milliseconds from this event to a later one of the same GPU; both are done."""
        return float(call("cudaEventElapsedTime", self._event, later._event))


def _check_package() -> None:
    try:
        from cuda.bindings import runtime  # noqa: F401
    except ImportError as error:
        raise Error(
            f"the package cuda-python is not installed ({error}); {installs('cuda')} brings it"
        ) from None

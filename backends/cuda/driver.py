"""The CUDA calls that a group of ranks makes, behind a protocol that a test can play."""

# pyright: reportMissingImports=false, reportMissingModuleSource=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import ctypes
from typing import Any, Protocol

from irc.errors import Error


class Driver(Protocol):
    """Memory, streams and kernels of the current GPU; pointers and streams are integers."""

    def allocate(self, nbytes: int) -> int:
        """New memory on the device."""
        ...

    def free(self, pointer: int) -> None:
        """Give memory back; waits for the device."""
        ...

    def write(self, pointer: int, data: bytes, stream: int) -> None:
        """Copy to the device; `data` may go once this returns."""
        ...

    def read(self, pointer: int, nbytes: int, stream: int) -> bytes:
        """Copy from the device, after what is on the stream."""
        ...

    def zero(self, pointer: int, nbytes: int, stream: int) -> None:
        """Put zeroing memory on the stream."""
        ...

    def open_stream(self) -> int:
        """A new stream, which does not wait for the default stream."""
        ...

    def close_stream(self, stream: int) -> None:
        """Give a stream up."""
        ...

    def ready(self, stream: int) -> bool:
        """Whether all work on the stream is done; an Error where the GPU has failed."""
        ...

    def add_rms_norm(
        self, dtype: str, weight_dtype: str, rows: int, columns: int, eps: float, offset: float
    ) -> Any:
        """launch(total, residual, weight, normed, stream): see irc.backends.cuda.norm."""
        ...


class Cuda:
    """The Driver that is CUDA, on the GPU that is current for the thread that calls."""

    def __init__(self) -> None:
        from cuda.bindings import runtime

        self._cuda = runtime
        self._not_ready = runtime.cudaError_t.cudaErrorNotReady
        self._success = runtime.cudaError_t.cudaSuccess

    def _call(self, function: str, *arguments: Any) -> Any:
        from .runtime import call

        return call(function, *arguments)

    def allocate(self, nbytes: int) -> int:
        return int(self._call("cudaMalloc", max(1, nbytes)))

    def free(self, pointer: int) -> None:
        self._call("cudaFree", pointer)

    def write(self, pointer: int, data: bytes, stream: int) -> None:
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        host = ctypes.create_string_buffer(data, len(data))
        self._call(
            "cudaMemcpyAsync", pointer, ctypes.addressof(host), len(data), kind, stream
        )  # pageable memory is staged before the call returns

    def read(self, pointer: int, nbytes: int, stream: int) -> bytes:
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        host = ctypes.create_string_buffer(nbytes)
        self._call("cudaMemcpyAsync", ctypes.addressof(host), pointer, nbytes, kind, stream)
        self._call("cudaStreamSynchronize", stream)
        return host.raw

    def zero(self, pointer: int, nbytes: int, stream: int) -> None:
        (status,) = self._cuda.cudaMemsetAsync(pointer, 0, nbytes, stream)
        if status != self._success:
            raise Error(f"zeroing {nbytes} bytes on the GPU failed: {status.name}")

    def open_stream(self) -> int:
        flags = self._cuda.cudaStreamNonBlocking
        return int(self._call("cudaStreamCreateWithFlags", flags))

    def close_stream(self, stream: int) -> None:
        self._call("cudaStreamDestroy", stream)

    def ready(self, stream: int) -> bool:
        (status,) = self._cuda.cudaStreamQuery(stream)
        if status == self._success:
            return True
        if status == self._not_ready:
            return False
        raise Error(f"the GPU failed: {status.name}")

    def add_rms_norm(
        self, dtype: str, weight_dtype: str, rows: int, columns: int, eps: float, offset: float
    ) -> Any:
        from .norm import add_rms_norm

        return add_rms_norm(dtype, weight_dtype, rows, columns, eps, offset)

"""Arrays in device memory, memory by name that grows, and whether all fits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias, TypeVar

import numpy as np

from irc.analysis.units import amount
from irc.backends.cuda.driver import Array, Driver, Stream
from irc.backends.cuda.plan.arena import aligned
from irc.errors import Error
from irc.ir.dtypes import dtype as dtype_called
from irc.ir.dtypes import numpy_dtype, packed, unpacked

Shape: TypeAlias = tuple[int, ...]
K = TypeVar("K")


@dataclass(frozen=True)
class DeviceArray:
    """An array in device memory: row-major, elements of four bits in pairs."""

    address: int
    shape: Shape
    dtype: str

    @property
    def size(self) -> int:
        """Bytes."""
        return size_of(self.shape, self.dtype)


def size_of(shape: Shape, dtype: str) -> int:
    """Bytes of an array in device memory."""
    return dtype_called(dtype).nbytes(prod(shape))


def packed_offsets(sizes: Mapping[K, int]) -> tuple[dict[K, int], int]:
    """The offsets of pieces of memory behind each other, all aligned, and the bytes of all."""
    offsets, end = dict[K, int](), 0
    for name, size in sizes.items():
        offsets[name] = end
        end += aligned(size)
    return offsets, end


def as_stored(array: Array, dtype: str) -> Array:
    """A contiguous array as device memory has it."""
    return packed(array) if dtype_called(dtype).bits < 8 else np.ascontiguousarray(array)


def host_like(shape: Shape, dtype: str) -> tuple[Shape, Any]:
    """(shape, numpy dtype) of the host memory that an array is downloaded into."""
    if dtype_called(dtype).bits < 8:
        return (size_of(shape, dtype),), np.uint8
    return shape, numpy_dtype(dtype)


def as_array(host: Array, shape: Shape, dtype: str) -> Array:
    """The array that was downloaded into host memory of `host_like`."""
    if dtype_called(dtype).bits < 8:
        return unpacked(host, dtype)[: prod(shape)].reshape(shape)
    return host


def check_room(driver: Driver, parts: Mapping[str, int], sizes: Mapping[str, int]) -> None:
    """An Error with all numbers where the free memory is less than the bytes of some parts."""
    needed, free = sum(parts.values()), driver.free_memory()
    if needed <= free:
        return
    listed = ", ".join(f"{name} {amount(size)}" for name, size in parts.items())
    at = ", ".join(f"{name}={size}" for name, size in sizes.items())
    raise Error(
        f"expected {amount(needed)} of free memory for a rank{f' at {at}' if at else ''} ({listed})"
        f", found {amount(free)} of {amount(driver.gpu.memory)} free on {driver.gpu.name}; compile "
        "for more ranks (--mesh tp=N), quantize, or choose smaller sizes"
    )


class Memory:
    """Device memory and page-locked host memory by name; each grows where more is needed.

    Growing frees what the name had before, after everything on the stream is done. `user` tells
    whose inputs are there.
    """

    def __init__(self, driver: Driver, stream: Stream) -> None:
        self._driver, self._stream = driver, stream
        self._device: dict[str, tuple[int, int]] = {}
        self._host: dict[str, Array] = {}
        self._constants: dict[str, tuple[object, Array]] = {}
        self.user = object()

    def device(self, name: str, size: int) -> int:
        """The address of at least `size` bytes of device memory."""
        address, capacity = self._device.get(name, (0, 0))
        if capacity < size or not address:
            if address:
                self._stream.wait()
                del self._device[name]
                self._driver.free(address)
            address = self._driver.allocate(max(size, 1))
            self._device[name] = address, size
        return address

    def host(self, name: str, shape: Shape, dtype: Any) -> Array:
        """A page-locked array."""
        kind = np.dtype(dtype)
        size = kind.itemsize * prod(shape)
        if name not in self._host or self._host[name].size < size:
            self._stream.wait()
            self._host[name] = self._driver.pinned(max(size, 1))
        return self._host[name][:size].view(kind).reshape(shape)

    def upload(self, name: str, array: Array) -> int:
        """Copy an array to the GPU through page-locked memory; returns its address."""
        self._constants.pop(name, None)
        staged = self.host(name, array.shape, array.dtype)
        staged[...] = array
        address = self.device(name, array.nbytes)
        self._stream.upload(address, staged)
        return address

    def keep(self, name: str, array: Array, shape: Shape) -> None:
        """Remember that the last upload was of this array, padded to a shape, if it never changes.

        The array is kept alive, so that no other one has its place in host memory.
        """
        if is_constant(array):
            self._constants[name] = _place(array, shape), array

    def has(self, name: str, array: Array, shape: Shape) -> bool:
        """Whether the device memory of a name has an array that never changes since its upload."""
        held = self._constants.get(name)
        return held is not None and is_constant(array) and held[0] == _place(array, shape)

    def free(self) -> None:
        """Free everything."""
        for address, _ in self._device.values():
            self._driver.free(address)
        self._device.clear()
        self._host.clear()
        self._constants.clear()


def is_constant(array: Array) -> bool:
    """Whether nobody can write an array, nor what it is a view of."""
    while not array.flags.writeable and isinstance(array.base, np.ndarray):
        array = array.base
    return not array.flags.writeable and array.base is None


def _place(array: Array, shape: Shape) -> object:
    return array.ctypes.data, array.shape, array.strides, array.dtype, shape

"""Times of what is enqueued, in memory of its own."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from irc.backends.cuda.device import CudaStream
from irc.backends.cuda.driver import Driver
from irc.backends.cuda.execute.launch import Enqueue, Kernels
from irc.backends.cuda.measure import median_us
from irc.backends.cuda.plan import Argument, Kernel, Launch
from irc.errors import Error

COLD = 128 << 20  # bytes that calls take turns with, beyond any L2
_LAUNCHES = 5  # of a graph, whose median counts
_RESERVE = 256 << 20  # bytes of device memory that stay free
_PATTERN = 1 << 20  # bytes
_READ = 2 << 30  # bytes
READ = Kernel(
    "read_all",
    """
extern "C" __global__ void read_all(const uint4* x, int* y, int count) {
  u32 sum = 0;
  #pragma unroll 8
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    const uint4 v = __ldcs(x + i);
    sum ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (sum == 12345u) *y = 1;
}
""",
)


class Timing:
    """Times calls on one stream; nothing else runs on the GPU."""

    def __init__(self, driver: Driver, stream: CudaStream) -> None:
        self._driver, self.stream = driver, stream

    @contextmanager
    def memory(self, sizes: Sequence[int]) -> Generator[list[int]]:
        """Addresses of so many bytes with random numbers, freed again; none where too little
        memory is free."""
        if sum(sizes) + _RESERVE > self._driver.free_memory():
            yield []
            return
        addresses = [self._driver.allocate(size) for size in sizes]
        try:
            for address, size in zip(addresses, sizes, strict=True):
                self._fill(address, size)
            yield addresses
        finally:
            for address in addresses:
                self._driver.free(address)

    def us(self, calls: Sequence[Enqueue]) -> float:
        """The microseconds of a call, of some that follow each other in a graph; infinite where
        they cannot run."""

        def enqueue() -> None:
            for call in calls:
                call(self.stream.handle)

        with suppress(Error):
            enqueue()  # loads the kernels of libraries, which a capture may not
            self.stream.wait("what is timed")
            graph = self.stream.capture(enqueue)
            us = median_us(self.stream, graph, _LAUNCHES, 1) / len(calls)
            self.stream.drop(graph)
            return us
        return float("inf")

    def read_rate(self, kernels: Kernels) -> float:
        """The bytes per microsecond that a plain kernel reads."""
        kernels.load([READ])
        with self.memory([_READ, 256]) as addresses:
            if not addresses:
                raise Error(f"less than {(_READ + _RESERVE) >> 20} MB of the GPU are free")
            values = [*addresses, _READ // 16]
            given = Argument(""), Argument(""), values[2]
            grids = ((blocks, 1, 1) for blocks in (256, 512, 1024))
            launches = [Launch(READ.name, grid, 512, given) for grid in grids]
            calls = [kernels.bind(launch, READ, values, False) for launch in launches]
            return _READ / min(self.us([call]) for call in calls)

    def _fill(self, address: int, size: int) -> None:
        """Random numbers between -2 and 2, of any float dtype: clocks depend on what is
        multiplied."""
        rng = np.random.default_rng(0)
        pattern = rng.integers(0, 256, min(size, _PATTERN), np.uint8) & np.uint8(0xBF)
        self.stream.upload(address, pattern)
        done = pattern.size
        while done < size:
            more = min(done, size - done)
            self.stream.copy(address + done, address, more)
            done += more
        self.stream.wait("random numbers")

"""The fastest algorithm of a product, by timing each on this GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import cycle, islice

import numpy as np

from irc.backends.cuda.device import CudaStream
from irc.backends.cuda.driver import Driver
from irc.backends.cuda.measure import median_us
from irc.backends.cuda.plan.product import Product
from irc.errors import Error

from .cublaslt import ALIGNMENT, CublasLt

_LAUNCHES = 5  # of a graph, whose median counts
_GRAPH_FLOPS = 1 << 39  # work of a graph, about 1 ms
_CALLS = 2, 32  # the least and the most calls of a graph
_COLD = 128 << 20  # bytes of weights that the calls of a graph take turns with, beyond any L2
_RESERVE = 256 << 20  # bytes of device memory that stay free
_BETTER = 0.98  # of the time of the first algorithm; what is not better gives way to it
_PATTERN = 1 << 20  # bytes


class Fastest:
    """Times algorithms in memory of its own, which it frees again; see `CublasLt.prepare`."""

    def __init__(self, library: CublasLt, driver: Driver, stream: CudaStream) -> None:
        self._library, self._driver, self._stream = library, driver, stream

    def __call__(self, product: Product, offered: Sequence[bytes]) -> bytes | None:
        """The fastest algorithm; None where too little memory is free to time them."""
        times = self.times(product, offered)
        if not times:
            return None
        best = min(range(len(times)), key=times.__getitem__)
        return offered[best if times[best] < _BETTER * times[0] else 0]

    def times(self, product: Product, offered: Sequence[bytes]) -> list[float]:
        """The microseconds of a call by each algorithm, infinite for one that cannot run.

        Empty where too little memory is free.
        """
        sizes = [each.nbytes for each in product.operands()]
        step = -(-sizes[1] // ALIGNMENT) * ALIGNMENT
        copies = max(1, _COLD // step)
        sizes[1] = step * copies
        if sum(sizes) + _RESERVE > self._driver.free_memory():
            return []
        addresses = [self._driver.allocate(size) for size in sizes]
        try:
            for address, size in zip(addresses, sizes, strict=True):
                self._fill(address, size)
            turns = [addresses[1] + n * step for n in range(copies)]
            return [self._us(product, each, addresses, turns) for each in offered]
        finally:
            for address in addresses:
                self._driver.free(address)

    def _us(
        self, product: Product, algorithm: bytes, addresses: Sequence[int], weights: Sequence[int]
    ) -> float:
        """The microseconds of a call, with the weights in turn; infinite where the algorithm
        cannot run."""
        x, _, *others = addresses
        least, most = _CALLS
        count = min(most, max(least, _GRAPH_FLOPS // max(1, product.flops)))
        calls = [
            self._library.bind_product(product, (x, weight, *others), algorithm)
            for weight in islice(cycle(weights), count)
        ]

        def enqueue() -> None:
            for call in calls:
                call(self._stream.handle)

        with suppress(Error):
            enqueue()  # loads the kernels, which a capture may not
            self._stream.wait("a product")
            graph = self._stream.capture(enqueue)
            us = median_us(self._stream, graph, _LAUNCHES, 1) / count
            self._stream.drop(graph)
            return us
        return float("inf")

    def _fill(self, address: int, size: int) -> None:
        """Random numbers between -2 and 2, of any float dtype: clocks depend on what is
        multiplied."""
        rng = np.random.default_rng(0)
        pattern = rng.integers(0, 256, min(size, _PATTERN), np.uint8) & np.uint8(0xBF)
        self._stream.upload(address, pattern)
        done = pattern.size
        while done < size:
            more = min(done, size - done)
            self._stream.copy(address + done, address, more)
            done += more
        self._stream.wait("random numbers")

"""The fastest algorithm of a product, by timing each on this GPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice

from irc.backends.cuda.device import CudaStream
from irc.backends.cuda.driver import Driver
from irc.backends.cuda.plan.product import Product
from irc.backends.cuda.tuning import fastest

from .cublaslt import ALIGNMENT, CublasLt
from .timing import COLD, Timing

_GRAPH_FLOPS = 1 << 39  # work of a graph, about 1 ms
_CALLS = 2, 32  # the least and the most calls of a graph


class Fastest:
    """Times algorithms; see `CublasLt.prepare`."""

    def __init__(self, library: CublasLt, driver: Driver, stream: CudaStream) -> None:
        self._library, self._timing = library, Timing(driver, stream)

    def __call__(self, product: Product, offered: Sequence[bytes]) -> bytes | None:
        """The fastest algorithm; None where too little memory is free to time them."""
        times = self.times(product, offered)
        if not times:
            return None
        named = {str(i): us for i, us in enumerate(times)}
        return offered[int(fastest(named))]

    def times(self, product: Product, offered: Sequence[bytes]) -> list[float]:
        """The microseconds of a call by each algorithm, infinite for one that cannot run.

        Empty where too little memory is free.
        """
        sizes = [each.nbytes for each in product.operands()]
        step = -(-sizes[1] // ALIGNMENT) * ALIGNMENT
        copies = max(1, COLD // step)
        sizes[1] = step * copies
        with self._timing.memory(sizes) as addresses:
            if not addresses:
                return []
            turns = [addresses[1] + n * step for n in range(copies)]
            return [self._us(product, each, addresses, turns) for each in offered]

    def _us(
        self, product: Product, algorithm: bytes, addresses: Sequence[int], weights: Sequence[int]
    ) -> float:
        """The microseconds of a call, with the weights in turn."""
        x, _, *others = addresses
        least, most = _CALLS
        count = min(most, max(least, _GRAPH_FLOPS // max(1, product.flops)))
        turns = islice(cycle(weights), count)
        bind = self._library.bind_product
        return self._timing.us([bind(product, (x, each, *others), algorithm) for each in turns])

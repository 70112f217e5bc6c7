"""The weights of a rank, from their files to the GPU, each range of bytes once."""

from __future__ import annotations

from collections.abc import Sequence

from irc.backends.cuda.driver import Driver, Stream
from irc.backends.cuda.execute.upload import PIECE, Range, Uploads, allocate_weights
from irc.backends.tensorrt.runtime.plan import Binding

ALIGNMENT = 256


class Weights:
    """The weights of one rank in device memory: `addresses` by the engine's inputs."""

    def __init__(
        self, driver: Driver, stream: Stream, bindings: Sequence[Binding], piece: int = PIECE
    ) -> None:
        self._driver = driver
        ranges = {each.name: Range(each.path, each.offset, each.size) for each in bindings}
        offsets: dict[Range, int] = {}
        self.bytes = 0
        for each in ranges.values():
            if each not in offsets:
                offsets[each] = self.bytes
                self.bytes += -(-each.size // ALIGNMENT) * ALIGNMENT
        self._memory = allocate_weights(driver, self.bytes) if self.bytes else 0
        places = {each: self._memory + offset for each, offset in offsets.items()}
        self.addresses = {name: places[each] for name, each in ranges.items()}
        if self.bytes:
            with Uploads(driver, stream, piece) as uploads:
                uploads.files(places.items())

    def free(self) -> None:
        """Free the memory."""
        if self._memory:
            self._driver.free(self._memory)
            self._memory = 0

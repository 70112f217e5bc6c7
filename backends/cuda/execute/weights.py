"""The weights of one rank in device memory; each rank reads its bytes only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from irc.backends.cuda.driver import Driver, Stream
from irc.backends.cuda.execute.memory import check_room, packed_offsets, size_of
from irc.backends.cuda.execute.upload import PIECE, Range, Uploads
from irc.backends.ranks.ports import sized
from irc.errors import Error
from irc.ir.core import Weight
from irc.weights.checkpoint import Reader

# Where the bytes of a weight come from: ranges of files one behind the other, or its name where it
# has to be computed.
Source: TypeAlias = "tuple[Range, ...] | str"


class FileWeights:
    """Weights in device memory: `addresses` by name. Equal bytes of a file are there once."""

    def __init__(self, driver: Driver, stream: Stream, piece: int = PIECE) -> None:
        self._driver, self._stream = driver, stream
        self.uploads = Uploads(driver, stream, piece)
        self._memory: list[int] = []
        self._known: dict[Source, int] = {}  # addresses
        self.addresses: dict[str, int] = {}

    def add_ranges(self, ranges: Mapping[str, Range]) -> None:
        """Upload weights that are ranges of files; nothing is uploaded later."""
        sources: dict[str, Source] = {name: (extent,) for name, extent in ranges.items()}
        self._add(sources, {(extent,): extent.size for extent in ranges.values()})
        self.uploads.free()

    def _add(
        self,
        sources: Mapping[str, Source],
        sizes: Mapping[Source, int],
        check: Callable[[int], None] = lambda size: None,
        compute: Callable[[Uploads, list[str]], None] = lambda uploads, names: None,
    ) -> None:
        missing = {source: size for source, size in sizes.items() if source not in self._known}
        offsets, total = packed_offsets(missing)
        check(total)
        check_room(self._driver, {"weights": total}, {})
        if total:
            self._place(offsets, total)
            try:
                with self.uploads as uploads:
                    uploads.files(place for key in missing for place in _places(key, self._known))
                    compute(uploads, [key for key in missing if isinstance(key, str)])
            except BaseException:  # what has no bytes yet must not be found there
                self._drop(missing)
                raise
        self.addresses |= {name: self._known.get(source, 0) for name, source in sources.items()}

    def _place(self, offsets: Mapping[Source, int], total: int) -> None:
        address = self._driver.allocate(total)
        self._memory.append(address)
        self._known |= {source: address + offset for source, offset in offsets.items()}

    def _drop(self, missing: Mapping[Source, int]) -> None:
        for source in missing:
            del self._known[source]
        with suppress(Error):  # of a GPU that has failed
            self._driver.free(self._memory.pop())

    def free(self) -> None:
        """Free the memory."""
        self.uploads.free()
        for address in self._memory:
            self._driver.free(address)
        self._memory.clear()
        self._known.clear()
        self.addresses.clear()


class DeviceWeights(FileWeights):
    """Weights by the buffers of plans, also those that have to be computed."""

    def __init__(
        self, driver: Driver, stream: Stream, reader: Reader, rank: int, piece: int = PIECE
    ) -> None:
        super().__init__(driver, stream, piece)
        self._reader, self._rank = reader, rank

    def add(
        self, weights: Mapping[str, Weight], check: Callable[[int], None] = lambda size: None
    ) -> None:
        """Read and upload the weights that are not there yet, after `check` of their bytes."""
        new = {name: weight for name, weight in weights.items() if name not in self.addresses}
        sources = {name: self._source(name, weight) for name, weight in new.items()}
        sizes = {source: bytes_of(new[name]) for name, source in sources.items()}

        def compute(uploads: Uploads, names: list[str]) -> None:
            self._compute(uploads, {name: new[name] for name in names})

        self._add(sources, sizes, check, compute)

    def _compute(self, uploads: Uploads, weights: Mapping[str, Weight]) -> None:
        """Upload what is no range of a file; threads compute the next blocks meanwhile."""
        addresses = [self._known[key] for key in weights]
        tensors = [(weight, [self._rank]) for weight in weights.values()]
        for number, (block,) in self._reader.stream(tensors, as_bytes=True):
            uploads.blocks(addresses[number], [block])
            addresses[number] += block.nbytes

    def _source(self, name: str, weight: Weight) -> Source:
        """The bytes of files that a weight is, or its name where it has to be computed."""
        self._reader.check(weight)
        extents = self._reader.extents(weight, self._rank)
        return tuple(Range(Path(e.path), e.offset, e.nbytes) for e in extents) or name


def bytes_of(weight: Weight) -> int:
    """The bytes of a weight of this rank."""
    return size_of(sized(weight.type.shape, {}), weight.type.dtype)


def _places(source: Source, addresses: Mapping[Source, int]) -> Iterator[tuple[Range, int]]:
    """The ranges of a source, each with its address."""
    address = addresses[source]
    for part in source if isinstance(source, tuple) else ():
        yield part, address
        address += part.size

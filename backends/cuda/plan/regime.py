"""The sizes for which one plan holds, and the GPU and choices that it is made for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from irc.ir.core import Value, Weight
from irc.ir.dims import Dim, DimLike, bind, symbol


@dataclass(frozen=True)
class Target:
    """A GPU: its compute capability, multiprocessors, and shared memory of a block in bytes.

    The default is an H200.
    """

    capability: int = 90
    multiprocessors: int = 132
    shared: int = 227 << 10

    def __str__(self) -> str:
        shared = f"{self.shared >> 10} KB of shared memory"
        return f"sm_{self.capability}, {self.multiprocessors} multiprocessors, {shared}"


@dataclass(frozen=True)
class Device:
    """What kernels are made for: a GPU, and the choices of kernels by key (tuning.py)."""

    target: Target = field(default_factory=Target)
    choices: Mapping[str, str] = field(default_factory=dict[str, str])


class Regime(Mapping[str, int]):
    """The sizes that a plan is made at, and every decision that depends on them.

    A plan holds for all sizes at which its decisions come out the same. So whoever makes launches
    asks `bucket`, which records the answer; whoever reads a size restricts the plan to it. What a
    template computes of sizes (`grid`, `shared`, `settings`) is computed for every call.

    `apart`: mesh axes whose ranks do not share memory -> the reason. `stored`: values in memory ->
    the reason; other operands are computed inside kernels, by their elements (codegen/body.py).
    `constants`: arguments of the function that no result overwrites.
    """

    def __init__(
        self, sizes: Mapping[str, int], device: Device, apart: Mapping[str, str] | None = None
    ) -> None:
        self._sizes, self.device, self.apart = dict(sizes), device, apart or {}
        self.decisions: dict[tuple[Dim, tuple[int, ...]], int] = {}
        self.candidates: dict[str, tuple[str, ...]] = {}
        self.stored: Mapping[Value, str] = {}
        self.constants: Collection[Value] = ()

    @property
    def target(self) -> Target:
        """The GPU."""
        return self.device.target

    def choose(self, key: str, names: Iterable[str]) -> str:
        """One of the kernels with these names: the choice for the key, else the first one, which
        the rules of irc give. `candidates` records the names of several."""
        first, *others = names
        if others:
            self.candidates[key] = (first, *others)
        choice = self.device.choices.get(key, "")
        return choice if choice in others else first

    def bucket(self, size: DimLike, bounds: Sequence[int]) -> int | None:
        """The least of the ascending `bounds` that is at least `size`; None where `size` is larger
        than all of them."""
        bound = bind(size, self._sizes)
        assert not isinstance(bound, Dim), f"{bound} has no value"
        number = bisect_left(bounds, bound)
        if isinstance(size, Dim):
            self.decisions[size, tuple(bounds)] = number
        return bounds[number] if number < len(bounds) else None

    def is_constant(self, value: Value) -> bool:
        """Whether no kernel writes a value during a step, so that all may read it at any time."""
        return isinstance(value, Weight) or value in self.constants

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Whether every decision comes out the same at other sizes."""
        for (size, bounds), number in self.decisions.items():
            bound = bind(size, sizes)
            if isinstance(bound, Dim) or bisect_left(bounds, bound) != number:
                return False
        return True

    def ranges(self) -> dict[Dim, tuple[int, int | None]]:
        """The least and the largest number of every size that decides; None: without a limit."""
        ranges: dict[Dim, tuple[int, int | None]] = {}
        for (size, bounds), number in self.decisions.items():
            least, largest = ranges.get(size, (0, None))
            if number:
                least = max(least, bounds[number - 1] + 1)
            if number < len(bounds):
                largest = bounds[number] if largest is None else min(largest, bounds[number])
            ranges[size] = least, largest
        return ranges

    def __getitem__(self, name: str) -> int:
        """The size of a symbol; a plan that depends on it holds for this very size."""
        size = self._sizes[name]
        self.decisions[symbol(name), (size - 1, size)] = 1
        return size

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

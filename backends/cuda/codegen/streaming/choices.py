"""The shape of the kernels of streaming products: warps, copies, and shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

MOST_ROWS = 16


@dataclass(frozen=True)
class Target:
    """A GPU: its compute capability, multiprocessors, and shared memory of a block in bytes.

    A block takes more than half of it, so that each multiprocessor has one block: where two fit,
    they are placed unevenly. It leaves some to attention, which may start beside it.
    """

    capability: int = 90
    multiprocessors: int = 132
    shared: int = 227 << 10

    @property
    def budget(self) -> int:
        """Bytes of shared memory that a product uses."""
        return self.shared - (27 << 10 if self.shared > 200 << 10 else 0)


H200 = Target()
_targets = [H200]


def target() -> Target:
    """The GPU that kernels are made for: an H200 until `use` is called."""
    return _targets[-1]


def use(new: Target) -> None:
    """Make kernels for the GPU of this process."""
    _targets[-1] = new


@dataclass(frozen=True)
class Choice:
    """One kernel: its constants, its dynamic shared memory and its grid."""

    constants: dict[str, int]
    shared: int
    blocks: int

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.constants["WARPS"]

    @property
    def name(self) -> str:
        """What distinguishes it from the other candidates of a product."""
        return f"{'one_row' if 'PIECE' in self.constants else 'tiles'} {self.warps}"


def candidates(
    n: int, k: int, gated: bool, codes: Codes, rows: int, target: Target
) -> Iterator[Choice | str]:
    """The kernels that could compute a product, or why one cannot; those of the rules first."""
    if rows == 1 and codes.bits == 16:
        yield from (one_row(n, k, gated, target, warps) for warps in (0, 6, 8, 10, 12, 16))
    for warps in ((8, 4), (4,), (6,), (12,), (16,)):
        yield tiles(n, k, gated, codes, rows, target, warps)


def one_row(n: int, k: int, gated: bool, target: Target, warps: int = 0) -> Choice | str:
    """The kernel for one row of x in 16-bit floats (one_row.cuh), or why there is none.

    `warps` of a block are chosen by the size of the weights where they are 0.
    """
    if target.capability < 90:
        return "bulk copies need compute capability 9.0"
    piece = next((p for p in range(2048, 768, -256) if k % p == 0), 0)
    if not piece:
        return f"rows of {k} weights cannot be cut into copies of 2 to 4 KB"
    large = n * k * (2 if gated else 1) >= 1 << 24
    warps, size = warps or (12 if large else 8), 2 * piece
    fixed = -(-2 * k // 128) * 128 + 4 * warps
    stages = min(12, (target.budget - fixed) // (warps * (size + 8)))
    if stages < 2:
        return f"x of {k} numbers leaves no shared memory for weights"
    shared = fixed + warps * stages * (size + 8)
    constants = {"WARPS": warps, "STAGES": stages, "PIECE": piece}
    return Choice(constants, _alone(shared, target), min(target.multiprocessors, n))


@dataclass(frozen=True)
class Codes:
    """How weights are stored: bits of a code, and columns that share a scale (0: no scales)."""

    bits: int
    group: int = 0
    zero: bool = False

    def lane(self, k: int) -> int:
        """Bytes of a row of k columns that a lane takes at once, so that four lanes share a scale;
        0 if there is no such number."""
        return next((size for size in (16, 8, 4) if self._fits(size, k)), 0)

    def _fits(self, size: int, k: int) -> bool:
        columns = 32 * size // self.bits
        return size >= self.bits and k % columns == 0 and self.group % columns == 0


# Warps of a block, tiles of 16 rows that they compute at a time, and pieces of each that are under way.
SHAPES = ((16, 1, 4), (16, 2, 2), (16, 2, 3), (16, 2, 4), (16, 3, 2), (8, 1, 8), (8, 2, 4), (8, 2, 6), (8, 3, 3), (8, 3, 4))


def tiles(
    n: int,
    k: int,
    gated: bool,
    codes: Codes,
    rows: int,
    target: Target,
    shape: tuple[int, ...] = (16, 2, 2, 1, 1, 0, 0),
) -> Choice | str:
    """The kernel for up to 16 rows of x (tiles.cuh), or why there is none."""
    lane = codes.lane(k)
    if not lane:
        return f"rows of {k} weights of {codes.bits} bits with scales for groups of {codes.group} do not fit"
    warps, count, depth, pair, blocks, prefetch, steady = shape
    rows = next(size for size in (1, 2, 4, 8, 16) if rows <= size)
    columns = 32 * lane // codes.bits
    rounds = depth * ceil(k // columns / (warps * depth))
    parts = 4 * (2 if rows <= 4 else 1) * warps * rows * (16 * count + 4)
    fixed = parts + 12 * warps * rows
    phase, room = rounds, target.budget - fixed
    if codes.bits < 16:
        while rows * (2 * min(k, phase * warps * columns) + 64) > room:
            phase = depth * ceil(ceil(phase / depth) / 2) if phase > depth else 0
            if not phase:
                return f"{rows} rows of {k} numbers leave no shared memory for weights"
        fixed += rows * (2 * min(k, phase * warps * columns) + 64)
    constants = {"WARPS": warps, "TILES": count, "DEPTH": depth, "LANE": lane, "ROWS": rows, "PHASE_ROUNDS": phase, "PAIR": pair, "PREFETCH": prefetch, "STEADY": steady, "BLOCKS": blocks}
    return Choice(constants, fixed, min(max(1, blocks) * target.multiprocessors, n))


def _alone(shared: int, target: Target) -> int:
    """So much that no second block fits beside it."""
    return max(shared, target.shared // 2 + 1024)

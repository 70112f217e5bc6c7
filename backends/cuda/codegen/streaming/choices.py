"""The shape of the kernels of streaming products: warps, copies, and shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil

from ...plan.regime import Target

MOST_ROWS = 16
# Of kernels for weights of so many bits: warps, tiles and depth, that of the rules first.
SHAPES = {
    16: ((12, 2, 4), (8, 2, 6), (16, 2, 2)),
    8: ((16, 2, 2), (16, 3, 2), (8, 2, 2)),
    4: ((16, 2, 2), (16, 3, 2), (8, 2, 4), (8, 2, 2), (4, 2, 2)),
}


# Bytes of shared memory that a product leaves to attention, which may start beside it.
BESIDE, LARGE = 27 << 10, 200 << 10


def budget(target: Target) -> int:
    """Bytes of shared memory that a product uses.

    A block takes more than half of what there is, so that each multiprocessor has one block: where
    two fit, they are placed unevenly.
    """
    return target.shared - (BESIDE if target.shared > LARGE else 0)


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
        if "PIECE" in self.constants:
            return f"one_row {self.warps}"
        return "tiles {WARPS}x{TILES}x{DEPTH}".format_map(self.constants)


def candidates(
    n: int, k: int, gated: bool, codes: Codes, rows: int, target: Target
) -> Iterator[Choice | str]:
    """The kernels that could compute a product, or why one cannot; those of the rules first."""
    if rows == 1 and codes.bits == 16:
        found = [one_row(n, k, gated, target, warps) for warps in (0, 6, 8, 10, 12, 16)]
        if isinstance(found[0], Choice):  # the others compute no norm
            yield from found
            return
    shapes = SHAPES[codes.bits]
    if codes.bits < 16 and 32 < ceil(n / target.multiprocessors) * (1 + gated) <= 48:
        shapes = (shapes[1], *shapes)  # all rows of a block at once
    for shape in shapes:
        yield tiles(n, k, gated, codes, rows, target, shape)


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
    stages = min(12, (budget(target) - fixed) // (warps * (size + 8)))
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


def tiles(
    n: int, k: int, gated: bool, codes: Codes, rows: int, target: Target, shape: tuple[int, ...]
) -> Choice | str:
    """The kernel for up to 16 rows of x (tiles.cuh), or why there is none. `shape`: warps of a
    block, tiles of 16 rows of weights that they compute at once, and pieces under way."""
    lane = codes.lane(k)
    if not lane:
        groups = f" in groups of {codes.group}" if 0 < codes.group < k else ""
        return f"rows of {k} weights of {codes.bits} bits{groups} cannot be cut into pieces"
    rows = next(size for size in (1, 2, 4, 8, 16) if rows <= size)
    (warps, tiles, depth), columns = shape, 32 * lane // codes.bits
    rounds = depth * ceil(k // columns / (warps * depth))
    fixed = 4 * warps * rows * ((2 if rows <= 4 else 1) * (16 * tiles + 4) + 3)
    phase, staged = rounds, 0
    while codes.bits < 16:  # as few phases of x as leave room
        staged = rows * (2 * min(k, phase * warps * columns) + 64)
        if fixed + staged <= budget(target):
            break
        if phase == depth:
            return f"{rows} rows of {k} numbers do not fit the shared memory"
        phase = depth * ceil(phase / depth / 2)
    constants = {"WARPS": warps, "TILES": tiles, "DEPTH": depth, "PAIR": 2 - depth % 2}
    constants |= {"LANE": lane, "ROWS": rows, "PHASE_ROUNDS": phase}
    shared = fixed + staged
    if codes.bits < 16 or rows <= 4:  # otherwise x needs room in the L1 cache
        shared = _alone(shared, target)
    return Choice(constants, shared, min(target.multiprocessors, n))


def _alone(shared: int, target: Target) -> int:
    """So much that no second block fits beside it."""
    return max(shared, target.shared // 2 + 1024)

"""The shape of the kernels of streaming products: warps, copies, and shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

MOST_ROWS = 16
TILE = 32  # rows of weights that a block computes at a time


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

    @property
    def strip(self) -> int:
        """Columns in 128 bytes of a row."""
        return 1024 // self.bits

    def scales(self) -> int:
        """Numbers in f32 that a row needs in a strip: scales, and zero points."""
        return max(1, self.strip // self.group) * (2 if self.zero else 1) if self.group else 0

    def lane(self) -> int:
        """Bytes of a row that a lane takes at once, so that four lanes share a scale; 0: none."""
        sizes = [size for size in (16, 8, 4) if size >= self.bits]
        return next((size for size in sizes if self._fits(32 * size // self.bits)), 0)

    def _fits(self, step: int) -> bool:
        return self.group % step == 0 and (
            self.group % self.strip == 0 or self.strip % self.group == 0
        )


def tiles(
    n: int,
    k: int,
    gated: bool,
    codes: Codes,
    rows: int,
    target: Target,
    warps: Sequence[int] = (8, 4),
) -> Choice | str:
    """The kernel for up to 16 rows of x (tiles.cuh), or why there is none.

    Of the numbers of warps, the first that leaves memory for weights is taken.
    """
    if k % codes.strip:
        return f"a row of {k} weights of {codes.bits} bits is no multiple of 128 bytes"
    if not codes.lane():
        return f"scales for groups of {codes.group} columns do not fit its operands"
    rows = next(size for size in (1, 2, 4, 8, 16) if rows <= size)
    for count in warps:
        found = _tiles(n, k, gated, codes, rows, count, target)
        if found is not None:
            return found
    return f"{rows} rows of {k} numbers leave no shared memory for weights"


def _tiles(
    n: int, k: int, gated: bool, codes: Codes, rows: int, warps: int, target: Target
) -> Choice | None:
    """The kernel with as few phases of x as leave memory for four strips of weights per warp."""
    strips, blocks = k // codes.strip, min(target.multiprocessors, n)
    slot = TILE * (128 + 4 * codes.scales())
    parts = 4 * (2 if rows <= 4 else 1) * warps * rows * (TILE + 4) + 12 * rows
    most = ceil(ceil(n / blocks) / (TILE // 2 if gated else TILE))  # tiles of a block
    best: Choice | None = None
    for phases in range(1, strips + 1):
        columns = ceil(strips / phases)
        if columns < min(warps, strips) and best is not None:
            break
        if columns > warps:
            columns = ceil(columns / warps) * warps
        totals = 4 * TILE * rows * most if columns < strips else 0
        fixed = rows * (2 * columns * codes.strip + 64) + parts + totals
        stages = min(12, (target.budget - fixed) // (warps * slot))
        if stages > (best.constants["STAGES"] if best else 1):
            constants = {"WARPS": warps, "STAGES": stages, "PHASE_STRIPS": columns, "ROWS": rows}
            shared = _alone(fixed + warps * stages * slot, target)
            best = Choice(constants | {"LANE": codes.lane()}, shared, blocks)
        if stages >= 4:
            break
    return best


def _alone(shared: int, target: Target) -> int:
    """So much that no second block fits beside it."""
    return max(shared, target.shared // 2 + 1024)

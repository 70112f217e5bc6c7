"""The shape of the kernels of streaming products: warps, copies, and shared memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import ceil

from ...plan.regime import Target

MOST_ROWS = 16
# Of kernels for weights of so many bits: warps, tiles and depth, that of the rules first.
SHAPES = {
    16: ((12, 2, 4), (8, 2, 6), (16, 2, 2)),
    8: ((16, 2, 2), (16, 3, 2), (8, 2, 2)),
    4: ((16, 2, 2), (16, 3, 2), (8, 2, 4), (8, 2, 2), (4, 2, 2)),
}
# Of kernels with chunks: warps, and blocks of a cluster.
CHUNK_WARPS, CLUSTERS = 8, (1, 2, 4, 8)


# Bytes of shared memory that a product leaves to attention, which may start beside it.
BESIDE, LARGE = 27 << 10, 200 << 10
# Of the kernel for one row: chunks of a sum over all columns, which at most so many ranks divide;
# stages of its rings, bytes that are taken from a ring at once, and of a copy.
CHUNKS = 8
MOST_STAGES, MOST_BYTES, COPIES = 8, 4096, (3072, 6144)
# Warps of a block, those that are tried first first: for few weights, for one matrix and for two.
# Fewer than LEAST_WARPS only where there is no room for more.
LEAST_WARPS = 8
ORDER_OF_WARPS, LARGE_WEIGHTS = ((8, 12, 6, 4), (12, 8, 10, 6, 4), (8, 12, 10, 6, 4)), 1 << 24
LARGEST_X = 64 << 10  # bytes of x in a block of a kernel with chunks


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
    def ring(self) -> int:
        """Bytes under way to the warps of a block of a kernel for one row."""
        return self.constants["STAGES"] * self.constants["COPY"] * self.warps

    @property
    def kernel(self) -> str:
        """The file with the kernel."""
        by_constant = {"CHUNKS": "one_row", "STRIPS": "chunks", "TILES": "tiles"}
        return next(name for constant, name in by_constant.items() if constant in self.constants)

    @property
    def cluster(self) -> int:
        """Blocks of a cluster, which lie along x of the grid; the clusters then lie along y."""
        return self.constants.get("CLUSTER", 1)

    @property
    def resident(self) -> int:
        """Blocks for which the registers of a multiprocessor have to suffice."""
        return 1 if self.kernel == "tiles" else 2

    def has_norm(self, codes: Codes) -> bool:
        """Whether it can compute rms_norm of x."""
        if self.kernel == "one_row":
            return True
        return codes.bits < 16 and (self.kernel == "tiles" or self.constants["ROWS"] == 1)

    def grid(self, layers: int) -> tuple[int, int, int]:
        """The grid for so many times MOST_ROWS rows of x."""
        if self.kernel == "chunks":
            return self.cluster, self.blocks // self.cluster * layers, 1
        return self.blocks, layers, 1

    @property
    def name(self) -> str:
        """What distinguishes it from the other candidates of a product."""
        if self.kernel == "one_row":
            return f"one_row {self.warps}"
        if self.kernel == "chunks":
            return "chunks of {STRIPS}, {CLUSTER} blocks".format_map(self.constants)
        return "tiles {WARPS}x{TILES}x{DEPTH}".format_map(self.constants)


def candidates(
    n: int, k: int, gated: bool, codes: Codes, rows: int, target: Target, ranks: int
) -> Iterator[Choice | str]:
    """The kernels that could compute a product, or why one cannot; those of the rules first.

    Columns of the weights are divided among `ranks`, of which each has `k`.
    """
    if rows == 1 and codes.bits == 16:
        answers = [one_row(n, k, gated, target, warps, ranks) for warps in (0, 6, 8, 10, 12, 16)]
        if isinstance(answers[0], Choice):  # the others compute no norm
            yield from answers
            return
    shapes, strips = SHAPES[codes.bits], (2, 1, 3)
    if codes.bits < 16 and 32 < ceil(n / target.multiprocessors) * (1 + gated) <= 48:
        shapes = (shapes[1], *shapes)  # all rows of a block at once
        strips = (3, 2, 1) if rows == 1 else strips
    of_chunks = [
        chunks(n, k, gated, codes, rows, target, *shape)
        for shape in product(strips, CLUSTERS if rows > 1 else CLUSTERS[:1])
    ]
    of_tiles = [tiles(n, k, gated, codes, rows, target, shape) for shape in shapes]
    by_chunks = codes.bits == 8 or (codes.bits == 4 and rows > 1)
    yield from (*of_chunks, *of_tiles) if by_chunks else (*of_tiles, *of_chunks)


def one_row(
    n: int, k: int, gated: bool, target: Target, warps: int = 0, ranks: int = 1
) -> Choice | str:
    """The kernel for one row of x in 16-bit floats (one_row.cuh), or why there is none.

    `warps` of a block are chosen by the size of the weights where they are 0. Of a matrix whose
    columns are divided among `ranks`, `k` are those of one of them. Neither the target nor the
    number of rows of weights changes the order of additions.
    """
    if target.capability < 90:
        return "bulk copies need compute capability 9.0"
    if k % 8:
        return f"rows of {k} weights do not start at multiples of 16 bytes"
    matrices = 2 if gated else 1
    if not warps:
        order = ORDER_OF_WARPS[0 if n * k * matrices < LARGE_WEIGHTS else matrices]
        answers = [one_row(n, k, gated, target, warps, ranks) for warps in order]
        kernels = [answer for answer in answers if isinstance(answer, Choice)]
        most = [kernel for kernel in kernels if kernel.warps >= LEAST_WARPS] or kernels
        return max(most, key=lambda kernel: kernel.ring) if most else answers[0]
    chunks = CHUNKS // ranks if CHUNKS % ranks == 0 else 1
    chunks = chunks if k % (8 * chunks) == 0 else 1
    chunk, most = k // 8 // chunks, MOST_BYTES // (16 * matrices)  # vectors of 16 bytes
    lanes = next((size for size in (8, 16) if 32 // size * chunk <= most), 32)
    of_all = chunk * min(chunks, 32 // lanes)  # that all lanes sum together
    sets = max(size for size in (1, 2, 4, 8) if size == 1 or size * of_all <= min(most, k // 8))
    segment = sets * of_all
    if segment > most:  # a part of a chunk
        segment = 32 * ceil(ceil(chunk / 32) / ceil(chunk / most))
    fixed = -(-2 * k // 128) * 128 + 4 * ceil(k / 256)
    room = (budget(target) - fixed) // (warps * matrices) - 8 * MOST_STAGES
    whole = 16 * max(segment, chunk)
    sizes = [c for c in range(whole, COPIES[1] + 1, whole) if COPIES[0] <= c <= room // 2]
    sizes = sizes or [min(MOST_BYTES, room // 2 // 128 * 128)]  # some begin inside a segment
    stages, copy = max(
        ((min(MOST_STAGES, room // max(size, 1)), size) for size in sizes),
        key=lambda ring: ring[0] * ring[1],
    )
    if stages < 2 or copy < 16 * segment:
        return f"x of {k} numbers leaves no shared memory for weights"
    shared = fixed + warps * matrices * stages * (copy + 8)
    constants = {"WARPS": warps, "STAGES": stages, "COPY": copy, "CHUNKS": chunks}
    constants |= {"LANES": lanes, "SEGMENT": segment}
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

    def chunk_lane(self, k: int) -> int:
        """The same where pieces at the end of a row may be incomplete, and rows start at multiples
        of 16 bytes."""
        group = self.group if self.group < k else 0
        sizes = [s for s in (16, 8, 4) if s >= self.bits and group % (32 * s // self.bits) == 0]
        return sizes[0] if sizes and k * self.bits % 128 == 0 else 0

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


def chunks(
    n: int, k: int, gated: bool, codes: Codes, rows: int, target: Target, strips: int, cluster: int
) -> Choice | str:
    """The kernel for up to 16 rows of x (chunks.cuh), or why there is none: `strips` of 16 rows of
    weights at once, and blocks of a cluster, which share the columns."""
    lane, size, warps = codes.chunk_lane(k), 1024 // codes.bits, CHUNK_WARPS
    if target.capability < 90:
        return "clusters need compute capability 9.0"
    if not lane:
        return f"rows of {k} weights of {codes.bits} bits cannot be cut into chunks"
    rows = next(most for most in (1, 2, 4, 8, 16) if rows <= most)
    clusters = clusters_of(target, cluster)
    unit, held = strips * (8 if gated else 16), ceil(ceil(k / size) / cluster)
    words = (0 < codes.group < k) + codes.zero
    stage = 16 * strips * (128 + 128 // lane * words)
    sums = ceil(unit * rows / cluster / 4 + 1) * (1 + gated) if cluster > 1 else 1  # in fours
    fixed = 4 * warps * (2 * rows * (16 * strips + 4) + 1 + rows) + 64 * cluster * sums + 32
    fixed += 8 * ((n // clusters + unit) // unit) * (2 if cluster > 1 else 1)
    staged = held * 2 * size * rows
    stages = min(12, (budget(target) - fixed - staged) // (warps * stage))
    if stages < 2 or staged > LARGEST_X:
        return f"{rows} rows of {k} numbers do not fit the shared memory"
    shared = fixed + staged + stages * warps * stage
    constants = {"WARPS": warps, "STRIPS": strips, "STAGES": stages, "CLUSTER": cluster}
    constants |= {"LANE": lane, "ROWS": rows, "SHARED_BYTES": shared}
    return Choice(constants, _alone(shared, target), clusters * cluster)


def clusters_of(target: Target, size: int) -> int:
    """How many clusters of so many blocks run at once: not all multiprocessors are in a cluster of
    more than two. An H200 has 30 of 4 blocks, and 15 of 8."""
    usable = target.multiprocessors - (12 if size > 2 else 0)
    return max(1, usable // size)


def _alone(shared: int, target: Target) -> int:
    """So much that no second block fits beside it."""
    return max(shared, target.shared // 2 + 1024)

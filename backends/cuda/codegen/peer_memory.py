"""Collectives of ranks that write to each other's memory: sums, with the residual that is added
behind, and shards of all ranks.

Sums of streaming products are added in f32, as one rank does; others are rounded before.
"""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace as with_parts

from irc.ir.core import Value
from irc.ir.dims import DimLike, exact_divide, product
from irc.ir.dtypes import numpy_dtype
from irc.ops import AllGather, AllReduce, AllReduceAdd, FusedLinear
from irc.ops.fused_linear import LinearParts

from ..plan.core import WARP
from ..plan.regime import Regime
from ..plan.template import Grid, Sizes, Template, launches_of
from .body import Body
from .files import helpers
from .kernels import launch, number
from .streaming.products import streamed

LARGEST = 1 << 20  # bytes that a rank sends another one, above which NCCL is faster
MOST_RANKS = 8  # of peer_memory.cuh, as those below
MOST_BLOCKS, PACK = 64, 16  # PACK: bytes
THREADS = (128, 512)  # of a block, at least and at most


def buffer_size(ranks: int) -> int:
    """Bytes of the memory of one rank into which the others write."""
    return 2 * ranks * LARGEST


@launches_of(FusedLinear, order=-1)
def reduced_linear(op: FusedLinear, regime: Regime) -> list[Template] | str | None:
    """The launch of a product that writes its sums in f32, before rounding, and that of the sum
    over ranks."""
    parts = LinearParts.of(op)
    if not op.axis or op.act:
        return f"{op.act} rounds before ranks add" if op.axis else None
    sums = Value(op.result.type.replace(dtype="f32"), None, 0)
    parts = with_parts(parts, axis="", residual=None)
    product = streamed(op, parts, sums, regime)
    total = _summed(op, sums, op.residual, regime)
    if isinstance(product, str) or isinstance(total, str):
        return product if isinstance(product, str) else str(total)
    return [product, total]


@launches_of(AllReduce, AllReduceAdd)
def all_reduce(op: AllReduce | AllReduceAdd, regime: Regime) -> list[Template] | str:
    """The launch of a sum over ranks, with the residual that is added behind."""
    kind, dtype = op.attributes.get("op", "sum"), op.x.type.dtype
    if kind != "sum" or dtype not in ("f32", "f16", "bf16"):
        return f"ranks write to each other sums of floats, no {kind} of {dtype}"
    residual = op.residual if isinstance(op, AllReduceAdd) else None
    total = _summed(op, op.x, residual, regime)
    return total if isinstance(total, str) else [total]


@launches_of(AllGather)
def all_gather(op: AllGather, regime: Regime) -> list[Template] | str:
    """The launch that joins the operands of all ranks. Half of a word that is sent is data."""
    size, count = numpy_dtype(op.x.type.dtype).itemsize, product(op.x.type.shape)
    if size < 4 and exact_divide(count, 4 // size) is None:
        return f"ranks write words of 4 bytes to each other, which {op.x.type} has no number of"
    sent = Sent(op, count, 2 * size)
    if why := sent.refusal(regime):
        return why
    body = Body([op.x])
    words = f"{body.size(count)} * {size} / 4"
    pointers = f"(const u32*){body.pointer(op.x)}, (u32*)out0"
    body.line(f"all_gather<{op.group_size}>({pointers}, peers, {words});")
    return [sent.launch("all_gather", body, regime)]


def _summed(
    op: FusedLinear | AllReduce | AllReduceAdd, x: Value, residual: Value | None, regime: Regime
) -> Template | str:
    """The launch of the sum of x over ranks."""
    count = product(x.type.shape)
    sent = Sent(op, count, numpy_dtype(x.type.dtype).itemsize)
    if why := sent.refusal(regime):
        return why
    body = Body([x] if residual is None else [x, residual])
    pointers = [body.pointer(value) for value in body.stored]
    flags = f"{op.group_size}, {str(residual is not None).lower()}"
    rest = "out0" if residual is None else pointers[1]
    given = f"{pointers[0]}, {rest}, out0, peers, {body.size(count)}"
    body.line(f"all_reduce<{flags}>({given});")
    return sent.launch("all_reduce", body, regime)


@dataclass(frozen=True)
class Sent:
    """What an operation sends from one rank to another: `count` times so many bytes."""

    op: FusedLinear | AllReduce | AllReduceAdd | AllGather
    count: DimLike
    nbytes: int

    def refusal(self, regime: Regime) -> str:
        """Why NCCL sends it, or nothing."""
        ranks = self.op.group_size
        if not 1 < ranks <= MOST_RANKS:
            return f"{ranks} ranks are not 2 to {MOST_RANKS}, which write to each other"
        fits = regime.bucket(self.count, (LARGEST // self.nbytes,)) is not None
        return "" if fits else f"NCCL sends more than {LARGEST} bytes faster"

    def launch(self, name: str, body: Body, regime: Regime) -> Template:
        """The launch in few blocks, of more threads where each has several packs."""
        of_all = MOST_BLOCKS * PACK  # bytes of one thread of every block
        threads = range(THREADS[0], THREADS[1] + 1, WARP)
        bounds = [of_all * number // self.nbytes for number in threads]
        bound = regime.bucket(self.count, bounds)

        def grid(sizes: Sizes) -> Grid:
            packs = -(-number(self.count, sizes) * self.nbytes // PACK)
            return max(1, min(MOST_BLOCKS, -(-packs // THREADS[0]))), 1, 1

        return launch(
            name,
            body,
            [self.op.result],
            grid,
            operations=[self.op],
            block=THREADS[1] if bound is None else threads[bounds.index(bound)],
            helpers=helpers("peer_memory.cuh"),
            peers=self.op.axis,
        )

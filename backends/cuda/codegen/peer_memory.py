"""Collectives of ranks that write to each other's memory: sums, with the residual that is added
behind, and shards of all ranks.

Sums of streaming products are added in f32, as one rank does; others are rounded before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from irc.ir.core import Op, Value
from irc.ir.dims import product
from irc.ir.dtypes import numpy_dtype
from irc.ops import Add, AddRmsNorm, AllGather, AllReduce, Linear

from ..plan.core import WARP
from ..plan.template import Fused, Sizes, Template, fusion
from .body import Body
from .files import helpers
from .kernels import launch, number
from .norms import norm_of_sum
from .streaming.products import Product, product_of, streamed

LARGEST = 1 << 20  # bytes that a rank sends another one, above which NCCL is faster
MOST_RANKS = 8  # of peer_memory.cuh, as those below
MOST_BLOCKS, PACK = 64, 16  # PACK: bytes
THREADS = (128, 512)  # of a block, at least and at most


def buffer_size(ranks: int) -> int:
    """Bytes of the memory of one rank into which the others write."""
    return 2 * ranks * LARGEST


@fusion(AllReduce)
def _alone(op: Op, sizes: Sizes) -> Fused | str | None:
    assert isinstance(op, AllReduce)
    return _summed(op, None, [op], op.result, sizes)


@fusion(Add, order=-1)
def _added(op: Op, sizes: Sizes) -> Fused | str | None:
    assert isinstance(op, Add)
    return _with_residual(op, (op.x, op.y), op.result, sizes)


@fusion(AddRmsNorm, order=-1)
def _added_norm(op: Op, sizes: Sizes) -> Fused | str | None:
    """The total by this kernel, and its norm by one of its own for those who need it."""
    assert isinstance(op, AddRmsNorm)
    found = _with_residual(op, (op.x, op.residual), op.results[1], sizes)
    if not isinstance(found, Fused):
        return found
    return Fused((*found.templates, norm_of_sum(op)), found.covers)


@fusion(AllGather)
def _gathered(op: Op, sizes: Sizes) -> Fused | str | None:
    """Half of a word that is sent is data."""
    assert isinstance(op, AllGather)
    size, nbytes = numpy_dtype(op.x.type.dtype).itemsize, _nbytes(op.x, sizes)
    if nbytes % 4:
        return f"ranks write numbers of 4 bytes to each other, no {nbytes} bytes"
    if why := _refused(op, 2 * nbytes):
        return why
    body = Body([op.x])
    count = f"{body.size(product(op.x.type.shape))} * {size} / 4"
    pointers = f"(const u32*){body.pointer(op.x)}, (u32*)out0"
    body.line(f"all_gather<{op.group_size}>({pointers}, peers, {count});")
    return Fused((_launched("all_gather", body, [op], op.result, 2 * nbytes),), (op,))


def _with_residual(
    op: Op, pair: tuple[Value, Value], total: Value, sizes: Sizes
) -> Fused | str | None:
    for x, residual in (pair, pair[::-1]):
        made = x.producer
        if not isinstance(made, AllReduce) or len(x.users) != 1 or x is residual:
            continue
        if residual.type == x.type:
            return _summed(made, residual, [made, op], total, sizes)
    return None


def _summed(
    op: AllReduce, residual: Value | None, covers: Sequence[Op], total: Value, sizes: Sizes
) -> Fused | str:
    if op.op != "sum" or op.x.type.dtype not in ("f32", "f16", "bf16"):
        return f"ranks write to each other sums of floats, no {op.op} of {op.x.type.dtype}"
    before = _unrounded(op.x, sizes)
    x = before.templates[0].writes[0] if before.templates else op.x
    nbytes = _nbytes(x, sizes)
    if why := _refused(op, nbytes):
        return why
    body = Body([x] if residual is None else [x, residual])
    pointers = [body.pointer(each) for each in body.stored]
    flags = f"{op.group_size}, {str(residual is not None).lower()}"
    rest = "out0" if residual is None else pointers[1]
    given = f"{pointers[0]}, {rest}, out0, peers, {body.size(product(x.type.shape))}"
    body.line(f"all_reduce<{flags}>({given});")
    launched = _launched("all_reduce", body, covers, total, nbytes)
    return Fused((*before.templates, launched), (*before.covers, *covers))


def _unrounded(x: Value, sizes: Sizes) -> Fused:
    """The launch of a product that writes a new value, the f32 before rounding; or no launches."""
    op = x.producer
    found = product_of(op) if isinstance(op, Linear) and len(x.users) == 1 else None
    if isinstance(found, Product):
        result = Value(x.type.replace(dtype="f32"), None, 0)
        launched = streamed(replace(found, result=result), sizes)
        if isinstance(launched, Fused):
            return launched
    return Fused((), ())


def _nbytes(x: Value, sizes: Sizes) -> int:
    return number(product(x.type.shape), sizes) * numpy_dtype(x.type.dtype).itemsize


def _refused(op: AllReduce | AllGather, sent: int) -> str:
    """Why NCCL computes it."""
    if op.group_size > MOST_RANKS:
        return f"{op.group_size} ranks are more than the {MOST_RANKS} that write to each other"
    return f"NCCL sends {sent} bytes faster" if sent > LARGEST else ""


def _launched(name: str, body: Body, covers: Sequence[Op], result: Value, sent: int) -> Template:
    packs = -(-sent // PACK)
    blocks = max(1, min(MOST_BLOCKS, -(-packs // THREADS[0])))
    return launch(
        name,
        body,
        [result],
        lambda _: (blocks, 1, 1),
        operations=covers,
        block=max(THREADS[0], min(THREADS[1], -(-packs // blocks // WARP) * WARP)),
        helpers=helpers("peer_memory.cuh"),
        peers=next(each.axis for each in covers if isinstance(each, AllReduce | AllGather)),
    )

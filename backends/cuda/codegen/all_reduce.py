"""Sums over ranks that write to each other's memory, with the residual that is added behind."""

from __future__ import annotations

from irc.ir.core import Op, Value
from irc.ir.dims import product
from irc.ir.dtypes import numpy_dtype
from irc.ops import Add, AddRmsNorm, AllReduce

from ..plan.core import WARP
from ..plan.template import Fused, Grid, Sizes, Template, fusion
from .body import Body
from .files import helpers
from .kernels import launch, number
from .norms import norm_of_sum

LARGEST = 1 << 20  # bytes, above which NCCL is faster
MOST_RANKS = 8  # of all_reduce.cuh, as those below
MOST_BLOCKS, PACK = 64, 16  # PACK: bytes
THREADS = (128, 512)  # of a block, at least and at most


def buffer_size(ranks: int) -> int:
    """Bytes of the memory of one rank into which the others write."""
    return 2 * ranks * LARGEST


@fusion(AllReduce)
def _alone(op: Op, sizes: Sizes) -> Fused | str | None:
    assert isinstance(op, AllReduce)
    return _refused(op, sizes) or Fused((_template(op, None, op, sizes),), (op,))


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


def _with_residual(
    op: Op, pair: tuple[Value, Value], total: Value, sizes: Sizes
) -> Fused | str | None:
    for x, residual in (pair, pair[::-1]):
        made = x.producer
        if not isinstance(made, AllReduce) or len(x.users) != 1 or x is residual:
            continue
        if residual.type == x.type:
            template = _template(made, residual, op, sizes, total)
            return _refused(made, sizes) or Fused((template,), (made, op))
    return None


def _refused(op: AllReduce, sizes: Sizes) -> str | None:
    """Why NCCL computes it."""
    if op.op != "sum" or op.x.type.dtype not in ("f32", "f16", "bf16"):
        return f"ranks write to each other sums of floats, no {op.op} of {op.x.type.dtype}"
    if op.group_size > MOST_RANKS:
        return f"{op.group_size} ranks are more than the {MOST_RANKS} that write to each other"
    nbytes = _count(op, sizes) * numpy_dtype(op.x.type.dtype).itemsize
    return f"NCCL adds {nbytes} bytes faster" if nbytes > LARGEST else None


def _count(op: AllReduce, sizes: Sizes) -> int:
    return number(product(op.x.type.shape), sizes)


def _template(
    op: AllReduce, residual: Value | None, last: Op, sizes: Sizes, total: Value | None = None
) -> Template:
    body = Body([op.x] if residual is None else [op.x, residual])
    count = body.size(product(op.x.type.shape))
    pointers = [body.pointer(each) for each in body.stored]
    flags = f"{op.group_size}, {str(residual is not None).lower()}"
    body.line(f"all_reduce<{flags}>({pointers[0]}, {pointers[-1]}, out0, peers, {count});")
    packs = -(-_count(op, sizes) * numpy_dtype(op.x.type.dtype).itemsize // PACK)
    blocks = max(1, min(MOST_BLOCKS, -(-packs // THREADS[0])))
    threads = max(THREADS[0], min(THREADS[1], -(-packs // blocks // WARP) * WARP))
    grid: Grid = (blocks, 1, 1)
    return launch(
        "all_reduce",
        body,
        [total or op.result],
        lambda _: grid,
        operations=[op] if last is op else [op, last],
        block=threads,
        helpers=helpers("all_reduce.cuh"),
        peers=op.axis,
    )

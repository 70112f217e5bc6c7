"""The largest elements of few long rows, such as logits: many blocks share a row."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from irc.ir.core import Op, Value
from irc.ir.dims import product
from irc.ir.dtypes import dtype
from irc.ir.types import TensorType
from irc.ops import Argmax, Topk

from ..plan.storage import leaves
from ..plan.template import Fused, Sizes, Template, fusion
from .body import ELEMENTS, Body, Index
from .files import helpers
from .kernels import BLOCK, launch, number

LONG = 1 << 14  # elements of a row, from which on it is shared
SLICE = 1 << 11  # elements of a block, at least
MOST = 1 << 10  # results per row, whose keys are in shared memory
BLOCKS = 264  # of all rows, about


@fusion(Argmax, Topk)
def split_select(op: Op, sizes: Sizes) -> Fused | str | None:
    """One launch for argmax or topk along the last dimension."""
    assert isinstance(op, Argmax | Topk)
    shape = op.x.type.shape
    count = op.k if isinstance(op, Topk) else 1
    if op.dim % len(shape) != len(shape) - 1 or number(shape[-1], sizes) < LONG:
        return None
    rows = number(product(shape[:-1]), sizes)
    parts = min(number(shape[-1], sizes) // SLICE, BLOCKS // max(rows, 1))
    if parts < 2 or rows < 1:
        return None
    if not isinstance(count, int) or count > MOST:
        return f"{op.opname} by many blocks per row: there are more than {MOST} results"
    return Fused((_template(op, count, rows, parts),), (op,))


def _template(op: Argmax | Topk, count: int, rows: int, parts: int) -> Template:
    """Every block finds the largest of its slice; the last one of a row, the largest of these."""
    read, _ = leaves(op.x, lambda value: type(value.producer) not in ELEMENTS)
    body = Body(read)
    length = body.size(op.x.type.shape[-1])
    body.line("const ix row = blockIdx.y, parts = gridDim.x, part = row * parts + blockIdx.x;")
    body.line(f"const ix slice = ({length} + parts - 1) / parts, first = blockIdx.x * slice;")
    body.line(f"const ix until = first + slice < {length} ? first + slice : {length};")
    index = body.unflattened("row", op.x.type.shape[:-1])
    with select(body, op.x, count, "first", "until", lambda i: (*index, i)):
        body.line(f"store(scratch0, part * {count} + i, (long long)chosen[i].value);")
        body.line(f"store(scratch1, part * {count} + i, (int)chosen[i].place);")
    body.lines += LAST.splitlines()
    body.line("auto found = [&](ix i) -> Key {")
    body.line("  return {(u64)load(scratch0, i), (u32)load(scratch1, i)};")
    body.line("};")
    candidates = f"row * parts * {count}, (row + 1) * parts * {count}"
    body.line(f"select_largest<{_width(op.x)}>({count}, {candidates}, found, chosen);")
    with body.block(f"for (int i = threadIdx.x; i < {count}; i += blockDim.x)"):
        at = body.variable("const ix", f"row * {count} + rank_of(i, {count}, chosen)")
        place = body.variable("const ix", "(ix)~chosen[i].place")
        if isinstance(op, Topk):
            body.line(f"store(out0, {at}, {body.element(op.x, (*index, place))});")
        body.line(f"store(out{len(op.results) - 1}, {at}, (int){place});")
    kept = (rows * parts * count,)
    return launch(
        "split_select",
        body,
        op.results,
        lambda _: (parts, rows, 1),
        operations=[op],
        block=BLOCK,
        scratch=[TensorType("i64", kept), TensorType("i32", kept)],
        zeros=[TensorType("i32", (rows,))],
        helpers=helpers("select.cuh"),
    )


@contextmanager
def select(
    body: Body, x: Value, count: int, first: str, until: str, index: Callable[[str], Index]
) -> Generator[None]:
    """Statements for the `count` largest elements of a row, and a loop over them as chosen[i].

    `first`, `until`: the elements of the row; `index` gives the index of one.
    """
    body.line(f"__shared__ Key chosen[{count}];")
    with body.block("auto key = [&](ix i) -> Key"):
        body.line(f"return {{ordered({body.element(x, index('i'))}), ~(u32)i}};")
    body.line(f";select_largest<{_width(x)}>({count}, {first}, {until}, key, chosen);")
    with body.block(f"for (int i = threadIdx.x; i < {count}; i += blockDim.x)"):
        yield


def _width(x: Value) -> int:
    """Bytes of an element as a key."""
    return 8 if dtype(x.type.dtype).bits == 64 else 4


# Only the block of a row that comes here last goes on.
LAST = """\
  __shared__ int is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd((int*)zeros0 + row, 1) == (int)parts - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  if (threadIdx.x == 0) store(zeros0, row, 0);
"""

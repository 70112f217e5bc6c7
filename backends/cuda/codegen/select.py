"""Kernels that compare or place elements: argmax, topk, running sums, scatter_elements."""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager

from irc.ir.core import Value
from irc.ir.dims import product
from irc.ops import Argmax, Cumsum, ScatterElements, Topk

from ..plan.template import Template, kernels_of
from .body import REGISTERS, Body, Index
from .files import helpers
from .kernels import blocks, each_thing, launch
from .rows import Rows
from .split_select import MOST, select

COMBINE = {"add": "add", "mul": "mul", "max": "maximum", "min": "minimum"}
LONG = 1 << 11  # elements; in shorter rows every element is compared with every other

# Sums of a block's numbers from that of thread 0 to that of the caller, and the sum of all. It may
# be called again at once.
SCAN = """template <typename T> INLINE T block_scan(T value, T* before, T* total) {
  __shared__ T sums[1024];
  const int me = threadIdx.x, threads = blockDim.x;
  sums[me] = value;
  __syncthreads();
  for (int step = 1; step < threads; step *= 2) {
    T other = me >= step ? sums[me - step] : (T)0;
    __syncthreads();
    sums[me] = add(other, sums[me]);
    __syncthreads();
  }
  *before = me > 0 ? sums[me - 1] : (T)0;
  *total = sums[threads - 1];
  value = sums[me];
  __syncthreads();
  return value;
}
"""


@kernels_of(Argmax)
def argmax(op: Argmax, stored: Collection[Value]) -> list[Template]:
    """The place of the largest element of every row."""
    body, x = Body(stored), op.x
    rows = Rows(body, x.type.shape, (op.dim,))
    kind = REGISTERS[x.type.dtype][0]
    with rows.each():
        body.line(f"Place<{kind}> best = {{0, -1}};")
        with rows.columns() as column:
            found = body.element(x, rows.index(column))
            body.line(f"best = Larger()(best, Place<{kind}>{{{found}, {column}}});")
        rows.combined("best", "Larger")
        with rows.once():
            body.line("store(out0, row, (int)best.place);")
    return [rows.launch(op)]


@kernels_of(Topk)
def topk(op: Topk, stored: Collection[Value]) -> list[Template]:
    """The k largest elements of every row, in order."""
    size = op.x.type.shape[op.dim]
    short = isinstance(size, int) and size <= LONG
    if short or not isinstance(op.k, int) or op.k > MOST:
        return [_topk_by_counting(op, stored)]
    return [_topk_by_keys(op, stored)]


def _topk_by_counting(op: Topk, stored: Collection[Value]) -> Template:
    """Every element is placed by the number of elements in front of it."""
    body, x = Body(stored), op.x
    kind = REGISTERS[x.type.dtype][0]
    rows = Rows(body, x.type.shape, (op.dim,), together=True)
    rows.keep(kind)
    with rows.each():
        if rows.keeps:
            body.line("__syncthreads();")
            with rows.columns() as column:
                rows.remembered(column, body.element(x, rows.index(column)))
            body.line("__syncthreads();")
        with rows.columns() as column:
            index = rows.index(column)
            mine = rows.recall(kind, column) or body.element(x, index)
            front = body.variable("int", "0")
            with body.block(f"for (ix other = 0; other < {rows.length}; ++other)"):
                theirs = rows.recall(kind, "other") or body.element(x, rows.index("other"))
                first = f"Place<{kind}>{{{mine}, {column}}}, Place<{kind}>{{{theirs}, other}}"
                body.line(f"{front} += Larger()({first}).place != {column};")
            with body.block(f"if ({front} < {body.size(op.k)})"):
                _store_chosen(op, body, rows, front, mine, column)
    return rows.launch(op)


def _topk_by_keys(op: Topk, stored: Collection[Value]) -> Template:
    """The largest elements are found by their bytes, and placed by the number in front of them."""
    assert isinstance(op.k, int)
    body, x = Body(stored), op.x
    rows = Rows(body, x.type.shape, (op.dim,), together=True)
    with rows.each():
        with select(body, x, op.k, "0", rows.length, rows.index):
            rank = body.variable("const int", f"rank_of(i, {op.k}, chosen)")
            place = body.variable("const ix", "(ix)~chosen[i].place")
            _store_chosen(op, body, rows, rank, body.element(x, rows.index(place)), place)
        body.line("__syncthreads();")
    return rows.launch(op, helpers("select.cuh"))


def _store_chosen(op: Topk, body: Body, rows: Rows, number: str, value: str, place: str) -> None:
    """Write an element of the row as number `number` of the results."""
    at = op.dim % op.x.type.ndim
    index = rows.index("0")
    to = body.place(op.results[0], (*index[:at], number, *index[at + 1 :]))
    body.line(f"store(out0, {to}, {value});")
    body.line(f"store(out1, {to}, (int){place});")


@kernels_of(Cumsum)
def cumsum(op: Cumsum, stored: Collection[Value]) -> list[Template]:
    """The sum of every row up to each of its elements."""
    body, x, result = Body(stored), op.x, op.results[0]
    kind = REGISTERS[x.type.dtype][0]
    rows = Rows(body, x.type.shape, (op.dim,))
    with rows.each():
        body.line(f"{kind} sum = 0;")
        if not rows.together:
            with rows.columns() as column:
                index = rows.index(column)
                before = body.variable(kind, "sum")
                body.line(f"sum = add(sum, {body.element(x, index)});")
                done = before if op.exclusive else "sum"
                body.line(f"store(out0, {body.place(result, index)}, {done});")
        else:
            _scanned(op, body, rows, kind)
    return [rows.launch(op, SCAN if rows.together else "")]


def _scanned(op: Cumsum, body: Body, rows: Rows, kind: str) -> None:
    """Running sums of a row by all threads of a block, as many elements at a time."""
    head = f"for (ix start = 0; start < {rows.length}; start += (ix)blockDim.x)"
    with body.block(head):
        body.line("const ix column = start + (ix)threadIdx.x;")
        body.line(f"{kind} mine = 0, before, total;")
        with body.block(f"if (column < {rows.length})"):
            body.line(f"mine = {body.element(op.x, rows.index('column'))};")
        body.line("mine = block_scan(mine, &before, &total);")
        with body.block(f"if (column < {rows.length})"):
            place = body.place(op.results[0], rows.index("column"))
            done = "before" if op.exclusive else "mine"
            body.line(f"store(out0, {place}, add(sum, {done}));")
        body.line("sum = add(sum, total);")


@kernels_of(ScatterElements)
def scatter_elements(op: ScatterElements, stored: Collection[Value]) -> list[Template]:
    """x with updates; combined ones are in the order of the indices, so that sums are repeatable.

    An index out of range changes nothing.
    """
    if op.reduction == "none":
        return [_copied(op, stored), _replaced(op, stored)]
    return [_combined(op, stored)]


def _copied(op: ScatterElements, stored: Collection[Value]) -> Template:
    body, result = Body(stored), op.results[0]
    count = product(result.type.shape)
    with body.block(each_thing(body.size(count))):
        index = body.unflattened("i", result.type.shape)
        body.line(f"store(out0, i, {body.element(op.x, index)});")
    return launch("scatter_copy", body, op.results, blocks(count), operations=[op])


def _replaced(op: ScatterElements, stored: Collection[Value]) -> Template:
    body = Body(stored)
    count = product(op.indices.type.shape)
    with body.block(each_thing(body.size(count))):
        index = body.unflattened("i", op.indices.type.shape)
        with _target(op, body, index) as place:
            body.line(f"store(out0, {place}, {body.element(op.updates, index)});")
    return launch("scatter_elements", body, op.results, blocks(count), operations=[op])


def _combined(op: ScatterElements, stored: Collection[Value]) -> Template:
    """Every element looks for its updates, so that it is rounded once."""
    body, result = Body(stored), op.results[0]
    at, shape = op.dim % op.x.type.ndim, result.type.shape
    kind = REGISTERS[result.type.dtype][0]
    count = product(shape)
    with body.block(each_thing(body.size(count))):
        index = body.unflattened("i", shape)
        total = body.variable(kind, body.element(op.x, index))
        with body.block(f"for (ix k = 0; k < {body.size(op.indices.type.shape[at])}; ++k)"):
            place = (*index[:at], "k", *index[at + 1 :])
            wanted = body.element(op.indices, place)
            size = body.size(shape[at])
            with body.block(f"if ({wanted} == {index[at]} || {wanted} + {size} == {index[at]})"):
                update = body.element(op.updates, place)
                body.line(f"{total} = {COMBINE[op.reduction]}({total}, {update});")
        body.line(f"store(out0, i, {total});")
    return launch("scatter_elements", body, op.results, blocks(count), operations=[op])


@contextmanager
def _target(op: ScatterElements, body: Body, index: Index) -> Generator[str]:
    """Statements where an index is in range; the number of the element that it names."""
    at = op.dim % op.x.type.ndim
    size = body.size(op.x.type.shape[at])
    wanted = body.element(op.indices, index)
    to = body.variable("const long long", f"{wanted} < 0 ? {wanted} + {size} : {wanted}")
    with body.block(f"if ({to} >= 0 && {to} < {size})"):
        yield body.place(op.results[0], (*index[:at], f"(ix){to}", *index[at + 1 :]))

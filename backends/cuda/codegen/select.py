"""Kernels that compare or place elements: argmax, topk, running sums, scatter_elements."""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager

from irc.ir.core import Value
from irc.ir.dims import product
from irc.ir.dtypes import dtype
from irc.ir.types import TensorType
from irc.ops import Argmax, Cumsum, ScatterElements, Topk

from ..plan.regime import Regime
from ..plan.template import Grid, Sizes, Template, kernels_of
from .body import REGISTERS, Body, Index, Packs
from .files import helpers
from .kernels import BLOCK, blocks, each_thing, launch, number, pack_size
from .rows import Rows, bound

COMBINE = {"add": "add", "mul": "mul", "max": "maximum", "min": "minimum"}
SELECT, SCAN = helpers("select.cuh"), helpers("scan.cuh")
MOST = 1 << 10  # results per row, whose keys are in shared memory
COUNTED = 1 << 11  # elements of rows, up to which every element is compared with every other
LONG = 1 << 14  # elements of a row, from which on several blocks share it
SLICE = 1 << 11  # elements of a block of these, at least
BLOCKS = 264  # of all rows that are shared, at most


@kernels_of(Argmax)
def argmax(op: Argmax, regime: Regime) -> list[Template]:
    """The place of the largest element of every row."""
    return [_largest(op, 1, regime.stored)]


@kernels_of(Topk)
def topk(op: Topk, regime: Regime) -> list[Template]:
    """The k largest elements of every row, in order."""
    size, count = op.x.type.shape[op.dim], op.k
    short = isinstance(size, int) and size <= COUNTED
    if short or not isinstance(count, int) or count > MOST:
        return [_topk_by_counting(op, regime.stored)]
    return [_largest(op, count, regime.stored)]


def _topk_by_counting(op: Topk, stored: Collection[Value]) -> Template:
    """Every element is placed by the number of elements in front of it."""
    body, x = Body(stored), op.x
    kind = REGISTERS[x.type.dtype][0]
    rows = Rows(body, x.type.shape, (op.dim,), together=True)
    number = rows.kept(kind, lambda column: body.element(x, rows.index(column)))
    with rows.each():
        if rows.keeps:
            body.line("__syncthreads();")
            with rows.columns() as column:
                number(column)
            body.line("__syncthreads();")
        with rows.columns() as column:
            value = number(column)
            key = body.variable("const Key", f"{{ordered({value}), ~(u32){column}}}")
            front = body.variable("int", "0")
            with body.block(f"for (ix other = 0; other < {rows.length}; ++other)"):
                body.line(f"{front} += larger({{ordered({number('other')}), ~(u32)other}}, {key});")
            with body.block(f"if ({front} < {body.size(op.k)})"):
                _store_chosen(op, body, rows.index(front), value, column)
    return rows.launch(op, SELECT)


def reader(body: Body, x: Value, row: Index, dim: int, pack: int, kind: str) -> bool:
    """Define `read(pack, x)`, which reads `pack` neighbours along `dim` of a row as numbers of a
    kind; whether they turn out to lie apart. `row` is the index without this dimension."""
    with body.block(f"auto read = [&](ix pack, {kind} (&x)[{pack}])"):
        packs = Packs(pack, row, "pack", body.depth)
        body.packs = packs if pack > 1 else None
        columns = [body.variable("const ix", f"pack * {pack} + {i}") for i in range(pack)]
        packs.last.update((column, i) for i, column in enumerate(columns))
        for i, column in enumerate(columns):
            body.line(f"x[{i}] = {body.element(x, (*row[:dim], column, *row[dim:]))};")
        body.packs = None
    body.line(";")
    return packs.strided


def _sliced(op: Argmax | Topk, stored: Collection[Value], pack: int) -> tuple[Body, Index, bool]:
    """A body with the `slice` of a row that the block has, which is read in packs of `pack`
    neighbours; the index of the row; whether the packs turn out to be strided.
    """
    shape, dim = op.x.type.shape, op.dim % op.x.type.ndim
    outer, kind = (*shape[:dim], *shape[dim + 1 :]), REGISTERS[op.x.type.dtype][0]
    body = Body(stored)
    body.line(f"const ix parts = gridDim.x / {body.size(product(outer))};")
    body.line("const ix row = blockIdx.x / parts, part = blockIdx.x % parts;")
    body.line(f"const ix packs = {body.size(shape[dim])} / {pack}, more = packs % parts;")
    body.line("const ix first = part * (packs / parts) + (part < more ? part : more);")
    body.line("const ix until = first + packs / parts + (part < more);")
    index = body.unflattened("row", outer)
    strided = reader(body, op.x, index, dim, pack, kind)
    body.line(f"const Slice<{kind}, {pack}, decltype(read)> slice = {{first, until, read}};")
    return body, index, strided


def _largest(op: Argmax | Topk, count: int, stored: Collection[Value]) -> Template:
    """Every block finds the largest of its slice; the last one of a row, the largest of these.

    Of few long rows each has several blocks, else one.
    """
    kind, dim = op.x.type.dtype, op.dim % op.x.type.ndim
    shape = op.x.type.shape
    rows, size = product((*shape[:dim], *shape[dim + 1 :])), shape[dim]
    pack = pack_size([op.x]) if dim == op.x.type.ndim - 1 else 1
    body, index, strided = _sliced(op, stored, pack)
    if strided:
        pack, (body, index, _) = 1, _sliced(op, stored, 1)
    width = 8 if dtype(kind).bits == 64 else 4
    body.line(f"__shared__ Key chosen[{count}];")
    if count == 1:
        least = f"({REGISTERS[kind][0]}){bound(kind, greatest=False)}"
        body.line(f"keep_largest<{width}>(slice.largest({least}), chosen);")
    else:
        body.line(f"select_largest<{width}>({count}, slice, chosen);")
    each = f"for (int i = threadIdx.x; i < {count}; i += blockDim.x)"
    with body.block("if (parts > 1)"):
        with body.block(each):
            body.line(f"store(scratch0, blockIdx.x * {count} + i, (long long)chosen[i].value);")
            body.line(f"store(scratch1, blockIdx.x * {count} + i, (int)chosen[i].place);")
        body.line("if (!is_last_block((int*)zeros0 + row, parts)) return;")
        ends = f"row * parts * {count}, (row + 1) * parts * {count}"
        body.line(f"const Found found = {{scratch0, scratch1, {ends}}};")
        body.line(f"select_largest<{width}>({count}, found, chosen);")
    with body.block(each):
        place = body.variable("const ix", "(ix)~chosen[i].place")
        if isinstance(op, Argmax):
            body.line(f"store(out0, row, (int){place});")
        else:
            rank = body.variable("const ix", f"rank_of(i, {count}, chosen)")
            value = body.element(op.x, (*index[:dim], place, *index[dim:]))
            _store_chosen(op, body, (*index[:dim], rank, *index[dim:]), value, place)

    def grid(sizes: Sizes) -> Grid:
        total, elements = max(1, number(rows, sizes)), number(size, sizes)
        most = min(elements // SLICE, BLOCKS // total) if elements >= LONG else 1
        return total * max(1, most), 1, 1

    return launch(
        op.opname,
        body,
        op.results,
        grid,
        operations=[op],
        block=32 if isinstance(size, int) and size <= BLOCK else BLOCK,
        scratch=[TensorType(kind, (BLOCKS * count,)) for kind in ("i64", "i32")],
        zeros=[TensorType("i32", (BLOCKS,))],
        helpers=SELECT,
    )


def _store_chosen(op: Topk, body: Body, index: Index, value: str, place: str) -> None:
    """Write an element, which is at `place` of its row, at the index of its rank."""
    to = body.place(op.results[0], index)
    body.line(f"store(out0, {to}, {value});")
    body.line(f"store(out1, {to}, (int){place});")


@kernels_of(Cumsum)
def cumsum(op: Cumsum, regime: Regime) -> list[Template]:
    """The sum of every row up to each of its elements: by a block, as many elements at a time."""
    body, kind = Body(regime.stored), REGISTERS[op.x.type.dtype][0]
    rows = Rows(body, op.x.type.shape, (op.dim,), together=True)
    with rows.each():
        body.line(f"{kind} sum = 0;")
        with body.block(f"for (ix start = 0; start < {rows.length}; start += (ix)blockDim.x)"):
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
    return [rows.launch(op, SCAN)]


@kernels_of(ScatterElements)
def scatter_elements(op: ScatterElements, regime: Regime) -> list[Template]:
    """x with updates; combined ones are in the order of the indices, so that sums are repeatable.

    An index out of range changes nothing.
    """
    if op.reduction == "none":
        return [_copied(op, regime.stored), _replaced(op, regime.stored)]
    return [_combined(op, regime.stored)]


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

"""Kernels that go along dimensions of a value: its rows. Reductions, softmax and running sums.

The threads of a block share a row where its elements lie side by side, or rows are few; otherwise
every thread has rows of its own, so that neighbours read neighbours. All sums are in registers
(f32, f64 or integers) and are rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TypeAlias

from irc.ir.core import Op, Value
from irc.ir.dims import DimLike, Shape, product
from irc.ir.dtypes import integer_range, is_float
from irc.ops import LogSoftmax, ReduceMax, ReduceMean, ReduceMin, ReduceProd, ReduceSum, Softmax
from irc.ops.reduce import Along, Reduction

from ..plan.regime import Regime
from ..plan.template import Template, kernels_of
from .body import REGISTERS, Body, Index, Packs
from .kernels import blocks, launch, pack_size

Source: TypeAlias = Callable[[str], str]

SHORT = 16  # rows up to this length have one thread
FEW = 256  # rows up to this number have a block each, even where their elements lie apart
MOST_KEPT = 32 << 10  # bytes of shared memory that keep a row
EACH = 2  # packs of a row that a thread keeps in registers, at most

INFINITY = "__uint_as_float(0x7f800000u)"


class Rows:
    """The rows of a value along `dims`, one for every index of its other dimensions.

    `shape` is that of the value, or any other of as many elements: the indices that this gives are
    those of `real`. `together`: whether the threads of a block share a row. `pack`: how many
    neighbours a thread takes at once where it visits a row, see `packed`.
    """

    def __init__(
        self,
        body: Body,
        shape: Sequence[DimLike],
        dims: Sequence[int],
        real: Shape | None = None,
        together: bool | None = None,
        pack: int = 1,
    ) -> None:
        self.body, self.shape, self.real = body, tuple(shape), real
        self.dims = [dim % len(self.shape) for dim in dims]
        self.outer = [i for i in range(len(self.shape)) if i not in self.dims]
        self.count = product(tuple(self.shape[i] for i in self.outer))
        self.size = product(tuple(self.shape[i] for i in self.dims))
        self.length = body.size(self.size)
        self.together = self._shared() if together is None else together
        whole = self.together and real is None and self.dims == [len(self.shape) - 1]
        self.pack, self.strided = (pack if whole else 1), False
        self.each_thread = self._each_thread()  # packs that a thread keeps in registers, or 0
        self.block = self._block() if self.together else 256
        self._packs: list[Packs] = []  # these packs
        self._row: Index = ()
        self._loops = 0  # over the elements of a row
        self.keeps = False

    def _shared(self) -> bool:
        if isinstance(self.size, int) and self.size <= SHORT:
            return False
        long = [i for i, size in enumerate(self.shape) if size != 1]
        few = isinstance(self.count, int) and self.count <= FEW
        return few or not long or long[-1] in self.dims

    def _each_thread(self) -> int:
        """How many packs of a row every thread has, if all have as many, and few."""
        if self.pack == 1 or not isinstance(self.size, int):
            return 0
        fit = [n for n in range(1, EACH + 1) if self.size % (32 * self.pack * n) == 0]
        few = [n for n in fit if self.size // (self.pack * n) <= 512]
        return next((n for n in (*few, *fit) if self.size // (self.pack * n) <= 1024), 0)

    def _block(self) -> int:
        if not isinstance(self.size, int):
            return 256
        if self.each_thread:
            return self.size // (self.pack * self.each_thread)
        most = 1024 if self.size > 1 << 14 else 512
        each = max(4, 2 * self.pack)  # elements of a thread
        return min(most, max(32, -(-self.size // (32 * each)) * 32))

    def launch(self, op: Op, helpers: str = "", writes: Sequence[Value] = ()) -> Template:
        """The launch of the body, which writes the results of an operation, or `writes`."""
        grid = blocks(self.count, 1 if self.together else self.block)
        if self.each_thread:
            helpers = f"{helpers}constexpr int THREADS = {self.block};\n"
        return launch(
            op.opname,
            self.body,
            writes or op.results,
            grid,
            operations=[op],
            block=self.block,
            helpers=helpers,
        )

    def kept(self, kind: str, make: Source) -> Source:
        """The numbers that `make` gives, by column: where there is room, they are made in the first
        loop that asks for them, and read from registers or shared memory in later ones.

        To be called before `each`. All of one kernel share the memory: once the last ones are asked
        for, the others are gone.
        """
        if self.each_thread:
            return cache(make)
        width = 8 if kind in ("double", "long long", "u64") else 4
        if not (
            self.together and isinstance(self.size, int) and 0 < self.size * width <= MOST_KEPT
        ):
            return make
        if not self.keeps:
            self.body.line(f"__shared__ {kind} kept[{self.size}];")
        self.keeps, first = True, 0

        def number(column: str) -> str:
            nonlocal first
            first = first or self._loops
            if self._loops > first:
                return self.body.variable(kind, f"kept[{self._place(column)}]")
            name = make(column)
            self.body.line(f"kept[{self._place(column)}] = {name};")
            return name

        return number

    @contextmanager
    def each(self) -> Generator[None]:
        """The loop over rows."""
        first, step = "blockIdx.x", "gridDim.x"
        if not self.together:
            first = f"(ix){first} * (ix)blockDim.x + (ix)threadIdx.x"
            step = f"(ix){step} * (ix)blockDim.x"
        head = f"for (ix row = {first}; row < {self.body.size(self.count)}; row += {step})"
        with self.body.block(head):
            self._row = self.body.unflattened("row", [self.shape[i] for i in self.outer])
            if self.each_thread:
                self._packs = [self._own_pack(n) for n in range(self.each_thread)]
            yield

    def _own_pack(self, number: int) -> Packs:
        """A pack of the thread, at the same place in every row."""
        body = self.body
        with body.before_wait():
            place = body.variable("const ix", f"{number * self.block} + threadIdx.x")
            packs = Packs(self.pack, self._row, place, body.depth)
            for k in range(self.pack):
                packs.last[body.variable("const ix", f"{place} * {self.pack} + {k}")] = k
        return packs

    def read_early(self, value: Value) -> None:
        """Read the row `value` [size], which no kernel writes, before the kernel waits.

        To be called in `each`; where threads keep no packs it does nothing.
        """
        body = self.body
        for packs in self._packs:
            with body.before_wait():
                body.packs, packs.depth = packs, body.depth
                if body.packed(value, (next(iter(packs.last)),)) and value not in body.read_early:
                    body.read_early.append(value)
            body.packs = None

    @contextmanager
    def columns(self) -> Generator[str]:
        """The loop over the elements of a row; the number of the element."""
        self._loops += 1
        first, step = ("threadIdx.x", "blockDim.x") if self.together else ("0", "1")
        with self.body.block(
            f"for (ix column = {first}; column < {self.length}; column += {step})"
        ):
            yield "column"

    def visit(self, each: Callable[[str], None]) -> None:
        """Statements for every element of a row, by its number."""
        if self.pack == 1:
            with self.columns() as column:
                each(column)
            return
        self._loops += 1
        body = self.body
        for packs in self._packs:
            body.packs, packs.depth = packs, body.depth
            for column in packs.last:
                each(column)
            self.strided |= packs.strided
            body.packs = None
        if self._packs:
            return
        with body.block(
            f"for (ix pack = threadIdx.x; pack < {self.length} / {self.pack}; pack += blockDim.x)"
        ):
            packs = body.packs = Packs(self.pack, self._row, "pack", body.depth)
            for k in range(self.pack):
                column = body.variable("const ix", f"pack * {self.pack} + {k}")
                packs.last[column] = k
                each(column)
            self.strided |= packs.strided
            body.packs = None

    def store(self, number: int, value: Value, column: str, text: str) -> None:
        """Write an element of the result `value` of the launch."""
        self.body.store(number, value, self.index(column), text)

    def index(self, column: str) -> Index:
        """The index of an element of this row in the value."""
        inner = self.body.unflattened(column, [self.shape[i] for i in self.dims])
        places = dict(zip(self.outer, self._row, strict=True)) | dict(
            zip(self.dims, inner, strict=True)
        )
        index = tuple(places[i] for i in range(len(self.shape)))
        if self.real is None:
            return index
        number = self.body.variable("const ix", self.body.flattened(index, self.shape))
        return self.body.unflattened(number, self.real)

    @contextmanager
    def once(self) -> Generator[None]:
        """Statements that one thread of the row runs, at its end."""
        with self.body.block("if (threadIdx.x == 0)" if self.together else ""):
            yield

    def total(self, kind: str, start: str, operator: str, source: Source) -> str:
        """The combination of a number per element, which `source` makes from a column."""
        name = self.body.variable(kind, start)
        self.visit(lambda c: self.body.line(f"{name} = {operator}()({name}, {source(c)});"))
        if self.together:
            self.body.line(f"{name} = block_reduce({name}, {operator}());")
        return name

    def _place(self, column: str) -> str:
        """Where the number of an element is kept: those of a pack lie in different banks."""
        packs = self.body.packs
        return (
            column
            if packs is None
            else f"{packs.last[column]} * {self.length} / {self.pack} + pack"
        )


def packed(op: Op, make: Callable[[int], Rows]) -> Rows:
    """The rows that `make` gives for the size of packs: 16 bytes, or 1 where that is not simple."""
    x = op.operands[0]
    rows = make(pack_size([x, *(v for v in op.results if v.type.shape == x.type.shape)]))
    return make(1) if rows.strided else rows


def bound(dtype: str, greatest: bool) -> str:
    """The least or the greatest number of a dtype in C, which floats have in infinities."""
    if is_float(dtype):
        return INFINITY if greatest else f"-{INFINITY}"
    number = integer_range(dtype)[greatest]
    return f"({number + 1}LL - 1)" if number < 0 else f"{number}{'U' * (number >> 63)}LL"


def _reduction(op: Reduction) -> tuple[str, str]:
    """What a reduction starts with, and its operator."""
    dtype = op.x.type.dtype
    if isinstance(op, ReduceMax):
        return bound(dtype, greatest=False), "Max"
    if isinstance(op, ReduceMin):
        return bound(dtype, greatest=True), "Min"
    return ("1", "Mul") if isinstance(op, ReduceProd) else ("0", "Add")


@kernels_of(ReduceSum, ReduceMean, ReduceMax, ReduceMin, ReduceProd)
def reduction(op: Reduction, regime: Regime) -> list[Template]:
    """One number per row."""
    return [packed(op, lambda pack: _reduced(op, Body(regime.stored), pack)).launch(op)]


def _reduced(op: Reduction, body: Body, pack: int) -> Rows:
    x = op.x
    kind = REGISTERS[x.type.dtype][0]
    rows = Rows(body, x.type.shape, op.dims, pack=pack)
    start, operator = _reduction(op)
    with rows.each():
        total = rows.total(
            kind, f"({kind}){start}", operator, lambda c: body.element(x, rows.index(c))
        )
        if isinstance(op, ReduceMean):
            body.line(f"{total} = {total} / ({kind}){rows.length};")
        with rows.once():
            body.line(f"store(out0, row, {total});")
    return rows


@kernels_of(Softmax, LogSoftmax)
def softmax(op: Along, regime: Regime) -> list[Template]:
    """The powers of a row divided by their sum, or the logarithm of that."""
    return [packed(op, lambda pack: _softmax(op, Body(regime.stored), pack)).launch(op)]


def _softmax(op: Along, body: Body, pack: int) -> Rows:
    x, result = op.x, op.results[0]
    kind = REGISTERS[x.type.dtype][0]
    rows = Rows(body, x.type.shape, (op.dim,), pack=pack)
    number = rows.kept(kind, lambda column: body.element(x, rows.index(column)))

    def finish(column: str) -> None:
        below = f"{number(column)} - {most}"
        done = f"{below} - {total}" if isinstance(op, LogSoftmax) else f"exp({below}) / {total}"
        rows.store(0, result, column, done)

    with rows.each():
        most = rows.total(kind, f"({kind})-{INFINITY}", "Max", number)
        total = rows.total(kind, f"({kind})0", "Add", lambda c: f"exp({number(c)} - {most})")
        if isinstance(op, LogSoftmax):
            total = body.variable(kind, f"log({total})")
        rows.visit(finish)
    return rows

"""Kernels of matmul, linear and conv for any dtype and any shape."""

from __future__ import annotations

from dataclasses import dataclass

from irc.ir.core import Op, Value
from irc.ir.dims import DimLike, Shape, product
from irc.ops.convolution import Conv
from irc.ops.matmul import Linear, Matmul

from ..plan.regime import Regime
from ..plan.template import Grid, Sizes, Template, kernels_of
from .body import REGISTERS, Body
from .files import helpers
from .kernels import BLOCK, launch, number

HELPERS = helpers("products.cuh")
TILE = 64  # as in products.cuh
NARROW = 8  # sums over fewer rows or columns than this are made by one thread each
# What sums are made in: unsigned numbers wrap around.
SUMS = {"int": "u32", "long long": "u64"}


@dataclass(frozen=True)
class Products:
    """Sums over k of x(z, m, k) * y(z, k, n), for z, m and n below these sizes.

    `along`: neighbours along k of y lie together in memory, not those along n.
    """

    batches: DimLike
    rows: DimLike
    columns: DimLike
    depth: DimLike
    along: bool

    @property
    def narrow(self) -> bool:
        """Whether tiles of sums would be mostly empty at all sizes."""
        if self.along:
            return False
        return any(isinstance(n, int) and n < NARROW for n in (self.rows, self.columns))

    def call(self, body: Body, sums: str) -> str:
        """The statements that run them, with x, y and out defined before."""
        sizes = (self.batches, self.rows, self.columns, self.depth)
        body.line(f"const Sizes sizes = {{{', '.join(map(body.size, sizes))}}};")
        if self.narrow:
            return f"products_by_thread<{sums}>(sizes, x, y, out);"
        return f"products_by_tile<{sums}, {str(self.along).lower()}>(sizes, x, y, out);"

    def grid(self, sizes: Sizes) -> Grid:
        """A block per tile, or per block of results."""
        batches, rows, columns = (number(n, sizes) for n in (self.batches, self.rows, self.columns))
        if self.narrow:
            found = -(-batches * rows * columns // BLOCK)
        else:
            found = batches * -(-rows // TILE) * -(-columns // TILE)
        return (max(1, min(found, 2**31 - 1)), 1, 1)


@kernels_of(Matmul)
def matmul(op: Op, regime: Regime) -> list[Template]:
    """The launch of a matmul: leading dimensions broadcast."""
    assert isinstance(op, Matmul)
    body, shape = Body(regime.stored), op.result.type.shape
    rows, columns = shape[-2:]
    sizes = Products(product(shape[:-2]), rows, columns, op.x.type.shape[-1], along=False)
    for name, operand, last in (("x", op.x, ("m", "k")), ("y", op.y, ("k", "n"))):
        with body.block(_function(operand, name, f"ix z, ix {last[0]}, ix {last[1]}")):
            lead = body.unflattened("z", shape[:-2])
            own = operand.type.ndim - 2
            body.line(f"return {body.element(operand, (*lead[len(lead) - own :], *last))};")
        body.line(";")
    place = f"(z * {body.size(rows)} + m) * {body.size(columns)} + n"
    return [_launched(op, body, sizes, place, None, "n")]


@kernels_of(Linear)
def linear(op: Op, regime: Regime) -> list[Template]:
    """The launch of a linear."""
    assert isinstance(op, Linear)
    body, shape = Body(regime.stored), op.x.type.shape
    columns, depth = op.weight.type.shape
    sizes = Products(1, product(shape[:-1]), columns, depth, along=True)
    with body.block(_function(op.x, "x", "ix z, ix m, ix k")):
        if op.x.producer is None or op.x in regime.stored:
            kind, place = op.x.type.dtype, f"m * {body.size(depth)} + k"
            body.line(f"return load<{kind}>({body.pointer(op.x)}, {place});")
        else:
            index = body.unflattened("m", shape[:-1])
            body.line(f"return {body.element(op.x, (*index, 'k'))};")
    body.line(";")
    with body.block(_function(op.weight, "y", "ix z, ix k, ix n")):
        body.line(f"return {body.element(op.weight, ('n', 'k'))};")
    body.line(";")
    return [_launched(op, body, sizes, f"m * {body.size(columns)} + n", op.bias, "n")]


@kernels_of(Conv)
def conv(op: Op, regime: Regime) -> list[Template]:
    """The launch of a conv: per group, the weight [O, K] times the windows [K, positions]."""
    assert isinstance(op, Conv)
    body, shape = Body(regime.stored), op.result.type.shape
    outputs, inputs, *kernel = op.weight.type.shape
    each = outputs // op.groups
    places = body.size(product(shape[2:]))
    sizes = Products(
        op.groups, each, shape[0] * product(shape[2:]), inputs * product(tuple(kernel)), along=False
    )
    with body.block(_function(op.weight, "x", "ix z, ix m, ix k")):
        output = body.variable("ix", f"z * {body.size(each)} + m")
        index = body.unflattened("k", (inputs, *kernel))
        body.line(f"return {body.element(op.weight, (output, *index))};")
    body.line(";")
    with body.block(_function(op.x, "y", "ix z, ix k, ix n")):
        _window(op, body, (shape[0], *shape[2:]), (inputs, *kernel))
    body.line(";")
    output = f"z * {body.size(each)} + m"
    place = f"(n / {places} * {body.size(outputs)} + {output}) * {places} + n % {places}"
    return [_launched(op, body, sizes, place, op.bias, output)]


def _window(op: Conv, body: Body, positions: Shape, weight: Shape) -> None:
    """Returns the element of x, or 0 around it, under the weight's element k at position n."""
    row, *starts = body.unflattened("n", positions)
    channel, *steps = body.unflattened("k", weight)
    index = [row, body.variable("ix", f"z * {body.size(weight[0])} + {channel}")]
    around = zip(starts, steps, op.windows(), op.x.type.shape[2:], strict=True)
    for start, step, (stride, before, after, dilation, _), size in around:
        place = body.variable("ix", f"{start} * {stride} + {step} * {dilation} - {before}")
        index.append(place)
        if before or after:
            body.line(f"if ({place} < 0 || {place} >= {body.size(size)}) return 0;")
    body.line(f"return {body.element(op.x, index)};")


def _function(operand: Value, name: str, arguments: str) -> str:
    """The head of a function that gives elements of an operand."""
    return f"auto {name} = [&]({arguments}) -> {REGISTERS[operand.type.dtype][0]}"


def _launched(
    op: Op, body: Body, sizes: Products, place: str, bias: Value | None, at: str
) -> Template:
    """The launch, which stores the sums; element `at` of the bias is added before."""
    result = op.result
    kind, _ = REGISTERS[result.type.dtype]
    sums = SUMS.get(kind, kind)
    with body.block(f"auto out = [&](ix z, ix m, ix n, {sums} sum)"):
        total = f"({kind})sum"
        if bias is not None:
            total = f"add({total}, {body.element(bias, (body.variable('ix', at),))})"
        body.line(f"store(out0, {place}, {total});")
    body.line(";")
    body.line(sizes.call(body, sums))
    return launch(op.opname, body, [result], sizes.grid, operations=[op], helpers=HELPERS)

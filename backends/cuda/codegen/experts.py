"""Mixtures of experts in 16-bit floats: products of the tokens that each expert gets, and no more.

The pairs of a token and an expert are sorted by expert, in tiles of a few rows: a block of a
product multiplies one tile with a part of its expert's weights. Experts without tokens have no
tiles, so their weights are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from irc.ir.core import Value
from irc.ir.dims import DimLike, product
from irc.ir.types import TensorType
from irc.ops import Experts, MoeSlots
from irc.ops.mlp import activation

from ..plan.regime import Regime
from ..plan.storage import view_of
from ..plan.template import Grid, Sizes, Template, kernels_of, launches_of
from .body import REGISTERS, Body
from .files import constants, helpers
from .kernels import blocks, each_thing, launch, number

HELPERS = helpers("warp.cuh", "copies.cuh", "experts.cuh")
ALIGNED = 8  # elements of 16 bytes
MOST = 128  # rows of a tile


@dataclass(frozen=True)
class Shape:
    """A tile of results, `depth` elements of a row in one of `stages`, and the warps of a block."""

    rows: int
    columns: int  # of all weights
    depth: int
    stages: int
    warps: tuple[int, int, int]  # down, across, deep

    @property
    def shared(self) -> int:
        """Bytes of the stages."""
        return 2 * self.stages * (self.rows + self.columns) * (self.depth + 8)


# Few rows are a stream of weights, which warps share along k. Of the shapes for as many rows, the
# first whose stages fit a block is taken.
SHAPES = (
    Shape(16, 64, 256, 5, (1, 2, 4)),
    Shape(16, 64, 128, 4, (1, 2, 2)),
    Shape(64, 128, 64, 3, (2, 4, 1)),
    Shape(128, 128, 64, 3, (2, 2, 1)),
    Shape(128, 128, 32, 4, (2, 2, 1)),
)


@dataclass(frozen=True)
class Tiles:
    """The order of pairs, and (expert, first pair, pairs) of up to pairs / rows + experts tiles."""

    op: Experts
    shape: Shape
    order: Value
    table: Value

    @property
    def count(self) -> int:
        """How many experts this rank has."""
        size = self.op.up.type.shape[0]
        assert isinstance(size, int)
        return size

    def grid(self, columns: int) -> Callable[[Sizes], Grid]:
        """A block for each tile and part of the columns."""

        def grid(sizes: Sizes) -> Grid:
            pairs = number(_pairs(self.op), sizes)
            return max(1, min(pairs, pairs // self.shape.rows + self.count)), columns, 1

        return grid


@launches_of(Experts)
def experts(op: Experts, regime: Regime) -> list[Template] | str:
    """The launches of a mixture: the order of pairs, two products, and the sums."""
    if refusal := _refusal(op):
        return f"products of tiles of experts: {refusal}"
    kind, pairs, count = op.result.type.dtype, _pairs(op), op.up.type.shape[0]
    order = _memory("order", "i32", pairs)
    tiles = Tiles(op, _shape(op, regime), order, _memory("tiles", "i32", pairs + count, 3))
    hidden = _memory("hidden", kind, pairs, op.up.type.shape[1])
    done = _memory("done", kind, *op.chosen.type.shape, op.result.type.shape[-1])
    return [_sorted(tiles), _first(tiles, hidden), _last(tiles, hidden, done), _sums(tiles, done)]


def _pairs(op: Experts) -> DimLike:
    """How many pairs of a token and an expert there are."""
    return product(op.chosen.type.shape)


def _shape(op: Experts, regime: Regime) -> Shape:
    """The shape for as many pairs as an expert has on average, or a few more."""
    count = op.up.type.shape[0]
    assert isinstance(count, int)
    fitting = [shape for shape in SHAPES if shape.shared <= regime.target.shared]
    bounds = sorted({shape.rows * count for shape in fitting if shape.rows < MOST})
    rows = (regime.bucket(_pairs(op), bounds) or MOST * count) // count
    return next(shape for shape in fitting if shape.rows == rows)


def _memory(name: str, dtype: str, *shape: DimLike) -> Value:
    """What one launch leaves for the next."""
    return Value(TensorType(dtype, shape), None, 0, name)


def _refusal(op: Experts) -> str:
    """Why experts are not products of tiles, or nothing."""
    if op.result.type.dtype not in ("bf16", "f16"):
        return f"they are of bf16 or f16, not {op.result.type.dtype}"
    for weight in (op.up, op.down):
        if any(not isinstance(n, int) or n % ALIGNED for n in weight.type.shape[1:]):
            return f"rows or columns of {weight.type} are not a multiple of {ALIGNED}"
    return ""


def _expert(tiles: Tiles, body: Body, pair: Sequence[str]) -> str:
    """The number of a pair's expert on this rank, or -1."""
    op, slots = tiles.op, tiles.op.slots.producer
    chosen = body.element(op.chosen, pair)
    if op.first is not None:
        chosen = f"{chosen} - {body.element(op.first, ())}"
    chosen = body.variable("const long long", chosen)
    held = f"{chosen} >= 0 && {chosen} < {tiles.count}"
    expert = body.variable("const int", f"{held} ? (int){chosen} : -1")
    if isinstance(slots, MoeSlots) and slots.capacity == 0 and slots.chosen is op.chosen:
        return expert  # every pair has a slot
    return body.variable("const int", f"{body.element(op.slots, pair)} >= 0 ? {expert} : -1")


def _sorted(tiles: Tiles) -> Template:
    """The order of pairs, and the tiles."""
    body = Body(tiles.op.operands)
    with body.block("auto expert = [&](ix i) -> int"):
        pair = body.unflattened("i", tiles.op.chosen.type.shape)
        body.line(f"return {_expert(tiles, body, pair)};")
    pairs, sizes = body.size(_pairs(tiles.op)), f"{tiles.shape.rows}, {tiles.count}"
    body.line(f"; sort_pairs<{sizes}>({pairs}, expert, out0, out1);")
    return launch(
        "moe_sort",
        body,
        [tiles.order, tiles.table],
        blocks(1, 1),
        operations=[],
        block=1024,
        helpers=helpers("sort_pairs.cuh"),
    )


def _first(tiles: Tiles, hidden: Value) -> Template:
    """What the last product multiplies, for the pairs in order."""
    op = tiles.op
    body = Body([tiles.order, tiles.table, *op.operands])
    weights = [(op.up, op.up_bias)]
    if op.gate is not None:
        weights.insert(0, (op.gate, op.gate_bias))
    sums = [Value(hidden.type, None, i) for i in range(len(weights))]
    value = (activation(op.act, sums[0]) if op.gate is None else op.gated(*sums)).result

    def result(names: Sequence[str]) -> str:
        for each, name in zip(sums, names, strict=True):
            body.give(each, ("i", "j"), name)
        return body.element(value, ("i", "j"))

    choices = body.size(op.chosen.type.shape[1])
    row = f"({_of(body, tiles.order)} / {choices})"
    return _product(tiles, body, weights, (op.x, row), (hidden, "place"), result)


def _last(tiles: Tiles, hidden: Value, done: Value) -> Template:
    """The result of every pair."""
    body = Body([tiles.order, tiles.table, hidden, *tiles.op.operands])
    weights, pair = [(tiles.op.down, tiles.op.down_bias)], _of(body, tiles.order)
    return _product(tiles, body, weights, (hidden, "place"), (done, pair), lambda names: names[0])


def _of(body: Body, order: Value) -> str:
    """The pair that comes at `place`."""
    return f"load<i32>({body.pointer(order)}, place)"


def _product(
    tiles: Tiles,
    body: Body,
    weights: Sequence[tuple[Value, Value | None]],
    x: tuple[Value, str],
    y: tuple[Value, str],
    result: Callable[[Sequence[str]], str],
) -> Template:
    """The launch that multiplies tiles; `x` and `y` are values and their rows at a `place`.

    `weights` are those of products with the biases of their sums, of which `result` makes an
    element.
    """
    (source, row), (target, to), shape = x, y, tiles.shape
    _, n, k = weights[0][0].type.shape
    assert isinstance(n, int) and isinstance(k, int)
    columns = shape.columns // len(weights)
    sizes = {
        "ROWS": shape.rows,
        "COLUMNS": columns,
        "WEIGHTS": len(weights),
        "DEPTH": shape.depth,
        "STAGES": shape.stages,
        "N": n,
        "K": k,
    }
    sizes |= dict(zip(("WARPS_DOWN", "WARPS_ACROSS", "WARPS_DEEP"), shape.warps, strict=True))
    head = constants(sizes) + f"typedef {target.type.dtype} T;\n"
    table, rounding = body.pointer(tiles.table), REGISTERS[target.type.dtype][1]
    for i, name in enumerate(("expert", "first", "rows")):
        body.line(f"const int {name} = load<i32>({table}, 3 * blockIdx.x + {i});")
    body.line("if (rows == 0) return;")
    with body.block("auto value = [&](int j, float sum0, float sum1) -> float"):
        names = [body.variable("float", f"{rounding}(sum{i})") for i in range(len(weights))]
        for i, (_, bias) in enumerate(weights):
            if bias is not None:
                memory = view_of(bias)
                added = f"load<{bias.type.dtype}>({body.pointer(memory)}, (ix)expert * {n} + j)"
                names[i] = body.variable("float", f"{rounding}(add({names[i]}, {added}))")
        body.line(f"return {result(names)};")
    body.line(";")
    rows = (("x", "const u16*", body.pointer(source), row, k), ("y", "u16*", "out0", to, n))
    for name, kind, pointer, number_of_row, width in rows:
        with body.block(f"auto {name} = [&](int row)"):
            body.line("const ix place = first + row;")
            body.line(f"return ({kind}){pointer} + (u64){number_of_row} * {width};")
        body.line(";")
    pointers = [body.pointer(weight) for weight, _ in weights]
    which = f"(w ? {pointers[-1]} : {pointers[0]})"
    where = f"(const u16*){which} + (u64)expert * {n * k}"
    body.line(f"auto weights = [&](int w) {{ return {where}; }};")
    body.line(f"multiply_rows(rows, blockIdx.y * {columns}, x, weights, value, y);")
    return launch(
        "moe_product",
        body,
        [target],
        tiles.grid(-(-n // columns)),
        operations=[],
        block=32 * prod(shape.warps),
        shared=lambda sizes: shape.shared,
        helpers=head + HELPERS,
    )


def _sums(tiles: Tiles, done: Value) -> Template:
    """The sum over the experts of every token; a pair that was dropped adds nothing."""
    op, result = tiles.op, tiles.op.result
    body = Body([done, *op.operands])
    kind, count = REGISTERS[result.type.dtype][0], product(result.type.shape)
    with body.block(each_thing(body.size(count))):
        token, feature = body.unflattened("i", result.type.shape)
        total = body.variable(kind, "0")
        with body.block(f"for (ix k = 0; k < {body.size(op.chosen.type.shape[1])}; ++k)"):
            found, pair = body.variable(kind, "0"), (token, "k")
            with body.block(f"if ({_expert(tiles, body, pair)} >= 0)"):
                body.line(f"{found} = {body.element(done, (*pair, feature))};")
            weight = body.element(op.weights, pair)
            body.line(f"{total} = add({total}, mul({weight}, {found}));")
        body.line(f"store(out0, i, {total});")
    return launch("moe_combine", body, op.results, blocks(count), operations=[op])


@kernels_of(MoeSlots)
def moe_slots(op: MoeSlots, regime: Regime) -> list[Template]:
    """A block for each expert of each part counts the pairs of the expert."""
    body = Body(regime.stored)
    _, choices, part = op.pairs()
    capacity, pairs = op.capacity or part, body.size(part * choices)
    count = op.parts * op.experts
    with body.block(f"for (ix queue = blockIdx.x; queue < {count}; queue += gridDim.x)"):
        body.line(f"const ix first = queue / {op.experts} * {pairs};")
        body.line(f"const int expert = queue % {op.experts};")
        body.line("int taken = 0;")
        with body.block(f"for (ix start = 0; start < {pairs}; start += (ix)blockDim.x)"):
            body.line("const ix pair = start + (ix)threadIdx.x;")
            body.line("int slot = -1, mine = 0, unknown = 0, before, total;")
            with body.block(f"if (pair < {pairs})"):
                token = body.variable("const ix", f"(first + pair) / {body.size(choices)}")
                choice = body.variable("const ix", f"(first + pair) % {body.size(choices)}")
                chosen = body.element(op.chosen, (token, choice))
                body.line(f"mine = {chosen} == expert;")
                body.line(f"unknown = {chosen} < 0 || {chosen} >= {op.experts};")
            body.line("block_scan(mine, &before, &total);")
            body.line(f"if (mine && taken + before < {body.size(capacity)}) slot = taken + before;")
            body.line("if (mine || (unknown && expert == 0)) store(out0, first + pair, slot);")
            body.line("taken += total;")
    return [
        launch(
            "moe_slots",
            body,
            op.results,
            blocks(count, 1),
            operations=[op],
            helpers=helpers("scan.cuh"),
        )
    ]

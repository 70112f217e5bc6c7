"""Mixtures of experts in 16-bit floats: products of the tokens that each expert gets, and no more.

The pairs of a token and an expert are sorted by expert, in tiles of a few rows: a block of a
product multiplies one tile with a part of its expert's weights. Experts without tokens have no
tiles, so their weights are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

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

ALIGNED = 8  # elements of 16 bytes
MOST = 128  # rows of a tile
ENTRY = 5  # numbers that say what a tile is
GROUPS = 90  # the compute capability with products of groups of four warps


@dataclass(frozen=True)
class Shape:
    """A tile of results, `depth` elements of a row in one of `stages`, and the warps of a block."""

    rows: int
    columns: int  # of all weights
    depth: int
    stages: int
    warps: tuple[int, int, int]  # down, across, deep

    files = ("experts.cuh",)

    @property
    def shared(self) -> int:
        """Bytes of the stages."""
        return 2 * self.stages * (self.rows + self.columns) * (self.depth + 8)

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * prod(self.warps)

    @property
    def constants(self) -> dict[str, int]:
        """For the kernel."""
        names = ("WARPS_DOWN", "WARPS_ACROSS", "WARPS_DEEP")
        sizes = {"ROWS": self.rows, "DEPTH": self.depth, "STAGES": self.stages}
        return sizes | dict(zip(names, self.warps, strict=True))


@dataclass(frozen=True)
class GroupShape:
    """A tile of results of `groups` of four warps, and the stages of what they multiply."""

    rows: int
    columns: int  # of all weights
    stages: int
    groups: int

    files = ("wgmma.cuh", "grouped_gemm.cuh")

    @property
    def shared(self) -> int:
        """Bytes of the stages, of tensor maps and barriers, and of a gap in front."""
        return self.stages * (128 * (self.rows + self.columns) + 16) + 3 * 128 + 1024 + 256

    @property
    def threads(self) -> int:
        """Of a block: one more group copies."""
        return 128 * (self.groups + 1)

    @property
    def constants(self) -> dict[str, int]:
        """For the kernel."""
        return {
            "ROWS": self.rows,
            "STAGES": self.stages,
            "GROUPS": self.groups,
            "SHARED_BYTES": self.shared,
        }


AnyShape: TypeAlias = Shape | GroupShape

# Few rows are a stream of weights, which warps share along k. Of the shapes for as many rows, the
# first whose stages fit a block is taken.
SHAPES: tuple[AnyShape, ...] = (
    Shape(16, 64, 256, 5, (1, 2, 4)),
    Shape(16, 64, 128, 4, (1, 2, 2)),
    Shape(64, 128, 64, 3, (2, 4, 1)),
    Shape(128, 128, 64, 3, (2, 2, 1)),
    Shape(128, 128, 32, 4, (2, 2, 1)),
)
GROUP_SHAPES: tuple[AnyShape, ...] = (
    GroupShape(16, 64, 20, 1),
    GroupShape(64, 128, 8, 1),
    GroupShape(128, 256, 4, 2),
)


@dataclass(frozen=True)
class Tiles:
    """The order of pairs, and what sort_pairs.cuh says of up to 2 pairs / rows + experts tiles."""

    op: Experts
    shape: AnyShape
    order: Value
    table: Value

    @property
    def count(self) -> int:
        """How many experts this rank has."""
        size = self.op.up.type.shape[0]
        assert isinstance(size, int)
        return size

    def grid(self, columns: int, blocks: int) -> Callable[[Sizes], Grid]:
        """A block for each tile and part of the columns, or up to `blocks` for all of them."""

        def grid(sizes: Sizes) -> Grid:
            pairs = number(_pairs(self.op), sizes)
            tiles = max(1, min(pairs, 2 * pairs // self.shape.rows + self.count))
            return (min(tiles * columns, blocks), 1, 1) if blocks else (tiles, columns, 1)

        return grid


@launches_of(Experts)
def experts(op: Experts, regime: Regime) -> list[Template] | str:
    """The launches of a mixture: the order of pairs, two products, and the sums."""
    if refusal := _refusal(op):
        return f"products of tiles of experts: {refusal}"
    kind, pairs, count = op.result.type.dtype, _pairs(op), op.up.type.shape[0]
    order = _memory("order", "i32", pairs)
    tiles = Tiles(op, _shape(op, regime), order, _memory("tiles", "i32", 2 * pairs + count, ENTRY))
    hidden = _memory("hidden", kind, pairs, op.up.type.shape[1])
    done = _memory("done", kind, *op.chosen.type.shape, op.result.type.shape[-1])
    launches, x = [_sorted(tiles)], op.x
    if isinstance(tiles.shape, GroupShape):
        x = _memory("gathered", kind, pairs, op.x.type.shape[-1])
        launches.append(_gathered(tiles, x))
    first, last = _first(tiles, x, hidden, regime), _last(tiles, hidden, done, regime)
    return [*launches, first, last, _sums(tiles, done)]


def _pairs(op: Experts) -> DimLike:
    """How many pairs of a token and an expert there are."""
    return product(op.chosen.type.shape)


def _shape(op: Experts, regime: Regime) -> AnyShape:
    """The shape for as many pairs as an expert has on average, or a few more."""
    count = op.up.type.shape[0]
    assert isinstance(count, int)
    shapes = GROUP_SHAPES * (regime.target.capability == GROUPS) + SHAPES
    fitting = [shape for shape in shapes if shape.shared <= regime.target.shared]
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
    pairs = body.size(_pairs(tiles.op))
    body.line(f"; sort_pairs<{tiles.shape.rows}>({pairs}, expert, out0, out1);")
    return launch(
        "moe_sort",
        body,
        [tiles.order, tiles.table],
        blocks(1, 1),
        operations=[],
        block=1024,
        helpers=constants({"EXPERTS": tiles.count}) + helpers("sort_pairs.cuh"),
    )


def _gathered(tiles: Tiles, gathered: Value) -> Template:
    """The rows of x for the pairs in order, 16 bytes per thread."""
    op = tiles.op
    body = Body([tiles.order, op.x])
    parts, choices = gathered.type.shape[1] // ALIGNED, body.size(op.chosen.type.shape[1])
    count = gathered.type.shape[0] * parts
    with body.block(each_thing(body.size(count))):
        body.line(f"const ix place = i / {parts}, part = i % {parts};")
        row = f"(ix){_of(body, tiles.order)} / {choices}"
        body.line(
            f"((uint4*)out0)[i] = ((const uint4*){body.pointer(op.x)})[{row} * {parts} + part];"
        )
    return launch("moe_gather", body, [gathered], blocks(count), operations=[])


def _first(tiles: Tiles, x: Value, hidden: Value, regime: Regime) -> Template:
    """What the last product multiplies, for the pairs in order."""
    op = tiles.op
    body = Body([tiles.order, tiles.table, x, *op.operands])
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
    row = f"({_of(body, tiles.order)} / {choices})" if x is op.x else "place"
    return _product(tiles, body, weights, (x, row), (hidden, "place"), result, regime)


def _last(tiles: Tiles, hidden: Value, done: Value, regime: Regime) -> Template:
    """The result of every pair."""
    body = Body([tiles.order, tiles.table, hidden, *tiles.op.operands])
    weights, pair = [(tiles.op.down, tiles.op.down_bias)], _of(body, tiles.order)
    x, y = (hidden, "place"), (done, pair)
    return _product(tiles, body, weights, x, y, lambda names: names[0], regime)


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
    regime: Regime,
) -> Template:
    """The launch that multiplies tiles; `x` and `y` are values and their rows at a `place`.

    `weights` are those of products with the biases of their sums, of which `result` makes an
    element.
    """
    (target, to), shape = y, tiles.shape
    _, n, k = weights[0][0].type.shape
    assert isinstance(n, int) and isinstance(k, int)
    columns = shape.columns // len(weights)
    sizes = {"COLUMNS": columns, "WEIGHTS": len(weights), "N": n, "K": k, **shape.constants}
    parts, grouped = -(-n // columns), isinstance(shape, GroupShape)
    (_next if grouped else _tile)(tiles, body, columns, parts)
    rounding = REGISTERS[target.type.dtype][1]
    with body.block("auto value = [&](int j, float sum0, float sum1) -> float"):
        names = [body.variable("float", f"{rounding}(sum{i})") for i in range(len(weights))]
        for i, (_, bias) in enumerate(weights):
            if bias is not None:
                memory = view_of(bias)
                added = f"load<{bias.type.dtype}>({body.pointer(memory)}, (ix)expert * {n} + j)"
                names[i] = body.variable("float", f"{rounding}(add({names[i]}, {added}))")
        body.line(f"return {result(names)};")
    body.line(";")
    _row(body, "y", "u16*", "out0", to, n)
    pointers, source = [body.pointer(weight) for weight, _ in weights], body.pointer(x[0])
    if grouped:
        body.line(f"const void* const weights[2] = {{{pointers[0]}, {pointers[-1]}}};")
        rows = body.size(x[0].type.shape[0])
        given = f"(TensorMap*)scratch0, (int*)zeros0, {source}, {rows}, weights, {tiles.count}"
        body.line(f"grouped_gemm({given}, expert, first, rows, column, next, value, y);")
    else:
        _row(body, "x", "const u16*", source, x[1], k)
        which = f"(w ? {pointers[-1]} : {pointers[0]})"
        where = f"(const u16*){which} + (u64)expert * {n * k}"
        body.line(f"auto weights = [&](int w) {{ return {where}; }};")
        body.line(f"multiply_rows(rows, blockIdx.y * {columns}, x, weights, value, y);")
    most = regime.target.multiprocessors if grouped else 0
    maps = TensorType("i64", (most * (len(weights) + 1), 16))
    head = constants(sizes) + f"typedef {target.type.dtype} T;\n"
    return launch(
        "moe_product",
        body,
        [target],
        tiles.grid(parts, most),
        operations=[],
        block=shape.threads,
        shared=lambda sizes: shape.shared,
        scratch=[maps] if grouped else [],
        zeros=[TensorType("i32", (2,))] if grouped else [],
        helpers=head + helpers("warp.cuh", "copies.cuh", *shape.files),
    )


def _row(body: Body, name: str, kind: str, start: str, row: str, width: int) -> None:
    """The function that says where a row of the tile begins, by its number in the tile."""
    with body.block(f"auto {name} = [&](int row)"):
        body.line("const ix place = first + row;")
        body.line(f"return ({kind}){start} + (u64){row} * {width};")
    body.line(";")


def _tile(tiles: Tiles, body: Body, columns: int, parts: int) -> None:
    """The tile of this block."""
    table = body.pointer(tiles.table)
    for i, name in enumerate(("expert", "first", "rows")):
        body.line(f"const int {name} = load<i32>({table}, {ENTRY} * blockIdx.x + {i});")
    body.line("if (rows == 0) return;")


def _next(tiles: Tiles, body: Body, columns: int, parts: int) -> None:
    """The function that finds tile `i`: the rows of an expert go with some columns of its weights,
    then with the next ones."""
    table = body.pointer(tiles.table)
    body.line("int expert = 0, first = 0, rows = 0, column = 0;")
    with body.block("auto next = [&](int i) -> bool"):
        limit = f"2 * {body.size(_pairs(tiles.op))} / {tiles.shape.rows} + {tiles.count}"
        body.line(f"const i32* entry = {table} + {ENTRY} * (i / {parts});")
        body.line(f"if (i / {parts} >= {limit} || entry[2] == 0) return false;")
        body.line("const int begin = entry[3], count = entry[4];")
        body.line(f"const int within = i - begin * {parts};")
        body.line(f"entry = {table} + {ENTRY} * (begin + within % count);")
        body.line("expert = entry[0], first = entry[1], rows = entry[2];")
        body.line(f"column = within / count * {columns};")
        body.line("return true;")
    body.line(";")


def _sums(tiles: Tiles, done: Value) -> Template:
    """The sum over the experts of every token; a pair that was dropped adds nothing."""
    op, result = tiles.op, tiles.op.result
    body, kind = Body([done, *op.operands]), f"Pack<{result.type.dtype}, {ALIGNED}>"
    tokens, width = result.type.shape
    assert isinstance(width, int)
    shape = (tokens, width // ALIGNED)
    with body.block(each_thing(body.size(product(shape)))):
        token, part = body.unflattened("i", shape)
        total = body.variable("float", "{}", ALIGNED)
        with body.block(f"for (ix k = 0; k < {body.size(op.chosen.type.shape[1])}; ++k)"):
            pair = (token, "k")
            body.line(f"if ({_expert(tiles, body, pair)} < 0) continue;")
            place = body.place(done, (*pair, f"({part} * {ALIGNED})"))
            row = body.variable(
                f"const {kind}", f"*(const {kind}*)({body.pointer(done)} + {place})"
            )
            weight = body.element(op.weights, pair)
            added = f"add({total}[e], mul({weight}, (float){row}.item[e]))"
            body.line("#pragma unroll")
            body.line(f"for (int e = 0; e < {ALIGNED}; ++e) {total}[e] = {added};")
        sums = body.variable(kind, "{}")
        body.line("#pragma unroll")
        of = f"Memory<{result.type.dtype}>::of({total}[e])"
        body.line(f"for (int e = 0; e < {ALIGNED}; ++e) {sums}.item[e] = {of};")
        body.line(f"(({kind}*)out0)[i] = {sums};")
    return launch("moe_combine", body, op.results, blocks(product(shape)), operations=[op])


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

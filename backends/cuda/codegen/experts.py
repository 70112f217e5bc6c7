"""Mixtures of experts in 16-bit floats: products of the tokens that each expert gets, and no more.

The pairs of a token and an expert are sorted by expert, in tiles of a few rows: a block of a
product multiplies one tile with a part of its expert's weights. Experts without tokens have no
tiles, so their weights are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from irc.ir.core import Op, Value
from irc.ir.dims import DimLike, product
from irc.ir.types import TensorType
from irc.ops import Matmul, MoeCombine, MoeDispatch, MoeSlots

from ..plan.storage import is_pointwise, leaves, view_of
from ..plan.template import Fused, Sizes, Template, fusion
from .body import REGISTERS, Body
from .files import helpers
from .kernels import blocks, launch, number
from .library_products import untransposed
from .moe import combined
from .streaming.choices import target

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
class Mixture:
    """Experts between a dispatch and a combine: `last` of a function of the `first` products."""

    dispatch: MoeDispatch
    first: tuple[Matmul, ...]
    inner: tuple[Op, ...]  # between the first products and the last
    last: Matmul
    combine: MoeCombine

    @property
    def experts(self) -> int:
        """How many experts this rank has."""
        return self.dispatch.experts

    @property
    def pairs(self) -> DimLike:
        """How many pairs of a token and an expert there are."""
        return product(self.combine.chosen.type.shape)


@dataclass(frozen=True)
class Tiles:
    """The order of pairs, and (expert, first pair, pairs) of up to `count` tiles."""

    order: Value
    table: Value
    shape: Shape
    count: int


@fusion(MoeCombine)
def mixture(op: Op, sizes: Sizes) -> Fused | str | None:
    """The launches of a whole mixture, or why there are none."""
    assert isinstance(op, MoeCombine)
    found = mixture_of(op)
    if isinstance(found, str):
        return f"products of tiles of experts: {found}"
    pairs, experts = number(found.pairs, sizes), found.experts
    fitting = [each for each in SHAPES if each.shared <= target().shared]
    enough = (each for each in fitting if each.rows * experts >= pairs or each.rows == MOST)
    shape = next(enough)
    tiles = Tiles(
        _memory("order", "i32", found.pairs),
        _memory("tiles", "i32", found.pairs + experts, 3),
        shape,
        max(1, min(pairs, pairs // shape.rows + experts)),
    )
    kind = op.result.type.dtype
    hidden = _memory("hidden", kind, found.pairs, found.last.x.type.shape[-1])
    done = _memory("done", kind, *op.chosen.type.shape, op.result.type.shape[-1])
    launches = (
        _sorted(found, tiles),
        _first(found, tiles, hidden),
        _last(found, tiles, hidden, done),
        _combined(found, done),
    )
    return Fused(launches, (op, found.last, *found.inner, *found.first, found.dispatch))


def _memory(name: str, dtype: str, *shape: DimLike) -> Value:
    """What one launch leaves for the next."""
    return Value(TensorType(dtype, shape), None, 0, name)


def mixture_of(op: MoeCombine) -> Mixture | str:
    """The experts whose results are combined, or why they are not products of tiles."""
    last = op.buffer.producer
    if op.result.type.dtype not in ("bf16", "f16"):
        return f"they are of bf16 or f16, not {op.result.type.dtype}"
    if not isinstance(last, Matmul):
        return "what is combined is not a matmul"
    found, inner = leaves(last.x, lambda v: isinstance(v.producer, Matmul) or _is_bias(v))
    found = [value for value in found if not _is_bias(value)]
    first = tuple(v.producer for v in found if isinstance(v.producer, Matmul))
    dispatch = first[0].x.producer if first else None
    if not isinstance(dispatch, MoeDispatch) or len(first) != len(found) or len(first) > 2:
        return "they are not a function of one or two matmuls of what is dispatched"
    if any(each.x is not dispatch.result for each in first):
        return "the matmuls are of different values"
    if any(getattr(dispatch, name) is not getattr(op, name) for name in _SAME):
        return "dispatched and combined are different pairs"
    inner = tuple(each for each in inner if each.operands)
    if not all(is_pointwise(each) for each in inner):
        return "operations between products are not elementwise"
    for each in (last, *first):
        weight, turned = untransposed(each.y)
        if not turned or weight.type.ndim != 3:
            return "the weights are not [experts, outputs, inputs]"
        if any(not isinstance(n, int) or n % ALIGNED for n in weight.type.shape[1:]):
            return f"rows or columns of {weight.type} are not a multiple of {ALIGNED}"
    return Mixture(dispatch, first, inner, last, op)


def _is_bias(value: Value) -> bool:
    """Whether a value is a row for each expert [experts, 1, features], as it lies in memory."""
    shape = value.type.shape
    return view_of(value).producer is None and len(shape) == 3 and shape[1] == 1


_SAME = ("chosen", "slots", "first")


def _expert(found: Mixture, body: Body, pair: tuple[str, str]) -> str:
    """The number of a pair's expert on this rank, or -1."""
    op, slots = found.combine, found.combine.slots.producer
    chosen = body.element(op.chosen, pair)
    if op.first is not None:
        chosen = f"{chosen} - {body.element(op.first, ())}"
    expert = body.variable("const long long", chosen)
    held = f"{expert} >= 0 && {expert} < {found.experts}"
    if not isinstance(slots, MoeSlots) or slots.capacity != 0 or slots.chosen is not op.chosen:
        held += f" && {body.element(op.slots, pair)} >= 0"
    return body.variable("const int", f"{held} ? (int){expert} : -1")


def _sorted(found: Mixture, tiles: Tiles) -> Template:
    """One block sorts the pairs by expert, and divides those of each into tiles."""
    body = Body(list(found.combine.operands))
    pairs, shape, rows = body.size(found.pairs), found.combine.chosen.type.shape, tiles.shape.rows
    each = "for (ix i = threadIdx.x; i < {}; i += blockDim.x)"
    body.line(f"__shared__ int ends[{found.experts}];")
    body.line(f"{each.format(found.experts)} ends[i] = 0;")
    body.line(f"{each.format(f'{pairs} / {rows} + {found.experts}')} out1[3 * i + 2] = {{0}};")
    body.line("__syncthreads();")
    with body.block(each.format(pairs)):
        token, choice = body.unflattened("i", shape)
        expert = _expert(found, body, (token, choice))
        body.line(f"if ({expert} >= 0) atomicAdd(ends + {expert}, 1);")
    body.line("__syncthreads();")
    with body.block("if (threadIdx.x == 0)"):
        body.line("int begin = 0, tile = 0;")
        with body.block(f"for (int e = 0; e < {found.experts}; ++e)"):
            body.line("const int end = begin + ends[e];")
            body.line("ends[e] = begin;")
            with body.block(f"for (; begin < end; begin += {rows}, ++tile)"):
                body.line("out1[3 * tile] = {e};")
                body.line("out1[3 * tile + 1] = {begin};")
                body.line(f"out1[3 * tile + 2] = {{min({rows}, end - begin)}};")
            body.line("begin = end;")
    body.line("__syncthreads();")
    with body.block(each.format(pairs)):
        token, choice = body.unflattened("i", shape)
        expert = _expert(found, body, (token, choice))
        body.line(f"if ({expert} >= 0) store(out0, atomicAdd(ends + {expert}, 1), i);")
    writes = [tiles.order, tiles.table]
    return launch("moe_sort", body, writes, blocks(1, 1), operations=[found.dispatch], block=1024)


def _first(found: Mixture, tiles: Tiles, hidden: Value) -> Template:
    """What the last product multiplies, for the pairs in order."""
    body = Body([tiles.order, tiles.table, found.dispatch.x])
    rounding = REGISTERS[hidden.type.dtype][1]

    def value() -> None:
        with body.block("auto value = [&](int j, float first, float second) -> float"):
            for each, name in zip(found.first, ("first", "second"), strict=False):
                name = body.variable("float", f"{rounding}({name})")
                body.give(each.result, ("expert", "i", "j"), name)
            body.line(f"return {body.element(found.last.x, ('expert', 'i', 'j'))};")
        body.line(";")

    choices = body.size(found.combine.chosen.type.shape[1])
    pair = f"load<i32>({body.pointer(tiles.order)}, place)"
    row = body.pointer(found.dispatch.x), f"({pair} / {choices})"
    operations = (*found.first, *found.inner)
    return _product(body, tiles, found.first, operations, row, (hidden, "place"), value)


def _last(found: Mixture, tiles: Tiles, hidden: Value, done: Value) -> Template:
    """The result of every pair."""
    body = Body([tiles.order, tiles.table, hidden])
    pair = f"load<i32>({body.pointer(tiles.order)}, place)"
    row = body.pointer(hidden), "place"
    return _product(body, tiles, [found.last], [found.last], row, (done, pair))


def _product(
    body: Body,
    tiles: Tiles,
    products: Sequence[Matmul],
    operations: Sequence[Op],
    x: tuple[str, str],
    y: tuple[Value, str],
    value: Callable[[], None] | None = None,
) -> Template:
    """The launch that multiplies tiles; `x` and `y` are a pointer and the row of a `place`.

    `value` writes the function that makes a result of the sums: the first one, if there is none.
    """
    weights = [untransposed(each.y)[0] for each in products]
    _, n, k = weights[0].type.shape
    assert isinstance(n, int) and isinstance(k, int)
    tile, columns = tiles.shape, tiles.shape.columns // len(weights)
    constants = {
        "ROWS": tile.rows,
        "COLUMNS": columns,
        "WEIGHTS": len(weights),
        "DEPTH": tile.depth,
        "STAGES": tile.stages,
        "N": n,
        "K": k,
    }
    constants |= dict(zip(("WARPS_DOWN", "WARPS_ACROSS", "WARPS_DEEP"), tile.warps, strict=True))
    head = "".join(f"constexpr int {name} = {size};\n" for name, size in constants.items())
    head += f"typedef {y[0].type.dtype} T;\n"
    pointers, table = [body.pointer(each) for each in weights], body.pointer(tiles.table)
    for i, name in enumerate(("expert", "first", "rows")):
        body.line(f"const int {name} = load<i32>({table}, 3 * blockIdx.x + {i});")
    body.line("if (rows == 0) return;")
    if value is None:
        body.line("auto value = [&](int, float first, float) { return first; };")
    else:
        value()
    for name, kind, (pointer, row), width in (("x", "const u16*", x, k), ("y", "u16*", y, n)):
        pointer = pointer if isinstance(pointer, str) else "out0"
        with body.block(f"auto {name} = [&](int row)"):
            body.line("const ix place = first + row;")
            body.line(f"return ({kind}){pointer} + (u64){row} * {width};")
        body.line(";")
    which = f"(w ? {pointers[-1]} : {pointers[0]})"
    where = f"(const u16*){which} + (u64)expert * {n * k}"
    body.line(f"auto weights = [&](int w) {{ return {where}; }};")
    body.line(f"multiply_rows(rows, blockIdx.y * {columns}, x, weights, value, y);")
    return launch(
        "moe_product",
        body,
        [y[0]],
        lambda sizes: (tiles.count, -(-n // columns), 1),
        operations=operations,
        block=32 * prod(tile.warps),
        shared=lambda sizes: tile.shared,
        helpers=head + HELPERS,
    )


def _combined(found: Mixture, done: Value) -> Template:
    """The sum over the experts of every token."""
    body = Body([done, *found.combine.operands])

    def find(pair: tuple[str, str], feature: str, name: str) -> None:
        with body.block(f"if ({_expert(found, body, pair)} >= 0)"):
            body.line(f"{name} = {body.element(done, (*pair, feature))};")

    return combined(found.combine, body, find)

"""Kernels around the statements of a Body: their signature, and elementwise ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from irc.ir.core import Op, Value, Weight
from irc.ir.dims import Dim, DimLike, Shape, bind, product
from irc.ir.dtypes import numpy_dtype
from irc.ir.types import TensorType
from irc.ops import Concat

from ..plan.core import Kernel
from ..plan.template import Grid, Sizes, Template
from .body import FOUR_BITS, Body, Index, Packs

BLOCK = 256  # threads
UNBOUNDED = 256  # threads of a block that fit with as many registers as a thread may have, 255
MANY = 3  # operands of a concat from which on each has blocks of its own
SIMPLE = 32  # statements per element, above which a thread has one element
NO_SHARED: Callable[[Sizes], int] = lambda sizes: 0  # noqa: E731


def launch(
    name: str,
    body: Body,
    writes: Sequence[Value],
    grid: Callable[[Sizes], Grid],
    *,
    operations: Sequence[Op],
    block: int = BLOCK,
    shared: Callable[[Sizes], int] = NO_SHARED,
    scratch: Sequence[TensorType] = (),
    zeros: Sequence[TensorType] = (),
    in_place: Mapping[Value, Value] | None = None,
    helpers: str = "",
    peers: str = "",
    bounds: str = "",
) -> Template:
    """The launch of a kernel with the statements of `body`, after `helpers`.

    The kernel's arguments are the pointers of the body, `out0`, `out1`, ... of `writes`,
    `scratch0`, ..., `zeros0`, ..., `peers` if any, and the symbols of the body. The kernel is
    called `name` and a number that is its own. `bounds`: the launch bounds, where they are not
    `block` alone. It waits for the kernel in front of it before the first statement that is not
    `early`.
    """
    reads, symbols = tuple(body.pointers), tuple(body.symbols)
    only = "" if in_place else "__restrict__ "
    # Read through ld.global.nc, which may find old copies in L1: what no kernel ever writes. A
    # kernel may start, and wait, before those in front of it write the rest.
    fixed = {v: only if isinstance(v, Weight) else "" for v in reads}
    arguments = [f"const {v.type.dtype}* {fixed[v]}{n}" for v, n in body.pointers.items()]
    arguments += [f"{v.type.dtype}* {only}out{i}" for i, v in enumerate(writes)]
    arguments += [f"{t.dtype}* {only}scratch{i}" for i, t in enumerate(scratch)]
    arguments += [f"{t.dtype}* {only}zeros{i}" for i, t in enumerate(zeros)]
    arguments += ["Peers* peers"] if peers else []
    arguments += [f"int given_{each}" for each in symbols]
    lines = [f"  const ix size_{each} = given_{each};" for each in symbols]
    lines += ["  allow_next();", *body.early, "  wait_for_previous();"]
    lines += [*body.first, *body.lines, "}", ""]
    rest = f"({', '.join(arguments)}) {{\n" + "\n".join(lines)
    # kernels that write to other ranks compute no operands, so that they need few registers
    bounds = bounds or f"__launch_bounds__({block})" * (block > UNBOUNDED and not peers)
    head = " ".join(filter(None, ('extern "C" __global__', bounds, "void")))
    name = f"{name}_{sha256((helpers + head + rest).encode()).hexdigest()[:8]}"
    return Template(
        kernel=Kernel(name, f"{helpers}{head} {name}{rest}"),
        reads=reads,
        writes=tuple(writes),
        symbols=symbols,
        grid=grid,
        block=block,
        shared=shared,
        scratch=tuple(scratch),
        in_place=in_place or {},
        operations=tuple(operations),
        waits=True,
        early=tuple(body.read_early),
        zeros=tuple(zeros),
        peers=peers,
    )


def blocks(count: DimLike, each: int = BLOCK) -> Callable[[Sizes], Grid]:
    """The grid with a thread for each of `count` things, in at least one block of `each`."""

    def grid(sizes: Sizes) -> Grid:
        found = number(count, sizes)
        return (max(1, min(-(-found // each), 2**31 - 1)), 1, 1)

    return grid


def each_thing(count: str) -> str:
    """The head of a loop in which the threads of the grid share out `count` things as `i`."""
    first = "(ix)blockIdx.x * (ix)blockDim.x + (ix)threadIdx.x"
    return f"for (ix i = {first}; i < {count}; i += (ix)gridDim.x * (ix)blockDim.x)"


def number(dim: DimLike, sizes: Sizes) -> int:
    """A size where the symbols are known."""
    found = bind(dim, sizes)
    assert not isinstance(found, Dim), f"{found} has no value"
    return found


def elementwise(outputs: Sequence[Value], stored: Collection[Value]) -> Template:
    """The launch that computes values of one shape from stored ones, element by element.

    A thread has one element, or 16 bytes where that is simple.
    """
    inputs = frozenset(stored).difference(outputs)
    parts = _parts_of(outputs)
    size = pack_size(outputs)
    if parts:
        body, grid = _joined(outputs[0], parts, Body(inputs))
    else:
        packs = _elements(outputs, Body(inputs), size) if size > 1 else None
        body = packs or _elements(outputs, Body(inputs), 1)
        assert body is not None
        grid = _blocks(outputs[0], size if packs else 1)
    made = [value.producer for value in outputs]
    operations = [op for op in dict.fromkeys(made) if op is not None]
    return launch("elementwise", body, outputs, grid, operations=operations)


def _blocks(value: Value, size: int) -> Callable[[Sizes], Grid]:
    return blocks(product(value.type.shape), BLOCK * size)


@dataclass(frozen=True)
class Part:
    """An operand of a concat: its elements from `start` on, along `dim` of `whole`."""

    value: Value
    whole: Value
    dim: int
    start: DimLike

    @property
    def size(self) -> int:
        """The elements per thread, which are neighbours in both values."""
        size, whole = pack_size([self.value]), self.whole.type.shape
        last = self.dim == len(whole) - 1
        while size > 1 and last and not (isinstance(self.start, int) and self.start % size == 0):
            size //= 2
        return min(size, pack_size([self.whole]))

    def place(self, body: Body, index: Index, size: int) -> str:
        """The number in `whole`, in packs, of the pack at `index` of the value."""
        whole, start = self.whole.type.shape, self.start
        if size > 1 and self.dim == len(whole) - 1:
            assert isinstance(start, int)
            start //= size
        at = f"({index[self.dim]} + {body.size(start)})"
        index = (*index[: self.dim], at, *index[self.dim + 1 :])
        return body.flattened(index, _packed(whole, size))


def _packed(shape: Shape, size: int) -> Shape:
    """The shape in packs of neighbours."""
    if size == 1:
        return shape
    assert isinstance(shape[-1], int)
    return (*shape[:-1], shape[-1] // size)


def _parts_of(outputs: Sequence[Value]) -> list[Part]:
    """The operands of a concat of many, which get blocks of their own."""
    op = outputs[0].producer
    if len(outputs) > 1 or not isinstance(op, Concat) or len(op.values) < MANY:
        return []
    found, start, dim = list[Part](), 0, op.dim % op.result.type.ndim
    for value in op.values:
        found.append(Part(value, op.result, dim, start))
        start = start + value.type.shape[dim]
    return found


def _joined(
    whole: Value, parts: Sequence[Part], body: Body
) -> tuple[Body, Callable[[Sizes], Grid]]:
    """Statements in which each block has elements of one operand, and their grid."""
    sizes = [
        each.size if each.size > 1 and _elements([each.value], Body(body.stored), each.size) else 1
        for each in parts
    ]
    grids = [_blocks(each.value, size) for each, size in zip(parts, sizes, strict=True)]
    body.line("ix block = blockIdx.x;")
    for each, size in zip(parts, sizes, strict=True):
        count = body.size(product(each.value.type.shape))
        many = body.variable("const ix", f"{count} ? ({count} - 1) / {BLOCK * size} + 1 : 1")
        with body.block(f"if (block >= 0 && block < {many})"):
            first = "block * (ix)blockDim.x + (ix)threadIdx.x"
            loop = f"for (ix i = {first}; i < {{}}; i += {many} * (ix)blockDim.x)"
            _elements([each.value], body, size, loop, each)
        body.packs = None
        body.line(f"block -= {many};")
    return body, lambda sizes: (sum(grid(sizes)[0] for grid in grids), 1, 1)


def pack_size(outputs: Sequence[Value]) -> int:
    """How many elements of a row make 16 bytes of the widest output; fewer where they must.

    Of elements of four bits, a thread has one: no model computes many of them.
    """
    if any(value.type.dtype in FOUR_BITS for value in outputs):
        return 1
    last = outputs[0].type.shape[-1:]
    size = min(8, 16 // max(numpy_dtype(value.type.dtype).itemsize for value in outputs))
    while not last or not isinstance(last[0], int) or last[0] % size:
        if size == 1:
            break
        size //= 2
    return size


def _elements(
    outputs: Sequence[Value], body: Body, size: int, loop: str = "", part: Part | None = None
) -> Body | None:
    """Statements with `size` neighbours per thread, or None where one per thread is better."""
    whole, before = outputs[0].type.shape, len(body.lines)
    shape = _packed(whole, size)
    total = body.variable("const ix", body.size(product(shape)))
    with body.block(loop.format(total) if loop else each_thing(total)):
        index = body.unflattened("i", shape)
        outer, inner = index[:-1], index[-1] if index else "0"
        place = "i" if part is None else part.place(body, index, size)
        if size > 1:
            body.packs = Packs(size, outer, inner, body.depth)
        for k in range(size):
            if body.packs:
                number = body.variable("const ix", f"i * {size} + {k}")
                index = (*outer, body.variable("const ix", f"{inner} * {size} + {k}"))
                body.remember(index, whole, number)
                body.packs.last[index[-1]] = body.packs.numbers[number] = k
            for n, value in enumerate(outputs):
                body.store(n, value, index, body.element(value, index), place)
            strided = body.packs is not None and body.packs.strided
            if size > 1 and (strided or len(body.lines) - before > SIMPLE * (k + 1)):
                return None
    return body

"""Kernels around the statements of a Body: their signature, and elementwise ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import sha256

from irc.ir.core import Op, Value
from irc.ir.dims import Dim, DimLike, bind, product
from irc.ir.dtypes import numpy_dtype
from irc.ir.types import TensorType

from ..plan.core import Kernel
from ..plan.template import Grid, Sizes, Template
from .body import FOUR_BITS, Body, Packs

BLOCK = 256  # threads
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
) -> Template:
    """The launch of a kernel with the statements of `body`, after `helpers`.

    The kernel's arguments are the pointers of the body, `out0`, `out1`, ... of `writes`,
    `scratch0`, ..., `zeros0`, ..., `peers` if any, and the symbols of the body. The kernel is
    called `name` and a number that is its own. It waits for the kernel in front of it before the
    first statement.
    """
    reads, symbols = tuple(body.pointers), tuple(body.symbols)
    only = "" if in_place else "__restrict__ "
    arguments = [f"const {v.type.dtype}* {only}{n}" for v, n in body.pointers.items()]
    arguments += [f"{v.type.dtype}* {only}out{i}" for i, v in enumerate(writes)]
    arguments += [f"{t.dtype}* {only}scratch{i}" for i, t in enumerate(scratch)]
    arguments += [f"{t.dtype}* {only}zeros{i}" for i, t in enumerate(zeros)]
    arguments += ["Peers* peers"] if peers else []
    arguments += [f"int given_{each}" for each in symbols]
    lines = [f"  const ix size_{each} = given_{each};" for each in symbols]
    lines += ["  allow_next();", "  wait_for_previous();", *body.first, *body.lines, "}", ""]
    rest = f"({', '.join(arguments)}) {{\n" + "\n".join(lines)
    name = f"{name}_{sha256((helpers + rest).encode()).hexdigest()[:8]}"
    return Template(
        kernel=Kernel(name, f'{helpers}extern "C" __global__ void {name}{rest}'),
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

    A thread has one element, or a byte of those of four bits, or 16 bytes where that is simple.
    """
    inputs = frozenset(stored).difference(outputs)
    size = pack_size(outputs)
    if any(value.type.dtype in FOUR_BITS for value in outputs):
        body, size = _pairs(outputs, Body(inputs)), 2
    else:
        packs = _packs(outputs, Body(inputs), size) if size > 1 else None
        body = packs or _single(outputs, Body(inputs))
        size = size if packs else 1
    made = [value.producer for value in outputs]
    return launch(
        "elementwise",
        body,
        outputs,
        blocks(product(outputs[0].type.shape), BLOCK * size),
        operations=[op for op in dict.fromkeys(made) if op is not None],
    )


def _single(outputs: Sequence[Value], body: Body) -> Body:
    """Statements with one element per thread."""
    shape = outputs[0].type.shape
    total = body.variable("const ix", body.size(product(shape)))
    with body.block(each_thing(total)):
        index = body.unflattened("i", shape)
        for n, value in enumerate(outputs):
            body.line(f"store<{value.type.dtype}>(out{n}, i, {body.element(value, index)});")
    return body


def pack_size(outputs: Sequence[Value]) -> int:
    """How many elements of a row make 16 bytes of the widest output; fewer where they must."""
    last = outputs[0].type.shape[-1:]
    size = min(8, 16 // max(numpy_dtype(value.type.dtype).itemsize for value in outputs))
    while not last or not isinstance(last[0], int) or last[0] % size:
        if size == 1:
            break
        size //= 2
    return size


def _packs(outputs: Sequence[Value], body: Body, size: int) -> Body | None:
    """Statements with `size` neighbours per thread, or None where one per thread is better."""
    *front, last = whole = outputs[0].type.shape
    assert isinstance(last, int)
    shape = (*front, last // size)
    total = body.variable("const ix", body.size(product(shape)))
    kinds = [f"Pack<{value.type.dtype}, {size}>" for value in outputs]
    with body.block(each_thing(total)):
        *outer, inner = body.unflattened("i", shape)
        packs = body.packs = Packs(size, tuple(outer), inner, depth=2)
        for n, kind in enumerate(kinds):
            body.line(f"{kind} pack{n};")
        for k in range(size):
            number = body.variable("const ix", f"i * {size} + {k}")
            index = (*outer, body.variable("const ix", f"{inner} * {size} + {k}"))
            body.remember(index, whole, number)
            packs.last[index[-1]] = packs.numbers[number] = k
            for n, value in enumerate(outputs):
                x = body.element(value, index)
                body.line(f"pack{n}.item[{k}] = Memory<{value.type.dtype}>::of({x});")
            if packs.strided or len(body.lines) > SIMPLE * (k + 1):
                return None
        for n, kind in enumerate(kinds):
            body.line(f"(({kind}*)out{n})[i] = pack{n};")
    return body


def _pairs(outputs: Sequence[Value], body: Body) -> Body:
    """Statements with two elements per thread, which are one byte where elements have four bits."""
    shape = outputs[0].type.shape
    total = body.variable("const ix", body.size(product(shape)))
    with body.block(each_thing(body.variable("const ix", f"{total} / 2 + {total} % 2"))):
        for half in (0, 1):
            at = body.variable("const ix", f"2 * i + {half}")
            for n, value in enumerate(outputs):
                body.line(f"Memory<{value.type.dtype}>::value half{half}_{n} = 0;")
            with body.block(f"if ({at} < {total})"):
                index = body.unflattened(at, shape)
                for n, value in enumerate(outputs):
                    body.line(f"half{half}_{n} = {body.element(value, index)};")
                    if value.type.dtype not in FOUR_BITS:
                        body.line(f"store<{value.type.dtype}>(out{n}, {at}, half{half}_{n});")
        for n, value in enumerate(outputs):
            if value.type.dtype in FOUR_BITS:
                body.line(f"store_pair<{value.type.dtype}>(out{n}, i, half0_{n}, half1_{n});")
    return body

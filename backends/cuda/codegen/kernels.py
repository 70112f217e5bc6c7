"""Kernels around the statements of a Body: their signature, and elementwise ones."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import sha256

from irc.ir.core import Op, Value
from irc.ir.dims import Dim, DimLike, bind, product
from irc.ir.types import TensorType

from ..plan.core import Kernel
from ..plan.template import Grid, Sizes, Template
from .body import Body

BLOCK = 256  # threads
FOUR_BITS = ("i4", "u4", "f4e2m1")
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
) -> Template:
    """The launch of a kernel with the statements of `body`, after `helpers`.

    The kernel's arguments are the pointers of the body, `out0`, `out1`, ... of `writes`,
    `scratch0`, ..., `zeros0`, ..., and the symbols of the body. The kernel is called `name` and a
    number that is its own. It waits for the kernel in front of it before the first statement.
    """
    reads, symbols = tuple(body.pointers), tuple(body.symbols)
    only = "" if in_place else "__restrict__ "
    arguments = [f"const {v.type.dtype}* {only}{n}" for v, n in body.pointers.items()]
    arguments += [f"{v.type.dtype}* {only}out{i}" for i, v in enumerate(writes)]
    arguments += [f"{t.dtype}* {only}scratch{i}" for i, t in enumerate(scratch)]
    arguments += [f"{t.dtype}* {only}zeros{i}" for i, t in enumerate(zeros)]
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
    """The launch that computes values of one shape from stored ones, element by element."""
    shape = outputs[0].type.shape
    body = Body([value for value in stored if value not in outputs])
    pairs = any(value.type.dtype in FOUR_BITS for value in outputs)
    count = product(shape)
    things = -(-count // 2) if pairs and isinstance(count, int) else count
    total = body.variable("const ix", body.size(count))
    until = body.variable("const ix", f"{total} / 2 + {total} % 2") if pairs else total
    with body.block(each_thing(until)):
        if pairs:
            _pair(body, outputs, total)
        else:
            index = body.unflattened("i", shape)
            for n, value in enumerate(outputs):
                body.line(f"store<{value.type.dtype}>(out{n}, i, {body.element(value, index)});")
    made = [value.producer for value in outputs]
    return launch(
        "elementwise",
        body,
        outputs,
        blocks(things),
        operations=[op for op in dict.fromkeys(made) if op is not None],
    )


def _pair(body: Body, outputs: Sequence[Value], total: str) -> None:
    """Statements for two elements, which are one byte where elements have four bits."""
    shape = outputs[0].type.shape
    names: list[list[str]] = [[], []]
    for half in (0, 1):
        at = body.variable("const ix", f"2 * i + {half}")
        for n, value in enumerate(outputs):
            dtype = value.type.dtype
            names[half].append(f"half{half}_{n}")
            body.line(f"Memory<{dtype}>::value half{half}_{n} = 0;")
        with body.block(f"if ({at} < {total})"):
            index = body.unflattened(at, shape)
            for n, value in enumerate(outputs):
                body.line(f"half{half}_{n} = {body.element(value, index)};")
                if value.type.dtype not in FOUR_BITS:
                    body.line(f"store<{value.type.dtype}>(out{n}, {at}, half{half}_{n});")
    for n, value in enumerate(outputs):
        if value.type.dtype in FOUR_BITS:
            body.line(f"store_pair<{value.type.dtype}>(out{n}, i, half0_{n}, half1_{n});")

"""Elements of operations that move, repeat, join and look up elements, and of constants."""

from __future__ import annotations

from collections.abc import Sequence

from irc import ops
from irc.ir.core import Value
from irc.ir.dims import DimLike, Shape, symbol

from .body import Body, Index, element
from .elementwise import literal, operand, register


def replaced(index: Index, dim: int, new: str) -> Index:
    """The index with another entry in one dimension, which may count from the end."""
    at = dim % len(index)
    return (*index[:at], new, *index[at + 1 :])


def where_inside(
    body: Body, value: Value, condition: str, index: Sequence[str], otherwise: str
) -> str:
    """The element where the condition holds, which alone reads memory, else `otherwise`."""
    kind = register(value.type.dtype)
    item = body.packed(value, tuple(index), condition)
    if item is not None:
        return body.variable(kind, f"{condition} ? {item} : {otherwise}")
    found = body.variable(kind, otherwise)
    with body.block(f"if ({condition})"):
        body.line(f"{found} = {body.element(value, index)};")
    return found


# ---- shape ---------------------------------------------------------------------------------------


@element(ops.Reshape)
def _reshape(body: Body, op: ops.Reshape, result: int, index: Index) -> str:
    old, new = op.x.type.shape, op.result.type.shape
    number = body.known_number(index, new)
    front, back = _common(old, new)
    inner = slice(front, len(new) - back)
    middle = body.variable("ix", body.flattened(index[inner], new[inner]))
    found = body.unflattened(middle, old[front : len(old) - back])
    found = (*index[:front], *found, *index[len(new) - back :])
    if number is not None:
        body.remember(found, old, number)
    return body.element(op.x, found)


def _common(a: Shape, b: Shape) -> tuple[int, int]:
    """How many dimensions two shapes share in front, and behind these at the end."""
    shortest = min(len(a), len(b))
    front = 0
    while front < shortest and a[front] == b[front]:
        front += 1
    back = 0
    while back < shortest - front and a[-1 - back] == b[-1 - back]:
        back += 1
    return front, back


@element(ops.Squeeze)
def _squeeze(body: Body, op: ops.Squeeze, result: int, index: Index) -> str:
    ndim = op.x.type.ndim
    gone = {dim % ndim for dim in op.dims}
    kept = iter(index)
    return body.element(op.x, ["0" if i in gone else next(kept) for i in range(ndim)])


@element(ops.Unsqueeze)
def _unsqueeze(body: Body, op: ops.Unsqueeze, result: int, index: Index) -> str:
    new = {dim % len(index) for dim in op.dims}
    return body.element(op.x, [each for i, each in enumerate(index) if i not in new])


@element(ops.Expand)
def _expand(body: Body, op: ops.Expand, result: int, index: Index) -> str:
    return operand(body, op.x, index)


@element(ops.Transpose)
def _transpose(body: Body, op: ops.Transpose, result: int, index: Index) -> str:
    found = [""] * len(index)
    for i, dim in enumerate(op.order):
        found[dim] = index[i]
    return body.element(op.x, found)


@element(ops.Flip)
def _flip(body: Body, op: ops.Flip, result: int, index: Index) -> str:
    for dim in op.dims:
        size = body.size(op.x.type.shape[dim])
        index = replaced(index, dim, body.variable("ix", f"{size} - 1 - {index[dim]}"))
    return body.element(op.x, index)


@element(ops.Repeat)
def _repeat(body: Body, op: ops.Repeat, result: int, index: Index) -> str:
    at = body.variable("ix", f"{index[op.dim]} / {op.count}")
    return body.element(op.x, replaced(index, op.dim, at))


# ---- parts ---------------------------------------------------------------------------------------


@element(ops.Slice)
def _slice(body: Body, op: ops.Slice, result: int, index: Index) -> str:
    at = index[op.dim]
    if at.isdigit() and isinstance(op.start, int):
        at = str(op.start + int(at) * op.step)
    else:
        at = body.variable("ix", f"{body.size(op.start)} + {at} * {op.step}")
    return body.element(op.x, replaced(index, op.dim, at))


@element(ops.Split)
def _split(body: Body, op: ops.Split, result: int, index: Index) -> str:
    start: DimLike = 0
    for size in op.sizes[:result]:
        start = start + size
    at = body.variable("ix", f"{index[op.dim]} + {body.size(start)}")
    return body.element(op.x, replaced(index, op.dim, at))


@element(ops.Concat)
def _concat(body: Body, op: ops.Concat, result: int, index: Index) -> str:
    dim = op.dim % len(index)
    found = body.variable(register(op.result.type.dtype), "0")
    start: DimLike = 0
    word = "if"
    for value in op.values:
        end = start + value.type.shape[dim]
        with body.block(f"{word} ({index[dim]} < {body.size(end)})"):
            at = body.variable("ix", f"{index[dim]} - {body.size(start)}")
            body.line(f"{found} = {body.element(value, replaced(index, dim, at))};")
        start, word = end, "else if"
    return found


@element(ops.Pad)
def _pad(body: Body, op: ops.Pad, result: int, index: Index) -> str:
    inside: list[str] = []
    places: list[str] = []
    for i, size, before, after in zip(index, op.x.type.shape, op.before, op.after, strict=True):
        at = i if before == 0 else body.variable("ix", f"{i} - {body.size(before)}")
        inside += [f"{at} >= 0"] * (before != 0) + [f"{at} < {body.size(size)}"] * (after != 0)
        places.append(at)
    if not inside:
        return body.element(op.x, places)
    value = literal(op.value, op.x.type.dtype)
    return where_inside(body, op.x, " && ".join(inside), places, value)


# ---- constants -----------------------------------------------------------------------------------


@element(ops.Full)
def _full(body: Body, op: ops.Full, result: int, index: Index) -> str:
    return literal(op.value, op.dtype)


@element(ops.Constant)
def _constant(body: Body, op: ops.Constant, result: int, index: Index) -> str:
    texts = [literal(value, op.dtype) for value in op.values]
    if len(set(texts)) <= 1:
        return texts[0] if texts else "0"
    number = body.variable("ix", body.place(op.result, index))
    return f"{body.table(register(op.dtype), texts)}[{number}]"


@element(ops.Iota)
def _iota(body: Body, op: ops.Iota, result: int, index: Index) -> str:
    return f"({register(op.dtype)}){index[0]}"


@element(ops.Rank)
def _rank(body: Body, op: ops.Rank, result: int, index: Index) -> str:
    return f"(int){body.size(symbol(rank_symbol(op)))}"


def rank_symbol(op: ops.Rank) -> str:
    """The symbol among the sizes of a plan that has a rank's position along the axes."""
    return "rank_" + "_".join(op.axes)


# ---- lookup --------------------------------------------------------------------------------------


def _inside(index: str, size: str) -> str:
    return f"{index} >= 0 && {index} < {size}"


@element(ops.Embedding)
def _embedding(body: Body, op: ops.Embedding, result: int, index: Index) -> str:
    row = body.element(op.ids, index[:-1])
    known = _inside(row, body.size(op.table.type.shape[0]))
    return where_inside(body, op.table, known, (f"(ix){row}", index[-1]), "0")


def from_front(body: Body, indices: Value, place: Index, size: str) -> str:
    """An index as a position from the front, where negative ones count from the end."""
    found = body.element(indices, place)
    kind = register(indices.type.dtype)
    return body.variable(kind, f"{found} < 0 ? {found} + {size} : {found}")


@element(ops.Gather)
def _gather(body: Body, op: ops.Gather, result: int, index: Index) -> str:
    ndim, inner = op.x.type.ndim, op.indices.type.ndim
    dim = op.dim % ndim
    size = body.size(op.x.type.shape[dim])
    at = from_front(body, op.indices, index[dim : dim + inner], size)
    places = (*index[:dim], f"(ix){at}", *index[dim + inner :])
    return where_inside(body, op.x, _inside(at, size), places, "0")


@element(ops.GatherElements)
def _gather_elements(body: Body, op: ops.GatherElements, result: int, index: Index) -> str:
    size = body.size(op.x.type.shape[op.dim])
    at = from_front(body, op.indices, index, size)
    return where_inside(body, op.x, _inside(at, size), replaced(index, op.dim, f"(ix){at}"), "0")

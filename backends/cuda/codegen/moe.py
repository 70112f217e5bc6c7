"""Kernels of mixtures of experts: the slots of tokens, and their ways to the experts and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager

from irc.ir.core import Value
from irc.ir.dims import DimLike, exact_divide, product
from irc.ops import MoeCombine, MoeDispatch, MoeSlots

from ..plan.template import Template, kernels_of
from .body import REGISTERS, Body
from .kernels import BLOCK, blocks, each_thing, launch
from .select import SCAN


@kernels_of(MoeSlots)
def moe_slots(op: MoeSlots, stored: Collection[Value]) -> list[Template]:
    """A block for each expert of each part counts the pairs of the expert."""
    body = Body(stored)
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
    return [launch("moe_slots", body, op.results, blocks(count, 1), operations=[op], helpers=SCAN)]


@contextmanager
def _row(
    op: MoeDispatch | MoeCombine,
    body: Body,
    pair: tuple[str, str],
    experts: DimLike,
    places: DimLike,
) -> Generator[str]:
    """Statements where a pair has a place in the buffer; the number of its row there."""
    _, _, part = op.pairs()
    chosen = body.element(op.chosen, pair)
    if op.first is not None:
        chosen = f"{chosen} - {body.element(op.first, ())}"
    expert = body.variable("const long long", chosen)
    slot = body.element(op.slots, pair)
    capacity = exact_divide(places, op.parts)
    assert capacity is not None
    inside = f"{expert} >= 0 && {expert} < {body.size(experts)} && {slot} >= 0"
    with body.block(f"if ({inside} && {slot} < {body.size(capacity)})"):
        first = f"{pair[0]} / {body.size(part)} * {body.size(capacity)}"
        yield body.variable(
            "const ix", f"(ix){expert} * {body.size(places)} + {first} + (ix){slot}"
        )


@kernels_of(MoeDispatch)
def moe_dispatch(op: MoeDispatch, stored: Collection[Value]) -> list[Template]:
    """Zeros, then the token of every pair in its place; a slot beyond the capacity is left out."""
    result = op.results[0]
    cleared, total = Body(stored), product(result.type.shape)
    with cleared.block(each_thing(cleared.size(total))):
        cleared.line("store(out0, i, 0);")
    body = Body(stored)
    tokens, choices = op.chosen.type.shape
    experts, places, width = result.type.shape
    with body.block(each_thing(body.size(tokens * choices * width))):
        token, choice, feature = body.unflattened("i", (tokens, choices, width))
        with _row(op, body, (token, choice), experts, places) as row:
            element = body.element(op.x, (token, feature))
            body.line(f"store(out0, {row} * {body.size(width)} + {feature}, {element});")
    return [
        launch("moe_clear", cleared, op.results, blocks(total), operations=[op]),
        launch(
            "moe_dispatch",
            body,
            op.results,
            blocks(tokens * choices * width, BLOCK),
            operations=[op],
        ),
    ]


@kernels_of(MoeCombine)
def moe_combine(op: MoeCombine, stored: Collection[Value]) -> list[Template]:
    """Every element of the result is the sum of those of its token's experts."""
    body = Body(stored)
    experts, places, _ = op.buffer.type.shape

    def add(pair: tuple[str, str], feature: str, found: str) -> None:
        with _row(op, body, pair, experts, places) as row:
            at = body.unflattened(row, (experts, places))
            body.line(f"{found} = {body.element(op.buffer, (*at, feature))};")

    return [combined(op, body, add)]


def combined(
    op: MoeCombine, body: Body, find: Callable[[tuple[str, str], str, str], None]
) -> Template:
    """The launch of a combine; `find(pair, feature, name)` sets a variable to a pair's result."""
    result = op.result
    kind, count = REGISTERS[result.type.dtype][0], product(result.type.shape)
    with body.block(each_thing(body.size(count))):
        token, feature = body.unflattened("i", result.type.shape)
        total = body.variable(kind, "0")
        with body.block(f"for (ix k = 0; k < {body.size(op.chosen.type.shape[1])}; ++k)"):
            found = body.variable(kind, "0")  # a pair that was dropped has zeros
            find((token, "k"), feature, found)
            weight = body.element(op.weights, (token, "k"))
            body.line(f"{total} = add({total}, mul({weight}, {found}));")
        body.line(f"store(out0, i, {total});")
    return launch("moe_combine", body, op.results, blocks(count), operations=[op])

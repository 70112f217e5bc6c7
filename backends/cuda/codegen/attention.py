"""Plain kernels of attention: every option of the operation, at any sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from irc.errors import Error
from irc.ir.core import Op, Value
from irc.ir.dims import DimLike, exact_divide
from irc.ops.attention import Attention

from ..plan.template import Grid, Sizes, Template, kernels_of
from .body import REGISTERS, Body
from .files import helpers
from .kernels import launch, number

HELPERS = helpers("attention.cuh")
THREADS = 128  # as in attention.cuh
ROWS = 8  # queries of a block, at most
SHARED = 40 << 10  # bytes of a block
FAR = 1 << 30  # more keys than an index counts
ROW = "const ix i = (first + row) / group, h = head * group + (first + row) % group;"
SCORE = ("b", "h", "i", "j")  # where a mask or a bias has the element of a score


@dataclass(frozen=True)
class Heads:
    """The sizes of an attention: `group` query heads share a key-value head."""

    batch: DimLike
    tokens: DimLike
    keys: DimLike
    key_heads: DimLike
    group: DimLike
    width: int  # features of a head of q and k
    values: int  # features of a head of v

    @classmethod
    def of(cls, op: Attention) -> Heads:
        """The sizes of `op`."""
        q, k, v = op.q.type.shape, op.k.type.shape, op.v.type.shape
        heads = exact_divide(q[2], op.head_dim)
        group = None if heads is None else exact_divide(heads, op.key_heads)
        values = v[3] if op.cached else exact_divide(v[2], op.key_heads)
        if group is None or not isinstance(values, int):
            raise Error(
                f"attention: expected heads of known sizes, found q {op.q.type}, {op.v.type}"
            )
        keys = k[2] if op.cached else k[1]
        return cls(q[0], q[1], keys, op.key_heads, group, op.head_dim, values)

    def rows(self, nbytes: int) -> int:
        """How many queries a block takes, in a dtype of registers of `nbytes`."""
        queries, row = self.tokens * self.group, (self.width + self.values + THREADS) * nbytes
        return max(1, min(ROWS, SHARED // row, queries if isinstance(queries, int) else ROWS))

    def grid(self, rows: int) -> Callable[[Sizes], Grid]:
        """The grid with a block per tile of so many queries, of every row and key-value head."""

        def grid(sizes: Sizes) -> Grid:
            tiles = -(-number(self.tokens * self.group, sizes) // rows)
            heads = number(self.batch, sizes) * number(self.key_heads, sizes)
            return (max(1, tiles * heads), 1, 1)

        return grid


@kernels_of(Attention)
def attention(op: Op, stored: Collection[Value]) -> list[Template]:
    """The launch of an attention: a block per row, key-value head and few queries."""
    assert isinstance(op, Attention)
    heads, body = Heads.of(op), Body(stored)
    kind, _ = REGISTERS[op.q.type.dtype]
    rows = heads.rows(8 if kind == "double" else 4)
    queries_of_block(heads, body, rows)
    _operands(op, body)
    keys_of_block(op, heads, body)
    visibility(op, body)
    scores(op, body, kind)
    sinks(op, body, kind)
    with body.block(f"auto out = [&](ix row, ix c, {kind} x)"):
        body.line(ROW)
        feature = f"(h * {heads.values} + c)"
        body.line(f"store(out0, {body.place(op.result, ('b', 'i', feature))}, x);")
    body.line(";")
    sizes = f"{kind}, {rows}, {heads.width}, {heads.values}"
    body.line(f"attend<{sizes}>(rows, low, high, query, key, value, visible, change, sink, out);")
    options = {"operations": [op], "block": THREADS, "helpers": HELPERS}
    return [launch("attention", body, [op.result], heads.grid(rows), **options)]


def queries_of_block(heads: Heads, body: Body, rows: int) -> None:
    """The queries of this block: row `b`, key-value head `head`, `rows` from `first` on."""
    batch, key_heads = body.size(heads.batch), body.size(heads.key_heads)
    body.line(f"const ix group = {body.size(heads.group)};")
    body.line(f"const ix queries = {body.size(heads.tokens)} * group;")
    body.line(f"const ix tiles = (queries + {rows - 1}) / {rows};")
    body.line(f"if (blockIdx.x >= tiles * {batch} * {key_heads}) return;")
    body.line(f"const ix head = blockIdx.x % {key_heads}, rest = blockIdx.x / {key_heads};")
    # The last queries come first: where they see the keys before them only, they take longest.
    body.line(f"const ix b = rest % {batch}, first = (tiles - 1 - rest / {batch}) * {rows};")
    body.line(f"const ix rows = queries - first < {rows} ? queries - first : {rows};")


def _operands(op: Attention, body: Body) -> None:
    """Functions that give elements of q, k and v."""
    kind = REGISTERS[op.q.type.dtype][0]
    with body.block(f"auto query = [&](ix row, ix d) -> {kind}"):
        body.line(ROW)
        feature = body.variable("const ix", f"h * {op.head_dim} + d")
        body.line(f"return {body.element(op.q, ('b', 'i', feature))};")
    body.line(";")
    for name, value in (("key", op.k), ("value", op.v)):
        with body.block(f"auto {name} = [&](ix j, ix d) -> {kind}"):
            index: tuple[str, ...] = ("b", "head", "j", "d")
            if not op.cached:
                width = exact_divide(value.type.shape[2], op.key_heads)
                assert width is not None
                feature = body.variable("const ix", f"head * {body.size(width)} + d")
                index = ("b", "j", feature)
            body.line(f"return {body.element(value, index)};")
        body.line(";")


def sinks(op: Attention, body: Body, kind: str) -> None:
    """The function that gives the score of a query's sink, -infinity without sinks."""
    with body.block(f"auto sink = [&](ix row) -> {kind}"):
        if op.sinks is None:
            body.line(f"return ({kind})__uint_as_float(0xff800000u);")
        else:
            body.line(ROW)
            body.line(f"return ({kind}){body.element(op.sinks, ('h',))};")
    body.line(";")


def keys_of_block(op: Attention, heads: Heads, body: Body) -> None:
    """`low` and `high`: the keys that any query of the block may see; `before` these queries."""
    tokens, keys = body.size(heads.tokens), body.size(heads.keys)
    before = f"{keys} - {tokens}" if op.past is None else body.element(op.past, ("b",))
    body.line(f"const ix before = (ix)({before});")
    body.line(f"ix low = 0, high = {keys};")
    if op.causal:
        body.line("const ix until = before + (first + rows - 1) / group + 1;")
        body.line("if (until < high) high = until;")
    if op.lengths is not None:
        length = body.element(op.lengths, ("b",))
        body.line(f"if ({length} < high) high = (ix){length};")
    if op.window:
        body.line(f"const ix since = before + first / group - {min(op.window, FAR)} + 1;")
        body.line("if (since > 0) low = since;")


def visibility(op: Attention, body: Body) -> None:
    """The function that says whether a query of the block sees a key."""
    with body.block("auto visible = [&](ix row, ix j) -> bool"):
        body.line(ROW)
        body.line("const ix position = before + i;")
        if op.causal:
            body.line("if (j > position) return false;")
        if op.window:
            body.line(f"if (j <= position - {min(op.window, FAR)}) return false;")
        seen = "true" if op.mask is None else body.element(op.mask, SCORE)
        body.line(f"return {seen};")
    body.line(";")


def scores(op: Attention, body: Body, kind: str, scaled: bool = True) -> None:
    """The function that makes a score of the product of a query and a key."""
    with body.block(f"auto change = [&](ix row, ix j, {kind} x) -> {kind}"):
        if scaled:
            body.line(ROW)
            body.line(f"x = mul(x, ({kind}){op.score_scale!r});")
        if op.softcap:
            body.line(f"x = mul(tanh(x / ({kind}){op.softcap!r}), ({kind}){op.softcap!r});")
        if op.bias is not None:
            body.line(f"x = add(x, ({kind}){body.element(op.bias, SCORE)});")
        body.line("return x;")
    body.line(";")

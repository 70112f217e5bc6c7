"""Attention of any number of queries: on tensor cores, and plain with every option."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import e as EULER
from math import log2

from irc.errors import Error
from irc.ir.dims import DimLike, exact_divide
from irc.ir.types import TensorType
from irc.ops.attention import Attention

from ..plan.regime import Regime
from ..plan.template import Grid, Sizes, Template, kernels_of, launches_of
from .body import REGISTERS, Body
from .cache_rows import cache_row, pool_of
from .files import constants, helpers
from .kernels import launch, number

PLAIN = helpers("attention.cuh")
TENSOR_CORES = helpers("warp.cuh", "copies.cuh", "prefill_attention.cuh")
THREADS = 128  # of a plain block, as in attention.cuh
ROWS = 8  # queries of a plain block, at most
SHARED = 40 << 10  # bytes of a plain block
WIDEST = 256  # features of a head on tensor cores
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

    def rows(self, most: int) -> int:
        """How many queries a plain block takes, where shared memory has room for `most`."""
        queries = self.tokens * self.group
        return max(1, min(ROWS, most, queries if isinstance(queries, int) else ROWS))

    def grid(self, rows: int) -> Callable[[Sizes], Grid]:
        """The grid with a block per tile of so many queries, of every row and key-value head."""

        def grid(sizes: Sizes) -> Grid:
            tiles = -(-number(self.tokens * self.group, sizes) // rows)
            heads = number(self.batch, sizes) * number(self.key_heads, sizes)
            return (max(1, tiles * heads), 1, 1)

        return grid


@launches_of(Attention, order=1)
def prefill_attention(op: Attention, regime: Regime) -> list[Template] | str:
    """The launch on tensor cores for any number of queries, or why there is none."""
    refusal = _refusal(op)
    return f"attention on tensor cores: {refusal}" if refusal else [_on_tensor_cores(op)]


def _refusal(op: Attention) -> str:
    """Why the kernel cannot compute an attention; empty if it can."""
    if op.q.type.dtype not in ("bf16", "f16"):
        return f"it takes bf16 and f16, not {op.q.type.dtype}"
    heads = Heads.of(op)
    for size in (heads.width, heads.values):
        if size % 8 or not 0 < size <= WIDEST:
            return f"it takes heads of 8 to {WIDEST} features, a multiple of 8, not {size}"
    if op.mask is not None and op.cached:
        return "it takes no mask over caches, whose other rows may hold anything"
    return ""


def _on_tensor_cores(op: Attention) -> Template:
    """The launch: a block per row, key-value head and tile of queries."""
    heads = Heads.of(op)
    body = Body(list(op.operands))
    narrow = max(heads.width, heads.values) <= 128
    warps, keys, blocks = (8, 64, 2) if narrow else (4, 32, 1)
    queries_of_block(heads, body, 16 * warps)
    _rows(op, heads, body)
    keys_of_block(op, heads, body)
    visibility(op, body)
    changed = bool(op.softcap) or op.score_scale <= 0
    changed |= op.bias is not None or op.sinks is not None
    if changed:
        scores(op, body, "float")
    else:
        body.line("auto change = [&](ix row, ix j, float x) { return x; };")
    sinks(op, body, "float")
    _whole(op, body)
    with body.block("auto out = [&](ix row, ix c, u32 pair)"):
        body.line(ROW)
        place = body.place(op.result, ("b", "i", f"(h * {heads.values} + c)"))
        body.line(f"*(u32*)(out0 + {place}) = pair;")
    body.line(";")
    functions = "query, key, value, whole, visible, change, sink, out"
    body.line(f"prefill_attention(rows, low, high, {functions});")
    scale = (1.0 if changed else op.score_scale) * log2(EULER)
    sizes = {"KEYS": keys, "WARPS": warps, "D": heads.width, "DV": heads.values}
    head = constants({**sizes, "CHANGED": changed, "SCALE": scale})
    head += f"typedef {op.q.type.dtype} T;\n"
    wide, wide_values = (-(-n // 64) * 128 for n in (heads.width, heads.values))
    nbytes = 16 * warps * wide + 2 * keys * (wide + wide_values) + 1024
    return launch(
        "prefill_attention",
        body,
        [op.result],
        heads.grid(16 * warps),
        operations=[op],
        block=32 * warps,
        shared=lambda sizes: nbytes,
        helpers=head + TENSOR_CORES,
        bounds=f"__launch_bounds__({32 * warps}, {blocks})",
    )


def _rows(op: Attention, heads: Heads, body: Body) -> None:
    """Functions that give where rows of q, k and v lie."""
    with body.block("auto query = [&](ix row)"):
        body.line(ROW)
        place = body.place(op.q, ("b", "i", f"h * {op.head_dim}"))
        body.line(f"return (const u16*)({body.pointer(op.q)} + {place});")
    body.line(";")
    for name, operand, width in (("key", op.k, heads.width), ("value", op.v, heads.values)):
        with body.block(f"auto {name} = [&](ix j)"):
            memory, pages = pool_of(operand)
            row, at = cache_row(body, memory, pages, "b", "j")
            if pages is not None:  # padding may have no page: it reads the last one, as a gather
                last = f"{body.size(memory.type.shape[0])} - 1"
                row = body.variable("const ix", f"{row} < 0 ? {last} : {row}")
            index = (row, "head", at, "0") if op.cached else ("b", "j", f"head * {width}")
            place = body.place(memory, index)
            body.line(f"return (const u16*)({body.pointer(memory)} + {place});")
        body.line(";")


def _whole(op: Attention, body: Body) -> None:
    """The function that says whether all queries of the block see the keys from j on."""
    with body.block("auto whole = [&](ix j) -> bool"):
        conditions = ["j + KEYS <= high" if op.mask is None else "false"]
        if op.causal:
            conditions.append("j + KEYS - 1 <= before + first / group")
        if op.window:
            last = "before + (first + rows - 1) / group"
            conditions.append(f"j > {last} - {min(op.window, FAR)}")
        body.line(f"return {' && '.join(conditions)};")
    body.line(";")


@kernels_of(Attention)
def plain_attention(op: Attention, regime: Regime) -> list[Template]:
    """The launch with a block per row, key-value head and few queries.

    Where the heads of one query are too wide for shared memory, they lie in scratch memory.
    """
    heads, body = Heads.of(op), Body(regime.stored)
    kind, _ = REGISTERS[op.q.type.dtype]
    nbytes, row = (8 if kind == "double" else 4), heads.width + heads.values
    rows = heads.rows(SHARED // ((row + THREADS) * nbytes))
    is_wide = (row + THREADS) * nbytes > SHARED
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
    if is_wide:
        body.line(f"{kind}* const room = ({kind}*)scratch0 + blockIdx.x * (ix){row};")
    else:
        body.line(f"__shared__ {kind} room[{rows * row}];")
    sizes = f"{kind}, {rows}, {heads.width}, {heads.values}"
    functions = "query, key, value, visible, change, sink, out"
    body.line(f"plain_attention<{sizes}>(room, rows, low, high, {functions});")
    count = heads.batch * heads.key_heads * heads.tokens * heads.group
    scratch = [TensorType("f64" if nbytes == 8 else "f32", (count * row,))] if is_wide else []
    options = {"operations": [op], "block": THREADS, "helpers": PLAIN, "scratch": scratch}
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

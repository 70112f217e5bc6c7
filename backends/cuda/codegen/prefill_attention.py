"""Attention of many queries in 16-bit floats, on tensor cores."""

from __future__ import annotations

from math import e as EULER
from math import log2

from irc.ir.core import Op
from irc.ops.attention import Attention

from ..plan.template import Fused, Sizes, Template, fusion
from .attention import FAR, ROW, Heads, keys_of_block, queries_of_block, scores, sinks, visibility
from .body import Body
from .decode_attention import find_site
from .files import helpers
from .head_rows import head_rows, takes
from .kernels import launch

HELPERS = helpers("warp.cuh", "copies.cuh", "prefill_attention.cuh")
WIDEST = 256  # features of a head


@fusion(Attention, order=1)
def prefill_attention(op: Op, sizes: Sizes) -> Fused | str | None:
    """The launch for any number of queries, or why there is none."""
    assert isinstance(op, Attention)
    refusal = _refusal(op)
    if refusal:
        return f"attention on tensor cores: {refusal}"
    site = find_site(op)
    if takes(site):
        return Fused((head_rows(site), template(op)), site.covers)
    return Fused((template(op),), (op,))


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


def template(op: Attention) -> Template:
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
    body.line("attend(rows, low, high, query, key, value, whole, visible, change, sink, out);")
    scale = (1.0 if changed else op.score_scale) * log2(EULER)
    constants = {"KEYS": keys, "WARPS": warps, "D": heads.width, "DV": heads.values}
    head = "".join(f"constexpr int {name} = {n};\n" for name, n in constants.items())
    head += f"constexpr bool CHANGED = {str(changed).lower()};\n"
    head += f"constexpr float SCALE = (float){scale!r};\ntypedef {op.q.type.dtype} T;\n"
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
        helpers=head + HELPERS,
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
        index = ("b", "head", "j", "0") if op.cached else ("b", "j", f"head * {width}")
        with body.block(f"auto {name} = [&](ix j)"):
            place = body.place(operand, index)
            body.line(f"return (const u16*)({body.pointer(operand)} + {place});")
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

"""The launch in front of attention of many queries that norms, turns and caches the new heads."""

from __future__ import annotations

from ..plan.template import Template
from .body import Body
from .decode_attention import Site, constants_of_heads
from .files import helpers
from .kernels import blocks, launch

HELPERS = helpers("warp.cuh", "head_rows.cuh")
WARPS = 4


def takes(site: Site) -> bool:
    """Whether there is a launch for what is in front of an attention."""
    if site.k is None or (site.rope is None and site.norm is None):
        return False
    sizes = [site.rope.turned if site.rope else 0, site.attention.head_dim]
    if not isinstance(site.attention.key_heads, int):
        return False
    sizes += [
        size for rows in (site.q, site.k, site.v) if rows for size in (rows.offset, rows.stride)
    ]
    return all(isinstance(size, int) and size % 4 == 0 for size in sizes)


def head_rows(site: Site) -> Template:
    """The launch: a block per token."""
    op, rope = site.attention, site.rope
    assert site.k is not None and site.v is not None and op.past is not None
    rows = (site.q, site.k, site.v)
    batch, tokens, features = op.q.type.shape
    body = Body([*(each.value for each in rows), *op.operands, *site.gains])
    count, room = body.size(tokens), body.size(site.count)
    body.line(f"if (blockIdx.x >= {body.size(batch)} * {count}) return;")
    body.line(f"const ix block = blockIdx.x, b = block / {count}, token = block % {count};")
    past = body.element(op.past, ("b",))
    body.line(f"const bool kept = {past} >= 0 && {past} < {room} - token;")
    body.line(f"const ix row = kept ? (ix){past} + token : 0;")
    arguments = [
        f"(const u16*){body.pointer(each.value)} + block * {each.stride} + {each.offset}"
        for each in rows
    ]
    arguments.append(f"{body.pointer(rope.positions)} + block" if rope else "(const i32*)0")
    arguments += [body.pointer(gain) for gain in site.gains] or ["(const T*)0"] * 2
    arguments.append(f"(u16*)out0 + block * {features}")
    for out, cache in (("out1", site.keys), ("out2", site.values)):
        body.pointer(cache)
        arguments.append(f"(u16*){out} + {body.place(cache, ('b', '0', 'row', '0'))}")
    body.line(f"head_rows({', '.join([*arguments, 'kept', room])});")
    return launch(
        "head_rows",
        body,
        (op.q, op.k, op.v),
        blocks(batch * tokens, 1),
        operations=[each for each in site.covers if each is not op],
        block=32 * WARPS,
        in_place={op.k: site.keys, op.v: site.values},
        helpers="\n".join([*constants_of_heads(site), *_sizes(site), HELPERS]),
    )


def _sizes(site: Site) -> list[str]:
    op = site.attention
    heads = op.q.type.shape[2] // op.head_dim
    found = {
        "D": op.head_dim,
        "DV": op.v.type.shape[3],
        "HEADS": heads,
        "KEY_HEADS": site.key_heads,
        "WARPS": WARPS,
    }
    return [f"constexpr int {name} = {size};" for name, size in found.items()]

"""Decode attention with the shape of its blocks that is the fastest, as far as that is known."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from irc.ir.core import Op
from irc.ops import Attention

from ..plan.template import Fused, Sizes, Template, Tuning, fusion
from ..tuning import used
from .decode_attention import (
    CLUSTER,
    KEYS_OF_BLOCK,
    Shape,
    Site,
    find_site,
    refusal,
    shape_of,
    template,
)
from .kernels import number
from .streaming.choices import target

SUMS = 1 << 13  # numbers in f32 of a block, at most


@fusion(Attention)
def decode_attention(op: Op, sizes: Sizes) -> Fused | str | None:
    """The launch for one query per sequence, or why there is none."""
    assert isinstance(op, Attention)
    if number(op.q.type.shape[1], sizes) != 1:
        return None
    if reason := refusal(op, sizes):
        return f"decode attention: {reason}"
    site = find_site(op)
    shapes, key = shapes_of(site, sizes), key_of(site, sizes)
    first = next(iter(shapes.values()))
    launch = template(site, sizes, shapes.get(used().get(key, ""), first))

    def variants() -> dict[str, Template]:
        return {name: template(site, sizes, shape) for name, shape in shapes.items()}

    tuning = Tuning(key, variants, number(site.count, sizes) - 1)
    return Fused((replace(launch, tuning=tuning),), site.covers)


def shapes_of(site: Site, sizes: Sizes) -> dict[str, Shape]:
    """The shapes that are tried by name, that of the rules first."""
    first, keys = shape_of(site, sizes), number(site.count, sizes)
    found, width = [first], first.rows * -(-site.attention.head_dim // 64) * 64
    for splits in (first.splits // 2, first.splits, 2 * first.splits):
        if 0 < splits <= target().multiprocessors and (splits - 1) * KEYS_OF_BLOCK < keys:
            cluster = splits if splits <= CLUSTER else 1
            for warps, resident in product((4, 8, 12), (1, 2, 4)):
                if warps * width <= SUMS:
                    changes = {"warps": warps, "resident": resident}
                    found.append(replace(first, splits=splits, cluster=cluster, **changes))
    return {f"{s.splits} splits, {s.warps} warps, {s.resident} resident": s for s in found}


def key_of(site: Site, sizes: Sizes) -> str:
    """What the choice of a shape depends on."""
    op = site.attention
    batch, keys = number(op.q.type.shape[0], sizes), number(site.count, sizes)
    heads = f"{op.q.type.shape[2]} features, {site.key_heads} heads of {op.head_dim}"
    return f"decode attention {op.q.type.dtype}, {heads}, {batch} rows, {keys} keys"

"""Decode attention with the shape of its blocks that is the fastest, as far as that is known."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from irc.ir.core import Op
from irc.ops import Attention

from ..plan.template import Fused, Sizes, Template, Tuning, fusion
from ..tuning import used
from .decode_attention import Shape, Site, find_site, padded, refusal, template
from .kernels import number
from .streaming.choices import target

SHORT = 4096  # keys, up to which splits are joined in a cluster
CLUSTER = 8  # blocks, at most
KEYS_OF_BLOCK = 64  # at least
MANY = 1024  # keys of a block, above which it has more warps
ROWS = 16  # query heads of a block, at most
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
    found, width = [first], first.rows * padded(site.attention.head_dim)
    for splits in (first.splits // 2, first.splits, 2 * first.splits):
        if 0 < splits <= target().multiprocessors and (splits - 1) * KEYS_OF_BLOCK < keys:
            cluster = cluster_of(splits, keys)
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


def shape_of(site: Site, sizes: Sizes) -> Shape:
    """The shape that was fastest on an H200: a block per multiprocessor, or many small ones."""
    op = site.attention
    group = int(op.q.type.shape[2]) // op.head_dim // site.key_heads
    parts = -(-group // (ROWS if op.head_dim <= 128 else ROWS // 2))
    rows = -(-group // parts)
    heads = number(op.q.type.shape[0], sizes) * site.key_heads * parts
    keys = number(site.count, sizes)
    splits, ahead = splits_of(heads, keys), op.head_dim <= 128
    many = heads > target().multiprocessors and ahead
    sums = rows * padded(op.head_dim)  # of a warp, in shared memory
    warps = 12 if keys > MANY * splits and sums <= 512 else 8
    return Shape(
        group=group,
        rows=rows,
        parts=parts,
        warps=4 if many or sums > 1024 else warps,
        splits=splits,
        cluster=cluster_of(splits, keys),
        resident=4 if many and rows <= 8 else 1,
        ahead=ahead,
    )


def splits_of(heads: int, keys: int) -> int:
    """The number of blocks that share the keys of one key head, a power of two.

    Clusters of more than two blocks take half of the multiprocessors: of more clusters, some wait.
    """
    blocks = target().multiprocessors // heads
    splits = 1
    while 2 * splits <= blocks and splits * KEYS_OF_BLOCK < keys:
        if splits > 1 and cluster_of(2 * splits, keys) > 1 and 4 * splits > blocks:
            break
        splits *= 2
    return min(splits, CLUSTER) if keys <= SHORT else splits


def cluster_of(splits: int, keys: int) -> int:
    """How many of the blocks of a head are a cluster."""
    return splits if splits <= CLUSTER and keys <= SHORT else 1

"""Makes the heads of every attention divide over the ranks, before anything is sharded."""

from __future__ import annotations

from irc.ir.core import Module
from irc.ops import Attention
from irc.pipeline import Stats

from ..shared.edit import retype
from .blocks import Block
from .head_layout import head_layout
from .place import mesh_axes, planned_axes
from .rows import Row
from .smaller_blocks import blocks_within_heads


def even_heads(module: Module, rows: list[Row], origins: dict[str, str], stats: Stats) -> None:
    """Rewrite weights and caches of every attention whose heads do not divide."""
    for function in module.functions.values():
        blocks = [op for op in function if isinstance(op, Attention)]
        changed = [_even(module, op, rows, origins, stats) for op in blocks]
        if not any(changed):
            continue
        for op in function:
            retype(op)


def _even(
    module: Module, op: Attention, rows: list[Row], origins: dict[str, str], stats: Stats
) -> bool:
    features, kv_heads = op.q.type.shape[2], op.key_heads
    if not isinstance(features, int) or not isinstance(kv_heads, int):
        return False
    heads = features // op.head_dim
    block = Block.of(op, heads, kv_heads)
    group_size = _group_size(module, rows, origins, block)
    if heads % group_size == 0 and kv_heads % group_size == 0:
        return False
    if block is None and blocks_within_heads(op, heads, kv_heads, stats):
        block = Block.of(op, heads, kv_heads)
    name = op.loc.scope if op.loc is not None and op.loc.scope else "attention"
    what = f"{name}: {heads} query and {kv_heads} key-value heads"
    layout = head_layout(heads, kv_heads, group_size)
    if block is None or not block.allows(layout):
        stats.explain(
            f"{what} do not divide over {group_size} ranks, and an operation that makes or uses "
            "them is shared, is no plain projection, or has scales that two heads share; attention "
            "is replicated"
        )
        return False
    block.rewrite(layout)
    stats.count("heads")
    stats.explain(f"{what} over {group_size} ranks: {layout.reason(group_size)}")
    return True


def _group_size(
    module: Module, rows: list[Row], origins: dict[str, str], block: Block | None
) -> int:
    """The number of ranks over which the plan shards the query projection; 1 if it does not."""
    if block is None:
        return module.mesh.group_size(mesh_axes(module, ("tp",)))
    name = block.query.weight.name
    axes = planned_axes(module, rows, origins.get(name, name), block.query.split)
    return module.mesh.group_size(axes)

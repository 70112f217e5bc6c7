"""Gives the caches of a model one fixed capacity, for backends that allocate them once."""

from __future__ import annotations

from irc.errors import Error
from irc.ir.core import Module
from irc.ir.dims import Dim, DimLike
from irc.ops.fused_attention import cache_writes
from irc.passes.shard.make_divisible import substitute
from irc.pipeline import Pass, Stats, register


@register("static-capacity")
class StaticCapacity(Pass):
    """The capacity of key-value caches becomes the largest of its range.

    Every symbol in the third dimension of a cache that an operation writes is replaced by the upper
    end of its range, everywhere.
    """

    def run(self, module: Module, stats: Stats) -> None:
        fix_capacities(module, stats)


def fix_capacities(module: Module, stats: Stats, multiple: int = 1) -> None:
    """Replace the symbols of the capacities by the upper ends of their ranges, rounded up."""
    sizes: dict[str, DimLike] = {}
    writes = [(op, write) for op in module.ops() for write in cache_writes(op)]
    for op, write in writes:
        capacity = write.capacity
        for name in capacity.symbols() if isinstance(capacity, Dim) else ():
            if name not in module.dims:
                raise Error(
                    f"the capacity {name} of a cache has no upper end; give it a range with "
                    f"--dims {name}=min:typical:max"
                ).at(op)
            sizes[name] = -(-module.dims[name][2] // multiple) * multiple
            if module.dims[name][2] < 1:
                raise Error(f"the capacity {name} is 0; give it a larger range").at(op)
    if not sizes:
        return
    substitute(module, sizes)
    for name, size in sizes.items():
        module.dims.pop(name)
        stats.explain(f"the caches hold {size} tokens, the most that {name} may be")
        stats.count("fixed")

"""`Assignment`: a site with its scheme, and the sizes of its blocks, which fit its weight."""

from __future__ import annotations

from dataclasses import dataclass

from irc.errors import Error
from irc.ir.core import Module, Value, Weight
from irc.ir.dtypes import dtype
from irc.ops import Attention
from irc.pipeline import Stats
from irc.quantization.formats import FORMATS, Format, grid_shape
from irc.quantization.schemes import Scheme
from irc.quantization.sites import Site

from ..shard.blocks import Block as AttentionBlock
from ..shard.even_blocks import can_pad
from ..shard.place import planned_axes
from ..shard.rows import Row as PlanRow
from ..shared.segments import segments_of

MOST_ZEROS = 8  # features to each zero that makes blocks whole, at least
SMALLEST = 16  # elements of a group; smaller ones cost more in scales than they save


@dataclass(frozen=True)
class Assignment:
    """A site, its scheme, and per dimension of its weight the block that shares a scale."""

    site: Site
    scheme: Scheme
    block: tuple[int, ...]

    @property
    def format(self) -> Format:
        """The format of the weight."""
        return FORMATS[self.scheme.weight[0]]

    @property
    def inputs_block(self) -> int:
        """How many inputs share a scale; 0 is all of them."""
        return self.block[self.site.inputs]

    @property
    def method(self) -> str:
        """How scales of the weight are found."""
        return "mse" if dtype(self.format.codes).bits < 8 else "absmax"

    @property
    def parts(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """(dtype, shape) of codes, scales, and zeros and tensor_scale where there are some."""
        site, format = self.site, self.format
        grid = grid_shape(site.shape, self.block)
        found = {
            "codes": (format.codes, site.shape),
            "scales": (format.scales or site.weight.type.dtype, grid),
        }
        if format.zeros:
            found["zeros"] = format.zeros, grid
        if format.tensor_scale:
            found["tensor_scale"] = "f32", (1,) * len(grid)
        return found


class Assigner:
    """Finds blocks that divide weights, and the shards that the rows of a plan make of them."""

    def __init__(self, module: Module, rows: list[PlanRow], stats: Stats) -> None:
        self.module, self.rows, self.stats = module, rows, stats
        self.heads = _head_sizes(module)

    def assign(self, site: Site, scheme: Scheme, group: int = 0) -> Assignment:
        """The blocks of a scheme at a site, with another group where one is given."""
        outputs, inputs = scheme.weight[1]
        if group:
            inputs = _group(scheme, group)
        if not outputs and segments_of(site.op.result):
            outputs = 1
            what = "its outputs are several layers' (they are split), so each has a scale"
            self.stats.explain(f"{site.name}: {what}")
        block = [1] * len(site.shape)
        block[site.outputs] = self._fitted(site, site.outputs, outputs, scheme)
        block[site.inputs] = self._fitted(site, site.inputs, inputs, scheme)
        return Assignment(site, scheme, tuple(block))

    def _fitted(self, site: Site, dim: int, wanted: int, scheme: Scheme) -> int:
        """The largest block of at most `wanted` elements that no shard cuts, or a default.

        Multiples of 16 come first, which products with quantized weights need.
        """
        if wanted < 2:
            return wanted
        size, fixed = site.shape[dim], bool(FORMATS[scheme.weight[0]].scales)
        shard = self._shard(site.weight, dim, size)
        ranks, zeros = self._ranks(site.weight, dim), self._zeros(site, dim, fixed)

        def fits(block: int) -> bool:
            return size % block == 0 and (shard % block == 0 or -size % (block * ranks) <= zeros)

        fitting = [n for n in range(1, min(wanted, max(size, 1)) + 1) if fits(n)]
        found = max([n for n in fitting if n % SMALLEST == 0] or fitting)
        if found == wanted:
            return wanted
        what = f"{site.name}: {'outputs' if dim == site.outputs else 'inputs'}"
        where = f"{size}" if shard == size else f"{size} in shards of {shard}"
        if fixed:
            raise Error(
                f"{what}: blocks of {wanted}, which {scheme.name} requires, do not divide {where}; "
                "exclude the layer, choose another scheme such as w8a16, or another mesh"
            )
        default = 0 if dim == site.inputs else 1
        if found < min(SMALLEST, wanted):
            found = default
        how = f"blocks of {found}" if found > 1 else "one scale per row"
        self.stats.explain(f"{what}: blocks of {wanted} do not divide {where}; {how}")
        return found

    def _zeros(self, site: Site, dim: int, fixed: bool) -> int:
        """How many features `shard` may add to make blocks whole; -1 where it cannot add any."""
        if (site.weight, dim) in self.heads:
            return -1
        size = site.shape[dim]
        return (size if fixed else size // MOST_ZEROS) if can_pad(site.op, dim) else -1

    def _ranks(self, weight: Weight, dim: int) -> int:
        return self.module.mesh.group_size(planned_axes(self.module, self.rows, weight.name, dim))

    def _shard(self, weight: Weight, dim: int, size: int) -> int:
        """The elements of a dimension that a rank gets; of a head, where heads are rearranged."""
        count = self._ranks(weight, dim)
        head, kv_heads = self.heads.get((weight, dim), (size, count))
        uneven = size // head % count or kv_heads % count
        return head if uneven and (weight, dim) in self.heads else -(-size // count)


def _group(scheme: Scheme, group: int) -> int:
    """The number of inputs of a block of another size than the scheme's."""
    format, (_, inputs) = scheme.weight
    if FORMATS[format].scales:
        raise Error(f"{scheme.name} has blocks of {inputs} by definition; leave the group out")
    if scheme.weight[1] == (0, 0):
        raise Error(f"{scheme.name} has one scale per tensor; leave the group out")
    return group


def _head_sizes(module: Module) -> dict[tuple[Value, int], tuple[int, int]]:
    """(size of a head, key-value heads) of the dimensions of weights that hold heads."""
    found: dict[tuple[Value, int], tuple[int, int]] = {}
    for op in module.ops():
        if not isinstance(op, Attention):
            continue
        features, kv_heads = op.q.type.shape[2], op.key_heads
        if not isinstance(features, int) or not isinstance(kv_heads, int):
            continue
        block = AttentionBlock.of(op, features // op.head_dim, kv_heads)
        if block is None:
            continue
        parts = [(part, path.heads) for path in block.paths for part in path.projection.parts]
        parts.append(((block.output, block.inputs), features // op.head_dim))
        for (weight, dim), heads in parts:
            found[weight, dim] = _size_of_head(weight, dim, heads), kv_heads
    return found


def _size_of_head(weight: Value, dim: int, heads: int) -> int:
    """The features of a head in a dimension of a weight."""
    size = weight.type.shape[dim]
    assert isinstance(size, int)
    return size // heads

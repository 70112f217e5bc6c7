"""Which sites of a module are quantized, by which scheme, and in which blocks of their weights.

A table of mixed precision is JSON that maps globs on scopes to schemes, the first match first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

from irc.errors import Error, did_you_mean
from irc.ir.core import Module, Op, Value, Weight
from irc.ir.dtypes import dtype
from irc.json_files import read_object
from irc.ops import Attention, Embedding, Linear, Matmul, Topk
from irc.quantization.formats import FORMATS, Format, grid_shape
from irc.quantization.schemes import Scheme, scheme_called
from irc.quantization.sites import Site

from ..shard.pad_blocks import can_pad
from ..shard.pad_heads import Block as AttentionBlock
from ..shard.plan import Plan
from ..shared.parameters import segments_of

_WHAT, _CACHES = "the table of schemes", "kv_cache_quant_algo"


@dataclass(frozen=True)
class Row:
    """The scheme of the sites that a glob matches; None leaves them as they are."""

    glob: str
    scheme: Scheme | None
    group: int = 0


def read_table(table: str) -> list[Row]:
    """The rows of a JSON file, or of JSON text that begins with a brace.

    A value is a scheme, null, or {"scheme": ..., "group": ...}. The file may also be TensorRT-LLM's
    quant_cfg.json, which has quant_algo and group_size under "quantized_layers".
    """
    return _rows(_read(table), _WHAT if _is_text(table) else table)


def read_caches(table: str) -> str:
    """The kind of caches that a table names as `kv_cache_quant_algo`; empty without."""
    kind = _read(table).get(_CACHES)
    return str(kind).lower() if kind is not None else ""


def _is_text(table: str) -> bool:
    return table.lstrip().startswith("{")


def _read(table: str) -> Mapping[str, Any]:
    if not _is_text(table):
        return read_object(Path(table), _WHAT)
    try:
        return json.loads(table)
    except (ValueError, RecursionError) as error:
        raise Error(f"{_WHAT} is not JSON: {error}") from None


def _rows(table: Mapping[str, Any], source: str) -> list[Row]:
    globs = {key: value for key, value in table.items() if key != _CACHES}
    rows = globs.get("quantized_layers", globs)
    if not isinstance(rows, dict) or not rows:
        raise Error(f'{source} has no rows; write some, such as {{"*.mlp.*": "w4a16", "*": null}}')
    return [_row(glob, value, source) for glob, value in cast("dict[str, Any]", rows).items()]


def _row(glob: str, value: Any, source: str) -> Row:
    group: Any = 0
    if isinstance(value, dict):
        entry = cast("dict[str, Any]", value)
        group = entry.get("group", entry.get("group_size", 0))
        value = entry.get("scheme", entry.get("quant_algo", ""))
    if not isinstance(value, str | None) or type(group) is not int or group < 0:
        raise Error(
            f'{source}: {glob!r} has {json.dumps(value)}; give a scheme, null, or {{"scheme": '
            '"w4a16", "group": 64}'
        )
    if value is None:
        return Row(glob, None)
    try:
        return Row(glob, scheme_called(value), group)
    except Error as error:
        raise Error(f"{source}: {glob!r}: {error.message}") from None


# -- the options of the pass about sites


HEADS = ("*lm_head", "*embed_out")
HEAD = "lm_head.weight"  # the name by which plans and globs find the weight of a tied head
# What a head gets that no option names. In examples/outlier_llama it adds 0.0001 nats per token to
# the divergence of a scheme, a head in w4a16 0.0067 to the 0.0519 of all layers.
HEAD_SCHEME = "w8a16"
_ROUTERS = ("*router", "*shared_expert_gate")
_DEPTH = 8  # operations between the scores of a router and the choice of the largest


@dataclass(frozen=True)
class Selection:
    """The options of the pass about sites.

    `base` is the row of sites that no row of the table matches. `include` None is everything.
    Routers stay as they are, and heads get `HEAD_SCHEME`, unless a glob of `include` or a row of
    the table names them, or `exclude` is empty.
    """

    base: Row | None
    include: Sequence[str] | None
    exclude: Sequence[str] | None
    table: Sequence[Row]

    def rows(self, sites: Sequence[Site], weights: Sequence[str]) -> dict[str, Row]:
        """The row of every site to quantize, by name; a glob has to match one of the weights."""
        self._check_globs(sites, weights)
        rows = {site.name: self._row(site) for site in sites}
        return {name: row for name, row in rows.items() if row is not None}

    def why_not(self, site: Site) -> str:
        """Why a site stays as it is."""
        if not _fits(site, self.exclude or ()) and self._is_exception(site) and _routes(site):
            return "it routes tokens; it is left out unless include names it"
        return "its name is excluded, or not included"

    def _row(self, site: Site) -> Row | None:
        if _fits(site, self.exclude or ()):
            return None
        if self.include is not None and not _fits(site, self.include):
            return None
        row = self._table_row(site) or self.base
        if row is None or (row is not self.base and row.scheme is None):
            return None
        if not self._is_exception(site):
            return row
        if is_head(site):
            return Row(row.glob, scheme_called(HEAD_SCHEME))
        return None if _routes(site) else row

    def _table_row(self, site: Site) -> Row | None:
        return next((row for row in self.table if _fits(site, [row.glob])), None)

    def _is_exception(self, site: Site) -> bool:
        """Whether no option names the site, so that what is usual for routers and heads applies."""
        row = self._table_row(site)
        named = self.include is not None or (row is not None and row.glob != "*")
        return not named and (self.exclude is None or len(self.exclude) > 0)

    def _check_globs(self, sites: Sequence[Site], weights: Sequence[str]) -> None:
        """An Error about a glob that matches nothing."""
        globs = [*(self.include or ()), *(self.exclude or ()), *(row.glob for row in self.table)]
        names = [*(name for site in sites for name in _names(site)), *weights]
        for glob in globs:
            if glob != "*" and not any(fnmatchcase(name, glob) for name in names):
                shown = f"they are called {', '.join(names[:3])} and so on" if names else "none"
                near = did_you_mean(glob, names)
                raise Error(f"{glob!r} fits no layer of this module{near}; {shown}")


def is_head(site: Site) -> bool:
    """Whether a site makes logits: by its name, or because its weight is an embedding's table."""
    return _is_tied(site) or _fits(site, HEADS)


def _is_tied(site: Site) -> bool:
    return any(isinstance(user, Embedding) for user in site.weight.users)


def _names(site: Site) -> tuple[str, ...]:
    """The names of a site for globs: its scope, its weight, and of a tied head also those that it
    has once its weight is its own."""
    tied = (HEAD.removesuffix(".weight"), HEAD) if _is_tied(site) else ()
    return (site.name, site.weight.name, *tied)


def _fits(site: Site, globs: Iterable[str]) -> bool:
    names = _names(site)
    return any(fnmatchcase(name, glob) for glob in globs for name in names)


def _routes(site: Site) -> bool:
    """Whether a site routes tokens: by its name, or because its largest results are chosen."""
    return _fits(site, _ROUTERS) or _chooses(site.op, _DEPTH)


def _chooses(op: Op, depth: int) -> bool:
    """Whether a topk chooses among the results of an operation, without a product before it."""
    users = {user for result in op.results for user in result.users}
    return any(
        isinstance(user, Topk)
        or (depth > 0 and not isinstance(user, (Linear, Matmul)) and _chooses(user, depth - 1))
        for user in users
    )


# -- the blocks that share a scale


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
        parts = {
            "codes": (format.codes, site.shape),
            "scales": (format.scales or site.weight.type.dtype, grid),
        }
        if format.zeros:
            parts["zeros"] = format.zeros, grid
        if format.tensor_scale:
            parts["tensor_scale"] = "f32", (1,) * len(grid)
        return parts


class Assigner:
    """Finds blocks that divide weights, and the shards that the rows of a plan make of them."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.stats = plan, plan.stats
        self.heads = _head_sizes(plan.module)

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
        ranks, zeros = self.plan.group_size(site.weight.name, dim), self._zeros(site, dim, fixed)

        def fits(block: int) -> bool:
            return size % block == 0 and (shard % block == 0 or -size % (block * ranks) <= zeros)

        fitting = [n for n in range(1, min(wanted, max(size, 1)) + 1) if fits(n)]
        largest = max([n for n in fitting if n % SMALLEST == 0] or fitting)
        if largest == wanted:
            return wanted
        what = f"{site.name}: {'outputs' if dim == site.outputs else 'inputs'}"
        where = f"{size}" if shard == size else f"{size} in shards of {shard}"
        if fixed:
            raise Error(
                f"{what}: blocks of {wanted}, which {scheme.name} requires, do not divide {where}; "
                "exclude the layer, choose another scheme such as w8a16, or another mesh"
            )
        default = 0 if dim == site.inputs else 1
        if largest < min(SMALLEST, wanted):
            largest = default
        how = f"blocks of {largest}" if largest > 1 else "one scale per row"
        self.stats.explain(f"{what}: blocks of {wanted} do not divide {where}; {how}")
        return largest

    def _zeros(self, site: Site, dim: int, fixed: bool) -> int:
        """How many features `shard` may add to make blocks whole; -1 where it cannot add any."""
        if (site.weight, dim) in self.heads:
            return -1
        size = site.shape[dim]
        return (size if fixed else size // MOST_ZEROS) if can_pad(site.op, dim) else -1

    def _shard(self, weight: Weight, dim: int, size: int) -> int:
        """The elements of a dimension that a rank gets; of a head, where heads are rearranged."""
        count = self.plan.group_size(weight.name, dim)
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
    sizes: dict[tuple[Value, int], tuple[int, int]] = {}
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
            sizes[weight, dim] = _size_of_head(weight, dim, heads), kv_heads
    return sizes


def _size_of_head(weight: Value, dim: int, heads: int) -> int:
    """The features of a head in a dimension of a weight."""
    size = weight.type.shape[dim]
    assert isinstance(size, int)
    return size // heads

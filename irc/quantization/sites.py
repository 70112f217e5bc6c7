"""The sites of a module that can be quantized: products with a weight, and KV caches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ..ir.core import Function, Module, Op, Value, Weight
from ..ops import CacheUpdate, Linear, Matmul, Transpose

FLOATS = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class Site:
    """A linear or matmul of activations `x` and a weight.

    `name` is the scope of the weight: its name without ".weight". `weight_operand` is the operand
    of `op`: the weight, or a transpose of it. `inputs` is the dimension of the weight that is
    summed over, `outputs` the one with the features of the result; experts have a dimension more.
    Statistics of x are called `key`: the name, and NAME:1 and so on for other inputs of a weight.
    `keys` are those of all inputs along the same dimension.
    """

    name: str
    op: Op
    x: Value
    weight: Weight
    weight_operand: Value
    inputs: int
    outputs: int
    key: str = ""
    keys: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the weight."""
        return tuple(size for size in self.weight.type.shape if isinstance(size, int))


@dataclass(frozen=True)
class CacheSite:
    """The update of a KV cache; `name` is the argument that holds it, such as k0."""

    name: str
    op: CacheUpdate

    @property
    def new(self) -> Value:
        """The keys or values that this call writes, [B, S, heads * head_dim]."""
        return self.op.new


def find_sites(module: Module) -> list[Site]:
    """Every product of activations and a float weight, in order; several may share a weight."""
    sites = [site for op in module.ops() for site in _site(op)]
    inputs: dict[str, dict[Value, str]] = {}  # by name: the key of every input
    along: dict[tuple[Weight, int], dict[str, None]] = {}
    for site in sites:
        keys = inputs.setdefault(site.name, {})
        key = keys.setdefault(site.x, f"{site.name}:{len(keys)}" if keys else site.name)
        along.setdefault((site.weight, site.inputs), {})[key] = None
    return [
        replace(site, key=inputs[site.name][site.x], keys=(*along[site.weight, site.inputs],))
        for site in sites
    ]


def find_caches(module: Module) -> list[CacheSite]:
    """Every update of a float cache that is an argument, in order."""
    return [
        CacheSite(str(op.cache.name), op)
        for op in module.ops()
        if isinstance(op, CacheUpdate)
        and isinstance(op.cache.owner, Function)
        and op.cache.type.dtype in FLOATS
    ]


def by_input(sites: Iterable[Site]) -> list[list[Site]]:
    """Sites in groups that multiply the same value, such as the projections q, k and v."""
    groups: dict[Value, list[Site]] = {}
    for site in sites:
        groups.setdefault(site.x, []).append(site)
    return list(groups.values())


def site_name(weight: Weight) -> str:
    """The scope of a weight."""
    return weight.name.removesuffix(".weight")


def _site(op: Op) -> Iterator[Site]:
    if not isinstance(op, (Linear, Matmul)):
        return
    x, operand = op.operands[:2]
    found = _weight_behind(operand)
    if found is None or isinstance(x, Weight):
        return
    weight, order = found
    last = len(order) - 1
    inputs, outputs = (last, last - 1) if isinstance(op, Linear) else (last - 1, last)
    yield Site(site_name(weight), op, x, weight, operand, order[inputs], order[outputs])


def _weight_behind(value: Value) -> tuple[Weight, tuple[int, ...]] | None:
    """(weight, order): dimension i of the value is dimension order[i] of the float weight."""
    order = tuple(range(value.type.ndim))
    op = value.producer
    if isinstance(op, Transpose):
        value, order = op.x, tuple(dim % len(order) for dim in op.order)
    numbers = all(isinstance(size, int) for size in value.type.shape)
    if not isinstance(value, Weight) or not numbers or value.type.dtype not in FLOATS:
        return None
    return value, order

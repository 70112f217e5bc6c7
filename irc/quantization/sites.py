"""The sites of a module that can be quantized, and `FakeQuantize`, which rounds a value there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ..ir.core import Function, Module, Op, Value, Weight
from ..ops import (
    CacheUpdate,
    Clip,
    Dequantize,
    DynamicScale,
    Full,
    Linear,
    Matmul,
    Quantize,
    Transpose,
)

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
    stored = _weight_behind(operand)
    if stored is None or isinstance(x, Weight):
        return
    weight, order = stored
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


@dataclass(frozen=True)
class FakeQuantize:
    """How a value is quantized to codes of `dtype` and dequantized at once.

    `scale` is static, of the whole tensor, with `zero` as the code of 0. Without it every call
    computes scales of dtype `scales`: one per token if `block` is 0, else one per block of that
    many features. `tensor_scale` is the second level of NVFP4. `clamp` are limits (low, high) to
    which values are clipped before.
    """

    dtype: str
    scale: float | None = None
    zero: int = 0
    block: int = 0
    scales: str = "f32"
    tensor_scale: float | None = None
    clamp: tuple[float, ...] = ()

    def apply(self, x: Value, before: Op) -> Value:
        """x, quantized and dequantized in front of an operation."""
        dtype: Any = self.dtype
        kind: Any = x.type.dtype
        if self.clamp:
            x = result_before(Clip(x, low=self.clamp[0], high=self.clamp[1]), before, x.name)
        scale = self._scale(x, before)
        zero = constant(self.zero, x.type.ndim, before, self.dtype) if self.zero else None
        codes = result_before(Quantize(x, scale, zero=zero, dtype=dtype), before, "codes")
        name = f"{x.name}_{self.dtype}" if x.name else None
        return result_before(Dequantize(codes, scale, zero=zero, dtype=kind), before, name)

    def _scale(self, x: Value, before: Op) -> Value:
        if self.scale is not None:
            return constant(self.scale, x.type.ndim, before)
        options: Any = {"dtype": self.dtype, "block": self.block, "scale": self.scales}
        if self.tensor_scale is None:
            return result_before(DynamicScale(x, **options), before, "scales")
        whole = constant(self.tensor_scale, x.type.ndim, before)
        scales = result_before(DynamicScale(x, tensor_scale=whole, **options), before, "scales")
        return result_before(Dequantize(scales, whole, dtype="f32"), before, "scales")


def constant(value: float, ndim: int, before: Op, dtype: str = "f32") -> Value:
    """One number for a complete tensor of `ndim` dimensions."""
    return result_before(Full(value=value, shape=(1,) * ndim, dtype=dtype), before)


def result_before(op: Op, before: Op, name: str | None = None) -> Value:
    """The result of a new operation, put in front of another one."""
    assert before.parent is not None
    before.parent.insert(op, before)
    op.loc, op.result.name = before.loc, name
    return op.result

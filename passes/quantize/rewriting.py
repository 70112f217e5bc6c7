"""Replaces weights by codes and scales, and rounds inputs of products and KV caches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Any

import numpy as np

from irc.errors import Error, did_you_mean
from irc.ir.core import Module, Op, Value, Weight
from irc.ir.types import TensorType
from irc.ops import CacheUpdate, Dequantize, Quantize, Transpose
from irc.quantization.formats import FORMATS, Format
from irc.quantization.sites import CacheSite, FakeQuantize, Site, constant, find_caches, site_name
from irc.rewrite import erase_dead, permit
from irc.weights import QuantizedRef, Ref, with_shape

from ..shared.edit import free_name, insert_before, retype
from ..shared.parameters import replace_weights
from .algorithms import ENCODE, Array, Context
from .assignment import Assignment


def quantize_weights(assigned: Sequence[Assignment], context: Context) -> None:
    """Quantize the weights of all sites; those that share a weight use the same codes."""
    groups: dict[Weight, list[Assignment]] = {}
    for assignment in assigned:
        groups.setdefault(assignment.site.weight, []).append(assignment)
    parts = {old: _quantized(group, context) for old, group in groups.items()}
    replace_weights(context.module, parts)


def _quantized(assigned: Sequence[Assignment], context: Context) -> list[Weight]:
    """The weights that take the place of the one that some sites share."""
    first = assigned[0]
    parts = ENCODE.get(first.scheme.algorithm, _round)(first, context)
    weights = _new_weights(context.module, first, parts)
    for assignment in assigned:
        value = _dequantized(weights, first, assignment.site.op)
        name = assignment.site.name.rpartition(".")[2]
        value.name = f"_{name}_weight" if name[:1].isdigit() else f"{name}_weight"
        use_weight(assignment.site, value)
    return list(weights.values())


def _round(assigned: Assignment, context: Context) -> Mapping[str, Ref]:
    return rounded_parts(assigned)


def rounded_parts(assigned: Assignment) -> dict[str, Ref]:
    """References that round every weight to the nearest code when they are read."""
    weight, format, method = assigned.site.weight, assigned.format.name, assigned.method
    source = with_shape(weight.ref, weight.type.shape, weight.type.dtype)
    return {
        part: QuantizedRef(source, part, format, assigned.block, method) for part in assigned.parts
    }


def _new_weights(
    module: Module, assigned: Assignment, parts: Mapping[str, Ref]
) -> dict[str, Weight]:
    """The new weights by part. Codes have the name of the weight, so that plans match them."""
    old = assigned.site.weight
    scope, endings = site_name(old), {"scales": "scale", "zeros": "zero"}
    weights: dict[str, Weight] = {}
    for part, ref in parts.items():
        name = free_name(f"{scope}.{endings.get(part, part)}", module.weights)
        name = old.name if part == "codes" else name
        weights[part] = Weight(TensorType(*assigned.parts[part]), name, ref)
    return weights


def _dequantized(parts: Mapping[str, Weight], assigned: Assignment, before: Op) -> Value:
    """The weight as codes and scales represent it."""
    kind = assigned.site.weight.type.dtype
    scales: Value = parts["scales"]
    if "tensor_scale" in parts:
        wide = Dequantize(scales, parts["tensor_scale"], dtype="f32")
        scales = insert_before(wide, before).result
    asked: dict[str, Any] = {} if scales.type.dtype == kind else {"dtype": kind}
    dequantize = Dequantize(parts["codes"], scales, zero=parts.get("zeros"), **asked)
    return insert_before(dequantize, before).result


def use_weight(site: Site, new: Value) -> None:
    """Multiply by a new value in place of the weight, transposed as that was."""
    transposed = site.weight_operand.producer
    if isinstance(transposed, Transpose):
        new = insert_before(Transpose(new, order=transposed.order), site.op).result
    operands = (site.op.operands[0], new, *site.op.operands[2:])
    site.op.set_operands(operands)
    if transposed is not None and not transposed.result.users:
        erase_dead(transposed)


# -- inputs of products, each value once for all products that take it


@dataclass(frozen=True)
class Activation:
    """How a value is quantized: its format, elements per scale (0 is a token), static or not."""

    format: Format
    block: int = 0
    static: bool = False


def activation_of(assigned: Assignment, context: Context) -> Activation | None:
    """How the inputs of a site are quantized, if they are."""
    scheme = assigned.scheme
    if not scheme.activation:
        return None
    format = FORMATS[scheme.activation_format]
    if format.tensor_scale:  # without it, small inputs would become 0
        context.calibrated(scheme.name)
    if scheme.activation == "block":
        return Activation(format, assigned.inputs_block)
    if scheme.activation == "token":
        return Activation(format)
    if context.statistics is None and format.name == "fp8":
        context.stats.explain(
            f"{scheme.name} without calibration: inputs have a scale per token, computed when the "
            "model runs; with --calibration they have one per tensor"
        )
        return Activation(format)
    context.calibrated(scheme.name)
    return Activation(format, static=True)


def quantize_input(
    group: Sequence[Assignment], activation: Activation, factors: Array | None, context: Context
) -> None:
    """Quantize the value that some sites in order multiply, which was divided by `factors`."""
    first = group[0].site.op
    x = first.operands[0]
    limit = _limit(group, activation, factors, context)
    new = _rounding(activation, limit).apply(x, first)
    for assignment in group:
        op = assignment.site.op
        op.set_operands((new, *op.operands[1:]))


def _limit(
    group: Sequence[Assignment], activation: Activation, factors: Array | None, context: Context
) -> float | None:
    """The largest magnitude to represent, by the calibration; None where nothing asks for it."""
    statistics = context.statistics
    if statistics is None or not (activation.static or activation.format.tensor_scale):
        return None
    name = group[0].site.key
    if factors is not None:
        return float((statistics.largest(name) / factors).max())
    observer = context.observer if activation.static else "min-max"  # blocks have their own scales
    return statistics.scale_range(name, observer, activation.format.codes)


def _rounding(activation: Activation, limit: float | None) -> FakeQuantize:
    """The rounding of values up to a limit."""
    format = activation.format
    if activation.static:
        return FakeQuantize(format.codes, _scale(limit, format.largest))
    whole = None
    if format.tensor_scale:
        whole = _scale(limit, format.largest * FORMATS["fp8"].largest)
    scales = format.scales or "f32"
    return FakeQuantize(format.codes, block=activation.block, scales=scales, tensor_scale=whole)


def _scale(limit: float | None, largest: float) -> float:
    """The scale that maps a limit to the largest code; 1 where the limit is 0 or not known."""
    return limit / largest if limit else 1.0


# -- KV caches of narrow numbers: new keys and values are quantized, and dequantized to be read


KINDS = ("int8", "fp8")


def check_kind(kind: str) -> None:
    """An Error unless caches can be stored so."""
    if kind not in KINDS:
        names = " or ".join(KINDS)
        raise Error(f"no format of caches called {kind!r}{did_you_mean(kind, KINDS)}; give {names}")


def parse_scales(texts: Iterable[str]) -> dict[str, float]:
    """By the argument of a cache, its scale, from texts such as "k0=0.02"."""
    scales: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            scales[name] = float(number)
        except ValueError:
            scales[name] = nan
        if not 0 < np.float32(scales[name]) < inf:
            raise Error(f'{text!r} is not a scale of a cache; give one above 0, such as "k0=0.02"')
    return scales


def quantize_caches(kind: str, scales: Mapping[str, float], context: Context) -> int:
    """Store all caches as int8 or fp8, with a scale per cache; returns how many there were.

    `scales` hold without calibration. An FP8 cache that has none has the scale 1: its numbers keep
    their exponents.
    """
    caches = find_caches(context.module)
    for name in scales.keys() - {site.name for site in caches}:
        context.stats.explain(f"no cache is called {name}, so its scale is left out")
    sites = [site for site in caches if permit("quantize", site.op)]
    for site in sites:
        _quantize_cache(site, kind, _cache_scale(site, kind, scales, context))
    return len(sites)


def _cache_scale(
    site: CacheSite, kind: str, scales: Mapping[str, float], context: Context
) -> float:
    if context.statistics is None and site.name in scales:
        return scales[site.name]
    if kind == "fp8" and context.statistics is None:
        return 1.0
    statistics = context.calibrated(f"a cache in {kind}")
    statistics.check_width(site.name, site.new.type.shape[-1])
    format = FORMATS[kind]
    limit = statistics.scale_range(site.name, context.observer, format.codes)
    return _scale(limit, format.largest)


def _quantize_cache(site: CacheSite, kind: str, scale: float) -> None:
    op = site.op
    codes: Any = FORMATS[kind].codes
    cache = op.cache
    float_type = cache.type.dtype
    written = constant(scale, op.new.type.ndim, op)
    new = insert_before(Quantize(op.new, written, dtype=codes), op)
    cache.type = cache.type.replace(dtype=codes)
    op.set_operands((cache, new.result, *op.operands[2:]))
    retype(op)
    _read_cache(op, scale, float_type)


def _read_cache(op: CacheUpdate, scale: float, float_type: str) -> None:
    """Dequantize a cache for everything that reads it; results of the function keep the codes."""
    users = [user for user in op.result.users if user.opname != "return"]
    if not users:
        return
    behind = op.next
    assert behind is not None
    scales = constant(scale, op.result.type.ndim, behind)
    kind: Any = float_type
    read = insert_before(Dequantize(op.result, scales, dtype=kind), behind).result
    for user in users:
        user.set_operands(tuple(read if v is op.result else v for v in user.operands))

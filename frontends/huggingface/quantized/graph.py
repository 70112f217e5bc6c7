"""Puts quantized layers into a module: `dequantize` of their codes, and quantized inputs."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....errors import Error
from ....ir.core import Module, Op, Value, Weight
from ....ops import Dequantize, Gather, Mul
from ....quantization.sites import Site, find_sites, result_before, site_name
from ....weights import Cast
from .parts import Layer, Part


def insert(module: Module, layers: Mapping[str, Layer]) -> None:
    """Let the weights of `layers` be dequantized where they are used, and their inputs quantized.

    An input that several layers quantize alike is quantized once.
    """
    places = {op: i for i, op in enumerate(module.ops())}
    sites = [site for site in find_sites(module) if site.weight.name in layers]
    new: dict[str, list[Weight]] = {name: [] for name in layers}
    for name, layer in layers.items():
        weight = module.weights[name]
        users = sorted(weight.users, key=places.__getitem__)
        if len({op.parent for op in users}) > 1:
            raise Error(f"{name} is quantized, and several functions use it; put inline before")
        changed = layer.order is not None or layer.factors is not None
        if changed and not {site.op for site in sites} >= {*users}:
            raise Error(
                f"{name} takes its input features in another order (desc_act=true), or times "
                "factors (pre_quant_scale); irc reads that only in weights of linear"
            )
        if users:
            weight.replace_by(_dequantized(users[0], weight, layer, new[name]))
    _tell_of_plain_inputs([site for site in sites if not _fits(site, layers[site.weight.name])])
    inputs: dict[Any, Value] = {}
    for site in sites:
        x = _input(site, layers[site.weight.name], inputs, new[site.weight.name])
        site.op.set_operands((x, *site.op.operands[1:]))
    weights = [part for w in module.weights.values() for part in new.get(w.name, [w])]
    module.weights.clear()
    for weight in weights:
        module.add_weight(weight)


def _dequantized(op: Op, weight: Weight, layer: Layer, new: list[Weight]) -> Value:
    """The weight from its codes, which take its name, so that plans of sharding fit."""
    kind: Any = weight.type.dtype
    if kind == "f32" and layer.scales.dtype in ("f16", "bf16"):
        layer = replace(layer, scales=_cast(layer.scales, kind))
    parts = {
        name: _declared(weight, name, part.of_rank(weight.type.ndim), new)
        for name, part in layer.parts().items()
        if part is not None
    }
    scale: Value = parts["scale"]
    if "tensor_scale" in parts:
        scale = result_before(Dequantize(scale, parts["tensor_scale"], dtype="f32"), op, "scales")
    values = Dequantize(parts[""], scale, zero=parts.get("zero"), dtype=kind)
    return result_before(values, op, f"{site_name(weight).rpartition('.')[2]}_weight")


def _cast(part: Part, dtype: str) -> Part:
    return part if part.dtype == dtype else Part(part.ref.then(Cast(dtype)), dtype, part.shape)


def _declared(weight: Weight, name: str, part: Part, new: list[Weight]) -> Weight:
    """One of the weights that replace a weight."""
    new.append(Weight(part.type, f"{site_name(weight)}.{name}" if name else weight.name, part.ref))
    return new[-1]


def _fits(site: Site, layer: Layer) -> bool:
    """Whether the blocks of the inputs of a layer divide them, or it quantizes none."""
    block = layer.activation.block if layer.activation else 0
    return site.shape[site.inputs] % (block or 1) == 0


def _tell_of_plain_inputs(sites: list[Site]) -> None:
    """Warn where inputs stay floats, which the checkpoint wants in codes."""
    if sites:
        more = f" and {len(sites) - 1} more" if len(sites) > 1 else ""
        name = sites[0].weight.name
        text = f"the inputs of {name}{more} stay floats: their blocks do not divide them"
        warnings.warn(text, stacklevel=5)


def _input(site: Site, layer: Layer, done: dict[Any, Value], new: list[Weight]) -> Value:
    """The input of a site, in the order of its layer, times factors, and quantized as that says."""
    x, op = site.x, site.op
    if layer.order is not None:
        key = op.parent, x, layer.order
        if key not in done:
            order = _declared(site.weight, "order", layer.order, new)
            done[key] = result_before(Gather(x, order, dim=-1), op, x.name)
        x = done[key]
    if layer.factors is not None:
        key = op.parent, x, layer.factors
        if key not in done:
            factors = _declared(site.weight, "factors", _cast(layer.factors, x.type.dtype), new)
            done[key] = result_before(Mul(x, factors), op, x.name)
        x = done[key]
    activation = layer.activation
    if activation is None or not _fits(site, layer):
        return x
    key = op.parent, x, activation
    if key not in done:
        done[key] = activation.apply(x, op)
    return done[key]

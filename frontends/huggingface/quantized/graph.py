"""Puts quantized layers into a module: `dequantize` of their codes, and quantized inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ....errors import Error
from ....ir.core import Module, Op, Value, Weight
from ....ops import Dequantize, Gather
from ....quantization.activations import result_before
from ....quantization.sites import Site, find_sites, site_name
from ....weights import Cast
from .parts import Layer, Part


def insert(module: Module, layers: Mapping[str, Layer]) -> None:
    """Let the weights of `layers` be dequantized where they are used, and their inputs quantized.

    An input that several layers quantize alike is quantized once.
    """
    sites = {site.op: site for site in find_sites(module) if site.weight.name in layers}
    for name, layer in layers.items():
        if layer.order is not None and not sites.keys() >= module.weights[name].users.keys():
            raise Error(
                f"{name} has its input features in another order (desc_act=true); irc reads "
                "that only in weights of linear"
            )
    editor = _Editor(module, layers)
    for op in list(module.ops()):
        operands = tuple(editor.weight(op, value) for value in op.operands)
        site = sites.get(op)
        if site is not None:
            operands = (editor.input(site), *operands[1:])
        if operands != op.operands:
            op.set_operands(operands)
    editor.replace_weights()


class _Editor:
    """The operations and weights that are put in, each once per function."""

    def __init__(self, module: Module, layers: Mapping[str, Layer]) -> None:
        self.module, self.layers = module, layers
        self.values: dict[Any, Value] = {}  # by function and what is computed
        self.weights: dict[str, list[Weight]] = {}  # by the weight that they replace

    def weight(self, op: Op, value: Value) -> Value:
        """The dequantized codes of a weight that `op` uses; any other value is returned."""
        if not isinstance(value, Weight) or value.name not in self.layers:
            return value
        key = op.parent, value
        if key not in self.values:
            self.values[key] = self._dequantized(op, value, self.layers[value.name])
        return self.values[key]

    def input(self, site: Site) -> Value:
        """The input of a site, quantized and dequantized as its layer says."""
        layer, x, op = self.layers[site.weight.name], site.x, site.op
        if layer.order is not None:
            key = op.parent, x, layer.order
            if key not in self.values:
                order = self._declare(site.weight, "order", layer.order)
                self.values[key] = result_before(Gather(x, order, dim=-1), op, x.name)
            x = self.values[key]
        activation = layer.activation
        if activation is None or site.shape[site.inputs] % (activation.block or 1):
            return x
        key = op.parent, x, activation
        if key not in self.values:
            self.values[key] = activation.apply(x, op)
        return self.values[key]

    def replace_weights(self) -> None:
        """Declare the new weights of the module in the places of the old ones."""
        weights = list(self.module.weights.values())
        self.module.weights.clear()
        for weight in weights:
            for each in self.weights.get(weight.name, [weight]):
                self.module.add_weight(each)

    def _dequantized(self, op: Op, weight: Weight, layer: Layer) -> Value:
        kind: Any = weight.type.dtype
        if kind == "f32" and layer.scales.dtype in ("f16", "bf16"):
            wide = replace(layer.scales, ref=layer.scales.ref.then(Cast(kind)), dtype=kind)
            layer = replace(layer, scales=wide)
        parts = {
            name: self._declare(weight, name, part.of_rank(weight.type.ndim))
            for name, part in layer.parts().items()
            if part is not None
        }
        scale: Value = parts["scale"]
        if "tensor_scale" in parts:
            levels = Dequantize(scale, parts["tensor_scale"], dtype="f32")
            scale = result_before(levels, op, "scales")
        values = Dequantize(parts[""], scale, zero=parts.get("zero"), dtype=kind)
        return result_before(values, op, f"{site_name(weight).rpartition('.')[2]}_weight")

    def _declare(self, weight: Weight, name: str, part: Part) -> Weight:
        """A new weight of the module; codes have the name of the old one, so that plans fit."""
        called = f"{site_name(weight)}.{name}" if name else weight.name
        new = Weight(part.type, called, part.ref)
        self.weights.setdefault(weight.name, []).append(new)
        return new

"""Replaces the weights of sites by codes and scales, which a `dequantize` multiplies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from irc.ir.core import Module, Op, Value, Weight
from irc.ir.types import TensorType
from irc.ops import Dequantize, Transpose
from irc.quantization.sites import Site
from irc.rewrite import erase_dead
from irc.weights import QuantizedRef, Ref, pinned

from ..shared.edit import free_name, insert_before
from .algorithms import ENCODE, Context
from .assignment import Assignment


def quantize_weight(assigned: list[Assignment], context: Context) -> None:
    """Quantize the weight that some sites share; all of them use the same codes."""
    first = assigned[0]
    parts = ENCODE.get(first.scheme.algorithm, _round)(first, context)
    weights = _add_weights(context.module, first, parts)
    for each in assigned:
        found = _dequantized(weights, first, each.site.op)
        found.name = f"{each.site.name.rpartition('.')[2]}_weight"
        use_weight(each.site, found)


def _round(assigned: Assignment, context: Context) -> Mapping[str, Ref]:
    return rounded_parts(assigned)


def rounded_parts(assigned: Assignment) -> dict[str, Ref]:
    """References that round every weight to the nearest code when they are read."""
    weight, format, method = assigned.site.weight, assigned.format.name, assigned.method
    source = pinned(weight.ref, weight.type.shape, weight.type.dtype)
    return {
        part: QuantizedRef(source, part, format, assigned.block, method) for part in assigned.parts
    }


def _add_weights(
    module: Module, assigned: Assignment, parts: Mapping[str, Ref]
) -> dict[str, Weight]:
    """The new weights by part. Codes have the name of the weight, so that plans match them."""
    site, old = assigned.site, assigned.site.weight
    types = {part: TensorType(*each) for part, each in assigned.parts.items()}
    names = {"codes": old.name, "scales": f"{site.name}.scale", "zeros": f"{site.name}.zero"}
    new = {
        part: Weight(types[part], free_name(names.get(part, f"{site.name}.{part}"), []), ref)
        for part, ref in parts.items()
    }
    _replace(module, old, list(new.values()))
    return new


def _replace(module: Module, old: Weight, new: list[Weight]) -> None:
    """Put new weights at the place of an old one."""
    weights = list(module.weights.values())
    module.weights.clear()
    for weight in weights:
        for each in new if weight is old else [weight]:
            each.name = free_name(each.name, module.weights)
            module.add_weight(each)


def _dequantized(parts: Mapping[str, Weight], assigned: Assignment, before: Op) -> Value:
    """The weight as codes and scales represent it."""
    kind = assigned.site.weight.type.dtype
    scales: Value = parts["scales"]
    if "tensor_scale" in parts:
        wide = Dequantize(scales, parts["tensor_scale"], dtype="f32")
        scales = insert_before(wide, before).result
    asked: dict[str, Any] = {} if scales.type.dtype == kind else {"dtype": kind}
    found = Dequantize(parts["codes"], scales, zero=parts.get("zeros"), **asked)
    return insert_before(found, before).result


def use_weight(site: Site, new: Value) -> None:
    """Multiply by a new value in place of the weight, transposed as that was."""
    transposed = site.weight_operand.producer
    if isinstance(transposed, Transpose):
        new = insert_before(Transpose(new, order=transposed.order), site.op).result
    operands = (site.op.operands[0], new, *site.op.operands[2:])
    site.op.set_operands(operands)
    if transposed is not None and not transposed.result.users:
        erase_dead(transposed)

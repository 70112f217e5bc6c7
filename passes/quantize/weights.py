"""Replaces the weights of sites by codes and scales, which a `dequantize` multiplies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from irc.ir.core import Module, Op, Value, Weight
from irc.ir.types import TensorType
from irc.ops import Dequantize, Transpose
from irc.quantization.sites import Site, site_name
from irc.rewrite import erase_dead
from irc.weights import QuantizedRef, Ref, pinned

from ..shared.edit import free_name, insert_before
from ..shared.parameters import replace_weights
from .algorithms import ENCODE, Context
from .assignment import Assignment


def quantize_weights(assigned: Sequence[Assignment], context: Context) -> None:
    """Quantize the weights of all sites; those that share a weight use the same codes."""
    groups: dict[Weight, list[Assignment]] = {}
    for each in assigned:
        groups.setdefault(each.site.weight, []).append(each)
    parts = {old: _quantized(group, context) for old, group in groups.items()}
    replace_weights(context.module, parts)


def _quantized(assigned: Sequence[Assignment], context: Context) -> list[Weight]:
    """The weights that take the place of the one that some sites share."""
    first = assigned[0]
    parts = ENCODE.get(first.scheme.algorithm, _round)(first, context)
    weights = _new_weights(context.module, first, parts)
    for each in assigned:
        found = _dequantized(weights, first, each.site.op)
        name = each.site.name.rpartition(".")[2]
        found.name = f"_{name}_weight" if name[:1].isdigit() else f"{name}_weight"
        use_weight(each.site, found)
    return list(weights.values())


def _round(assigned: Assignment, context: Context) -> Mapping[str, Ref]:
    return rounded_parts(assigned)


def rounded_parts(assigned: Assignment) -> dict[str, Ref]:
    """References that round every weight to the nearest code when they are read."""
    weight, format, method = assigned.site.weight, assigned.format.name, assigned.method
    source = pinned(weight.ref, weight.type.shape, weight.type.dtype)
    return {
        part: QuantizedRef(source, part, format, assigned.block, method) for part in assigned.parts
    }


def _new_weights(
    module: Module, assigned: Assignment, parts: Mapping[str, Ref]
) -> dict[str, Weight]:
    """The new weights by part. Codes have the name of the weight, so that plans match them."""
    old = assigned.site.weight
    scope, endings = site_name(old), {"scales": "scale", "zeros": "zero"}
    found: dict[str, Weight] = {}
    for part, ref in parts.items():
        name = free_name(f"{scope}.{endings.get(part, part)}", module.weights)
        name = old.name if part == "codes" else name
        found[part] = Weight(TensorType(*assigned.parts[part]), name, ref)
    return found


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

"""Factors of the inputs of products: weights are multiplied by them, the inputs divided by them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from irc.ir.core import Module, Op, Value, Weight
from irc.ir.dtypes import numpy_dtype
from irc.ir.types import TensorType
from irc.ops import LayerNorm, Linear, Mul, RmsNorm
from irc.quantization.sites import Site
from irc.weights import Cast, FileRef, ProductRef, Ref, pinned

from ..shared.edit import free_name, insert_before, used_once
from .algorithms import Array, Context
from .assignment import Assignment
from .stored import stored


def rescale(
    group: Sequence[Assignment], context: Context, settings: object, find: Callable[[], Array]
) -> Array | None:
    """Divide the value that some sites multiply by the factors [K] that `find` computes.

    The inverse of the factors goes into the weights of the operations that make the value; where
    that is not possible a `mul` is inserted. Sites whose weights have other uses are left alone.
    """
    sites = [each.site for each in group]
    if not _own_weights(sites):
        context.stats.explain(f"{sites[0].name}: not rescaled, its weight has other uses")
        return None
    kind = sites[0].x.type.dtype

    def compute() -> dict[str, Array]:
        # rounded, so that it cancels the factors after a cast
        inverse = (1 / find()).astype(numpy_dtype(kind)).astype(np.float32)
        return {"factors": 1 / inverse, "inverse": inverse}

    file = stored(group, context, settings, compute)
    factors, inverse = FileRef(file, "factors"), FileRef(file, "inverse")
    for weight, dim in {site.weight: site.inputs for site in sites}.items():
        _multiply(weight, factors, dim)
    before = _scaling(sites[0].x, {site.op for site in sites})
    for weight in before:
        _multiply(weight, inverse, 0)
    if not before:
        _insert_mul(context.module, sites, inverse)
    context.stats.count("inverse folded" if before else "inverse multiplied")
    return context.reader.read(factors)


def _own_weights(sites: Sequence[Site]) -> bool:
    """Whether nothing but these sites uses their weights."""
    operands = {site.op for site in sites} | {site.weight_operand.producer for site in sites}
    return all(set(site.weight.users) <= operands for site in sites)


def _multiply(weight: Weight, factors: Ref, dim: int) -> None:
    """Multiply a weight by factors along a dimension."""
    ref = pinned(weight.ref, weight.type.shape, weight.type.dtype)
    weight.ref = ProductRef(ref, factors, dim)


def _insert_mul(module: Module, sites: Sequence[Site], inverse: Ref) -> None:
    x, name = sites[0].x, free_name(f"{sites[0].name}.input_factors", module.weights)
    kind = x.type.dtype
    ref = inverse if kind == "f32" else inverse.then(Cast(kind))
    weight = module.add_weight(Weight(TensorType(kind, x.type.shape[-1:]), name, ref))
    product = insert_before(Mul(x, weight), sites[0].op).result
    for op in {site.op: None for site in sites}:
        op.set_operands((product, *op.operands[1:]))


def _scaling(value: Value, users: Collection[Op]) -> list[Weight]:
    """The weights, by dimension 0, that scale the features of a value; none if it has other users.

    They are those of a norm or a linear, also of one that a product multiplies.
    """
    op = value.producer
    if op is None or not set(value.users) <= set(users):
        return []
    match op:
        case RmsNorm(offset=0.0) | LayerNorm(weight=Weight()) | Linear():
            weights = op.operands[1:]
            own = all(isinstance(each, Weight) and used_once(each) for each in weights)
            return [each for each in weights if isinstance(each, Weight)] if own else []
        case Mul():
            sides = (each for each in op.operands if each.type.shape == value.type.shape)
            found = (_scaling(each, {op}) for each in sides if used_once(each))
            return next(filter(None, found), list[Weight]())
        case _:
            return []

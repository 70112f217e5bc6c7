"""`random_weights`: values for a model that has no checkpoint, where somebody asks for them."""

from __future__ import annotations

from dataclasses import replace

from ..core import Module, Weight
from ..weights import Cast, ConcatRef, RandomRef, Ref, UnboundRef


def random_weights(module: Module, seed: int) -> Module:
    """Replace every `unbound(key)` by seeded normal numbers, and return the module.

    Matrices get 1/sqrt(inputs), so that activations keep their size; the weights of norms 1; other
    vectors 0.02. The numbers depend on key and seed only, and are made when they are read: a rank
    makes its own rows, and of the rows that it cuts the whole ones, whose numbers it drops.
    """
    for weight in module.weights.values():
        weight.ref = _filled(weight.ref, seed, _scale(weight), weight.type.dtype)
    return module


def _filled(ref: Ref, seed: int, scale: float, dtype: str) -> Ref:
    if isinstance(ref, ConcatRef):
        return replace(ref, parts=tuple(_filled(part, seed, scale, dtype) for part in ref.parts))
    if not isinstance(ref, UnboundRef):
        return ref
    if ref.shape is None:
        return RandomRef(ref.key, seed, scale, steps=ref.steps)
    # What is cut and joined was pinned to the whole shape, which tells the scale also when the
    # weight is one rank's. Numbers that say their shape are f32, others as the weight is.
    scale = ref.shape[-1] ** -0.5 if len(ref.shape) > 1 and ref.shape[-1] else scale
    return RandomRef(ref.key, seed, scale, ref.shape, steps=(Cast(dtype), *ref.steps))


def _scale(weight: Weight) -> float:
    shape = weight.type.shape
    if len(shape) > 1 and isinstance(shape[-1], int):
        return shape[-1] ** -0.5
    norms = any(
        name == "weight" and value is weight and op.opname.endswith("norm")
        for op in weight.users
        for name, value in op.named_operands()
    )
    return 1.0 if norms else 0.02

"""`random_weights`: seeded random values for a model without a checkpoint."""

from __future__ import annotations

from ..errors import Error
from ..ir.core import Module, Weight
from ..weights import Cast, RandomRef, Ref, UnboundRef


def random_weights(module: Module, seed: int) -> Module:
    """Replace every `unbound(key)` by seeded normal numbers, and return the module.

    The standard deviation is 1/sqrt(inputs) for matrices, so that activations keep their size, 1
    for weights of norms, and 0.02 for other vectors. The numbers depend on key and seed only and
    are generated when they are read: a rank generates the rows of its shard. An Error about
    integers of 32 and 64 bits, which are keys or positions.
    """
    for weight in module.weights.values():
        if weight.type.dtype in ("i32", "i64") and isinstance(weight.ref, UnboundRef):
            raise Error(
                f"the weight {weight.name} is {weight.type}: random keys or positions make no "
                "index; give the weights with --checkpoint FOLDER"
            )
        weight.ref = _filled(weight.ref, seed, _scale(weight), weight.type.dtype)
    return module


def _filled(ref: Ref, seed: int, scale: float, dtype: str) -> Ref:
    if ref.inputs:
        return ref.with_inputs([_filled(part, seed, scale, dtype) for part in ref.inputs])
    if not isinstance(ref, UnboundRef):
        return ref
    if ref.shape is None:
        return RandomRef(ref.key, seed, scale, steps=ref.steps)
    # A sliced or joined source carries its global shape, which determines the scale even when the
    # weight is a shard. Sources with a shape are f32; others have the weight's dtype.
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

"""Quantized tensors as ONNX nodes.

DequantizeLinear knows three forms of scales: one for all elements, one per index of a dimension,
and blocks along one dimension. Everything else is written by the expansion.
"""

from __future__ import annotations

from irc import ops
from irc.backends.onnx.emitter import TABLE, Emitter, Lowered
from irc.core import Op, Value
from irc.dims import Shape
from irc.ops.quant import block_sizes


def per_index(op: ops.Dequantize) -> int | None:
    """The only dimension whose indices have different scales, -1 if all have the same."""
    own = [dim for dim, blocks in enumerate(op.scale.type.shape) if blocks != 1]
    if not own:
        return -1
    return (
        own[0] if len(own) == 1 and op.scale.type.shape[own[0]] == op.x.type.shape[own[0]] else None
    )


def in_blocks(op: ops.Dequantize) -> tuple[int, int] | None:
    """(the only dimension in blocks, their size), where all others have scales per index."""
    sizes = block_sizes(op.x.type.shape, op.scale.type.shape)
    found = [(dim, size) for dim, size in enumerate(sizes) if size != 1]
    if len(found) != 1:
        return None
    dim, size = found[0]
    return (dim, size) if isinstance(size, int) else None


def scales_refusal(op: Op) -> str | None:
    """Why the scales fit no form of DequantizeLinear."""
    assert isinstance(op, ops.Dequantize)
    if per_index(op) is not None or in_blocks(op) is not None:
        return None
    return "has blocks along several dimensions, which DequantizeLinear does not have"


def _refusal(op: Op) -> str | None:
    kind = op.operands[0].type.dtype
    return f"takes {kind}, which is f32 by then" if kind.startswith("f8") else scales_refusal(op)


@TABLE.lower(ops.Dequantize, unless=_refusal)
def dequantize(e: Emitter, op: ops.Dequantize) -> Lowered:
    dim, blocks = per_index(op), in_blocks(op)
    scales: Shape | None = None
    attributes: dict[str, int] = {}
    if dim is not None:
        scales = () if dim < 0 else (op.scale.type.shape[dim],)
        attributes = {} if dim < 0 else {"axis": dim}
    elif blocks is not None:
        attributes = {"axis": blocks[0], "block_size": blocks[1]}
    x, *zero = _quantized(e, [op.x, *([op.zero] if op.zero is not None else [])])
    shaped = [e.get(op.scale), *zero]
    if scales is not None:
        shaped = [e.add("Reshape", name, e.shape(scales)) for name in shaped]
    return e.add("DequantizeLinear", x, *shaped, **attributes)


def _quantized(e: Emitter, values: list[Value]) -> list[str]:
    """The names of values of one dtype: weights as they lie in their files, maybe in four bits."""
    weights = [weight for value in values if (weight := e.weight(value)) is not None]
    if len(weights) < len(values):  # what is computed is wider
        return [e.get(value) for value in values]
    return [e.stored(weight)[0] for weight in weights]

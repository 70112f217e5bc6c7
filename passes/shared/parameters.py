"""Parameters of projections: weights, and weights that are dequantized by scales and zeros.

Slicing and joining rows keeps every scale: those of codes are sliced and joined with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from irc.ir.core import Module, Op, Value, Weight
from irc.ir.dims import DimLike, exact_divide
from irc.ir.types import TensorType
from irc.ir.weight_parts import weight_part
from irc.ops import Add, Dequantize, DynamicScale, Full, Linear, Matmul, Quantize, Transpose
from irc.rewrite import erase_dead
from irc.weights import Shard, Slice, with_shape

from .edit import free_name, insert_before, used_once

_DEEPEST = 6  # operations that `same` compares, one behind the other


def weights_of(parameter: Value) -> list[Weight] | None:
    """The weights of a parameter, its elements or codes first.

    None where more computes it, or where what is dequantized has other uses.
    """
    if isinstance(parameter, Weight):
        return [parameter]
    op = parameter.producer
    if not isinstance(op, Dequantize) or not used_once(parameter):
        return None
    weights: list[Weight] = []
    for operand in op.operands:
        inner = weights_of(operand)
        if inner is None:
            return None
        weights += inner
    return weights


def same(x: Value, y: Value, depth: int = _DEEPEST) -> bool:
    """Whether two values are equal: one value, weights of one reference, or equal operations."""
    if x is y:
        return True
    if isinstance(x, Weight) and isinstance(y, Weight):
        return x.type is y.type and x.ref == y.ref
    a, b = x.producer, y.producer
    if a is None or b is None or type(a) is not type(b) or not a.pure or not depth:
        return False
    alike = (x.index, a.present, a.attributes) == (y.index, b.present, b.attributes)
    pairs = list(zip(a.operands, b.operands, strict=False))
    alike &= len(a.operands) == len(b.operands)
    return alike and all(same(p, q, depth - 1) for p, q in pairs)


def per_index(weight: Weight, size: DimLike, dim: int = 0) -> DimLike | None:
    """How many indices of a parameter of this size share one of this weight of it."""
    return exact_divide(size, weight.type.shape[dim])


def is_shared(weight: Weight, size: DimLike, dim: int = 0) -> bool:
    """Whether all indices of a dimension of a parameter have the scales of this weight."""
    return weight.type.shape[dim] == 1 != size


def in_use(weight: Weight) -> str | None:
    """Why a weight cannot be replaced by others."""
    if sum(weight.users.values()) > 1:
        return f"@{weight.name} has other uses"
    if weight.type.sharded:
        return f"@{weight.name} is {weight.type}; fuse before sharding or after localize"
    return None


def slice_refusal(parameter: Value, cuts: Sequence[tuple[int, int]], dim: int = 0) -> str | None:
    """Why a parameter cannot be sliced into these ranges; None if it can."""
    weights, size = weights_of(parameter), parameter.type.shape[dim]
    if weights is None:
        return "the weight is computed, or shared by several operations"
    for weight in weights:
        if is_shared(weight, size, dim):
            continue
        refusal = in_use(weight)
        if any(isinstance(step, Shard) for step in weight.ref.every_step()):
            refusal = f"@{weight.name} is a rank's shard; fuse before localize"
        if refusal is not None:
            return refusal
        block = per_index(weight, size, dim)
        if not isinstance(block, int) or any(at % block for cut in cuts for at in cut):
            return f"a segment ends within {block} features that share a scale in @{weight.name}"
    return None


class Slicer:
    """Slices parameters; `finish` gives the module the new weights for the old ones."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.parts: dict[Weight, list[Weight]] = {}

    def features(
        self, parameter: Value, cut: tuple[int, int], number: int, before: Op, dim: int = 0
    ) -> Value:
        """A range of a parameter, which `slice_refusal` allows, under the number of the segment."""
        size = parameter.type.shape[dim]

        def sliced(value: Value) -> Value:
            if not isinstance(value, Weight):
                op = value.producer
                assert op is not None
                new = op.rebuilt([sliced(operand) for operand in op.operands])
                return insert_before(new, before).result
            if is_shared(value, size, dim):
                return value
            block = per_index(value, size, dim)
            assert isinstance(block, int)
            part = self._part(value, number, dim, cut[0] // block, cut[1] // block)
            self.parts.setdefault(value, []).append(part)
            return part

        return sliced(parameter)

    def _part(self, weight: Weight, number: int, dim: int, begin: int, end: int) -> Weight:
        shape = weight.type.shape
        ranges = tuple((begin, end) if i == dim else None for i in range(len(shape)))
        ref = with_shape(weight.ref, shape, weight.type.dtype).then(Slice(ranges))
        cut = TensorType(weight.type.dtype, (*shape[:dim], end - begin, *shape[dim + 1 :]))
        if self.module.local:
            cut = weight_part(ref, cut, self.module.mesh)
        return Weight(cut, free_name(f"{weight.name}.{number}", self.module.weights), ref)

    def separate(
        self,
        merged: Value,
        source: Value,
        parts: Iterable[tuple[Value, int]],
        segments: Iterable[Segment],
    ) -> None:
        """A projection per segment in place of a merged one, which the segments alone use.

        `parts` are its parameters, each with its dimension of output features.
        """
        last, parts = merged.producer, list(parts)
        assert last is not None
        for number, (value, begin, end) in enumerate(segments):
            cut = [self.features(part, (begin, end), number, last, dim) for part, dim in parts]
            value.replace_by(_projected(last, source, cut, value.name))
        for user in list(merged.users):
            user.erase()
        erase_dead(last)

    def finish(self) -> None:
        """Put the new weights in the places of the old ones."""
        replace_weights(self.module, self.parts)


def _projected(last: Op, source: Value, parts: list[Value], name: str | None) -> Value:
    """The projection of some of the features of another one."""
    weight, bias = parts[0], parts[1] if len(parts) > 1 else None
    if isinstance(last, Linear):
        op: Op = insert_before(Linear(source, weight, bias=bias), last)
    else:
        op = insert_before(Matmul(source, weight), last)
        if bias is not None:
            op = insert_before(Add(op.result, bias), last)
    op.result.name = name
    return op.result


def replace_weights(module: Module, parts: Mapping[Weight, Sequence[Weight]]) -> None:
    """Put new weights in the places of old ones."""
    weights = list(module.weights.values())
    module.weights.clear()
    for weight in weights:
        for kept in parts.get(weight, [weight]):
            module.add_weight(kept)


@dataclass(frozen=True)
class Product:
    """A linear, or a matmul by a weight or its transpose, with the dimensions of the weight."""

    op: Linear | Matmul
    parameter: Value
    inputs: int
    outputs: int

    @staticmethod
    def of(op: Op) -> Product | None:
        """The operation as a product with a weight, if it is one."""
        if isinstance(op, Linear):
            return Product(op, op.weight, 1, 0) if weights_of(op.weight) else None
        if not isinstance(op, Matmul) or op.y.type.ndim < 2:
            return None
        last, turned = op.y.type.ndim - 1, op.y.producer
        swapped = (*range(last - 1), last, last - 1)
        if isinstance(turned, Transpose) and turned.order == swapped and used_once(op.y):
            return Product(op, turned.x, last, last - 1) if weights_of(turned.x) else None
        return Product(op, op.y, last - 1, last) if weights_of(op.y) else None

    @property
    def name(self) -> str:
        """The name of the weight, or of its codes."""
        return next(weight.name for weight in weights_of(self.parameter) or ())

    def features(self, dim: int) -> Value | None:
        """The value that has the features of a dimension of the weight."""
        if dim not in (self.inputs, self.outputs):
            return None
        return self.op.x if dim == self.inputs else self.op.result


# -- values seen through the operations that quantize them


def rounded(value: Value) -> Value:
    """What the uses of a value see: itself, or what quantize and dequantize leave of it."""
    quantizers = [user for user in value.users if not isinstance(user, DynamicScale)]
    if len(quantizers) != 1 or not isinstance(quantizers[0], Quantize):
        return value
    codes = quantizers[0].result
    readers = [user for user in codes.users if isinstance(user, Dequantize) and user.x is codes]
    return readers[0].result if len(codes.users) == len(readers) == 1 else value


def has_one_scale(op: Op) -> bool:
    """Whether an operation quantizes or dequantizes a complete tensor by one constant scale."""
    return isinstance(op, (Quantize, Dequantize)) and isinstance(op.scale.producer, Full)


# -- segments of merged features: the ranges that splits and slices take apart


Segment = tuple[Value, int, int]  # what has it, its first feature, the end


def segments_of(merged: Value) -> list[Segment] | None:
    """The segments of the features of a value, if its uses take them apart."""
    last = merged.type.ndim - 1
    segments: list[Segment] = []
    for user in merged.users:
        if user.opname not in ("split", "slice") or user.attributes["dim"] % (last + 1) != last:
            return None
        parts = _of_split(user) if user.opname == "split" else _of_slice(user)
        if parts is None:
            return None
        segments += parts
    segments.sort(key=lambda segment: segment[1])
    apart = all(a[2] <= b[1] for a, b in pairwise(segments))
    return segments if apart and len(segments) > 1 else None


def _of_split(op: Op) -> list[Segment] | None:
    segments: list[Segment] = []
    at = 0
    for value, size in zip(op.results, op.attributes["sizes"], strict=True):
        if not isinstance(size, int):
            return None
        segments.append((value, at, at + size))
        at += size
    return segments


def _of_slice(op: Op) -> list[Segment] | None:
    start, stop, step = (op.attributes[name] for name in ("start", "stop", "step"))
    if not isinstance(start, int) or not isinstance(stop, int) or step != 1:
        return None
    return [(op.result, start, stop)]

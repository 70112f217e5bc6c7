"""What inference functions share: broadcasting, dtype agreement, positions, rule texts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from ..errors import Error
from ..ir.attributes import Number
from ..ir.core import Op, Value
from ..ir.dims import Dim, DimLike, Shape
from ..ir.dtypes import dtype, is_float
from ..ir.types import TensorType


def shape_text(shape: Sequence[DimLike]) -> str:
    """A shape as it reads in a message: `[B, 64]`."""
    return f"[{', '.join(map(str, shape))}]"


def broadcast(*shapes: Shape) -> Shape:
    """The numpy broadcast of shapes; a symbol broadcasts with itself and 1 only."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(_broadcast_dim(dims, shapes) for dims in zip(*padded, strict=True))


def _broadcast_dim(dims: tuple[DimLike, ...], shapes: tuple[Shape, ...]) -> DimLike:
    size: DimLike = 1
    for dim in dims:
        if dim == 1 or dim == size:
            continue
        if size != 1:
            text = " and ".join(map(shape_text, shapes))
            raise Error(f"the shapes {text} do not broadcast: {size} against {dim}")
        size = dim
    return size


def same_dtype(op: str, *values: Value) -> str:
    """The dtype that all values share."""
    first = values[0].type.dtype
    for value in values[1:]:
        if value.type.dtype != first:
            raise Error(f"{op}: the operands are {first} and {value.type.dtype}; cast one of them")
    return first


def float_operand(op: str, value: Value) -> TensorType:
    """The type of an operand that must be floating-point."""
    if not is_float(value.type.dtype):
        raise Error(f"{op} takes floating-point operands, not {value.type}")
    return value.type


def any_operand(op: str, value: Value) -> TensorType:
    """The type of an operand that may have any dtype."""
    return value.type


def number_operand(op: str, value: Value) -> TensorType:
    """The type of an operand that must not be bool."""
    if value.type.dtype == "bool":
        raise Error(f"{op} takes numbers, not {value.type}; for bool use and, or, not, where, cast")
    return value.type


def index_operand(op: str, value: Value) -> TensorType:
    """The type of an operand that holds positions or ids: i32 or i64."""
    if value.type.dtype not in ("i32", "i64"):
        raise Error(f"{op} takes indices in i32 or i64, not {value.type}")
    return value.type


def bool_operand(op: str, value: Value) -> TensorType:
    """The type of an operand that must be bool."""
    if value.type.dtype != "bool":
        raise Error(f"{op} takes bool here, not {value.type}; make one with eq, lt or cast")
    return value.type


def number_fits(op: str, value: Number, name: str) -> None:
    """Raise unless an element of dtype `name` can hold `value` (floats take any number)."""
    kind = dtype(name)
    if kind.is_float:
        return
    signed = kind.kind == "int"
    bits = 1 if kind.kind == "bool" else kind.bits - signed
    low, high = (-(1 << bits) if signed else 0), (1 << bits) - 1
    if isinstance(value, float) or not low <= value <= high:
        raise Error(f"{op}: {value} is not an integer that {name} holds ({low} to {high})")


def position(op: str, dim: int, rank: int) -> int:
    """A dimension counted from either end as a position from the front."""
    if not -rank <= dim < rank:
        raise Error(f"{op}: there is no dimension {dim} in a tensor of {rank} dimensions")
    return dim % rank


def positions(op: str, dims: Sequence[int], rank: int) -> tuple[int, ...]:
    """Several dimensions as positions from the front, in increasing order, each once."""
    if not dims:
        raise Error(f"{op}: dims names no dimension")
    positions = sorted(position(op, dim, rank) for dim in dims)
    for a, b in pairwise(positions):
        if a == b:
            raise Error(f"{op}: dims names dimension {a} twice")
    return tuple(positions)


def same_but(op: str, dim: int, shapes: Sequence[Shape]) -> None:
    """Raise unless all shapes agree in rank and in every dimension other than `dim`."""
    first = shapes[0]
    for shape in shapes[1:]:
        if len(shape) != len(first) or any(
            a != b for i, (a, b) in enumerate(zip(first, shape, strict=True)) if i != dim
        ):
            raise Error(
                f"{op}: the shapes {shape_text(first)} and {shape_text(shape)} may differ "
                f"in dimension {dim} only"
            )


def not_above(op: str, low: DimLike, high: DimLike, what: str) -> None:
    """Raise where `low` exceeds `high` whatever the symbols are; the rest is for run time."""
    gap = high - low
    if isinstance(gap, Dim):
        if all(coefficient < 0 for _, coefficient in gap.terms):
            raise Error(f"{op}: {what} {low} lies beyond {high}")
    elif gap < 0:
        raise Error(f"{op}: {what} {low} lies beyond {high}")


def run_sizes(op: str, dims: Sequence[DimLike]) -> tuple[int, ...]:
    """Sizes at run time, when every symbol has its value."""
    for dim in dims:
        if isinstance(dim, Dim):
            raise Error(f"{op}: {dim} has no value yet")
    return tuple(dim for dim in dims if not isinstance(dim, Dim))


def dim_names(rank: int, replicated: Iterable[int] = ()) -> list[str]:
    """One name per dimension of a sharding rule: `d0 d1!`, where `!` marks the replicated ones."""
    kept = set(replicated)
    return [f"d{i}!" if i in kept else f"d{i}" for i in range(rank)]


def rule_along(type: TensorType, *dims: int) -> str:
    """The rule of an operation that keeps every dimension, and needs `dims` replicated."""
    words = dim_names(type.ndim, [dim % type.ndim for dim in dims])
    return rule_text([words], [words])


def rule_text(operands: Iterable[Sequence[str]], results: Iterable[Sequence[str]]) -> str:
    """The text of a sharding rule from the words of every operand and result."""
    left, right = (", ".join(" ".join(words) for words in side) for side in (operands, results))
    return f"{left} -> {right}"


class AlongDim(Op):
    """Base of the operations along one dimension, which must be replicated."""

    __slots__ = ()
    dim: int

    def sharding_rule(self) -> str:
        return rule_along(self.operands[0].type, self.dim)

"""What inference functions share: broadcasting, dtype agreement, dimension positions."""

from __future__ import annotations

from ..core import Value
from ..dims import DimLike, Shape
from ..dtypes import is_float
from ..errors import Error
from ..types import TensorType


def broadcast(*shapes: Shape) -> Shape:
    """The numpy broadcast of shapes; symbols must be equal or meet a 1."""
    rank = max(map(len, shapes))
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    return tuple(_broadcast_dim(dims, shapes) for dims in zip(*padded, strict=True))


def _broadcast_dim(dims: tuple[DimLike, ...], shapes: tuple[Shape, ...]) -> DimLike:
    found: DimLike = 1
    for dim in dims:
        if dim == 1 or dim == found:
            continue
        if found != 1:
            text = " and ".join(f"[{', '.join(map(str, s))}]" for s in shapes)
            raise Error(f"the shapes {text} do not broadcast: {found} against {dim}")
        found = dim
    return found


def same_dtype(op: str, *values: Value) -> str:
    """The dtype that all values share."""
    first = values[0].type.dtype
    for value in values[1:]:
        if value.type.dtype != first:
            raise Error(
                f"{op}: the operands are {first} and {value.type.dtype}; cast one of them"
            )
    return first


def float_operand(op: str, value: Value) -> TensorType:
    """The type of an operand that must be floating-point."""
    if not is_float(value.type.dtype):
        raise Error(f"{op} takes floating-point operands, not {value.type}")
    return value.type


def position(op: str, dim: int, rank: int) -> int:
    """A dimension counted from either end as a position from the front."""
    if not -rank <= dim < rank:
        raise Error(f"{op}: there is no dimension {dim} in a tensor of {rank} dimensions")
    return dim % rank

"""Shape and dtype of a reference, where they are known without opening its files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ..errors import Error
from ..ir.mesh import Mesh
from .computed import ComputedRef
from .sources import BytesRef, ConcatRef, RandomRef, Ref, UnboundRef, ZerosRef
from .steps import Cast, Cyclic, Pad, Shard, Slice, Transpose, Unsqueeze, step_shape

Sizes: TypeAlias = tuple[int, ...]
# (shape, dtype) of a source without steps; None where it is not known.
Known: TypeAlias = Callable[[Ref], tuple[Sizes | None, str | None]]


def stated(source: Ref) -> tuple[Sizes | None, str | None]:
    """(shape, dtype) that a source itself states; a tensor of a file states neither."""
    match source:
        case ZerosRef() | BytesRef():
            return source.shape, source.dtype
        case RandomRef() | UnboundRef():
            return source.shape, None
        case _:
            return None, None


def shape_before(shape: Sequence[int], ref: Ref) -> Sizes | None:
    """The shape of the source, from `shape` after all steps; None if they slice or pad."""
    for step in reversed(ref.steps):
        if isinstance(step, Transpose) and sorted(step.order) == list(range(len(shape))):
            shape = [shape[step.order.index(i)] for i in range(len(shape))]
        elif not isinstance(step, Cast):
            return None
    return tuple(shape)


def check_steps(ref: Ref, rank: int) -> None:
    """An Error where a step does not fit the dimensions of a reference of `rank` at its end."""
    rank -= sum(isinstance(step, Unsqueeze) for step in ref.steps)
    ndims = ref.input_ndims(rank) if isinstance(ref, ComputedRef) else [rank] * len(ref.inputs)
    for each, ndim in zip(ref.inputs, ndims, strict=True):
        check_steps(each, ndim)
    for step in ref.steps:
        match step:
            case Shard(dim) | Cyclic(dim) | Pad(dim):
                fits = 0 <= dim < rank
            case Transpose(order):
                fits = sorted(order) == list(range(rank))
            case Slice(ranges):
                fits = len(ranges) == rank
            case _:
                fits = not isinstance(step, Unsqueeze) or 0 <= step.dim <= rank
        if not fits:
            raise Error(f"{step} does not fit {rank} dimensions, which are counted from 0")
        rank += isinstance(step, Unsqueeze)


def ref_shape(ref: Ref, mesh: Mesh, known: Known = stated) -> Sizes | None:
    """The shape after all steps, equal on every rank; None if it is not known.

    An Error names a step that does not fit, or parts that cannot be concatenated.
    """
    shapes = shapes_of(ref, mesh, known)
    return None if shapes is None else shapes[-1]


def shapes_of(ref: Ref, mesh: Mesh, known: Known = stated) -> list[Sizes] | None:
    """The shape of the source and after every step."""
    shape: Any = _source_shape(ref, mesh, known)
    if shape is None:
        return None
    shapes = [shape]
    for step in ref.steps:
        shapes.append(step_shape(shapes[-1], step, mesh, ref))
    return shapes


def ref_dtype(ref: Ref, known: Known = stated) -> str | None:
    """The dtype after all steps; None if it is not known."""
    for step in reversed(ref.steps):
        if isinstance(step, Cast):
            return step.dtype
    if isinstance(ref, ComputedRef):
        return ref.result_dtype([ref_dtype(each, known) for each in ref.inputs])
    if not isinstance(ref, ConcatRef):
        return known(ref)[1]
    dtypes = {ref_dtype(part, known) for part in ref.parts}
    if None not in dtypes and len(dtypes) > 1:
        names = " and ".join(sorted(filter(None, dtypes)))
        raise Error(f"{ref} joins {names}; cast the parts to one dtype")
    return dtypes.pop() if len(dtypes) == 1 else None


def _source_shape(ref: Ref, mesh: Mesh, known: Known) -> Sizes | None:
    if not isinstance(ref, (ConcatRef, ComputedRef)):
        return known(ref)[0]
    shapes: list[Sizes] = []
    for each in ref.inputs:
        shape = ref_shape(each, mesh, known)
        if shape is None:
            return None
        shapes.append(shape)
    if isinstance(ref, ComputedRef):
        return ref.result_shape(shapes)
    rest = {(len(s), *s[: ref.dim], *s[ref.dim + 1 :]) for s in shapes}
    if len(rest) != 1 or not 0 <= ref.dim < len(shapes[0]):
        raise Error(f"{ref} joins tensors of shapes {', '.join(map(str, shapes))}")
    first = shapes[0]
    return (*first[: ref.dim], sum(s[ref.dim] for s in shapes), *first[ref.dim + 1 :])

"""Shape and dtype of a reference, as far as they are known without opening its files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import Error
from ..mesh import Mesh
from .sources import BytesRef, ConcatRef, FileRef, RandomRef, Ref, UnboundRef, ZerosRef
from .steps import Cast, Transpose, step_shape

if TYPE_CHECKING:
    from ..core import Module

Sizes: TypeAlias = tuple[int, ...]
# What is known of a source without steps: its shape and its dtype, None for what is not.
Known: TypeAlias = Callable[[Ref], tuple[Sizes | None, str | None]]


def nothing(source: Ref) -> tuple[Sizes | None, str | None]:
    """What sources say themselves; nothing of files, whose headers were not read."""
    match source:
        case ZerosRef() | BytesRef():
            return source.shape, source.dtype
        case RandomRef() | UnboundRef():
            return source.shape, None
        case _:
            return None, None


def sources_of(module: Module) -> Known:
    """What the weights of a module that are not cut or joined say about the tensors in its files.

    It holds for as long as the files do, so it may be asked after the weights have been cut.
    """
    found: dict[tuple[str, str], tuple[Sizes | None, str | None]] = {}
    for weight in module.weights.values():
        ref = weight.ref
        if not isinstance(ref, FileRef):
            continue
        shape = unmoved([size for size in weight.type.shape if isinstance(size, int)], ref)
        if shape is not None and len(shape) == weight.type.rank:
            casts = any(isinstance(step, Cast) for step in ref.steps)
            found[ref.file, ref.key] = shape, None if casts else weight.type.dtype

    def known(source: Ref) -> tuple[Sizes | None, str | None]:
        if isinstance(source, FileRef):
            return found.get((source.file, source.key), (None, None))
        return nothing(source)

    return known


def unmoved(shape: Sequence[int], ref: Ref) -> Sizes | None:
    """The shape of the source, from that after all steps; None if they cut or pad."""
    for step in reversed(ref.steps):
        if isinstance(step, Transpose) and sorted(step.order) == list(range(len(shape))):
            shape = [shape[step.order.index(i)] for i in range(len(shape))]
        elif not isinstance(step, Cast):
            return None
    return tuple(shape)


def ref_shape(ref: Ref, mesh: Mesh, known: Known = nothing) -> Sizes | None:
    """The shape after all steps, on every rank; None if it is not known.

    An Error where a step does not fit or the parts of a concatenation do not fit together.
    """
    shapes = shapes_of(ref, mesh, known)
    return None if shapes is None else shapes[-1]


def shapes_of(ref: Ref, mesh: Mesh, known: Known = nothing) -> list[Sizes] | None:
    """The shape of the source and after every step."""
    shape: Any = _source_shape(ref, mesh, known)
    if shape is None:
        return None
    shapes = [shape]
    for step in ref.steps:
        shapes.append(step_shape(shapes[-1], step, mesh, ref))
    return shapes


def ref_dtype(ref: Ref, known: Known = nothing) -> str | None:
    """The dtype after all steps; None if it is not known."""
    for step in reversed(ref.steps):
        if isinstance(step, Cast):
            return step.dtype
    if not isinstance(ref, ConcatRef):
        return known(ref)[1]
    dtypes = {ref_dtype(part, known) for part in ref.parts}
    if None not in dtypes and len(dtypes) > 1:
        names = " and ".join(sorted(filter(None, dtypes)))
        raise Error(f"{ref} joins {names}; cast the parts to one dtype")
    return dtypes.pop() if len(dtypes) == 1 else None


def _source_shape(ref: Ref, mesh: Mesh, known: Known) -> Sizes | None:
    if not isinstance(ref, ConcatRef):
        return known(ref)[0]
    shapes: list[Sizes] = []
    for part in ref.parts:
        shape = ref_shape(part, mesh, known)
        if shape is None:
            return None
        shapes.append(shape)
    rest = {(len(s), *s[: ref.dim], *s[ref.dim + 1 :]) for s in shapes}
    if len(rest) != 1 or not 0 <= ref.dim < len(shapes[0]):
        raise Error(f"{ref} joins tensors of shapes {', '.join(map(str, shapes))}")
    first = shapes[0]
    return (*first[: ref.dim], sum(s[ref.dim] for s in shapes), *first[ref.dim + 1 :])

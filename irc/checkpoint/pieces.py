"""A reference on one rank as pieces: boxes of the tensor that are boxes of sources, or zeros.

Every step but a cast only says where an element comes from. Followed back to the sources they
leave, for each box of the tensor, one range of indices per dimension of one source. What is read,
what lies contiguous in a file and which ranks hold the same is all seen from the pieces.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ..mesh import Mesh
from ..weights import (
    Cast,
    ConcatRef,
    Deal,
    Pad,
    Ref,
    Shard,
    Slice,
    Step,
    Transpose,
    Unsqueeze,
    ZerosRef,
)

Range: TypeAlias = tuple[int, int]  # begin, end
Shapes: TypeAlias = Callable[[Ref], Sequence[tuple[int, ...]]]  # of the source, after every step


@dataclass(frozen=True)
class Piece:
    """The elements of `box` are those of `source` (without steps) at `picks`; None is zeros.

    `picks` has the indices per dimension of the source. Dimension i of the tensor is dimension
    `order[i]` of the source, None for one that the source does not have. `casts` are dtypes to
    convert to, one after the other.
    """

    box: tuple[Range, ...]
    source: Ref | None
    picks: tuple[range, ...] = ()
    order: tuple[int | None, ...] = ()
    casts: tuple[str, ...] = ()

    def within(self, block: Sequence[Range]) -> Piece | None:
        """The part in a block of the tensor, its box counted from the block's begin."""
        box: list[Range] = []
        picks = list(self.picks)
        for dim, ((begin, end), (low, high)) in enumerate(zip(self.box, block, strict=True)):
            first, last = max(begin, low), min(end, high)
            if first >= last:
                return None
            box.append((first - low, last - low))
            at = self.order[dim] if self.order else None
            if at is not None:
                picks[at] = picks[at][first - begin : last - begin]
        return replace(self, box=tuple(box), picks=tuple(picks))


def pieces_of(ref: Ref, mesh: Mesh, rank: int, shapes: Shapes) -> tuple[Piece, ...]:
    """The pieces of the whole tensor on one rank; none if it has no elements."""
    shape = shapes(ref)[-1]
    sizes = tuple(map(range, shape))
    box = tuple((0, size) for size in shape)
    want = _Want(box, sizes, tuple(range(len(shape))), ())
    return _merged(_Search(mesh, rank, shapes).of(ref, want))


@dataclass(frozen=True)
class _Want:
    """`box` of the tensor takes the elements at `picks` of what was reached on the way back.

    Dimension i of that is dimension `dims[i]` of the tensor.
    """

    box: tuple[Range, ...]
    picks: tuple[range, ...]
    dims: tuple[int, ...]
    casts: tuple[str, ...]

    def part(self, dim: int, first: int, last: int) -> _Want:
        """Only the picks from position `first` to `last` of a dimension."""
        at = self.dims[dim]
        begin = self.box[at][0]
        box = (*self.box[:at], (begin + first, begin + last), *self.box[at + 1 :])
        return replace(self, box=box).picking(dim, self.picks[dim][first:last])

    def picking(self, dim: int, picks: range) -> _Want:
        """The same box from other indices of a dimension."""
        return replace(self, picks=(*self.picks[:dim], picks, *self.picks[dim + 1 :]))

    def moved(self, dim: int, count: int) -> _Want:
        """The same box from indices that are larger by `count`."""
        picks = self.picks[dim]
        return self.picking(dim, range(picks.start + count, picks.stop + count, picks.step))

    def turned(self, order: tuple[int, ...]) -> _Want:
        """Before a transposition to `order`."""
        back = [order.index(i) for i in range(len(order))]
        picks, dims = (tuple(many[i] for i in back) for many in (self.picks, self.dims))
        return replace(self, picks=picks, dims=dims)

    def without(self, dim: int) -> _Want:
        """Before a dimension of size 1 was added."""
        picks, dims = ((*many[:dim], *many[dim + 1 :]) for many in (self.picks, self.dims))
        return replace(self, picks=picks, dims=dims)

    def below(self, dim: int, size: int) -> tuple[_Want, _Want]:
        """(what is wanted of the first `size` indices of a dimension, the rest)."""
        picks = self.picks[dim]
        cut = bisect_left(picks, size)
        return self.part(dim, 0, cut), self.part(dim, cut, len(picks))

    @property
    def empty(self) -> bool:
        return not all(self.picks)


@dataclass(frozen=True)
class _Search:
    """The way back from a tensor to its sources, on one rank."""

    mesh: Mesh
    rank: int
    shapes: Shapes

    def of(self, ref: Ref, want: _Want) -> Iterator[Piece]:
        """The pieces of what is wanted of a reference."""
        yield from self._before(ref, ref.steps, want)

    def _before(self, ref: Ref, steps: tuple[Step, ...], want: _Want) -> Iterator[Piece]:
        """The pieces of what is wanted after the first `steps` of a reference."""
        if want.empty:
            return
        if not steps:
            yield from self._source(ref, want)
            return
        size = self.shapes(ref)[len(steps) - 1]
        *before, step = steps
        for inner, found in self._undo(step, size, want):
            if found:
                yield from self._before(ref, tuple(before), inner)
            elif not inner.empty:
                yield Piece(inner.box, None)

    def _undo(
        self, step: Step, shape: tuple[int, ...], want: _Want
    ) -> Iterator[tuple[_Want, bool]]:
        """What is wanted before a step, with False for what it fills with zeros."""
        match step:
            case Cast(dtype):
                yield replace(want, casts=(dtype, *want.casts)), True
            case Transpose(order):
                yield want.turned(order), True
            case Unsqueeze(dim):
                yield want.without(dim), True
            case Slice(cuts):
                for dim, cut in enumerate(cuts):
                    want = want.moved(dim, cut[0] if cut else 0)
                yield want, True
            case Shard(dim, axes):
                part = -(-shape[dim] // self.mesh.ways(axes))
                want = want.moved(dim, self.mesh.index(self.rank, axes) * part)
                yield from _padded(want, dim, shape[dim])
            case Pad(dim):
                yield from _padded(want, dim, shape[dim])
            case Deal(dim, ways):
                for part in _dealt(want, dim, ways, -(-shape[dim] // ways)):
                    yield from _padded(part, dim, shape[dim])

    def _source(self, ref: Ref, want: _Want) -> Iterator[Piece]:
        if isinstance(ref, ConcatRef):
            yield from self._joined(ref, want)
        elif isinstance(ref, ZerosRef):
            yield Piece(want.box, None)
        else:
            places = {dim: i for i, dim in enumerate(want.dims)}
            order = tuple(places.get(i) for i in range(len(want.box)))
            source = replace(ref, steps=())
            yield Piece(want.box, source, tuple(map(_plain, want.picks)), order, want.casts)

    def _joined(self, ref: ConcatRef, want: _Want) -> Iterator[Piece]:
        at = 0
        for part in ref.parts:
            size = self.shapes(part)[-1][ref.dim]
            here, want = want.below(ref.dim, at + size)
            yield from self.of(part, here.moved(ref.dim, -at))
            at += size


def _padded(want: _Want, dim: int, size: int) -> Iterator[tuple[_Want, bool]]:
    """What lies in a dimension of `size`, and what lies behind it and is zeros."""
    inside, behind = want.below(dim, size)
    yield inside, True
    yield behind, False


def _dealt(want: _Want, dim: int, ways: int, rows: int) -> Iterator[_Want]:
    """What is wanted of each part of a dealt dimension, in indices of before it was dealt."""
    while picks := want.picks[dim]:
        part = picks[0] // rows
        here, want = want.below(dim, (part + 1) * rows)
        chosen = here.picks[dim]
        first = (chosen[0] - part * rows) * ways + part
        step = chosen.step * ways
        yield here.picking(dim, range(first, first + len(chosen) * step, step))


def _plain(picks: range) -> range:
    """One index has no step, and the end is right behind the last, so that equal picks are."""
    return range(picks[0], picks[-1] + 1, picks.step if len(picks) > 1 else 1)


def _merged(pieces: Iterator[Piece]) -> tuple[Piece, ...]:
    """Neighbours that are neighbours in the source too become one piece."""
    found: list[Piece] = []
    for piece in pieces:
        while found and (both := _both(found[-1], piece)) is not None:
            piece = both
            found.pop()
        found.append(piece)
    return tuple(found)


def _both(first: Piece, second: Piece) -> Piece | None:
    """One piece that is both, if there is one."""
    alike = (first.source, first.order, first.casts) == (second.source, second.order, second.casts)
    unlike = [i for i, (a, b) in enumerate(zip(first.box, second.box, strict=True)) if a != b]
    if not alike or len(unlike) != 1:
        return None
    (dim,) = unlike
    if first.box[dim][1] != second.box[dim][0]:
        return None
    box = (*first.box[:dim], (first.box[dim][0], second.box[dim][1]), *first.box[dim + 1 :])
    if first.source is None:
        return replace(first, box=box)
    at = first.order[dim]
    if at is None:
        return None
    picks = _run(first.picks[at], second.picks[at])
    others = [i for i in range(len(first.picks)) if i != at]
    if picks is None or any(first.picks[i] != second.picks[i] for i in others):
        return None
    return replace(first, box=box, picks=(*first.picks[:at], picks, *first.picks[at + 1 :]))


def _run(first: range, second: range) -> range | None:
    """Two ranges as one, if the second goes on where the first ends."""
    step = second[0] - first[-1]
    if step < 1 or any(len(part) > 1 and part.step != step for part in (first, second)):
        return None
    return range(first[0], second[-1] + 1, step)

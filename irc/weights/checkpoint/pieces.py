"""`Piece`: a box of one rank's tensor that is a box of one source, or zeros.

Every step but a cast only moves elements. Followed back from the tensor to its sources, the steps
give, for each box of the tensor, one range of indices per dimension of one source. Reading,
contiguous extents and equality of ranks all derive from the pieces.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from ...ir.mesh import Mesh
from .. import Cast, ConcatRef, Cyclic, Pad, Ref, Shard, Slice, Step, Transpose, Unsqueeze, ZerosRef

Range: TypeAlias = tuple[int, int]  # begin, end
Shapes: TypeAlias = Callable[[Ref], Sequence[tuple[int, ...]]]  # of the source, after every step


@dataclass(frozen=True)
class Piece:
    """The elements of `box` are those of `source` (without steps) at `picks`; None is zeros.

    `picks` has the indices per dimension of the source. Dimension i of the tensor is dimension
    `order[i]` of the source; None is a dimension that the source lacks. `casts` are the dtypes of
    successive conversions.
    """

    box: tuple[Range, ...]
    source: Ref | None
    picks: tuple[range, ...] = ()
    order: tuple[int | None, ...] = ()
    casts: tuple[str, ...] = ()

    def within(self, block: Sequence[Range]) -> Piece | None:
        """The intersection with a block of the tensor; its box is relative to the block."""
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


def pieces_of(
    ref: Ref, mesh: Mesh, rank: int, shapes: Shapes, picks: Sequence[range] | None = None
) -> tuple[Piece, ...]:
    """The pieces of one rank's tensor, or of its elements at `picks`; none if there are none."""
    if picks is None:
        picks = tuple(map(range, shapes(ref)[-1]))
    box = tuple((0, len(pick)) for pick in picks)
    request = _Request(box, tuple(picks), tuple(range(len(picks))), ())
    return _merged(_Search(mesh, rank, shapes).of(ref, request))


@dataclass(frozen=True)
class _Request:
    """`box` of the tensor is the elements at `picks` of an earlier tensor.

    Dimension i of the earlier tensor is dimension `dims[i]` of the tensor.
    """

    box: tuple[Range, ...]
    picks: tuple[range, ...]
    dims: tuple[int, ...]
    casts: tuple[str, ...]

    def part(self, dim: int, first: int, last: int) -> _Request:
        """The picks from position `first` to `last` of a dimension."""
        at = self.dims[dim]
        begin = self.box[at][0]
        box = (*self.box[:at], (begin + first, begin + last), *self.box[at + 1 :])
        return replace(self, box=box).picking(dim, self.picks[dim][first:last])

    def picking(self, dim: int, picks: range) -> _Request:
        """The same box at other indices of a dimension."""
        return replace(self, picks=(*self.picks[:dim], picks, *self.picks[dim + 1 :]))

    def shifted(self, dim: int, count: int) -> _Request:
        """The same box at indices shifted by `count`."""
        picks = self.picks[dim]
        return self.picking(dim, range(picks.start + count, picks.stop + count, picks.step))

    def transposed(self, order: tuple[int, ...]) -> _Request:
        """The request before a transposition to `order`."""
        back = [order.index(i) for i in range(len(order))]
        picks, dims = (tuple(many[i] for i in back) for many in (self.picks, self.dims))
        return replace(self, picks=picks, dims=dims)

    def without(self, dim: int) -> _Request:
        """The request before a dimension of size 1 was added."""
        picks, dims = ((*many[:dim], *many[dim + 1 :]) for many in (self.picks, self.dims))
        return replace(self, picks=picks, dims=dims)

    def below(self, dim: int, size: int) -> tuple[_Request, _Request]:
        """(the part in the first `size` indices of a dimension, the rest)."""
        picks = self.picks[dim]
        cut = bisect_left(picks, size)
        return self.part(dim, 0, cut), self.part(dim, cut, len(picks))

    @property
    def empty(self) -> bool:
        return not all(self.picks)


@dataclass(frozen=True)
class _Search:
    """Follows the steps from a tensor back to its sources, on one rank."""

    mesh: Mesh
    rank: int
    shapes: Shapes

    def of(self, ref: Ref, request: _Request) -> Iterator[Piece]:
        """The pieces of a request on a reference."""
        yield from self._before(ref, ref.steps, request)

    def _before(self, ref: Ref, steps: tuple[Step, ...], request: _Request) -> Iterator[Piece]:
        """The pieces of a request on the tensor after the first `steps` of a reference."""
        if request.empty:
            return
        if not steps:
            yield from self._source(ref, request)
            return
        size = self.shapes(ref)[len(steps) - 1]
        *before, step = steps
        for inner, is_stored in self._undo(step, size, request):
            if is_stored:
                yield from self._before(ref, tuple(before), inner)
            elif not inner.empty:
                yield Piece(inner.box, None)

    def _undo(
        self, step: Step, shape: tuple[int, ...], request: _Request
    ) -> Iterator[tuple[_Request, bool]]:
        """The requests before a step; False marks elements that the step fills with zeros."""
        match step:
            case Cast(dtype):
                yield replace(request, casts=(dtype, *request.casts)), True
            case Transpose(order):
                yield request.transposed(order), True
            case Unsqueeze(dim):
                yield request.without(dim), True
            case Slice(cuts):
                for dim, cut in enumerate(cuts):
                    request = request.shifted(dim, cut[0] if cut else 0)
                yield request, True
            case Shard(dim, axes):
                part = -(-shape[dim] // self.mesh.group_size(axes))
                request = request.shifted(dim, self.mesh.index(self.rank, axes) * part)
                yield from _padded(request, dim, shape[dim])
            case Pad(dim):
                yield from _padded(request, dim, shape[dim])
            case Cyclic(dim, group_size):
                for part in _cyclic(request, dim, group_size, -(-shape[dim] // group_size)):
                    yield from _padded(part, dim, shape[dim])

    def _source(self, ref: Ref, request: _Request) -> Iterator[Piece]:
        if isinstance(ref, ConcatRef):
            yield from self._joined(ref, request)
        elif isinstance(ref, ZerosRef):
            yield Piece(request.box, None)
        else:
            places = {dim: i for i, dim in enumerate(request.dims)}
            order = tuple(places.get(i) for i in range(len(request.box)))
            source = replace(ref, steps=())
            yield Piece(
                request.box, source, tuple(map(_canonical, request.picks)), order, request.casts
            )

    def _joined(self, ref: ConcatRef, request: _Request) -> Iterator[Piece]:
        at = 0
        for part in ref.parts:
            size = self.shapes(part)[-1][ref.dim]
            here, request = request.below(ref.dim, at + size)
            yield from self.of(part, here.shifted(ref.dim, -at))
            at += size


def _padded(request: _Request, dim: int, size: int) -> Iterator[tuple[_Request, bool]]:
    """The part inside a dimension of `size` (True), and the padding after it (False)."""
    inside, behind = request.below(dim, size)
    yield inside, True
    yield behind, False


def _cyclic(request: _Request, dim: int, group_size: int, rows: int) -> Iterator[_Request]:
    """The request per part of a cyclic distribution, at indices of the original dimension."""
    while picks := request.picks[dim]:
        part = picks[0] // rows
        here, request = request.below(dim, (part + 1) * rows)
        chosen = here.picks[dim]
        first = (chosen[0] - part * rows) * group_size + part
        step = chosen.step * group_size
        yield here.picking(dim, range(first, first + len(chosen) * step, step))


def _canonical(picks: range) -> range:
    """A canonical range, so that ranges of equal indices compare equal."""
    return range(picks[0], picks[-1] + 1, picks.step if len(picks) > 1 else 1)


def _merged(pieces: Iterator[Piece]) -> tuple[Piece, ...]:
    """Merge adjacent pieces that are adjacent in their source."""
    merged: list[Piece] = []
    for piece in pieces:
        while merged and (both := _both(merged[-1], piece)) is not None:
            piece = both
            merged.pop()
        merged.append(piece)
    return tuple(merged)


def _both(first: Piece, second: Piece) -> Piece | None:
    """Two pieces as one, if they are adjacent along one dimension."""
    same = (first.source, first.order, first.casts) == (second.source, second.order, second.casts)
    different = [i for i, (a, b) in enumerate(zip(first.box, second.box, strict=True)) if a != b]
    if not same or len(different) != 1:
        return None
    (dim,) = different
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
    """Two ranges as one, if the second continues the first."""
    step = second[0] - first[-1]
    if step < 1 or any(len(part) > 1 and part.step != step for part in (first, second)):
        return None
    return range(first[0], second[-1] + 1, step)

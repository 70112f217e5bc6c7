"""Steps sorted by what they do: casts, then a chain of steps per dimension, then one transposition.

Steps of different dimensions and casts may change places, so any list of steps has this form. In
it neighbours meet, and what they do together may be said shorter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from ..dtypes import dtype as dtype_called
from ..errors import Error
from ..mesh import Mesh
from .steps import Cast, Deal, Pad, Shard, Slice, Step, Transpose, Unsqueeze, resized


@dataclass(frozen=True)
class Cut:
    """A slice of one dimension."""

    begin: int
    end: int


Link: TypeAlias = Cut | Shard | Deal | Pad  # all of one dimension
Chain: TypeAlias = tuple[Link, ...]


@dataclass(frozen=True)
class Form:
    """The steps after a source of `rank` dimensions, which is None where nothing tells it.

    Dimensions are those of the source and, behind them, those that were added, of size 1.
    `chains` are by dimension; `order` says which of them each dimension of the tensor is.
    """

    casts: tuple[str, ...] = ()
    chains: Mapping[int, Chain] = field(default_factory=dict[int, Chain])
    order: tuple[int, ...] | None = None
    rank: int | None = None

    def chain(self, dim: int) -> Chain:
        """The links of a dimension."""
        return self.chains.get(dim, ())

    def linked(self, dim: int, chain: Chain) -> Form:
        """The same with another chain in one dimension."""
        return replace(self, chains={**self.chains, dim: chain})

    def origin(self, dim: int) -> int:
        """The dimension that becomes a dimension of the tensor."""
        return dim if self.order is None else self.order[dim]

    def steps(self) -> tuple[Step, ...]:
        """The steps, in the one order that such a form is written in."""
        found: list[Step] = [Cast(dtype) for dtype in self.casts]
        if self.order is None or self.rank is None:
            return (*found, *_spelled(self.chains, 0))
        kept = tuple(dim for dim in self.order if dim < self.rank)
        found += _spelled({dim: self.chain(dim) for dim in range(self.rank)}, self.rank)
        if kept != tuple(sorted(kept)):
            found.append(Transpose(kept))
        added = {i: dim for i, dim in enumerate(self.order) if dim >= self.rank}
        found += [Unsqueeze(i) for i in added]
        found += _spelled({i: self.chain(dim) for i, dim in added.items()}, len(self.order))
        return tuple(found)


def _spelled(chains: Mapping[int, Chain], rank: int) -> list[Step]:
    """Chains as steps: slices of several dimensions in one, the rest by dimension."""
    found: list[Step] = []
    left = {dim: list(chain) for dim, chain in sorted(chains.items())}
    while any(left.values()):
        found += _slice(left, rank)
        for dim, links in left.items():
            found += _others(links, dim)
    return found


def _slice(left: Mapping[int, list[Link]], rank: int) -> list[Step]:
    """One step for the slices that all chains begin with; they are taken away."""
    cuts: dict[int, tuple[int, int]] = {}
    for dim, links in left.items():
        if links and isinstance(cut := links[0], Cut):
            cuts[dim] = (cut.begin, cut.end)
            del links[0]
    return [Slice(tuple(cuts.get(dim) for dim in range(rank)))] if cuts else []


def _others(links: list[Link], dim: int) -> list[Step]:
    """The steps of one chain before its next slice; they are taken away."""
    found: list[Step] = []
    for link in links:
        if isinstance(link, Cut):
            break
        found.append(replace(link, dim=dim))
    del links[: len(found)]
    return found


def form_of(steps: Sequence[Step], rank: int | None) -> Form | None:
    """Sorted steps after a source of a rank; None if it is not known and has to be.

    A slice or a transposition tells the rank, if it is not given.
    """
    added = 0
    for step in steps:
        if rank is None and isinstance(step, (Slice, Transpose)):
            rank = len(step.ranges if isinstance(step, Slice) else step.order) - added
        added += isinstance(step, Unsqueeze)
    if rank is None and added:
        return None
    form = Form(order=None if rank is None else tuple(range(rank)), rank=rank)
    for step in steps:
        if form.order is not None and not _fits(step, len(form.order)):
            raise Error(f"{step} does not fit a tensor of {len(form.order)} dimensions")
        form = _after(form, step)
    return form


def _fits(step: Step, rank: int) -> bool:
    match step:
        case Cast():
            return True
        case Transpose(order):
            return sorted(order) == list(range(rank))
        case Slice(ranges):
            return len(ranges) == rank
        case Unsqueeze(dim):
            return 0 <= dim <= rank
        case Shard(dim) | Deal(dim) | Pad(dim):
            return 0 <= dim < rank


def _after(form: Form, step: Step) -> Form:
    match step:
        case Cast(dtype):
            return replace(form, casts=(*form.casts, dtype))
        case Transpose(order):
            return replace(form, order=tuple(form.origin(i) for i in order))
        case Unsqueeze(i):
            order = form.order or ()
            return replace(form, order=(*order[:i], len(order), *order[i:]))
        case Slice(ranges):
            for i, part in enumerate(ranges):
                dim = form.origin(i)
                form = form.linked(dim, (*form.chain(dim), Cut(*part))) if part else form
            return form
        case Shard(i) | Deal(i) | Pad(i):
            dim = form.origin(i)
            return form.linked(dim, (*form.chain(dim), replace(step, dim=dim)))


def size_after(size: int | None, chain: Chain, mesh: Mesh) -> int | None:
    """The size of a dimension after its chain, as far as it is known."""
    for link in chain:
        if isinstance(link, Cut):
            size = link.end - link.begin
        elif size is not None:
            size = resized(size, link, mesh)
    return size


def all_zeros(size: int | None, chain: Chain, mesh: Mesh) -> bool:
    """Whether a slice lies in what was padded, so that nothing of the source is left."""
    for link, after in pairwise(chain):
        match link, after:
            case Pad(), Cut(begin, end) if size is not None and size <= begin < end:
                return True
            case _:
                size = size_after(size, (link,), mesh)
    return False


def shorter(chain: Chain, size: int | None, mesh: Mesh) -> Chain:
    """A chain that does the same to a dimension of this size with fewer or plainer links."""
    while True:
        now = _shorter(chain, size, mesh)
        if now == chain:
            return chain
        chain = now


def _shorter(chain: Chain, size: int | None, mesh: Mesh) -> Chain:
    """The first change that can be made, if any."""
    for i, link in enumerate(chain):
        alone = _alone(link, size, mesh)
        if alone != (link,):
            return (*chain[:i], *alone, *chain[i + 1 :])
        both = _both(link, chain[i + 1], size, mesh) if i + 1 < len(chain) else None
        if both is not None:
            return (*chain[:i], *both, *chain[i + 2 :])
        size = size_after(size, (link,), mesh)
    return chain


def _alone(link: Link, size: int | None, mesh: Mesh) -> Chain:
    """A link by itself, on a dimension of `size`."""
    match link:
        case Cut(0, end) if end == size:
            return ()
        case Pad(_, 0) | Deal(_, 1):
            return ()
        case Deal(dim, ways) if size is not None and size <= ways and size:
            return (Pad(dim, ways - size),)  # one element each, in the order they had
        case Shard(dim, axes):
            kept = tuple(axis for axis in axes if mesh.size(axis) > 1)
            return (Shard(dim, kept),) if kept else ()
        case _:
            return (link,)


def _both(link: Link, after: Link, size: int | None, mesh: Mesh) -> Chain | None:
    """Two links as others that do the same to a dimension of `size`, or None."""
    match link, after:
        case Cut(begin), Cut(first, last):
            return (Cut(begin + first, begin + last),)
        case Pad(dim, one), Pad(_, two):
            return (Pad(dim, one + two),)
        case Pad(dim), Cut(begin, end) if size is not None:
            if end <= size:
                return (after,)
            return (Cut(begin, size), Pad(dim, end - size)) if begin < size else None
        case Pad(_, count), (Shard() | Deal()) if size is not None:
            less, more = (resized(n, after, mesh) for n in (size, size + count))
            return (after,) if less == more else None
        case Shard(dim, outer), Shard(_, inner) if size is not None:
            even = resized(size, link, mesh) % mesh.ways(inner) == 0
            fits = even and not {*outer} & {*inner}
            return (Shard(dim, (*outer, *inner)),) if fits else None
        case _:
            return None


def shorter_casts(casts: Sequence[str], dtype: str | None) -> tuple[str, ...]:
    """Casts without those that change nothing after a source of `dtype`, None if not known."""
    found: list[str] = []
    for i, cast in enumerate(casts):
        before = found[-1] if found else dtype
        after = casts[i + 1] if i + 1 < len(casts) else None
        if cast != before and not (before and after and _passing(before, cast, after)):
            found.append(cast)
    return tuple(found)


def _passing(before: str, cast: str, after: str) -> bool:
    """Whether a cast keeps every value for the next one, which then may be the only one."""
    kinds = [dtype_called(name) for name in (before, cast, after)]
    exact = np.can_cast(kinds[0].numpy, kinds[1].numpy, "safe")
    return all(kind.is_float for kind in kinds) and exact

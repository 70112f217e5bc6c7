"""`simplified`: a reference said shorter, so that equal ones look equal and texts read well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from itertools import product as combinations

from ..errors import Error
from ..mesh import Mesh
from .chains import (
    Cut,
    Form,
    all_zeros,
    form_of,
    shorter,
    shorter_casts,
    size_after,
)
from .shapes import Known, nothing, ref_dtype, ref_shape
from .sources import ConcatRef, Ref, ZerosRef
from .steps import Cast, Pad, Shard, Slice, Step

_ROUNDS = 8  # of simplifying; one is nearly always enough, and each is right by itself


def simplified(ref: Ref, mesh: Mesh, known: Known = nothing) -> Ref:
    """A reference that reads the same bytes on every rank of the mesh, in canonical form.

    Slices of slices, sums of paddings, casts that change nothing and steps over one rank become
    one or none; slices go into a concatenation, whose parts that are neighbours in one source are
    joined; zeros behind anything become padding; a shard of a concatenation loses the axes along
    which the ranks have equal parts (`concat(k, k; 0).shard(0, tp)` is `k` on two ranks). `known`
    tells shapes and dtypes of sources (`sources_of`, `Reader.known`): with them more is seen.
    """
    simplifier = _Simplifier(mesh, known)
    found = simplifier.ref(ref)
    for _ in range(_ROUNDS):  # parts that were joined may have a shorter form themselves
        if (again := simplifier.ref(found)) == found:
            break
        found = again
    return found


@dataclass(frozen=True)
class _Simplifier:
    mesh: Mesh
    known: Known

    def ref(self, ref: Ref) -> Ref:
        """Any reference in canonical form."""
        source = self.join(ref.parts, ref.dim) if isinstance(ref, ConcatRef) else bare(ref)
        return self.stepped(source, ref.steps)

    def stepped(self, ref: Ref, more: Sequence[Step] = ()) -> Ref:
        """A reference with a canonical source, followed by more steps."""
        if not ref.steps and not more:
            return ref
        source, whole = bare(ref), replace(ref, steps=(*ref.steps, *more))
        form = self.form(whole)
        if form is None:
            return whole
        if isinstance(source, ZerosRef):
            shape = ref_shape(replace(source, steps=form.steps()), self.mesh, nothing)
            return ZerosRef(shape or (), form.casts[-1] if form.casts else source.dtype)
        form = self.shortened(form, source)
        done = replace(source, steps=form.steps())
        zeros = self.zeros(done, form)
        if zeros is not None:
            return zeros
        inner = self.inwards(source, form) if isinstance(source, ConcatRef) else None
        return done if inner is None else self.ref(inner)

    def shortened(self, form: Form, source: Ref) -> Form:
        """Steps after a canonical source, with fewer or plainer links."""
        sizes = self.before(form, source)
        chains = {d: shorter(c, sizes.get(d), self.mesh) for d, c in form.chains.items()}
        casts = shorter_casts(form.casts, ref_dtype(source, self.known))
        return replace(form, casts=casts, chains=chains)

    def zeros(self, ref: Ref, form: Form) -> Ref | None:
        """Zeros in place of a reference that has nothing else, if all about them is known."""
        sizes = self.before(form, bare(ref))
        if not any(all_zeros(sizes.get(d), c, self.mesh) for d, c in form.chains.items()):
            return None
        shape, dtype = ref_shape(ref, self.mesh, self.known), ref_dtype(ref, self.known)
        return None if shape is None or dtype is None else ZerosRef(shape, dtype)

    def form(self, ref: Ref) -> Form | None:
        """The sorted steps of a reference, None if its rank is not known and has to be."""
        sizes = self.source_sizes(ref)
        return form_of(ref.steps, None if sizes is None else len(sizes))

    def before(self, form: Form, source: Ref) -> dict[int, int | None]:
        """The sizes of all dimensions of a form before its chains, as far as they are known."""
        sizes = self.source_sizes(source) or (None,) * (form.rank or 0)
        added = len(form.order or ()) - (form.rank or 0)
        return dict(enumerate((*sizes, *[1] * added)))

    def sizes(self, ref: Ref) -> tuple[int | None, ...] | None:
        """The size of every dimension after all steps, None for what is not known."""
        form = self.form(ref)
        if form is None or form.order is None:
            return None
        sizes = self.before(form, ref)
        return tuple(size_after(sizes[d], form.chain(d), self.mesh) for d in form.order)

    def source_sizes(self, ref: Ref) -> tuple[int | None, ...] | None:
        """The sizes of the source without its steps."""
        return self.joined_sizes(ref) if isinstance(ref, ConcatRef) else self.known(bare(ref))[0]

    def joined_sizes(self, ref: ConcatRef) -> tuple[int | None, ...] | None:
        every = [self.sizes(part) for part in ref.parts]
        known = [sizes for sizes in every if sizes is not None]
        if not known:
            return None
        total: int | None = 0
        for sizes in every:
            size = None if sizes is None else sizes[ref.dim]
            total = None if size is None or total is None else total + size
        found = [
            next((n for n in column if n is not None), None) for column in zip(*known, strict=True)
        ]
        return (*found[: ref.dim], total, *found[ref.dim + 1 :])

    # -- parts become a concatenation

    def join(self, parts: Sequence[Ref], dim: int) -> Ref:
        """References joined along a dimension, in canonical form."""
        flat = [inner for part in parts for inner in self.spread(self.ref(part), dim)]
        sizes = [self.sizes(part) for part in flat]
        ranks = {len(known) for known in sizes if known is not None}
        if len(ranks) > 1 or any(dim not in range(rank) for rank in ranks):
            raise Error(f"{', '.join(map(str, parts))} cannot be joined along dimension {dim}")
        pairs = zip(flat, sizes, strict=True)
        kept = [part for part, known in pairs if known is None or known[dim] != 0] or flat[:1]
        joined = self.neighbours_merged(kept, dim)
        if len(joined) == 1:
            return joined[0]
        for outwards in (self.padding_outwards, self.cast_outwards):
            found = outwards(joined, dim)
            if found is not None:
                return found
        return ConcatRef(tuple(joined), dim)

    def neighbours_merged(self, parts: Sequence[Ref], dim: int) -> list[Ref]:
        """Parts with those joined that go on where the one before ends.

        Not slices that stand there twice in a row: these are heads that several ranks have.
        """
        joined: list[Ref] = []
        twice = False
        for i, part in enumerate(parts):
            before, twice = twice, part in (*parts[max(i - 1, 0) : i], *parts[i + 1 : i + 2])
            alone = (before or twice) and not isinstance(part, ZerosRef)
            both = self.merged(joined[-1], part, dim) if joined and not alone else None
            if both is None:
                joined.append(part)
            else:
                joined[-1] = both
        return joined

    def spread(self, ref: Ref, dim: int) -> list[Ref]:
        """The parts of a concatenation along the same dimension, with the steps after it."""
        if not isinstance(ref, ConcatRef) or ref.dim != dim:
            return [ref]
        casts = [step for step in ref.steps if isinstance(step, Cast)]
        pads = [step for step in ref.steps if isinstance(step, Pad) and step.dim == dim]
        if len(casts) + len(pads) < len(ref.steps):
            return [ref]
        parts = [self.stepped(part, casts) for part in ref.parts]
        return [*parts[:-1], self.stepped(parts[-1], pads)]

    def size(self, ref: Ref, dim: int) -> int | None:
        """The size of one dimension after all steps."""
        sizes = self.sizes(ref)
        return None if sizes is None else sizes[dim]

    def merged(self, first: Ref, second: Ref, dim: int) -> Ref | None:
        """Two neighbours as one reference, if the second goes on where the first ends."""
        if isinstance(second, ZerosRef):
            return self.stepped(first, [Pad(dim, second.shape[dim])])
        if bare(first) != bare(second):
            return None
        one, two = self.form(first), self.form(second)
        if one is None or two is None:
            return None
        at = one.origin(dim)
        same = (one.casts, one.order, one.rank) == (two.casts, two.order, two.rank)
        if not same or one.linked(at, ()).chains != two.linked(at, ()).chains:
            return None
        match one.chain(at), two.chain(at):
            case (Cut(begin, middle),), (Cut(again, end),) if middle == again:
                form = one.linked(at, (Cut(begin, end),))
                return self.stepped(bare(first), form.steps())
            case _:
                return None

    def padding_outwards(self, parts: Sequence[Ref], dim: int) -> Ref | None:
        """`concat(a, b.pad(0, 1); 0)` as `concat(a, b; 0).pad(0, 1)`."""
        last = self.form(parts[-1])
        if last is None:
            return None
        chain = last.chain(last.origin(dim))
        if not chain or not isinstance(pad := chain[-1], Pad):
            return None
        form = last.linked(last.origin(dim), chain[:-1])
        plain = self.stepped(bare(parts[-1]), form.steps())
        return self.stepped(self.join([*parts[:-1], plain], dim), [Pad(dim, pad.count)])

    def cast_outwards(self, parts: Sequence[Ref], dim: int) -> Ref | None:
        """`concat(a.cast(f32), b.cast(f32); 0)` as `concat(a, b; 0).cast(f32)`."""
        casts = {_last_cast(p) for p in parts if not isinstance(p, ZerosRef)}
        plain = [replace(p, steps=_without_last_cast(p.steps)) for p in parts]
        kinds = {ref_dtype(p, self.known) for p in plain if not isinstance(p, ZerosRef)}
        if len(casts) != 1 or len(kinds) != 1:
            return None
        (cast,), (kind,) = casts, kinds
        if cast is None or kind is None:
            return None
        parts = [replace(p, dtype=kind) if isinstance(p, ZerosRef) else p for p in plain]
        return self.stepped(self.join(parts, dim), [cast])

    # -- steps go into a concatenation

    def inwards(self, ref: ConcatRef, form: Form) -> Ref | None:
        """The same with the first step along the concatenation done to its parts, if it can be."""
        chain = form.chain(ref.dim)
        sizes = [self.size(part, ref.dim) for part in ref.parts]
        known = [size for size in sizes if size is not None]
        if not chain or len(known) < len(sizes) or form.rank is None:
            return None
        rest = form.linked(ref.dim, chain[1:]).steps()
        ends = list(accumulate(known))
        match chain[0]:
            case Cut(begin, end):
                parts = _cut(ref, ends, begin, end, form.rank)
                return ConcatRef(tuple(parts), ref.dim, steps=rest)
            case Shard(_, axes):
                found = self.unsharded(ref, ends, axes, form.rank)
                return found and replace(found, steps=(*found.steps, *rest))
            case _:
                return None

    def unsharded(
        self, ref: ConcatRef, ends: Sequence[int], axes: tuple[str, ...], rank: int
    ) -> Ref | None:
        """A shard without the axes along which ranks have equal parts, None if there are none.

        Only where every rank has its part in one part of the concatenation, and nothing is padded.
        """
        ways = self.mesh.ways(axes)
        size = ends[-1] // ways
        if size * ways != ends[-1] or not size or any(end % size for end in ends):
            return None
        starts = range(0, ends[-1], size)
        blocks = [self.join(_cut(ref, ends, at, at + size, rank), ref.dim) for at in starts]
        places = combinations(*(range(self.mesh.size(axis)) for axis in axes))
        table = dict(zip(places, blocks, strict=True))
        kept = [i for i in range(len(axes)) if not _constant(table, i)]
        if len(kept) == len(axes):
            return None
        first = [
            b for p, b in table.items() if not any(n for i, n in enumerate(p) if i not in kept)
        ]
        joined = ConcatRef(tuple(first), ref.dim)
        left = tuple(axes[i] for i in kept)
        return joined.then(Shard(ref.dim, left)) if left else joined


def bare(ref: Ref) -> Ref:
    """The source of a reference, without its steps."""
    return replace(ref, steps=()) if ref.steps else ref


def _cut(ref: ConcatRef, ends: Sequence[int], begin: int, end: int, rank: int) -> list[Ref]:
    """What lies between two positions along a concatenation, part by part."""
    found: list[Ref] = []
    start = 0
    for part, stop in zip(ref.parts, ends, strict=True):
        first, last = max(begin, start), min(end, stop)
        if first < last:
            found.append(part.then(_slice(ref.dim, first - start, last - start, rank)))
        start = stop
    return found or [ref.parts[0].then(_slice(ref.dim, 0, 0, rank))]


def _slice(dim: int, begin: int, end: int, rank: int) -> Slice:
    return Slice(tuple((begin, end) if i == dim else None for i in range(rank)))


def _constant(table: dict[tuple[int, ...], Ref], axis: int) -> bool:
    """Whether the blocks are equal along one axis."""
    return all(table[(*p[:axis], 0, *p[axis + 1 :])] == block for p, block in table.items())


def _last_cast(ref: Ref) -> Cast | None:
    return next((step for step in reversed(ref.steps) if isinstance(step, Cast)), None)


def _without_last_cast(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    last = max((i for i, step in enumerate(steps) if isinstance(step, Cast)), default=None)
    return steps if last is None else (*steps[:last], *steps[last + 1 :])

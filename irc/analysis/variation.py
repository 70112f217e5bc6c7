"""What is known of a value in the local view: how it may differ from rank to rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from ..core import Weight
from ..mesh import Mesh
from ..types import Axes, TensorType
from ..weights import ConcatRef, Ref, Shard, Transpose, Unsqueeze

Names: TypeAlias = frozenset[str]  # mesh axes
NONE: Names = frozenset()


@dataclass(frozen=True, eq=False, slots=True)
class Variation:
    """Over which mesh axes a value may differ, and in which way where that is known.

    `split` holds, per dimension, the axes whose ranks hold parts of it. Over `pending` the ranks
    hold terms of a sum that is not added up yet. Over `broken` the value was computed from such
    terms in a way that no later sum makes good; over `mixed`, a part of that, from such and from
    what each rank has a part of, so that nothing makes it good. What remains of `axes` differs in
    a way that is not known; over `numbered`, a part of that, by arithmetic with the number of the
    rank. `zero` says that every element is 0. Variations of one module are equal if identical.
    """

    axes: Names
    split: tuple[Axes, ...]
    pending: Names
    broken: Names
    mixed: Names
    numbered: Names
    zero: bool


class Variations:
    """Makes the variations of one mesh. Axes of one rank are left out: nothing varies over them."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.wide: Names = frozenset(name for name, size in mesh.axes if size > 1)
        self._known: dict[tuple[object, ...], Variation] = {}

    def make(
        self,
        axes: Iterable[str],
        split: tuple[Axes, ...],
        pending: Iterable[str] = (),
        broken: Iterable[str] = (),
        mixed: Iterable[str] = (),
        numbered: Iterable[str] = (),
        zero: bool = False,
    ) -> Variation:
        """That with these parts; what contradicts `axes` or is known better is left out."""
        wide = self.wide
        every, lost = wide.intersection(axes), wide.intersection(broken)
        split = tuple([self._kept(part, every) if part else part for part in split])
        waiting = wide.intersection(pending) - lost
        spoilt = lost.intersection(mixed)
        by_number = every.intersection(numbered) - waiting - lost
        by_number -= {axis for part in split for axis in part}
        key = (every, split, waiting, lost, spoilt, by_number, zero)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = Variation(*key)
        return known

    def _kept(self, part: Axes, axes: Names) -> Axes:
        return tuple([axis for axis in part if axis in axes])

    def same(self, rank: int, zero: bool = False) -> Variation:
        """That of a value of `rank` dimensions which is the same everywhere."""
        return self.make((), ((),) * rank, zero=zero)

    def of_type(self, type: TensorType) -> Variation:
        """That of one rank's part of what has this type in the global view."""
        axes = {axis for part in type.axes for axis in part} | {*type.partial}
        return self.make(axes, type.axes, type.partial)

    def of_weight(self, weight: Weight) -> Variation:
        """That of a weight, by the steps that cut it."""
        cuts = [step.axes for step in weight.ref.every_step() if isinstance(step, Shard)]
        rank = weight.type.rank
        if not cuts:
            return self.same(rank)
        return self.make([axis for axes in cuts for axis in axes], _cut_dims(weight.ref, rank))


def _cut_dims(ref: Ref, rank: int) -> tuple[Axes, ...]:
    """Which axes split every dimension; none where the parts of a concatenation disagree."""
    own = rank - sum(isinstance(step, Unsqueeze) for step in ref.steps)
    split: list[Axes] = [()] * own
    if isinstance(ref, ConcatRef):
        parts = {_cut_dims(part, own) for part in ref.parts}
        if len(parts) == 1:
            split = list(parts.pop())
    for step in ref.steps:
        if isinstance(step, Shard):
            split[step.dim] += step.axes
        elif isinstance(step, Transpose):
            split = [split[i] for i in step.order]
        elif isinstance(step, Unsqueeze):
            split.insert(step.dim, ())
    return tuple(split)

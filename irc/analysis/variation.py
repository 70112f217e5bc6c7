"""The variation of a value of the local view: how it may differ from rank to rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from ..ir.core import Weight
from ..ir.mesh import Mesh
from ..ir.types import Axes, TensorType
from ..weights import ConcatRef, Ref, Shard, Transpose, Unsqueeze

Names: TypeAlias = frozenset[str]  # mesh axes
NONE: Names = frozenset()


@dataclass(frozen=True, eq=False, slots=True)
class Variation:
    """The mesh axes over which a value may differ, and how, where that is known.

    `split` holds, per dimension, the axes that shard it. Over `partial` the ranks hold terms of a
    sum that is not completed yet. Over `broken` the value was computed from such terms so that no
    later sum corrects it; over `mixed`, a subset of that, from such terms and from shards, so that
    nothing does. The rest of `axes` differs in an unknown way; over `numbered`, a subset of that,
    by arithmetic with the rank number. `zero` says that every element is 0. Variations of one
    module are equal if identical.
    """

    axes: Names
    split: tuple[Axes, ...]
    partial: Names
    broken: Names
    mixed: Names
    numbered: Names
    zero: bool


class Variations:
    """Makes the variations of one mesh. Axes of one rank are left out."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.wide: Names = frozenset(name for name, size in mesh.axes if size > 1)
        self._known: dict[tuple[object, ...], Variation] = {}

    def make(
        self,
        axes: Iterable[str],
        split: tuple[Axes, ...],
        partial: Iterable[str] = (),
        broken: Iterable[str] = (),
        mixed: Iterable[str] = (),
        numbered: Iterable[str] = (),
        zero: bool = False,
    ) -> Variation:
        """A variation; what contradicts `axes` or is known better is left out."""
        wide = self.wide
        every, lost = wide.intersection(axes), wide.intersection(broken)
        split = tuple([self._kept(part, every) if part else part for part in split])
        waiting = wide.intersection(partial) - lost
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
        """The variation of a replicated value of `rank` dimensions."""
        return self.make((), ((),) * rank, zero=zero)

    def of_type(self, type: TensorType) -> Variation:
        """The variation of a local value of this global type."""
        axes = {axis for part in type.axes for axis in part} | {*type.partial}
        return self.make(axes, type.axes, type.partial)

    def of_weight(self, weight: Weight) -> Variation:
        """The variation of a weight, by its shard steps."""
        cuts = [step.axes for step in weight.ref.every_step() if isinstance(step, Shard)]
        rank = weight.type.ndim
        if not cuts:
            return self.same(rank)
        return self.make([axis for axes in cuts for axis in axes], _cut_dims(weight.ref, rank))


def _cut_dims(ref: Ref, rank: int) -> tuple[Axes, ...]:
    """The axes of every dimension; none where the parts of a concatenation disagree."""
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

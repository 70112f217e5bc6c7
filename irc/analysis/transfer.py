"""The variation of the results of a local operation, from that of its operands.

The sharding rules of the global view are read backwards: a dimension is sharded where a weight or
an argument is, and its axes go where its name goes. A name that is summed over leaves a partial
sum. What a rule does not determine stays unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from ..ir.core import Op, Value
from ..ir.dtypes import dtype
from ..ir.sharding import Rule, operand_words, parse_rule, result_words
from ..ir.types import Axes
from ..ops import Cast, Constant, Full, Pad, Reshape
from ..ops.collective import Collective, Exchange
from .variation import NONE, Names, Variation, Variations

Group: TypeAlias = frozenset[str]  # names of operands in which an operation is additive together


def transfer(
    op: Op, operands: Sequence[Variation], variations: Variations
) -> tuple[Variation, ...]:
    """The variation of every result of an operation that does not communicate."""
    axes = NONE.union(*[variation.axes for variation in operands])
    ranks = [result.type.ndim for result in op.results]
    if not axes:
        zero = _is_zero(op, operands)
        return tuple([variations.same(rank, zero) for rank in ranks])
    text = op.sharding_rule()
    if text is None:
        broken = NONE.union(*[variation.broken for variation in operands])
        mixed = NONE.union(*[variation.mixed for variation in operands])
        by_number = NONE.union(*numbers(op, operands))
        return tuple(
            [variations.make(axes, ((),) * rank, (), broken, mixed, by_number) for rank in ranks]
        )
    return _Flow(op, operands, parse_rule(text)).results(axes, variations)


def _is_zero(op: Op, operands: Sequence[Variation]) -> bool:
    """Whether the results are zeros: zero constants, and additive operations on zeros."""
    if isinstance(op, Full):
        return op.value == 0
    if isinstance(op, Constant):
        return not any(op.values)
    return bool(operands) and bool(op.sums) and all(variation.zero for variation in operands)


def additive_groups(op: Op) -> tuple[Group, ...]:
    """Its `sums`; a cast between floats rounds each term, and padding with 0 adds nothing."""
    if isinstance(op, Pad) and op.value == 0:
        return (frozenset(["x"]),)
    if isinstance(op, Cast):
        floats = all(_is_float(value) for value in (*op.operands, *op.results))
        return (frozenset(["x"]),) if floats else ()
    return op.sums


def numbers(op: Op, operands: Sequence[Variation]) -> list[Names]:
    """Per operand, the axes over which it brings the rank number into the results.

    Masks and positions of lookups only choose elements by it, and bring none.
    """
    made = dtype(op.results[0].type.dtype)
    return [
        variation.numbered
        if made.is_integer or (made.is_float and (isinstance(op, Cast) or _is_float(value)))
        else NONE
        for value, variation in zip(op.operands, operands, strict=True)
    ]


def _is_float(value: Value) -> bool:
    return dtype(value.type.dtype).is_float


class _Flow:
    """One operation under its sharding rule."""

    def __init__(self, op: Op, operands: Sequence[Variation], rule: Rule) -> None:
        self.op, self.operands, self.rule = op, operands, rule
        named = operand_words(op, rule)
        self.names = [name for name, _ in named]
        self.words = [words for _, words in named]
        self.results_words = result_words(rule, [result.type for result in op.results])
        self.where = self._known_splits()
        self.numbers = numbers(op, operands)
        kept = {word for words in self.results_words for word in words}
        self.kept = {a for word, axes in self.where.items() if word in kept for a in axes}
        self.lost = {a for word, axes in self.where.items() if word not in kept for a in axes}

    def _known_splits(self) -> dict[str, Axes]:
        """The axes of every name on which all operands that have it agree."""
        if isinstance(self.op, Reshape) and 1 in self.op.results[0].type.shape:
            return {}  # one rank's shard may have size 1: which dimension is sharded is unknown
        seen: dict[str, list[tuple[Axes, Variation]]] = {}
        for value, words, variation in zip(
            self.op.operands, self.words, self.operands, strict=True
        ):
            for word, size, axes in zip(words, value.type.shape, variation.split, strict=True):
                broadcast = size == 1 and not axes and word.startswith(".")
                if word != "1" and not broadcast:
                    seen.setdefault(word, []).append((axes, variation))
        where: dict[str, Axes] = {}
        for word, uses in seen.items():
            known = {axes for axes, _ in uses if axes}
            if len(known) != 1 or word in self.rule.replicated:
                continue
            (axes,) = known
            # an operand that is the same on every rank holds no shards of this dimension
            if all(own or variation.axes.issuperset(axes) for own, variation in uses):
                where[word] = axes
        used = [axis for axes in where.values() for axis in axes]
        return {w: axes for w, axes in where.items() if all(used.count(a) == 1 for a in axes)}

    def results(self, axes: Names, variations: Variations) -> tuple[Variation, ...]:
        """The variations of the results, which all have the same partial and broken sums."""
        broken = set(NONE.union(*[variation.broken for variation in self.operands]))
        partial: set[str] = set()
        for axis in axes:
            if self._contracts_numbers(axis):
                broken.add(axis)
                continue
            if axis in self.lost:
                (partial if self._adds_up(axis) else broken).add(axis)
                continue
            terms = [i for i, variation in enumerate(self.operands) if axis in variation.partial]
            if not terms:
                continue
            passed = self._passes(axis, terms)
            if passed is not None:
                (partial if passed else broken).add(axis)
        mixed = NONE.union(*[variation.mixed for variation in self.operands])
        mixed |= {axis for axis in broken if self._mixes(axis)}
        splits = [tuple([self.where.get(w, ()) for w in words]) for words in self.results_words]
        by_number = NONE.union(*self.numbers)
        return tuple(
            [variations.make(axes, split, partial, broken, mixed, by_number) for split in splits]
        )

    def _mixes(self, axis: str) -> bool:
        """Whether a partial or broken operand is combined with shards of another."""
        if axis not in self.kept and not self._chooses(axis):
            return False
        return any(
            axis in variation.partial | variation.broken | self.numbers[i]
            and not self._has(i, axis)
            for i, variation in enumerate(self.operands)
        )

    def _contracts_numbers(self, axis: str) -> bool:
        """Whether a contraction of sharded dimensions gives exactly the terms of its sum."""
        result = {word for words in self.results_words for word in words}
        return (
            axis in self.kept | self.lost
            and any(axis in row and not self._has(i, axis) for i, row in enumerate(self.numbers))
            and any(word not in result for words in self.words for word in words)
        )

    def _chooses(self, axis: str) -> bool:
        """Whether each rank selects other elements of its operand."""
        return bool(self.op.selects) and any(
            axis in variation.axes and name != self.op.selects
            for name, variation in zip(self.names, self.operands, strict=True)
        )

    def _adds_up(self, axis: str) -> bool:
        """Whether a contraction of split dimensions gives terms of its sum and nothing else."""
        for name, variation in zip(self.names, self.operands, strict=True):
            if name in self.op.addends:
                if axis not in variation.axes and not variation.zero:
                    return False  # it would be added once per rank
            elif axis in variation.partial:
                return False
        return True

    def _passes(self, axis: str, terms: list[int]) -> bool | None:
        """Whether terms of a sum give terms of a sum; None where unknown."""
        names, groups = self.names, additive_groups(self.op)
        if not all(any(names[i] in group for group in groups) for i in terms):
            return False
        if axis in self.kept:
            # a shard is made from this rank's term alone, unless the term is sharded alike
            return None if all(self._has(i, axis) for i in terms) else False
        fitting = next((g for g in groups if all(names[i] in g for i in terms)), None)
        if fitting is None:
            return None  # a product of two: right where only one rank has a term, as in a lookup
        if self._chooses(axis):
            return False  # each rank selects other elements, of its own term only
        passed: bool | None = True
        for i, variation in enumerate(self.operands):
            if i in terms:
                continue
            if axis in self.numbers[i] and names[i] in fitting:
                return False
            if axis in variation.axes:
                passed = None  # such as a mask that differs from rank to rank
            elif names[i] in fitting and not variation.zero:
                return False  # a complete value, which would be added once per rank
        return passed

    def _has(self, i: int, axis: str) -> bool:
        return any(axis in self.where.get(word, ()) for word in self.words[i])


def exchanged(op: Collective, operands: Sequence[Variation], variations: Variations) -> Variation:
    """The variation of the result of a collective, or of `rank`."""
    over = variations.wide.intersection(op.axes)
    axes = NONE.union(*[variation.axes for variation in operands])
    rank = op.results[0].type.ndim
    if not isinstance(op, Exchange):
        return variations.make(over, ((),) * rank, numbered=over)
    x = operands[0]
    split = _without(x.split, over) if len(x.split) == rank else ((),) * rank
    partial, broken = x.partial - over, NONE.union(*[s.broken for s in operands]) - over
    mixed = NONE.union(*[s.mixed for s in operands])
    if op.alike:
        return variations.make(axes - over, split, partial, broken, mixed, x.numbered)
    if op.root_receives:
        partial |= over  # zeros on all ranks but the root: together they hold the result
    elif op.scatters and (not op.gathers or _joins_shards(op, x, over)):
        split = _added(split, getattr(op, op.scatters), op.axes)
    return variations.make(axes | over, split, partial, broken, mixed, x.numbered)


def _joins_shards(op: Exchange, x: Variation, over: Names) -> bool:
    """Whether an all_to_all is known to join the shards of a dimension over `over`."""
    dim: int = getattr(op, op.gathers)
    return over.issubset(x.split[dim % len(x.split)])


def _without(split: tuple[Axes, ...], axes: Names) -> tuple[Axes, ...]:
    return tuple(tuple(axis for axis in part if axis not in axes) for part in split)


def _added(split: tuple[Axes, ...], dim: int, axes: Axes) -> tuple[Axes, ...]:
    at = dim % len(split)
    return (*split[:at], split[at] + axes, *split[at + 1 :])

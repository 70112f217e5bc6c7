"""How the results of an operation of the local view differ, from how its operands do.

The sharding rules of the global view are read backwards: a dimension is known to be split where a
weight or an argument is, and its axes go where its name goes. A name that is summed over leaves a
pending sum. What a rule cannot tell is left unknown; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from ..core import Op, Value
from ..dtypes import dtype
from ..ops.collective import Collective
from ..sharding import Rule, Words, named_dims, operand_words, parse_rule
from ..types import Axes
from .variation import NONE, Names, Variation, Variations

Group: TypeAlias = frozenset[str]  # names of operands in which an operation is additive together

_CHOOSING = ("gather", "gather_elements")  # their second operand says which elements


def transfer(
    op: Op, operands: Sequence[Variation], variations: Variations
) -> tuple[Variation, ...]:
    """The variation of every result of an operation that communicates with nobody."""
    axes = NONE.union(*[variation.axes for variation in operands])
    ranks = [result.type.rank for result in op.results]
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
    """Whether the results are zeros: constants that are, and what is additive in zeros."""
    if op.opname == "full":
        return op.attributes["value"] == 0
    if op.opname == "constant":
        return not any(op.attributes["values"])
    return bool(operands) and bool(op.sums) and all(variation.zero for variation in operands)


def additive_groups(op: Op) -> tuple[Group, ...]:
    """Its `sums`; a cast between floats rounds each term, and padding with 0 adds nothing."""
    if op.opname == "pad" and op.attributes["value"] == 0:
        return (frozenset(["x"]),)
    if op.opname == "cast":
        floats = all(_is_float(value) for value in (*op.operands, *op.results))
        return (frozenset(["x"]),) if floats else ()
    return op.sums


def numbers(op: Op, operands: Sequence[Variation]) -> list[Names]:
    """Per operand, the axes over which it brings the number of the rank into the results.

    What only chooses by that number does not: a mask, the positions of a lookup.
    """
    made = dtype(op.results[0].type.dtype)
    return [
        variation.numbered
        if made.is_integer or (made.is_float and (op.opname == "cast" or _is_float(value)))
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
        self.results_words = self._result_words()
        self.where = self._known_splits()
        self.numbers = numbers(op, operands)
        kept = {word for words in self.results_words for word in words}
        self.kept = {a for word, axes in self.where.items() if word in kept for a in axes}
        self.lost = {a for word, axes in self.where.items() if word not in kept for a in axes}

    def _result_words(self) -> list[Words]:
        results = self.op.results
        given = self.rule.results
        each = given * len(results) if len(given) == 1 else given
        return [named_dims(w, r.type.rank) for w, r in zip(each, results, strict=True)]

    def _known_splits(self) -> dict[str, Axes]:
        """The axes of every name on which all operands that have it agree."""
        if self.op.opname == "reshape" and 1 in self.op.results[0].type.shape:
            return {}  # one rank's part may have size 1: which dimension is split, who knows
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
            if len(known) != 1 or word in self.rule.whole:
                continue
            (axes,) = known
            # an operand that is the same on every rank holds no parts of this dimension
            if all(own or variation.axes.issuperset(axes) for own, variation in uses):
                where[word] = axes
        used = [axis for axes in where.values() for axis in axes]
        return {w: axes for w, axes in where.items() if all(used.count(a) == 1 for a in axes)}

    def results(self, axes: Names, variations: Variations) -> tuple[Variation, ...]:
        """The variations of the results, which all have the same pending and broken sums."""
        broken = set(NONE.union(*[variation.broken for variation in self.operands]))
        pending: set[str] = set()
        for axis in axes:
            if self._contracts_numbers(axis):
                broken.add(axis)
                continue
            if axis in self.lost:
                (pending if self._adds_up(axis) else broken).add(axis)
                continue
            terms = [i for i, variation in enumerate(self.operands) if axis in variation.pending]
            if not terms:
                continue
            passed = self._passes(axis, terms)
            if passed is not None:
                (pending if passed else broken).add(axis)
        mixed = NONE.union(*[variation.mixed for variation in self.operands])
        mixed |= {axis for axis in broken if self._mixes(axis)}
        splits = [tuple([self.where.get(w, ()) for w in words]) for words in self.results_words]
        by_number = NONE.union(*self.numbers)
        return tuple(
            [variations.make(axes, split, pending, broken, mixed, by_number) for split in splits]
        )

    def _mixes(self, axis: str) -> bool:
        """Whether an operand that is not good itself meets parts of another, or is cut by rank."""
        if axis not in self.kept and not self._chooses(axis):
            return False
        return any(
            axis in variation.pending | variation.broken | self.numbers[i]
            and not self._has(i, axis)
            for i, variation in enumerate(self.operands)
        )

    def _contracts_numbers(self, axis: str) -> bool:
        """Whether every rank multiplies its part of one matrix by a value made from its number."""
        result = {word for words in self.results_words for word in words}
        return (
            axis in self.kept | self.lost
            and any(axis in row and not self._has(i, axis) for i, row in enumerate(self.numbers))
            and any(word not in result for words in self.words for word in words)
        )

    def _chooses(self, axis: str) -> bool:
        """Whether each rank takes other elements of its operand."""
        return self.op.opname in _CHOOSING and axis in self.operands[1].axes

    def _adds_up(self, axis: str) -> bool:
        """Whether a contraction of split dimensions gives terms of its sum and nothing else."""
        addends: tuple[str, ...] = getattr(self.op, "addends", ())
        for name, variation in zip(self.names, self.operands, strict=True):
            if name in addends:
                if axis not in variation.axes and not variation.zero:
                    return False  # it would be added once per rank
            elif axis in variation.pending:
                return False
        return True

    def _passes(self, axis: str, terms: list[int]) -> bool | None:
        """Whether terms of a sum give terms of a sum; None where that is not known."""
        names, groups = self.names, additive_groups(self.op)
        if not all(any(names[i] in group for group in groups) for i in terms):
            return False
        if axis in self.kept:
            # the part of a rank is made from its term alone, unless the term is cut alike
            return None if all(self._has(i, axis) for i in terms) else False
        fitting = next((g for g in groups if all(names[i] in g for i in terms)), None)
        if fitting is None:
            return None  # a product of two: right where only one rank has a term, as in a lookup
        if self._chooses(axis):
            return False  # each rank takes another part, and of its own term only
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
    rank = op.results[0].type.rank
    if not operands:
        return variations.make(over, ((),) * rank, numbered=over)
    x = operands[0]
    split = _without(x.split, over) if len(x.split) == rank else ((),) * rank
    pending, broken = x.pending - over, NONE.union(*[s.broken for s in operands]) - over
    mixed = NONE.union(*[s.mixed for s in operands])
    if op.alike:
        return variations.make(axes - over, split, pending, broken, mixed, x.numbered)
    if op.opname in ("reduce", "collective_gather"):
        pending |= over  # zeros on all ranks but the root: together they hold the result
    elif op.opname in ("reduce_scatter", "collective_scatter"):
        split = _added(split, op.attributes["dim"], op.axes)
    elif op.opname == "all_to_all" and _joins_parts(op, x, over):
        split = _added(split, op.attributes["split"], op.axes)
    return variations.make(axes | over, split, pending, broken, mixed, x.numbered)


def _joins_parts(op: Collective, x: Variation, over: Names) -> bool:
    """Whether an all_to_all is known to join the parts of a dimension that is split over `over`."""
    dim: int = op.attributes["concat"]
    return over.issubset(x.split[dim % len(x.split)])


def _without(split: tuple[Axes, ...], axes: Names) -> tuple[Axes, ...]:
    return tuple(tuple(axis for axis in part if axis not in axes) for part in split)


def _added(split: tuple[Axes, ...], dim: int, axes: Axes) -> tuple[Axes, ...]:
    at = dim % len(split)
    return (*split[:at], split[at] + axes, *split[at + 1 :])

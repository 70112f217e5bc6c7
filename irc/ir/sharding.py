"""Sharding propagation from one line per operation: matmul is `... m k, ... k n -> ... m n`.

Each word names a dimension. A mesh axis on a named dimension goes wherever the name goes. A name
that does not reach the results was summed over, so the results are partial sums on its axis. A name
marked `!` must be replicated. A name marked `~` is a position: over its shards results add up too,
but a rank must know where its shard begins. `...` stands for leading dimensions, aligned from the
right as numpy broadcasts; `1` stands for a dimension of size one and never carries an axis. One
side may stand for several operands or results: a rule with a single word list is used for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from ..errors import Error
from .types import Axes, TensorType

if TYPE_CHECKING:
    from .core import Op

Words: TypeAlias = tuple[str, ...]
Sums: TypeAlias = tuple[frozenset[str], ...]


@dataclass(frozen=True)
class Rule:
    """A parsed rule: words per operand and result, the replicated names, the positions."""

    operands: tuple[Words, ...]
    results: tuple[Words, ...]
    replicated: frozenset[str]
    positions: frozenset[str]

    @property
    def is_elementwise(self) -> bool:
        """Whether every element of a result is made of the operands' elements at its place."""
        return all(words == ("...",) for words in self.operands + self.results)


@cache
def parse_rule(text: str) -> Rule:
    """A rule from its text; a ValueError where the declaration is wrong."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ValueError(f"the sharding rule {text!r} has no ->")
    operands, results = _side(left), _side(right)
    words = [word for side in operands + results for word in side]
    replicated, positions = ({w[:-1] for w in words if w.endswith(mark)} for mark in "!~")
    return Rule(_bare(operands), _bare(results), frozenset(replicated), frozenset(positions))


def _bare(side: tuple[Words, ...]) -> tuple[Words, ...]:
    return tuple(tuple(word.rstrip("!~") for word in words) for words in side)


def _side(text: str) -> tuple[Words, ...]:
    return tuple(tuple(part.split()) for part in text.split(","))


def parse_sums(text: str) -> tuple[frozenset[str], ...]:
    """The groups of operands in which an operation is additive, from `"x y"` or `"x | y"`."""
    return tuple(frozenset(group.split()) for group in text.split("|") if group.split())


def named_dims(words: Words, rank: int) -> Words:
    """One name per dimension, `...` spelled out as `.2 .1 .0` counted from the right."""
    if "..." not in words:
        if len(words) != rank:
            raise Error(f"the sharding rule has {len(words)} names for {rank} dimensions")
        return words
    at = words.index("...")
    count = rank - len(words) + 1
    if count < 0:
        raise Error(f"the sharding rule needs at least {len(words) - 1} dimensions, not {rank}")
    lead = tuple(f".{i}" for i in range(count - 1, -1, -1))
    return words[:at] + lead + words[at + 1 :]


def operand_words(op: Op, rule: Rule) -> list[tuple[str, Words]]:
    """(operand name, one name per dimension) for every operand that is there."""
    declared = (*op.operand_names, *op.optional_names)
    single = len(rule.operands) == 1
    if not single and len(rule.operands) != len(declared):
        raise Error(f"the sharding rule of {op.opname} has {len(rule.operands)} operands", op)
    table = dict(zip(declared, rule.operands * len(declared) if single else rule.operands))  # noqa: B905
    return [(n, named_dims(table[n], v.type.ndim)) for n, v in op.named_operands()]


def result_words(rule: Rule, types: Sequence[TensorType]) -> list[Words]:
    """One name per dimension of every result, which have these types."""
    word_lists = rule.results * len(types) if len(rule.results) == 1 else rule.results
    return [named_dims(words, type.ndim) for words, type in zip(word_lists, types, strict=True)]


def result_types(op: Op, outs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    """Result types: dtypes and shapes from `outs`, axes and partial sums from the rule."""
    if not any(v.type.sharded for v in op.operands):
        return outs
    text = op.sharding_rule()
    if text is None:
        return outs
    rule = parse_rule(text)
    where = axes_by_name(op, rule)
    check_replicated(op, rule, where)
    return spread_types(op, rule, where, outs, op.sums)


def check_replicated(op: Op, rule: Rule, where: dict[str, Axes]) -> None:
    """An Error where a dimension is sharded that the rule needs replicated."""
    for name in sorted(rule.replicated & where.keys()):
        raise Error(
            f"{op.opname} needs dimension {name!r} replicated, but it is sharded over "
            f"{'.'.join(where[name])}; put an all_gather before it",
            op,
        )


def spread_types(
    op: Op, rule: Rule, where: dict[str, Axes], outs: tuple[TensorType, ...], sums: Sums
) -> tuple[TensorType, ...]:
    """Result types with the axes of the names; an Error where sums do not pass through.

    `sums` are the groups of operands in which the operation is additive.
    """
    words = result_words(rule, outs)
    kept = {name for names in words for name in names}
    lost = [a for name, axes in where.items() if name not in kept for a in axes]
    _check_addends(op, lost)
    partial = tuple(sorted({*passed_sums(op, lost, sums), *lost}))
    varying = _passed_varying(op, rule, where)
    done: list[TensorType] = []
    for out, names in zip(outs, words, strict=True):
        axes = tuple(where.get(n, ()) for n in names)
        done.append(out.replace(axes=axes, partial=partial, varying=varying))
    return tuple(done)


def axes_by_name(op: Op, rule: Rule) -> dict[str, Axes]:
    """The axes of each name; every operand that has the name must agree.

    An operand that varies over axes may have any shard of the dimensions that they shard.
    """
    where: dict[str, Axes] = {}
    seen: dict[str, tuple[str, Axes, Axes]] = {}
    operands = list(op.named_operands())
    for (name, value), (_, words) in zip(operands, operand_words(op, rule), strict=True):
        varying = value.type.varying
        for word, size, axes in zip(words, value.type.shape, value.type.axes, strict=True):
            if word == "1" and axes:
                raise Error(
                    f"{op.opname} repeats a dimension of size 1 in {name}, so it cannot be sharded "
                    f"over {'.'.join(axes)}; put an all_gather before it",
                    op,
                )
            if word == "1" or (size == 1 and not axes and word.startswith(".")):
                continue  # a broadcast dimension fits any axes
            other, word_axes, free = seen.setdefault(word, (name, axes, varying))
            if axes and not word_axes and free and in_order(axes, free):
                seen[word] = (name, axes, varying)
            elif word_axes != axes and (axes or not in_order(word_axes, varying)):
                raise Error(_disagreement(op, word, other, word_axes, name, axes), op)
            if axes:
                where[word] = axes
    return where


def _passed_varying(op: Op, rule: Rule, where: dict[str, Axes]) -> Axes:
    """The axes over which results vary: those of operands that no dimension takes up."""
    if not any(value.type.varying for value in op.operands):
        return ()
    placed = {axis for axes in where.values() for axis in axes}
    varying: dict[str, None] = {}
    for (name, words), value in zip(operand_words(op, rule), op.operands, strict=True):
        own = rule.positions.union(words)
        held = {axis for word in own & where.keys() for axis in where[word]}
        wrong = () if rule.is_elementwise else placed.intersection(value.type.varying) - held
        for axis in sorted(wrong):
            raise Error(
                f"{op.opname} mixes shards over {axis} with {name}, which varies over {axis} in "
                "other dimensions",
                op,
            )
        varying.update(dict.fromkeys(value.type.varying))
    return tuple(axis for axis in varying if axis not in placed)


def in_order(axes: Axes, varying: Axes) -> bool:
    """Whether what varies so may be shards over axes: over all of them, in their order."""
    return tuple(axis for axis in varying if axis in axes) == axes


def _disagreement(op: Op, word: str, a: str, a_axes: Axes, b: str, b_axes: Axes) -> str:
    def layout(axes: Axes) -> str:
        return f"sharded over {'.'.join(axes)}" if axes else "replicated"

    what = "a leading dimension" if word.startswith(".") else f"dimension {word!r}"
    return (
        f"{op.opname}: {what} is {layout(a_axes)} in {a} and {layout(b_axes)} in {b}; "
        "shard both alike or gather one"
    )


def passed_sums(op: Op, lost: list[str], sums: Sums | None = None) -> Axes:
    """The partial sums that pass through; an Error where the operation is not additive in them.

    What is added to a contraction over `lost` is partial over it as the contraction itself is.
    """
    sums = op.sums if sums is None else sums
    partials = [
        (name, tuple(a for a in v.type.partial if name not in op.addends or a not in lost))
        for name, v in op.named_operands()
    ]
    partial = {name: partial for name, partial in partials if partial}
    if not partial:
        return ()
    axes = " ".join(sorted({axis for partial in partial.values() for axis in partial}))
    wrong = {n: partial for n, partial in partial.items() if not any(n in g for g in sums)}
    if wrong:
        raise Error(
            f"{op.opname} needs complete operands, but {_list(wrong)} is a partial sum over "
            f"{axes}; put an all_reduce before it",
            op,
        )
    groups = [group & {name for name, _ in partials} for group in sums]
    fits = next((g for g in groups if g >= partial.keys()), None)
    if fits is None:
        raise Error(f"{op.opname} multiplies partial sums ({_list(partial)}); complete one", op)
    if len({partial for name, partial in partials if name in fits}) > 1:
        raise Error(
            f"{op.opname} mixes a partial sum over {axes} with a complete value; "
            "put an all_reduce before it",
            op,
        )
    return next(iter(partial.values()))


def _check_addends(op: Op, lost: list[str]) -> None:
    """What is added to a contraction must be partial over the same axes, or it is added N times."""
    for name, value in op.named_operands():
        if name in op.addends and lost and not set(lost) <= set(value.type.partial):
            raise Error(
                f"{op.opname} would add {name} once per rank of {' '.join(lost)}; "
                f"add it after the all_reduce instead",
                op,
            )


def _list(names: dict[str, Axes]) -> str:
    return " and ".join(names)

"""Patterns of operations: `P.mul(P.silu("x"), "y")` matches a product with a silu."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product as combinations
from typing import Any, TypeAlias

from ..errors import Error, did_you_mean
from ..ir.core import Op
from ..ir.declare import op_class

MOST_VARIANTS = 64  # patterns without `|` that one pattern may expand to


class Pattern:
    """Base of all patterns. `a | b` matches what either matches, `a` first."""

    def __or__(self, other: Pattern) -> Alternatives:
        return Alternatives((*_choices(self), *_choices(other)))


@dataclass(frozen=True)
class Capture(Pattern):
    """Any value, captured by a name (None: not captured); a repeated name is the same value."""

    name: str | None = None


@dataclass(frozen=True)
class Rest(Pattern):
    """The remaining operands of a variadic operation, as a tuple."""

    name: str


@dataclass(frozen=True)
class Maybe(Pattern):
    """An optional operand, None if it is absent: `P.linear("x", "w", bias=P.maybe("b"))`."""

    name: str


@dataclass(frozen=True)
class WeightPattern(Pattern):
    """A weight of the module."""

    name: str | None = None


@dataclass(frozen=True)
class ConstantPattern(Pattern):
    """A `constant` or `full` of one repeated number: `value`, or one that the function accepts.

    Only a function can distinguish 0.0 and -0.0.
    """

    name: str | None = None
    value: Any = None


NAMED = (Capture, Rest, Maybe, WeightPattern, ConstantPattern)  # the patterns with a name


@dataclass(frozen=True, eq=False)
class OpPattern(Pattern):
    """An operation of one class over operands that match.

    `named` holds the optional operands; any other must be absent. `where` maps an attribute to its
    value, or to a function that accepts it. Below the root an operation must have exactly one use
    unless it is `shared`, because it is erased. `index` is the result that is matched, and
    `capturing` the name that captures the operation itself.
    """

    cls: type[Op]
    args: tuple[Pattern, ...]
    named: Mapping[str, Pattern]
    where: Mapping[str, Any]
    shared: bool = False
    index: int = 0
    capturing: str | None = None

    def capture(self, name: str) -> OpPattern:
        """This pattern, which also captures the operation (a string captures a value)."""
        return replace(self, capturing=name)

    def out(self, index: int) -> OpPattern:
        """This pattern, for the result at `index` instead of the first."""
        return replace(self, index=index)

    @property
    def opname(self) -> str:
        return self.cls.opname


@dataclass(frozen=True)
class Alternatives(Pattern):
    """Any of several patterns. A name that only some of them capture is None in the others."""

    choices: tuple[Pattern, ...]

    def capture(self, name: str) -> Alternatives:
        """The alternatives, which also capture the operation; all must be operations."""
        captured: list[Pattern] = []
        for choice in self.choices:
            if not isinstance(choice, OpPattern):
                raise Error(f"only an operation is captured by capture({name!r}), not {choice!r}")
            captured.append(choice.capture(name))
        return Alternatives(tuple(captured))


PatternLike: TypeAlias = Pattern | str


class Patterns:
    """Makes patterns: `P.NAME(...)` for the operation NAME, `P.and_` for a Python keyword."""

    any = Capture
    weight = WeightPattern
    constant = ConstantPattern
    maybe = Maybe

    def full(self, value: Any) -> ConstantPattern:
        """`P.constant(value=value)`."""
        return ConstantPattern(None, value)

    def __getattr__(self, name: str) -> Callable[..., OpPattern]:
        if name.startswith("__"):
            raise AttributeError(name)
        from .. import ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers them)

        cls = op_class(name.rstrip("_"))

        def make(*args: PatternLike, shared: bool = False, **named: Any) -> OpPattern:
            return op_pattern(cls, args, named, shared)

        return make


P = Patterns()


def op_pattern(
    cls: type[Op], args: tuple[PatternLike, ...], named: Mapping[str, Any], shared: bool
) -> OpPattern:
    """The pattern of an operation; an Error if it does not fit the declaration."""
    for name in named:
        if name not in cls.optional_names and name not in cls.attribute_types:
            names = [*cls.optional_names, *cls.attribute_types]
            hint = did_you_mean(name, names)
            raise Error(f"P.{cls.opname}: no attribute or optional operand {name!r}{hint}")
    operands = {n: _pattern(v) for n, v in named.items() if n in cls.optional_names}
    where = {n: v for n, v in named.items() if n in cls.attribute_types}
    patterns = tuple(_pattern(arg) for arg in args)
    _check_count(cls, patterns)
    return OpPattern(cls, patterns, operands, where, shared)


def _pattern(arg: Any) -> Pattern:
    if isinstance(arg, str):
        return Rest(arg[1:]) if arg.startswith("*") else Capture(arg)
    if isinstance(arg, Pattern):
        return arg
    raise Error(f"a pattern is a string or made by P, not {arg!r}")


def _check_count(cls: type[Op], args: tuple[Pattern, ...]) -> None:
    if any(isinstance(arg, Rest) for arg in args[:-1]):
        raise Error(f"P.{cls.opname}: '*rest' must be the last operand")
    rest = bool(args) and isinstance(args[-1], Rest)
    if rest and not cls.variadic:
        raise Error(f"P.{cls.opname}: '*rest' needs an operation with any number of operands")
    fixed = len(cls.operand_names) - cls.variadic
    if len(args) < fixed or (len(args) > fixed and not cls.variadic):
        names = ", ".join(cls.operand_names) or "none"
        raise Error(f"P.{cls.opname} takes {fixed} operands ({names}), not {len(args)}")


def _choices(pattern: Pattern) -> tuple[Pattern, ...]:
    return pattern.choices if isinstance(pattern, Alternatives) else (pattern,)


def variants(pattern: Pattern) -> list[Pattern]:
    """The patterns without `|` that a pattern expands to, in the order of trying."""
    if isinstance(pattern, Alternatives):
        patterns = [v for choice in pattern.choices for v in variants(choice)]
    elif isinstance(pattern, OpPattern):
        patterns: list[Pattern] = []
        inner = [variants(p) for p in (*pattern.args, *pattern.named.values())]
        for chosen in combinations(*inner):
            args = chosen[: len(pattern.args)]
            named = dict(zip(pattern.named, chosen[len(args) :], strict=True))
            patterns.append(replace(pattern, args=args, named=named))
            if len(patterns) > MOST_VARIANTS:
                break
    else:
        patterns = [pattern]
    if len(patterns) > MOST_VARIANTS:
        raise Error(f"a pattern expands to more than {MOST_VARIANTS}; write several rules instead")
    return patterns


def captured_names(pattern: Pattern) -> Iterator[str]:
    """The names that a pattern without `|` captures, in order, with duplicates."""
    if isinstance(pattern, OpPattern):
        if pattern.capturing is not None:
            yield pattern.capturing
        for inner in (*pattern.args, *pattern.named.values()):
            yield from captured_names(inner)
    elif isinstance(pattern, NAMED) and pattern.name is not None:
        yield pattern.name


def depth(pattern: Pattern) -> int:
    """The number of nested operations of a pattern."""
    if isinstance(pattern, OpPattern):
        return 1 + max((depth(p) for p in (*pattern.args, *pattern.named.values())), default=0)
    return 0


def matching_order(pattern: OpPattern) -> list[OpPattern]:
    """The operations of a pattern without `|` in the order of matching, root first."""
    inner = [p for p in (*pattern.named.values(), *pattern.args) if isinstance(p, OpPattern)]
    return [pattern, *(inner_pattern for p in inner for inner_pattern in matching_order(p))]

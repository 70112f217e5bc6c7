"""Why a rule did not apply: the attempt that came nearest, told in the words of the pattern."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..core import Function, Op, Value, Weight
from ..text.printer import literal
from .compile import is_matched_by, swappable
from .patterns import (
    NAMED,
    ConstantPattern,
    Maybe,
    OpPattern,
    Pattern,
    Rest,
    WeightPattern,
    op_patterns,
)
from .rules import Rule
from .strays import drop_strays, unplaced_users
from .watch import Miss, Watch, place


@dataclass(frozen=True)
class _State:
    """A way to match so far: what is bound, and which operations of the pattern are found."""

    bound: dict[str, Any]
    found: tuple[OpPattern, ...]

    def bind(self, name: str | None, value: Any) -> _State | None:
        if name is None or self.bound.get(name, value) is value:
            return self if name is None else _State(self.bound | {name: value}, self.found)
        return None


@dataclass
class _Attempt:
    """Matches one pattern at one root and remembers the failure that came latest."""

    pattern: OpPattern
    matched: tuple[OpPattern, ...] = ()
    reason: str = ""

    def fail(self, state: _State, reason: str) -> None:
        if not self.reason or len(state.found) > len(self.matched):
            self.matched, self.reason = state.found, reason

    def matches(self, op: Op) -> Iterator[dict[str, Any]]:
        for state in self.operation(self.pattern, op, _State({}, ())):
            yield state.bound

    def operation(self, pattern: OpPattern, op: Op, state: _State) -> Iterator[_State]:
        for name, wanted in pattern.where.items():
            given = getattr(op, name)
            if not (wanted(given) if callable(wanted) else given == wanted):
                text = "a value the rule refuses" if callable(wanted) else f"not {literal(wanted)}"
                return self.fail(state, f"{op.opname} has {name}={literal(given)}, {text}")
        for name in pattern.cls.optional_names:
            if name in op.present and name not in pattern.named:
                return self.fail(state, f"{op.opname} has the operand {name}")
            inner = pattern.named.get(name)
            if inner is not None and name not in op.present and not isinstance(inner, Maybe):
                return self.fail(state, f"{op.opname} has no operand {name}")
        found = _State(state.bound, (*state.found, pattern)).bind(pattern.capturing, op)
        if found is None:
            return self.fail(state, f"{op.opname} is another operation than the first")
        for parts in self.arrangements(pattern, op, found):
            yield from self.operands(parts, op, found)

    def arrangements(
        self, pattern: OpPattern, op: Op, state: _State
    ) -> Iterator[list[tuple[str, Pattern, Any]]]:
        """(how to call it, pattern, operand) of every operand, each way round."""
        fixed = len(op.operands) - len(op.present)
        plain = op.operands[:fixed]
        named = dict(op.named_operands())
        rest = bool(pattern.args) and isinstance(pattern.args[-1], Rest)
        count = len(pattern.args) - rest
        if len(plain) < count or (len(plain) > count and not rest):
            return self.fail(state, f"{op.opname} has {len(plain)} operands, not {count}")
        for operands in (plain, plain[::-1]) if swappable(pattern) else (plain,):
            values = [*operands[:count], operands[count:]] if rest else list(operands)
            parts = [
                (f"operand {i + 1}", p, v)
                for i, (p, v) in enumerate(zip(pattern.args, values, strict=True))
            ]
            yield parts + [(name, p, named.get(name)) for name, p in pattern.named.items()]

    def operands(
        self, parts: list[tuple[str, Pattern, Any]], op: Op, state: _State
    ) -> Iterator[_State]:
        if not parts:
            yield state
            return
        what, pattern, value = parts[0]
        called = what if op.__class__ is self.pattern.cls else f"{what} of {op.opname}"
        for found in self.value(pattern, value, called, state):
            yield from self.operands(parts[1:], op, found)

    def value(self, pattern: Pattern, value: Any, called: str, state: _State) -> Iterator[_State]:
        if isinstance(pattern, OpPattern):
            yield from self.producer(pattern, value, called, state)
            return
        if not is_matched_by(value, pattern):
            return self.fail(state, f"{called} is {_kind(value)}, not {_wanted(pattern)}")
        name = pattern.name if isinstance(pattern, NAMED) else None
        found = state.bind(name, value)
        if found is None:
            return self.fail(state, f"{called} is another value than the first {name!r}")
        yield found

    def producer(
        self, pattern: OpPattern, value: Value, called: str, state: _State
    ) -> Iterator[_State]:
        op = value.producer
        if op is None or op.__class__ is not pattern.cls:
            return self.fail(state, f"{called} is {_kind(value)}, not {pattern.opname}")
        if value.index != pattern.index:
            return self.fail(
                state, f"{called} is result {value.index} of {op.opname}, not {pattern.index}"
            )
        uses = sum(count for result in op.results for count in result.users.values())
        if uses != 1 and not pattern.shared:
            return self.fail(state, f"{called} is {op.opname}, which has {uses} uses")
        yield from self.operation(pattern, op, state)


def _kind(value: Value) -> str:
    if isinstance(value, Weight):
        return "a weight"
    return "an argument" if value.producer is None else value.producer.opname


def _wanted(pattern: Pattern) -> str:
    if isinstance(pattern, WeightPattern):
        return "a weight"
    value = pattern.value if isinstance(pattern, ConstantPattern) else None
    return "a constant" if value is None or callable(value) else f"the constant {literal(value)}"


def explain_misses(function: Function, rules: list[Rule], watch: Watch) -> None:
    """Add, for every operation that could be a root, what came nearest to applying there.

    An operation where no rule matched more than the root is no near miss, unless the root is all
    that the pattern has. The nearest come first.
    """
    misses: list[Miss] = []
    for op in list(function):
        candidates = [m for rule in rules if (m := _nearest(rule, op, watch)) is not None]
        if candidates:
            misses.append(min(candidates, key=lambda m: m.missing))
    watch.misses += sorted(misses, key=lambda m: m.missing)


def _nearest(rule: Rule, op: Op, watch: Watch) -> Miss | None:
    best: Miss | None = None
    for pattern in rule.variants:
        if pattern.cls is not op.__class__:
            continue
        total = sum(1 for _ in op_patterns(pattern))
        found, reason = _why(rule, pattern, op, watch)
        if reason and (found > 1 or total == 1) and (best is None or total - found < best.missing):
            best = Miss(rule.name, total - found, place(op), reason)
    return best


def _why(rule: Rule, pattern: OpPattern, op: Op, watch: Watch) -> tuple[int, str]:
    """(how many operations of the pattern were found, what is wrong), no text if it applies."""
    attempt = _Attempt(pattern)
    for bound in attempt.matches(op):
        captures = {n: bound.get(n) for n in rule.parameters}
        watch.reason = None
        new = rule.build(**captures)
        drop_strays(unplaced_users(captures.values()))
        if new is None:
            total = sum(1 for _ in op_patterns(pattern))
            why = watch.reason or "the rule declined"
            return total, f"{_shape(pattern, None)} matched; {why}"
        return 0, ""  # applies, but no more rewrites are permitted
    matched = attempt.matched or (pattern,)
    return len(matched), f"{_shape(pattern, matched)} matched; {attempt.reason}"


def _shape(pattern: OpPattern, matched: tuple[OpPattern, ...] | None) -> str:
    """`mul(silu(linear))`: the operations of a pattern, or those of them that were found."""
    inner = [
        _shape(p, matched)
        for p in (*pattern.args, *pattern.named.values())
        if isinstance(p, OpPattern) and (matched is None or any(p is m for m in matched))
    ]
    return pattern.opname + (f"({', '.join(inner)})" if inner else "")

"""A pattern as a generated Python function, which yields the captures of every way to match.

Every choice (which way round a commutative operation is) becomes a `for` loop around all that
follows, so a check that fails goes on with the next choice: full backtracking, no interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from ..core import Op, Value
from .constants import uniform
from .patterns import (
    Capture,
    ConstantPattern,
    Maybe,
    OpPattern,
    Pattern,
    Rest,
    WeightPattern,
)

Matcher: TypeAlias = Callable[[Op], Iterator[tuple[Any, ...]]]


def compile_pattern(pattern: OpPattern, names: tuple[str, ...]) -> Matcher:
    """A generator function from a root operation of the right class to captures in this order."""
    writer = _Writer()
    writer.operation(pattern, "root")
    captured = "".join(f"{writer.bound.get(name, 'None')}, " for name in names)
    writer.line(f"yield ({captured})")
    source = "\n".join(["def match(root):", *writer.lines])
    exec(source, writer.scope)
    return writer.scope["match"]


def sole_use(op: Op, user: Op) -> bool:
    """Whether one operand of `user` is the only use of all results of `op`."""
    uses = [result.users for result in op.results if result.users]
    return len(uses) == 1 and len(uses[0]) == 1 and uses[0].get(user) == 1


def swappable(pattern: OpPattern) -> bool:
    """Whether the operands may match the other way round."""
    return pattern.cls.commutative and len(pattern.args) == 2


class _Writer:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.indent = 1
        self.scope: dict[str, Any] = {"uniform": uniform, "sole_use": sole_use}
        self.bound: dict[str, str] = {}  # captured name -> variable
        self.count = 0

    def fresh(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def constant(self, value: Any) -> str:
        name = self.fresh("k")
        self.scope[name] = value
        return name

    def line(self, text: str) -> None:
        self.lines.append(" " * self.indent + text)

    def need(self, condition: str) -> None:
        """Give this choice up unless the condition holds."""
        self.line(f"if not ({condition}): {'continue' if self.indent > 1 else 'return'}")

    def bind(self, name: str | None, variable: str) -> None:
        if name is None:
            return
        if name in self.bound:
            self.need(f"{self.bound[name]} is {variable}")
        else:
            self.bound[name] = variable

    def operation(self, pattern: OpPattern, op: str) -> None:
        """Everything below an operation whose class is known to be right."""
        self.bind(pattern.capturing, op)
        for name, wanted in pattern.where.items():
            key = self.constant(wanted)
            test = f"{key}({op}.{name})" if callable(wanted) else f"{op}.{name} == {key}"
            self.need(test)
        self.optional_operands(pattern, op)
        values = [self.fresh("v") for _ in pattern.args]
        plain = [v for v, p in zip(values, pattern.args, strict=True) if not isinstance(p, Rest)]
        operands = self.fresh("o")
        if pattern.cls.variadic:
            self.line(f"{operands} = {op}.operands")
            rest = len(plain) < len(values)
            self.need(f"len({operands}) {'>=' if rest else '=='} {len(plain)}")
            for i, variable in enumerate(plain):
                self.line(f"{variable} = {operands}[{i}]")
            if rest:
                self.line(f"{values[-1]} = {operands}[{len(plain)}:]")
        elif swappable(pattern):
            self.line(f"{operands} = {op}.operands")
            pair = f"(({operands}, {operands}[::-1]) if {operands}[0] is not {operands}[1]"
            self.line(f"for {', '.join(values)} in {pair} else ({operands},)):")
            self.indent += 1
        elif values:
            extra = ", *_" if pattern.cls.optional_names else ""
            self.line(f"{', '.join(values)}{extra or ','} = {op}.operands")
        for inner, variable in zip(pattern.args, values, strict=True):
            self.value(inner, variable, op)

    def optional_operands(self, pattern: OpPattern, op: str) -> None:
        if not pattern.named:
            if pattern.cls.optional_names:
                self.need(f"not {op}.present")
            return
        for name in pattern.cls.optional_names:
            inner = pattern.named.get(name)
            if inner is None:
                self.need(f"{name!r} not in {op}.present")
                continue
            variable = self.fresh("v")
            self.line(f"{variable} = {op}.{name}")
            if isinstance(inner, Maybe):
                self.bind(inner.name, variable)
            else:
                self.need(f"{variable} is not None")
                self.value(inner, variable, op)

    def value(self, pattern: Pattern, variable: str, user: str) -> None:
        match pattern:
            case Capture(name) | Rest(name):
                self.bind(name, variable)
            case WeightPattern(name):
                # a Weight is the one kind of value without an owner
                self.need(f"{variable}.owner is None")
                self.bind(name, variable)
            case ConstantPattern(name, wanted):
                number = self.fresh("n")
                self.line(f"{number} = uniform({variable})")
                self.need(f"{number} is not None")
                if wanted is not None:
                    key = self.constant(wanted)
                    self.need(f"{key}({number})" if callable(wanted) else f"{number} == {key}")
                self.bind(name, variable)
            case OpPattern():
                self.producer(pattern, variable, user)
            case _:
                raise TypeError(f"{pattern!r} cannot stand here")

    def producer(self, pattern: OpPattern, variable: str, user: str) -> None:
        op = self.fresh("p")
        self.line(f"{op} = {variable}.owner")
        self.need(f"{op}.__class__ is {self.constant(pattern.cls)}")
        self.need(f"{variable}.index == {pattern.index}")
        if not pattern.shared:
            uses = self.fresh("u")
            self.line(f"{uses} = {variable}.users")
            self.need(f"len({uses}) == 1 and {uses}[{user}] == 1")
            self.need(f"len({op}.results) == 1 or sole_use({op}, {user})")
        self.operation(pattern, op)


def is_matched_by(value: Value, pattern: Pattern) -> bool:
    """Whether a value fits a pattern that is no operation; repeated names are not looked at."""
    match pattern:
        case WeightPattern():
            return value.owner is None
        case ConstantPattern(_, wanted):
            number = uniform(value)
            if number is None or wanted is None:
                return number is not None
            return bool(wanted(number)) if callable(wanted) else number == wanted
        case _:
            return True

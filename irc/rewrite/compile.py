"""`compile_pattern`: a pattern as a generated Python generator of the captures of every match.

Every choice (the order of the operands of a commutative operation) becomes a `for` loop around the
rest of the pattern, so a failed check continues with the next choice: full backtracking without an
interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from ..ir.core import Op, Value, Weight
from ..text.printer import literal
from .constants import uniform
from .patterns import Capture, ConstantPattern, Maybe, OpPattern, Pattern, Rest, WeightPattern

Matcher: TypeAlias = Callable[[Op], Iterator[tuple[Any, ...]]]
# Called with the number of operations of the pattern that matched, and why the next one did not.
Fail: TypeAlias = Callable[[int, str], None]


def compile_pattern(
    pattern: OpPattern, names: tuple[str, ...], fail: Fail | None = None
) -> Matcher:
    """A generator function from a root operation of the pattern's class to captures by `names`.

    With `fail` it reports every check that fails; the operations are counted in the order of
    `matching_order`.
    """
    writer = _Writer(pattern, fail)
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


class _Writer:
    """Writes the lines of one matcher; `scope` has the names that they use."""

    def __init__(self, root: OpPattern, fail: Fail | None) -> None:
        self.lines: list[str] = []
        self.indent = 1
        self.scope: dict[str, Any] = {"uniform": uniform, "sole_use": sole_use, "fail": fail}
        self.bound: dict[str, str] = {}  # captured name -> variable
        self.count = 0
        self.root, self.explains = root, fail is not None
        self.matched = 0  # operations of the pattern

    def fresh(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"

    def constant(self, value: Any) -> str:
        name = self.fresh("k")
        self.scope[name] = value
        return name

    def line(self, text: str) -> None:
        self.lines.append(" " * self.indent + text)

    def need(self, condition: str, reason: str | Callable[[Any], str], variable: str = "") -> None:
        """Continue with the next choice unless the condition holds.

        `reason` is the text for `fail`, or a function that makes it from the variable.
        """
        report = ""
        if self.explains:
            text = repr(reason)
            if not isinstance(reason, str):
                text = f"{self.constant(reason)}({variable})"
            report = f"fail({self.matched}, {text}); "
        self.line(f"if not ({condition}): {report}{'continue' if self.indent > 1 else 'return'}")

    def bind(self, name: str | None, variable: str, what: str) -> None:
        if name is None:
            return
        if name in self.bound:
            self.need(f"{self.bound[name]} is {variable}", f"{what} than the first {name!r}")
        else:
            self.bound[name] = variable

    def operation(self, pattern: OpPattern, op: str) -> None:
        """Match everything below an operation whose class is right."""
        opname = pattern.opname
        self.attributes(pattern, op)
        self.presence(pattern, op)
        self.matched += 1
        self.bind(pattern.capturing, op, f"{opname} is another operation")
        suffix = "" if pattern is self.root else f" of {opname}"
        for name, inner in pattern.named.items():
            variable = self.fresh("v")
            self.line(f"{variable} = {op}.{name}")
            self.value(inner, variable, op, f"{name}{suffix}")
        values = self.operands(pattern, op)
        for i, (inner, variable) in enumerate(zip(pattern.args, values, strict=True)):
            self.value(inner, variable, op, f"operand {i + 1}{suffix}")

    def attributes(self, pattern: OpPattern, op: str) -> None:
        for name, wanted in pattern.where.items():
            key = self.constant(wanted)
            text = "a value the rule refuses" if callable(wanted) else f"not {literal(wanted)}"

            def reason(value: Any, name: str = name, text: str = text) -> str:
                return f"{pattern.opname} has {name}={literal(value)}, {text}"

            test = f"{key}({op}.{name})" if callable(wanted) else f"{op}.{name} == {key}"
            self.need(test, reason, f"{op}.{name}")

    def presence(self, pattern: OpPattern, op: str) -> None:
        """Check which optional operands are present."""
        opname = pattern.opname
        if pattern.cls.optional_names and not pattern.named:
            self.need(
                f"not {op}.present",
                lambda present: f"{opname} has the operand {', '.join(present)}",
                f"{op}.present",
            )
            return
        for name in pattern.cls.optional_names:
            if name not in pattern.named:
                self.need(f"{name!r} not in {op}.present", f"{opname} has the operand {name}")
            elif not isinstance(pattern.named[name], Maybe):
                self.need(f"{name!r} in {op}.present", f"{opname} has no operand {name}")

    def operands(self, pattern: OpPattern, op: str) -> list[str]:
        """The variables of the operands, one per argument of the pattern."""
        values = [self.fresh("v") for _ in pattern.args]
        plain = [v for v, p in zip(values, pattern.args, strict=True) if not isinstance(p, Rest)]
        operands = self.fresh("o")
        if pattern.cls.variadic:
            rest = len(plain) < len(values)
            text = f"operands, not {len(plain)}"
            self.line(f"{operands} = {op}.operands")
            self.need(
                f"len({operands}) {'>=' if rest else '=='} {len(plain)}",
                lambda present: f"{pattern.opname} has {len(present)} {text}",
                operands,
            )
            for i, variable in enumerate(plain):
                self.line(f"{variable} = {operands}[{i}]")
            if rest:
                self.line(f"{values[-1]} = {operands}[{len(plain)}:]")
        elif pattern.cls.commutative and len(pattern.args) == 2:
            self.line(f"{operands} = {op}.operands")
            pair = f"(({operands}, {operands}[::-1]) if {operands}[0] is not {operands}[1]"
            self.line(f"for {', '.join(values)} in {pair} else ({operands},)):")
            self.indent += 1
        elif values:
            extra = ", *_" if pattern.cls.optional_names else ""
            self.line(f"{', '.join(values)}{extra or ','} = {op}.operands")
        return values

    def value(self, pattern: Pattern, variable: str, user: str, what: str) -> None:
        other = f"{what} is another value"
        match pattern:
            case Capture(name) | Rest(name) | Maybe(name):
                self.bind(name, variable, other)
            case WeightPattern(name):
                self.need(
                    f"{variable}.owner is None",  # true of weights only
                    lambda value: f"{what} is {_kind(value)}, not a weight",
                    variable,
                )
                self.bind(name, variable, other)
            case ConstantPattern(name, wanted):
                self.number(wanted, variable, what)
                self.bind(name, variable, other)
            case OpPattern():
                self.producer(pattern, variable, user, what)
            case _:
                raise TypeError(f"{pattern!r} is not a pattern of an operand")

    def number(self, wanted: Any, variable: str, what: str) -> None:
        any_number = wanted is None or callable(wanted)
        text = "a constant" if any_number else f"the constant {literal(wanted)}"

        def reason(value: Value) -> str:
            return f"{what} is {_kind(value)}, not {text}"

        number = self.fresh("n")
        self.line(f"{number} = uniform({variable})")
        self.need(f"{number} is not None", reason, variable)
        if wanted is not None:
            key = self.constant(wanted)
            test = f"{key}({number})" if callable(wanted) else f"{number} == {key}"
            self.need(test, reason, variable)

    def producer(self, pattern: OpPattern, variable: str, user: str, what: str) -> None:
        op = self.fresh("p")
        self.line(f"{op} = {variable}.owner")
        self.need(
            f"{op}.__class__ is {self.constant(pattern.cls)}",
            lambda value: f"{what} is {_kind(value)}, not {pattern.opname}",
            variable,
        )
        self.need(
            f"{variable}.index == {pattern.index}",
            lambda value: (
                f"{what} is result {value.index} of {pattern.opname}, not {pattern.index}"
            ),
            variable,
        )
        if not pattern.shared:
            uses = self.fresh("u")
            self.line(f"{uses} = {variable}.users")
            self.need(
                f"len({uses}) == 1 and {uses}[{user}] == 1"
                f" and (len({op}.results) == 1 or sole_use({op}, {user}))",
                lambda op: f"{what} is {pattern.opname}, which has {_uses(op)} uses",
                op,
            )
        self.operation(pattern, op)


def _kind(value: Value) -> str:
    """What a value is, for messages."""
    if isinstance(value, Weight):
        return "a weight"
    return "an argument" if value.producer is None else value.producer.opname


def _uses(op: Op) -> int:
    return sum(count for result in op.results for count in result.users.values())

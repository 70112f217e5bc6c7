"""The functions that ranks run: the main function, or one per pipeline stage.

A function of several stages consists of calls, each with the number of the stage that runs
it. A stage becomes one function: its arguments are those of the main arguments and of the values of
earlier stages that it needs; its results are those of the main function that it makes, and the
values that later stages need.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from irc.errors import Error
from irc.ir.core import Function, Module, Op, Result, Value, Weight
from irc.ir.dims import Dim
from irc.ir.mesh import Mesh
from irc.ops import Return

AXIS = "pp"  # the mesh axis along which stages lie


@dataclass
class Stage:
    """One function and the ranks that run it.

    `receives` and `sends` name the values from and to other stages, by the numbers of these.
    """

    function: Function
    ranks: list[int]
    receives: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    sends: dict[int, list[str]] = field(default_factory=dict[int, list[str]])


@contextmanager
def stages_of(module: Module, function: Function | None = None) -> Generator[list[Stage]]:
    """The stages of the main (or another) function in order; one stage if it has no calls."""
    main = module.main if function is None else function
    calls = _Pipeline(module.mesh, main)
    if not calls.calls:
        yield [Stage(main, list(range(module.mesh.ranks)))]
        return
    stages: list[Stage] = []
    try:
        for number in range(calls.count):
            stages.append(calls.stage(number))
        yield stages
    finally:
        for stage in stages:
            for op in stage.function:
                op.drop_operands()  # the weights remain in use


class _Pipeline:
    """A main function that is calls of stages."""

    def __init__(self, mesh: Mesh, main: Function) -> None:
        self.mesh, self.main = mesh, main
        self.calls = [op for op in self.main if _number(op) >= 0]
        self.count = len({_number(op) for op in self.calls})
        self.maker = {value: _number(op) for op in self.calls for value in op.results}
        self.users = {
            arg: dict.fromkeys(_number(op) for op in self.calls if arg in op.operands)
            for arg in self.main.args
        }
        if self.calls:
            self._check()
            self._names = _handed_names(self.main, self.maker)

    def _check(self) -> None:
        found = sorted({_number(op) for op in self.calls})
        if found != list(range(stage_count(self.mesh))):
            shown = ", ".join(map(str, found))
            raise Error(f"@{self.main.name} calls stages {shown}, but the mesh is ({self.mesh})")
        for op in self.main:
            late = [v for v in op.operands if self.maker.get(v, 0) > _number(op)]
            if op.opname != "return" and _number(op) < 0:
                raise Error(
                    f"{op.opname} is between the calls of stages, and no stage runs it; "
                    "make the pass pipeline run after all others"
                ).at(op)
            if op.opname != "return" and late:
                raise Error(
                    f"stage {_number(op)} needs a value of stage {self.maker[late[0]]}, "
                    "which runs after it"
                ).at(op)
        for a in self.main.aliases().values():
            arg = self.main.args[a]
            if len(self.users[arg]) > 1:
                shown = " and ".join(map(str, self.users[arg]))
                raise Error(f"the state {arg.name} is used by the stages {shown}; expected one")

    def stage(self, number: int) -> Stage:
        """The function of one stage, with copies of what its calls lead to."""
        calls = [op for op in self.calls if _number(op) == number]
        results, sent = self._results(number), self._sent(number)
        args, received = self._inputs(number, calls, results)
        inputs = [*((str(arg.name), arg) for arg in args), *((self._names[v], v) for v in received)]
        function = Function(self.main.name, [(name, value.type) for name, value in inputs])
        copies: dict[Value, Value] = {
            value: arg for (_, value), arg in zip(inputs, function.args, strict=True)
        }
        for call in calls:
            _copy(call, function, copies)
        handed = list(dict.fromkeys(value for values in sent.values() for value in values))
        returned = [*(self.main.returned[i] for i in results), *handed]
        function.append(Return([copies.get(value, value) for value in returned]))
        names, aliases = self.main.result_names(), self.main.aliases()
        function.results = (
            *(Result(names[i], _name(self.main, aliases.get(i))) for i in results),
            *(Result(self._names[value]) for value in handed),
        )
        stage = Stage(function, _ranks(self.mesh, number))
        for value in received:
            stage.receives.setdefault(self.maker[value], []).append(self._names[value])
        stage.sends = {to: [self._names[v] for v in values] for to, values in sent.items()}
        return stage

    def _results(self, number: int) -> list[int]:
        """Which results of the main function the stage makes; the first makes those of none."""
        found: list[int] = []
        for i, value in enumerate(self.main.returned):
            first = next(iter(self.users.get(value, ())), 0)
            if self.maker.get(value, first) == number:
                found.append(i)
        return found

    def _sent(self, number: int) -> dict[int, list[Value]]:
        """The values of this stage that others need, by those."""
        found: dict[int, dict[Value, None]] = {}
        for op in self.calls:
            for value in op.operands:
                if self.maker.get(value) == number != _number(op):
                    found.setdefault(_number(op), {})[value] = None
        return {to: list(found[to]) for to in sorted(found)}

    def _inputs(
        self, number: int, calls: list[Op], results: list[int]
    ) -> tuple[list[Value], list[Value]]:
        """(main arguments, values of earlier stages) that a stage needs."""
        aliases = self.main.aliases()
        used = dict.fromkeys(value for op in calls for value in op.operands)
        used |= dict.fromkeys(self.main.returned[i] for i in results)
        used |= dict.fromkeys(self.main.args[aliases[i]] for i in results if i in aliases)
        received = [value for value in used if self.maker.get(value, number) != number]
        needed = _symbols([*received, *(op.attributes["callee"] for op in calls)])
        for name in needed:
            if not any(_determines(value, name) for value in (*used, *received)):
                more = next((arg for arg in self.main.args if _determines(arg, name)), None)
                used |= {} if more is None else {more: None}  # for its shape alone
        return [arg for arg in self.main.args if arg in used], received


def _number(op: Op) -> int:
    """The stage that runs a call, or -1."""
    return getattr(op, "stage", -1) if op.opname == "call" else -1


def stage_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes along which the ranks of one stage lie."""
    return tuple(name for name in mesh.names if name != AXIS)


def stage_count(mesh: Mesh) -> int:
    """How many stages there are."""
    return mesh.size(AXIS) if AXIS in mesh.names else 1


def _ranks(mesh: Mesh, number: int) -> list[int]:
    if AXIS not in mesh.names:
        return list(range(mesh.ranks))
    return [rank for rank in range(mesh.ranks) if mesh.coordinates(rank)[AXIS] == number]


def _name(main: Function, arg: int | None) -> str | None:
    return None if arg is None else main.args[arg].name


def _handed_names(main: Function, maker: dict[Value, int]) -> dict[Value, str]:
    """Unique names for the values that stages make."""
    taken = {str(arg.name) for arg in main.args} | set(main.result_names())
    names: dict[Value, str] = {}
    for value, number in maker.items():
        base = re.sub(r"\W", "_", f"stage{number}_{value.name or 'value'}")
        name, n = base, 0
        while name in taken:
            n += 1
            name = f"{base}_{n}"
        taken.add(name)
        names[value] = name
    return names


def _copy(call: Op, function: Function, copies: dict[Value, Value]) -> None:
    """Append the body of what is called, and of what that calls."""
    callee: Function = call.attributes["callee"]
    inner = dict(zip(callee.args, (copies.get(v, v) for v in call.operands), strict=True))
    for op in callee:
        if op.opname == "return":
            break
        if op.opname == "call":
            _copy(op, function, inner)
            continue
        copy = op.rebuilt([inner.get(value, value) for value in op.operands])
        function.append(copy)
        for old, new in zip(op.results, copy.results, strict=True):
            new.name = old.name
            inner[old] = new
    for result, value in zip(call.results, callee.returned, strict=True):
        copies[result] = inner.get(value, value)


def _symbols(things: Iterable[Any]) -> dict[str, None]:
    """The symbols in types and attributes, of functions in all their operations."""
    found: dict[str, None] = {}
    for thing in things:
        if isinstance(thing, Dim):
            found |= dict.fromkeys(thing.symbols())
        elif isinstance(thing, Value) and not isinstance(thing, Weight):
            found |= _symbols(thing.type.shape)
        elif isinstance(thing, tuple):
            found |= _symbols(thing)
        elif isinstance(thing, Function):
            for op in thing:
                found |= _symbols((*op.results, *op.attributes.values()))
    return found


def _determines(value: Value, symbol: str) -> bool:
    """Whether a dimension of the value is `a*symbol + b`."""
    return any(
        isinstance(dim, Dim) and {name for name, _ in dim.terms} - {()} == {(symbol,)}
        for dim in value.type.shape
    )

"""Moves the operations of each stage into a function of its own."""

from __future__ import annotations

from collections.abc import Container, Mapping

from irc.ir.core import Function, Module, Op, Result, Value
from irc.ir.dims import Dim
from irc.ops import Call, Return

from ..shared.edit import attribute_symbols, copy_before, free_name, insert_functions
from .layers import alive_between


def stage_name(stage: int) -> str:
    """The name of the function of one stage."""
    return f"stage{stage}"


def home(value: Value, place: Mapping[Op, int], state: Value | None) -> int:
    """The group that gives back a value: the one that makes it or uses its state, else the first.

    `state` is the argument whose memory the value reuses.
    """
    maker = value.producer
    if maker is not None and maker in place:
        return place[maker]
    users = state.users if state is not None else ()
    return min((place[user] for user in users if user in place), default=0)


class Splitter:
    """Moves the operations of the main function into a function per stage, called in order.

    Operations of `repeated` are copied into every stage that needs them. A value that a later
    stage uses is a result of its stage and of every stage between, and an argument of each stage
    after its own, under one name.
    """

    def __init__(
        self, module: Module, stage_of: Mapping[Op, int], repeated: Container[Op], count: int
    ) -> None:
        self.module, self.main = module, module.main
        self.stage_of, self.repeated, self.count = stage_of, repeated, count
        self.received = [*alive_between(stage_of, count), []]
        aliases = self.main.aliases()
        self.states = {i: self.main.args[at] for i, at in aliases.items()}
        self.homes = [
            home(value, stage_of, self.states.get(i)) for i, value in enumerate(self.main.returned)
        ]
        self.names = self._names()

    def run(self) -> None:
        """Add the functions to the module, before the main one."""
        main, returned = self.main, list(self.main.returned)
        order = {op: i for i, op in enumerate(main)}
        bodies = [self._body(stage, order) for stage in range(self.count)]
        current: dict[Value, Value] = {}  # what the previous stage has sent
        functions: list[Function] = []
        for stage, body in enumerate(bodies):
            inputs = self._inputs(stage, body)
            outputs = self._outputs(stage)
            function = self._function(stage, body, inputs, outputs)
            call = Call([current.get(v, v) for v in inputs], callee=function, stage=stage)
            for result, name in zip(call.results, function.result_names(), strict=True):
                result.name = name
            main.insert(call, main.last)
            current = {}
            for (at, value, declared), result in zip(outputs, call.results, strict=True):
                if at is not None:
                    returned[at] = result
                if value in self.received[stage + 1] and declared.name == self.names[value]:
                    current[value] = result
            functions.append(function)
        self._finish(returned, functions)

    def _body(self, stage: int, order: Mapping[Op, int]) -> list[Op]:
        """The operations of a stage in program order, with what it repeats."""
        body = {op for op, at in self.stage_of.items() if at == stage}
        values = [v for at, v in enumerate(self.main.returned) if self.homes[at] == stage]
        values += [v for op in body for v in op.operands]
        while values:
            op = values.pop().producer
            if op is not None and op in self.repeated and op not in body:
                body.add(op)
                values += op.operands
        return sorted(body, key=order.__getitem__)

    def _inputs(self, stage: int, body: list[Op]) -> list[Value]:
        """Arguments of the main function that the stage uses, then received values."""
        used = {v for op in body for v in op.operands}
        for at, value in enumerate(self.main.returned):
            if self.homes[at] == stage:
                used |= {value, self.states.get(at, value)}
        handed = self.received[stage]
        direct = [arg for arg in self.main.args if arg in used]
        missing = _symbols(body) - _told([*direct, *handed])
        for arg in self.main.args:
            if missing & _told([arg]) and arg not in used:
                used.add(arg)
                missing -= _told([arg])
        return [*(arg for arg in self.main.args if arg in used), *handed]

    def _outputs(self, stage: int) -> list[tuple[int | None, Value, Result]]:
        """(index among the main function's results, value, declaration) of every result."""
        names = self.main.result_names()
        outputs: list[tuple[int | None, Value, Result]] = []
        for at, value in enumerate(self.main.returned):
            if self.homes[at] == stage:
                state = self.states.get(at)
                alias = state.name if state is not None else None
                outputs.append((at, value, Result(names[at], alias)))
        returned = {result.name for _, _, result in outputs}
        for value in self.received[stage + 1]:
            if self.names[value] not in returned:
                outputs.append((None, value, Result(self.names[value])))
        return outputs

    def _function(
        self,
        stage: int,
        body: list[Op],
        inputs: list[Value],
        outputs: list[tuple[int | None, Value, Result]],
    ) -> Function:
        args = [(self.names.get(v) or str(v.name), v.type) for v in inputs]
        function = Function(stage_name(stage), args)
        scope: dict[Value, Value] = dict(zip(inputs, function.args, strict=True))
        for op in body:
            if op in self.repeated:
                copy_before(op, function, None, scope)
            else:
                self.main.unlink(op)
                op.set_operands(tuple(scope.get(v, v) for v in op.operands))
                function.append(op)
        function.append(Return([scope.get(value, value) for _, value, _ in outputs]))
        function.results = tuple(result for _, _, result in outputs)
        return function

    def _names(self) -> dict[Value, str]:
        """A name for every value sent between stages, as argument and as result.

        A result of the main function that is no state keeps its name, so that it is given once.
        """
        args = {str(arg.name) for arg in self.main.args}
        results = self.main.result_names()
        taken = args | set(results)
        names: dict[Value, str] = {}
        for at, value in enumerate(self.main.returned):
            if at not in self.states and results[at] not in args:
                names.setdefault(value, results[at])
        handed: dict[Value, str] = {}
        for value in dict.fromkeys(v for values in self.received for v in values):
            handed[value] = names.get(value) or free_name(value.name or "handed", taken)
            taken.add(handed[value])
        return handed

    def _finish(self, returned: list[Value], functions: list[Function]) -> None:
        """Return the results of the stages, and erase moved and repeated operations."""
        main = self.main
        end = main.last
        assert end is not None
        end.set_operands(tuple(returned))
        for op in reversed(main):
            if op in self.repeated:
                op.erase()
        insert_functions(self.module, functions, main)


def _symbols(body: list[Op]) -> set[str]:
    """The symbols whose sizes the operations need."""
    sizes = [dim for op in body for result in op.results for dim in result.type.shape]
    symbols = {name for dim in sizes if isinstance(dim, Dim) for name in dim.symbols()}
    return symbols.union(*map(attribute_symbols, body))


def _told(values: list[Value]) -> set[str]:
    """The symbols whose sizes follow from the shapes of values: those in `S`, `2*S` or `S + 1`."""
    dims = [dim for value in values for dim in value.type.shape if isinstance(dim, Dim)]
    symbols: set[str] = set()
    for dim in dims:
        names = list(dim.symbols())
        if len(names) == 1 and all(len(monomial) <= 1 for monomial, _ in dim.terms):
            symbols |= set(names)
    return symbols

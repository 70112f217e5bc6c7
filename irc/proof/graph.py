"""The values and steps of a module's main function, with the functions that it calls inlined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..ir.core import Function, Module, Op, Value, Weight
from ..ir.types import TensorType
from ..weights import Ref


@dataclass(eq=False)
class Item:
    """One value where it is computed; a function called twice has two of each.

    `ref` is what a weight refers to, with the same name for the same file in every module.
    `tensor` numbers the global tensor that the value is, or is a part of: equal numbers, equal
    tensors; None where it is part of none, as the number of a rank. `part` numbers what the ranks
    hold, with padding and the terms of sums. `fixed`: made of weights and constants only.
    """

    type: TensorType
    name: str
    step: Step | None = None
    weight: Weight | None = None
    ref: Ref | None = None
    fixed: bool = False
    tensor: int | None = None
    part: int = -1

    @property
    def scope(self) -> str:
        """The module scope of its operation, "" where it is unknown."""
        loc = self.step.op.loc if self.step is not None else None
        return loc.scope if loc is not None else ""

    @property
    def kind(self) -> tuple[Any, ...]:
        """The dtype and shape of the global tensor, and over which axes it varies."""
        whole = self.type.global_type
        return whole.dtype, whole.shape, whole.varying


@dataclass(eq=False)
class Step:
    """One operation with its operands and results."""

    op: Op
    operands: tuple[Item, ...]
    results: tuple[Item, ...] = ()


@dataclass
class Graph:
    """A main function as steps in order; `arguments` and `results` by the names callers use."""

    module: Module
    arguments: dict[str, Item]
    weights: dict[str, Item]
    steps: list[Step] = field(default_factory=list[Step])
    results: dict[str, Item] = field(default_factory=dict[str, Item])

    def items(self) -> Iterator[Item]:
        """Arguments, weights, then results of steps in order."""
        yield from (*self.arguments.values(), *self.weights.values())
        for step in self.steps:
            yield from step.results

    def states(self) -> dict[str, str]:
        """Result to argument, of what one call leaves to the next."""
        main = self.module.main
        names = main.result_names()
        return {names[result]: str(main.args[arg].name) for result, arg in main.aliases().items()}


def graph_of(module: Module, located: Callable[[Module, Ref], Ref]) -> Graph:
    """The graph of a module's main function; `located` names the files of its references."""
    main = module.main
    arguments = {str(arg.name): Item(arg.type, str(arg.name)) for arg in main.args}
    weights = {
        name: Item(w.type, name, weight=w, ref=located(module, w.ref), fixed=True)
        for name, w in module.weights.items()
    }
    graph = Graph(module, arguments, weights)
    returned = _walk(graph, main, [*arguments.values()])
    graph.results = dict(zip(main.result_names(), returned, strict=True))
    return graph


def _walk(graph: Graph, function: Function, arguments: Sequence[Item]) -> list[Item]:
    """Append the steps of a function; returns what it returns."""
    scope: dict[Value, Item] = dict(zip(function.args, arguments, strict=True))
    scope |= {weight: graph.weights[name] for name, weight in graph.module.weights.items()}
    for op in function:
        operands = tuple(scope[value] for value in op.operands)
        if op.opname == "return":
            return [*operands]
        if op.opname == "call":
            scope |= zip(op.results, _walk(graph, op.attributes["callee"], operands), strict=True)
            continue
        step = Step(op, operands)
        fixed = all(item.fixed for item in operands) and op.opname != "rank"
        step.results = tuple([Item(v.type, v.name or "_", step, fixed=fixed) for v in op.results])
        graph.steps.append(step)
        scope |= zip(op.results, step.results, strict=True)
    return []

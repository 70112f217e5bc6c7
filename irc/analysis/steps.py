"""What one rank of each stage runs, step by step, with expected times: operations or kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..ir.core import Function, Module, Op, Value
from ..text.printer import names_of
from .communication import messages_of
from .cost import cost_of
from .sizes import LocalSizes
from .stages import stages_of
from .topology import Topology


@dataclass(frozen=True)
class Step:
    """An operation, a kernel of one or several operations, or a collective.

    `name` is that of the kernel, or the operation. `operation` and `scope` are those of the root,
    `values` the results of all operations in it as the text names them, `operations` their names.
    `rank` is the first of the stage. `us` is the expected time, the start of the kernel included;
    `nbytes` what is read and written, `flops` the floating-point operations, all of one rank.
    `source` is generated code, "" where there is none.
    """

    name: str
    operation: str
    scope: str
    values: tuple[str, ...]
    operations: tuple[str, ...]
    where: str
    rank: int
    us: float
    nbytes: float
    flops: float
    source: str = ""


def steps_of(module: Module, sizes: LocalSizes, topology: Topology) -> list[Step]:
    """A step per operation, of one rank of every stage, without those that take no time."""
    steps: list[Step] = []
    for stage in stages_of(module):
        for op, names in named_operations(stage.function):
            cost, sent = cost_of(op, sizes), messages_of(op, sizes, topology)
            us = cost.time(topology.device) + sum(message.us for message in sent)
            scope, where = (op.loc.scope, op.loc.where()) if op.loc is not None else ("", "")
            values = tuple(names[value] for value in op.results)
            moved = cost.bytes + sum(message.sent for message in sent)
            about = (op.opname, op.opname, scope, values, (op.opname,), where, stage.ranks[0])
            steps += [Step(*about, us, moved, cost.flops)] if us else []
    return steps


def named_operations(function: Function) -> Iterator[tuple[Op, dict[Value, str]]]:
    """Every operation that runs, in order, those of called functions at every call, each with the
    names of values in its function's text."""
    names = names_of(function)
    for op in function:
        if op.opname == "call":
            yield from named_operations(op.attributes["callee"])
        elif op.opname != "return":
            yield op, names

"""`Planner`: the plans of a function, one per sizes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from irc.analysis.sizes import LocalSizes
from irc.ir.core import Function, Module, Op, Value, Weight
from irc.ops import Rank
from irc.text.printer import names_of

from .core import Kernel, Launch, LibraryCall, Plan, Step, pointers
from .cost import bytes_of, flops_of
from .memory import Memory
from .nodes import Launches, Node, computed
from .prepare import prepared
from .template import AnyTemplate, CallTemplate, Template

MANY = 2**30  # elements; a loop over the threads of a grid may count a little further


class Planner:
    """Plans of one function of a module, for one rank of its mesh.

    Without `fused` only the makers of KERNELS and elementwise kernels are used, no FUSIONS. `apart`
    as of Launches.
    `weights` are the weights of all plans made so far, packed ones among them, by buffer.
    """

    def __init__(
        self, module: Module, function: str | None = None, rank: int = 0, fused: bool = True
    ) -> None:
        self.module = prepared(module)
        name = function or self.module.main.name
        self.function: Function = self.module.functions[name]
        self.rank, self.fused = rank, fused
        self.weights: dict[str, Weight] = {}
        self.apart: dict[str, str] = {}

    @cached_property
    def names(self) -> dict[Value, str]:
        """The names of values in the function's text."""
        return names_of(self.function)

    def positions(self) -> dict[str, int]:
        """The rank's position along the axes of every `rank` operation, as the symbol `rank_tp`."""
        mesh, found = self.module.mesh, dict[str, int]()
        for op in self.function:
            if isinstance(op, Rank):
                found["rank_" + "_".join(op.axes)] = mesh.index(self.rank, op.axes)
        return found

    def launches(self, sizes: Mapping[str, int]) -> Launches:
        """The launches at given sizes, with why values are stored and operations not fused."""
        return Launches(self.function, dict(sizes), self.fused, self.apart)

    def plan(self, sizes: Mapping[str, int]) -> Plan:
        """The plan at the sizes of all symbols in the function's arguments."""
        return _Build(self, dict(sizes)).plan()


class _Build:
    """One plan under construction."""

    def __init__(self, planner: Planner, sizes: dict[str, int]) -> None:
        self.planner, self.function, self.sizes = planner, planner.function, sizes
        self.launches = planner.launches(sizes)
        self.local = LocalSizes(planner.module.mesh, sizes)
        self.symbols = sizes | planner.positions()
        self.kernels: dict[str, Kernel] = {}
        self.memory = Memory(self.function, planner.names, self.local, planner.weights)

    def plan(self) -> Plan:
        nodes = self.launches.nodes
        self.memory.use(nodes)
        steps: list[Step] = []
        for number, node in enumerate(nodes):
            for template in node.templates:
                self.memory.begin(number, template)
                steps += self.memory.copies()
                if any(self.local.count(value.type) for value in template.writes):
                    steps.append(self._step(template, node))

        results = self.memory.results()
        steps += self.memory.copies()
        buffers = self.memory.placed(steps)
        written = {a.buffer for step in steps for a in pointers(step) if a.written}
        steps = [_with_constants(step, written, steps[i - 1 : i]) for i, step in enumerate(steps)]
        used = {a.buffer for step in steps for a in pointers(step)} | {*results}
        kept = {
            name: buffer
            for name, buffer in buffers.items()
            if name in used or buffer.place in ("input", "state", "output")
        }
        return Plan(
            self.function.name, self.sizes, kept, self.kernels, tuple(steps), tuple(results)
        )

    def _step(self, template: AnyTemplate, node: Node) -> Step:
        operations = computed(template, self.launches.stored)
        names = tuple(self.planner.names.get(v, "%_") for op in operations for v in op.results)
        sources = [op.loc.where() for op in operations if op.loc is not None]
        pointers = self.memory.arguments(template)
        nbytes = bytes_of(template.reads, template.writes, operations, self.local)
        flops = flops_of(operations, self.local)
        source = sources[0] if sources else ""
        if isinstance(template, CallTemplate):
            settings = template.settings(self.symbols)
            return LibraryCall(
                *(template.library, template.function, pointers, settings),
                *(names, source, nbytes, flops),
            )
        kernel = self._kernel(self._indexed(template, operations))
        launch = template.launch(kernel, pointers, self.symbols)
        return replace(launch, operations=names, source=source, nbytes=nbytes, flops=flops)

    def _indexed(self, template: Template, operations: Iterable[Op]) -> Kernel:
        """The kernel, whose indices have 64 bits where it meets a value of many elements."""
        kernel = template.kernel
        values = (*template.reads, *template.writes, *(v for op in operations for v in op.results))
        if all(self.local.count(value.type) < MANY for value in values):
            return kernel
        return replace(kernel, macros={**kernel.macros, "ix": "long long"})

    def _kernel(self, kernel: Kernel) -> str:
        """The name under which the plan has a kernel; another source gets another name."""
        name, number = kernel.name, 1
        while name in self.kernels and not _same(self.kernels[name], kernel):
            number += 1
            name = f"{kernel.name}_{number}"
        self.kernels[name] = kernel
        return name


def _same(a: Kernel, b: Kernel) -> bool:
    return a.source == b.source and dict(a.macros) == dict(b.macros)


def _with_constants(step: Step, written: Collection[str], before: Sequence[Step]) -> Step:
    """A launch with its constant arguments; it may start early only behind another launch."""
    if not isinstance(step, Launch):
        return step
    constant = [i for i, each in enumerate(pointers(step)) if each.buffer not in written]
    early = step.programmatic and bool(before) and isinstance(before[0], Launch)
    return replace(step, constant=tuple(constant), programmatic=early)

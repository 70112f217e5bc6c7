"""`Planner`: the plans of a function, one per regime of sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from irc.analysis.sizes import LocalSizes
from irc.ir.core import Module, Op, Value, Weight
from irc.ir.dims import Dim, bind, product
from irc.ir.dtypes import dtype
from irc.ir.types import TensorType
from irc.ops import Rank
from irc.text.printer import names_of

from ..tuning import device_of
from .core import MANY, Argument, Kernel, Launch, LibraryCall, Plan, Step
from .cost import Work
from .memory import Memory
from .nodes import Launches, Node, computed
from .prepare import copied, expand, prepared
from .regime import Device, Regime
from .template import AnyTemplate, CallTemplate, Sizes, Template


class Planner:
    """Plans of one function of a module, for one rank of its mesh.

    Without `fused` composite operations are expanded, and only kernels of single operations are
    used. `device`: an H200 with the choices of irc by default; `apart` as of Regime. `check` raises
    an Error about plans that may not be used.
    `weights` are the weights of all plans made so far, packed ones among them, by buffer. `origins`
    are the names of values in the module's text, see `prepared`.
    """

    def __init__(
        self,
        module: Module,
        function: str | None = None,
        rank: int = 0,
        fused: bool = True,
        device: Device | None = None,
    ) -> None:
        self.origins: dict[Value, str] = {}
        self.module = prepared(module, self.origins)
        self.function = self.module.functions[function or self.module.main.name]
        self.rank, self.fused, self.device = rank, fused, device or device_of()
        self.weights: dict[str, Weight] = {}
        self.apart: dict[str, str] = {}
        self.check: Callable[[Plan], None] = lambda plan: None
        self._plans: list[RegimePlan] = []

    def positions(self) -> dict[str, int]:
        """The rank's position along the axes of every `rank` operation, as the symbol `rank_tp`."""
        mesh, positions = self.module.mesh, dict[str, int]()
        for op in self.function:
            if isinstance(op, Rank):
                positions["rank_" + "_".join(op.axes)] = mesh.index(self.rank, op.axes)
        return positions

    def regime(self, sizes: Mapping[str, int]) -> RegimePlan:
        """The plan for the regime of the sizes of all symbols in the function's arguments."""
        for plan in self._plans:
            if plan.is_current(self) and plan.regime.holds(sizes):
                return plan
        self._plans = [plan for plan in self._plans if plan.is_current(self)]
        self._plans.append(RegimePlan(self, sizes))
        return self._plans[-1]

    def plan(self, sizes: Mapping[str, int]) -> Plan:
        """The plan at the sizes of all symbols in the function's arguments."""
        plan = self.regime(sizes).at(sizes)
        self.check(plan)
        return plan


@dataclass(frozen=True)
class _Planned:
    """A step whose sizes are not known yet; `behind`: what the step in front is."""

    template: AnyTemplate
    arguments: tuple[Argument, ...]
    kernel: str = ""
    operations: tuple[Op, ...] = ()
    names: tuple[str, ...] = ()
    source: str = ""
    behind: AnyTemplate | None = None


class RegimePlan:
    """The plan of a function for all sizes of a regime.

    `launches` say why values are stored and operations not fused; `names` are those of values in
    the text of the function, in which composite operations without kernels are expanded; `origins`
    as of Planner.
    """

    def __init__(self, planner: Planner, sizes: Mapping[str, int]) -> None:
        function, self.origins = copied(planner.function, planner.origins)
        self.regime = Regime(sizes, planner.device, dict(planner.apart))
        overwritten = {function.args[at] for at in function.aliases().values()}
        self.regime.constants = {arg for arg in function.args if arg not in overwritten}
        parts = partial(expand, origins=self.origins)
        self.launches = Launches(function, self.regime, parts, planner.fused)
        self.names = names_of(function)
        self._mesh, self._positions = planner.module.mesh, planner.positions()
        self._kernels: dict[str, Kernel] = {}
        self._memory = Memory(function, self.names, planner.weights)
        self._memory.use(self.launches.nodes)
        self._steps: list[_Planned] = []
        for number, node in enumerate(self.launches.nodes):
            for template in node.templates:
                self._memory.begin(number, template)
                self._copy()
                if not all(self._is_empty(value.type) for value in template.writes):
                    self._add(template, node)
        self._results = self._memory.results()
        self._copy()
        used = {a.buffer for step in self._steps for a in step.arguments} | {*self._results}
        self._memory.keep(used, [step.arguments for step in self._steps])

    def is_current(self, planner: Planner) -> bool:
        """Whether the planner would still make it for the same GPU, choices and groups."""
        return self.regime.device == planner.device and self.regime.apart == planner.apart

    def at(self, sizes: Mapping[str, int]) -> Plan:
        """The plan at sizes of the regime."""
        local, symbols = LocalSizes(self._mesh, sizes), {**sizes, **self._positions}

        @cache  # launches of one kind share their functions
        def at_sizes(function: Callable[[Sizes], Any]) -> Any:
            return function(symbols)

        return Plan(
            self.launches.function.name,
            dict(sizes),
            self._memory.buffers(local),
            self._kernels,
            tuple(_bound(step, local, symbols, at_sizes) for step in self._steps),
            tuple(self._results),
            self.regime.candidates,
            self.regime.ranges(),
        )

    def _is_empty(self, type: TensorType) -> bool:
        return self.regime.bucket(product(type.shape), (0,)) == 0

    def _copy(self) -> None:
        """Add the copies that have to come next."""
        for source, target, type in self._memory.copies():
            if not self._is_empty(type):
                ends = Argument(source), Argument(target, written=True)
                self._steps.append(_Planned(_copy_of(type), ends))

    def _add(self, template: AnyTemplate, node: Node) -> None:
        operations = tuple(computed(template, self.launches.stored))
        sources = [op.loc.where() for op in operations if op.loc is not None]
        self._steps.append(
            _Planned(
                template,
                self._memory.arguments(template),
                "" if isinstance(template, CallTemplate) else self._kernel(template, operations),
                operations,
                tuple(self.names.get(v, "%_") for op in operations for v in op.results),
                sources[0] if sources else "",
                self._steps[-1].template if self._steps else None,
            )
        )

    def _kernel(self, template: Template, operations: Iterable[Op]) -> str:
        """The name under which the plan has a kernel; another source gets another name.

        Its indices have 64 bits where it meets a value of many elements.
        """
        kernel = template.kernel
        values = (*template.reads, *template.writes, *(v for op in operations for v in op.results))
        counts = {product(value.type.shape) for value in values}
        if any(self.regime.bucket(count, (MANY - 1,)) is None for count in counts):
            kernel = replace(kernel, macros={**kernel.macros, "ix": "long long"})
        name, number = kernel.name, 1
        while name in self._kernels and self._kernels[name].text != kernel.text:
            number += 1
            name = f"{kernel.name}_{number}"
        self._kernels[name] = kernel
        return name


def _copy_of(type: TensorType) -> CallTemplate:
    """The copy of a value of this type."""
    value, kind = Value(type, None, 0), dtype(type.dtype)

    def settings(sizes: Mapping[str, int]) -> dict[str, int]:
        count = bind(product(type.shape), sizes)
        assert not isinstance(count, Dim)
        return {"nbytes": kind.nbytes(count)}

    return CallTemplate("memory", "copy", (value,), (value,), settings)


def _bound(
    step: _Planned,
    local: LocalSizes,
    symbols: Mapping[str, int],
    at_sizes: Callable[[Callable[[Sizes], Any]], Any],
) -> Step:
    """A step at the sizes of all symbols."""
    template = step.template
    work = Work(template.reads, template.writes, step.operations, local)
    if isinstance(template, CallTemplate):
        return LibraryCall(
            *(template.library, template.function, step.arguments, at_sizes(template.settings)),
            *(step.names, step.source, work),
        )
    early: list[int] = []
    if not isinstance(step.behind, CallTemplate):  # which may copy what is overwritten in place
        early = [i for i, value in enumerate(template.reads) if value in template.early]
    return Launch(
        step.kernel,
        at_sizes(template.grid),
        template.block,
        (*step.arguments, *(symbols[name] for name in template.symbols)),
        at_sizes(template.shared),
        template.cluster,
        tuple(early),
        template.waits and isinstance(step.behind, Template),
        *(step.names, step.source, work),
    )

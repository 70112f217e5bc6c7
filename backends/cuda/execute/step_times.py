"""The kernels and algorithms with which the steps of a program are the fastest.

Whole steps are timed: a kernel that is fast alone may keep the ones behind it from starting early.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from irc.analysis.topology_file import default_topology
from irc.artifact.manifest import Progress
from irc.backends.base import Arrays
from irc.backends.commands import Benched
from irc.backends.cuda.driver import Array
from irc.backends.cuda.execute.gpu import gathered
from irc.backends.cuda.execute.load import CudaGpu, CudaProgram
from irc.backends.cuda.facts import sizes_of
from irc.backends.cuda.plan import Launch, LibraryCall, Plan, Step
from irc.backends.cuda.plan.described import microseconds
from irc.backends.cuda.plan.regime import Device
from irc.backends.cuda.tuning import Choices, read_choices
from irc.backends.ranks.ports import sized
from irc.errors import Error

ROUNDS, STEPS = 5, 20  # every candidate runs so many steps in each round
LEAST = 0.02  # of the expected time of its launches, that a candidate has to save


def choose(benched: Benched, program: CudaProgram, tell: Progress) -> tuple[Choices, list[Timed]]:
    """The choices for the GPU of a program at the sizes asked for, or at typical and least ones;
    earlier ones for the same GPU and versions stay."""
    gpu = program.rank.gpu
    assert isinstance(gpu, CudaGpu)
    name, versions = str(gpu.driver.gpu), gpu.versions()
    before = read_choices(benched.artifact.path)
    choices = Choices(gpu.target, name, versions=versions)
    if (before.gpu, before.target, before.versions) == (name, gpu.target, versions):
        choices = before
    times, usual = StepTimes(program, choices), sizes_of(benched.module, benched.module.main)
    several = [usual["typical"] | dict(benched.dims)] if benched.dims else [*usual.values()]
    rows = [row for sizes in several for row in times.tune(sizes, benched.inputs(sizes), tell)]
    return replace(choices, kernels=times.kernels, products=times.products), rows


@dataclass(frozen=True)
class Timed:
    """What was chosen for a key, and the median microseconds of a step by candidate: first the one
    that was chosen before. Those that were no faster took part in fewer rounds."""

    key: str
    choice: str
    us: Mapping[str, float]


class StepTimes:
    """Times steps of a program and keeps what makes them faster; all ranks call the same methods.

    `kernels` and `products` are the choices so far, as in Choices.
    """

    def __init__(self, program: CudaProgram, choices: Choices) -> None:
        self._program, self._rank = program, program.rank
        self._base = Choices(choices.target).device
        self.kernels, self.products = dict(choices.kernels), dict(choices.products)
        self._chosen = set[str]()
        self._use({})

    def tune(
        self, sizes: Mapping[str, int], arrays: Mapping[str, Array], tell: Progress
    ) -> Iterator[Timed]:
        """Choose for every key of the plans at these sizes, one key after the other."""
        inputs = self._full(arrays, sizes)
        with closing(self._program.open(sizes)) as stream:

            def step_us() -> float:
                """Of the slowest rank; infinite where a kernel or algorithm cannot run."""
                try:
                    own = 1e3 * median(stream.times(inputs, STEPS))
                except Error:
                    own = float("inf")
                return max(self._of_all(own))

            if step_us() == float("inf"):
                stream.step(inputs)  # raises the error
            candidates = self._candidates()
            for number, (key, names) in enumerate(candidates.items()):
                if key not in self._chosen:
                    tell(f"timing {key}", number / len(candidates))
                    self._chosen.add(key)
                    yield self._choose(key, names, step_us)

    def _full(self, arrays: Mapping[str, Array], sizes: Mapping[str, int]) -> Arrays:
        """The inputs of a step that fills the caches, which takes the longest."""
        inputs = dict(arrays)
        for write in self._rank.stage.writes:
            if write.past in inputs:
                step, capacity = sized([write.step, write.capacity], sizes)
                inputs[write.past] = inputs[write.past] * 0 + max(0, capacity - step)
        return inputs

    def _candidates(self) -> dict[str, list[str]]:
        """The names that could be chosen by key, the current ones first, of all ranks."""
        calls = dict(self._rank.products().offered(call) for call in _products_of(self._plan))
        names: dict[str, list[str]] = {}
        for kernels, products in self._of_all([self._plan.candidates, calls]):
            names |= kernels | {key: offered for key, offered in products.items() if offered[1:]}
            for key in products.keys() & names.keys():
                self.products.setdefault(key, names[key][0])
        current = {**self._rank.planner.device.choices, **self.products}
        return {
            key: sorted(several, key=lambda name: name != current.get(key))
            for key, several in names.items()
        }

    def _choose(self, key: str, names: Sequence[str], step_us: Callable[[], float]) -> Timed:
        """Time the candidates in turn, so that clocks that drift slow down all of them.

        A candidate is kept only if its slowest round is faster than the fastest of the first one:
        of five rounds each that happens by chance once in 252 times. It leaves as soon as it is
        not.
        """
        first, us = names[0], {name: list[float]() for name in names}
        plans, left = dict[str, Plan](), list(names)
        for _ in range(ROUNDS):
            for name in left:
                self._use({key: name})
                us[name].append(step_us())
                plans[name] = self._plan
            left = [name for name in left if name == first or max(us[name]) < min(us[first])]
            if left == [first]:
                break
        medians = {name: median(each) for name, each in us.items()}
        best = min(left, key=medians.__getitem__)
        if medians[first] - medians[best] < LEAST * self._expected(key, plans[first], plans[best]):
            best = first
        self._use({key: best})
        return Timed(key, best, medians)

    def _use(self, chosen: Mapping[str, str]) -> None:
        """Let the next steps run with these choices too."""
        for key, name in chosen.items():
            (self.products if key in self.products else self.kernels)[key] = name
        if self.products:
            self._rank.products().choose(self.products)
        choices = {**self._base.choices, **self.kernels}
        self._rank.replan(Device(self._base.target, choices))

    @property
    def _plan(self) -> Plan:
        """The plan of the latest step."""
        return self._rank.plans[-1]

    def _expected(self, key: str, plan: Plan, other: Plan) -> float:
        """The expected microseconds of what a choice is for: the calls of a product, or the steps
        that another plan does not have."""
        others = [*map(_kernel_of, other.steps)]
        steps = [step for step in plan.steps if _kernel_of(step) not in others]
        if key in self.products:
            offered = self._rank.products().offered
            steps = [call for call in _products_of(plan) if offered(call)[0] == key]
        topology, mesh = default_topology(), self._rank.planner.module.mesh
        return sum(microseconds(plan, step, topology, mesh) for step in steps)

    def _of_all(self, value: Any) -> list[Any]:
        """A value of JSON of every rank."""
        host = self._rank.host
        if host is None:
            return [value]
        return [*map(json.loads, gathered(host, json.dumps(value)))]


def _products_of(plan: Plan) -> list[LibraryCall]:
    return [s for s in plan.steps if isinstance(s, LibraryCall) and s.library == "cublaslt"]


def _kernel_of(step: Step) -> object:
    """What two plans have in common where a choice changes nothing."""
    if isinstance(step, Launch):
        return step.kernel, step.grid, step.block, step.shared, step.operations
    return step.library, step.operations

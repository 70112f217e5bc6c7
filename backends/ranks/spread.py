"""How the global arrays of a program are sharded over its ranks, as the manifest says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from irc.backends.base import Arrays, Port, Ports
from irc.backends.ranks.facts import mesh_of_facts, peer, ports_of_facts
from irc.backends.ranks.inputs import Inputs, Sizes, sized
from irc.ir.layouts import join_arrays, split_array
from irc.ir.types import Axes


@dataclass(frozen=True)
class Result:
    """One global result: the axes that shard it, and the stage that computes it."""

    port: Port
    axes: tuple[Axes, ...]
    stage: int

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold shards of it."""
        return any(self.axes)


class Taker(Protocol):
    """A rank, and the inputs of the program that it takes."""

    @property
    def rank(self) -> int:
        """Its number."""
        ...

    @property
    def taken(self) -> Sequence[str]:
        """Names of inputs."""
        ...


class Spread:
    """The ports of the program, and the shard of every array that a rank has.

    `facts` is what the backend's `emit` returned.
    """

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.mesh = mesh_of_facts(facts)
        self.ports: Ports = ports_of_facts(facts["ports"])
        self.plain = Inputs("forward", self.ports.inputs)
        self.every = Inputs("forward", [*self.ports.inputs, *self.ports.states])
        self.stages: list[int] = [entry["stage"] for entry in facts["ranks"]]
        self._args = _axes(facts["ports"]["inputs"]) | _axes(facts["ports"]["states"])
        found = self._results(facts)
        self.results = {name: found[name] for name in facts["results"]}

    def _results(self, facts: Mapping[str, Any]) -> dict[str, Result]:
        states = {port.name: port for port in self.ports.states}
        outputs = {port.name: port for port in self.ports.outputs}
        axes = _axes(facts["ports"]["outputs"])
        found: dict[str, Result] = {}
        for number, stage in enumerate(facts["stages"]):
            for each in stage["results"]:
                name, state = each["result"], each.get("state")
                if state is not None:
                    found[name] = Result(states[state], self._args[state], number)
                elif name in outputs:  # and no value for another stage
                    found[name] = Result(outputs[name], axes[name], number)
        return found

    def part(self, model: Taker, arrays: Mapping[str, np.ndarray]) -> Arrays:
        """The shards that one rank takes of global inputs."""
        return {
            name: split_array(arrays[name], self._args[name], self.mesh, model.rank)
            for name in model.taken
            if name in arrays
        }

    def makers(self, result: Result) -> list[int]:
        """The ranks that have a result, or a shard of it."""
        return [rank for rank, stage in enumerate(self.stages) if stage == result.stage]

    def sources(self, result: Result) -> dict[int, int]:
        """Per rank that has a shard of a result, the first rank with the same shard."""
        first: dict[tuple[int, ...], int] = {}
        return {
            maker: first.setdefault(self._place(result, maker), maker)
            for maker in self.makers(result)
        }

    def _place(self, result: Result, rank: int) -> tuple[int, ...]:
        """The position of a rank's shard of a result, along each dimension."""
        return tuple(self.mesh.index(rank, axes) for axes in result.axes)

    def joined(self, result: Result, parts: Mapping[int, np.ndarray], sizes: Sizes) -> np.ndarray:
        """The global result from the shards of its makers."""
        if not result.is_sharded:
            return parts[min(parts)]
        count = len(set(self.stages))
        every: Sequence[np.ndarray] = [
            parts[rank if count == 1 else peer(self.mesh, rank, result.stage)]
            for rank in range(self.mesh.ranks)
        ]
        return join_arrays(every, result.axes, self.mesh, sized(result.port.shape, sizes))

    def whole(self, found: Sequence[Arrays], sizes: Sizes) -> Arrays:
        """The global results from those of all ranks."""
        return {
            name: self.joined(result, {r: found[r][name] for r in self.makers(result)}, sizes)
            for name, result in self.results.items()
            if name in found[self.makers(result)[0]]
        }


def _axes(facts: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Axes, ...]]:
    """Per port the mesh axes that shard each dimension."""
    return {
        fact["name"]: tuple(tuple(axes) for axes in fact.get("axes", [()] * len(fact["shape"])))
        for fact in facts
    }

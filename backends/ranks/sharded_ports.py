"""How the global arrays of a program are sharded over its ranks, as the manifest says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from irc.backends.base import Arrays, Port, Ports
from irc.backends.ranks.facts import mesh_of_facts, peer, ports_of_facts
from irc.backends.ranks.inputs import Inputs, Sizes, sized
from irc.errors import Error
from irc.ir.layouts import join_arrays, split_array
from irc.ir.types import Axes
from irc.weights.checkpoint import convert


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


class ShardedPorts:
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

    def shards(self, rank: int, names: Sequence[str], arrays: Mapping[str, np.ndarray]) -> Arrays:
        """A rank's shards of the global inputs of these names, as far as `arrays` has them."""
        return {
            name: split_array(arrays[name], self._args[name], self.mesh, rank)
            for name in names
            if name in arrays
        }

    def shard_shape(self, result: Result, sizes: Sizes) -> tuple[int, ...]:
        """The shape of a rank's shard of a result, padding included."""
        pairs = zip(sized(result.port.shape, sizes), result.axes, strict=True)
        return tuple(-(-size // self.mesh.group_size(axes)) for size, axes in pairs)

    def ranks_with(self, result: Result) -> list[int]:
        """The ranks that have a result, or a shard of it."""
        return [rank for rank, stage in enumerate(self.stages) if stage == result.stage]

    def sources(self, result: Result) -> dict[int, int]:
        """Per rank that has a shard of a result, the first rank with the same shard."""
        first: dict[tuple[int, ...], int] = {}  # by the position along each dimension
        return {
            rank: first.setdefault(tuple(self.mesh.index(rank, a) for a in result.axes), rank)
            for rank in self.ranks_with(result)
        }

    def join(self, result: Result, shards: Mapping[int, np.ndarray], sizes: Sizes) -> np.ndarray:
        """The global result in its dtype from the shards of all ranks that have one."""
        return convert(self._joined(result, shards, sizes), result.port.dtype)

    def _joined(self, result: Result, shards: Mapping[int, np.ndarray], sizes: Sizes) -> np.ndarray:
        if not result.is_sharded:
            return shards[min(shards)]
        count = len(set(self.stages))
        every: Sequence[np.ndarray] = [
            shards[rank if count == 1 else peer(self.mesh, rank, result.stage)]
            for rank in range(self.mesh.ranks)
        ]
        wanted = self.shard_shape(result, sizes)
        for shard in every:
            if shard.shape != wanted:
                raise Error(
                    f"a rank returned {list(shard.shape)} of {result.port.name}, not the shape "
                    f"{list(wanted)} that the manifest says; compile again"
                )
        return join_arrays(every, result.axes, self.mesh, sized(result.port.shape, sizes))

    def global_results(self, found: Sequence[Arrays], sizes: Sizes) -> Arrays:
        """The global results from those of all ranks."""
        return {
            name: self.join(result, {r: found[r][name] for r in self.ranks_with(result)}, sizes)
            for name, result in self.results.items()
            if name in found[self.ranks_with(result)[0]]
        }


def _axes(facts: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Axes, ...]]:
    """Per port the mesh axes that shard each dimension."""
    return {
        fact["name"]: tuple(tuple(axes) for axes in fact.get("axes", [()] * len(fact["shape"])))
        for fact in facts
    }

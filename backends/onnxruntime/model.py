"""The model of one rank: its sessions, inputs, outputs, and transfers to other stages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from irc.backends.base import Arrays, Ports
from irc.backends.onnxruntime.execution import States, run_parts
from irc.backends.onnxruntime.session import open_parts
from irc.backends.ranks.communicator import Communicator
from irc.backends.ranks.ports import (
    Sizes,
    contradictions_named,
    mesh_of_facts,
    peer,
    ports_of_facts,
    sized,
    writes_of_facts,
)
from irc.backends.recorder import Recorder
from irc.errors import Error


class RankModel:
    """The model of one rank with its sessions; all shapes and arrays are this rank's shards.

    `folder` holds it; `facts` is what the ONNX backend's `emit` returned. `threads`, `low_memory`
    and `recorder` are as OnnxRuntimeProgram has them. `outputs` has the model's name of every
    result, `states` the result of every state. `taken` are the inputs from the caller; other stages
    send the rest: `receives` and `sends` name values by the other rank.
    """

    def __init__(
        self,
        folder: Path,
        facts: Mapping[str, Any],
        rank: int = 0,
        *,
        threads: int | None = None,
        low_memory: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        with contradictions_named(Path(folder)):
            self._read(facts, rank)
        self.parts = open_parts(Path(folder), facts, rank, threads, low_memory, recorder)
        every = (*self.ports.inputs, *self.ports.states)
        named = {port.name for port in every}.union(self.outputs.values())
        if wrong := sorted(named ^ self.parts.names):
            raise Error(f"the manifest of {folder} and the model differ in {wrong}; compile again")

    def _read(self, facts: Mapping[str, Any], rank: int) -> None:
        mesh = mesh_of_facts(facts)
        self.rank = rank
        stage = facts["stages"][facts["ranks"][rank]["stage"]]
        self.ports: Ports = ports_of_facts(stage["ports"])
        self.grows: str | None = stage["grows"]
        self.writes = writes_of_facts(stage)
        self.outputs: dict[str, str] = {r["result"]: r["output"] for r in stage["results"]}
        self.states: dict[str, str] = {
            r["state"]: r["result"] for r in stage["results"] if "state" in r
        }
        kept = set(self.states.values())
        self.plain_outputs = {r: output for r, output in self.outputs.items() if r not in kept}
        self.receives = {peer(mesh, rank, e["stage"]): e["names"] for e in stage["receives"]}
        self.sends = {peer(mesh, rank, e["stage"]): e["names"] for e in stage["sends"]}
        sent = {name for names in self.sends.values() for name in names}
        self.passed_on = sent - set(facts["results"])  # to other stages, and to no caller
        self.fixed = {port.name for port in self.ports.states if port.fixed}
        received = {name for names in self.receives.values() for name in names}
        every = (*self.ports.inputs, *self.ports.states)
        self.taken = [port.name for port in every if port.name not in received]

    def check(
        self, inputs: Mapping[str, np.ndarray], sizes: Sizes, capacities: Sizes | None = None
    ) -> int:
        """The number of positions that the caches need for a run; an Error where they have fewer.

        `capacities` has the symbols in the shapes of the caches, by default those in `sizes`.
        """
        most = 0
        for write in self.writes:
            needed, (room,) = (
                write.needed(inputs, sizes),
                sized([write.capacity], {**sizes, **(capacities or {})}),
            )
            if needed > room:
                raise Error(
                    f"this run fills the caches up to position {needed}, but they have room for "
                    f"{room}; open the stream with a larger {self.grows or 'capacity'}"
                )
            most = max(most, needed)
        return most

    def run(
        self, arrays: Mapping[str, np.ndarray], sizes: Sizes, communicator: Communicator
    ) -> Arrays:
        """Every input in, states too, every result out; nothing is kept.

        `sizes` has the symbols of the whole program's inputs.
        """
        self.check(arrays, sizes)
        # GroupQueryAttention keeps what is behind the tokens of a cache only where it writes there
        caches = self.states.keys() - self.fixed
        memory = {name: np.array(arrays[name], order="C") for name in caches}
        results = self.execute(arrays, self.states_in(memory), communicator)
        return results | {self.states[name]: array for name, array in memory.items()}

    def states_in(self, memory: Arrays) -> States:
        """States in memory, by their names; fixed ones are not written in place, since the old
        state may be read when the new one is there."""
        written = {name: self.outputs[self.states[name]] for name in memory.keys() - self.fixed}
        return States(memory, written)

    def execute(
        self, arrays: Mapping[str, np.ndarray], states: States, communicator: Communicator | None
    ) -> Arrays:
        """The results for checked inputs, without those that only other pipeline stages get.

        Receives values from other stages, and sends them theirs. Results that belong to `states`
        are written there; fixed states are replaced.
        """
        for source in self.receives:
            assert communicator is not None
            arrays = {**arrays, **communicator.receive(source)}
        inputs = {name: np.asarray(array, order="C") for name, array in arrays.items()}
        values = run_parts(self.parts, inputs, states, communicator)
        for name in self.fixed if states.read else ():
            states.read[name] = values[self.outputs[self.states[name]]]
        outputs = self.plain_outputs if states.read else self.outputs
        results = {result: values[output] for result, output in outputs.items()}
        for to, names in self.sends.items():
            assert communicator is not None
            communicator.send(to, {name: results[name] for name in names})
        return {name: array for name, array in results.items() if name not in self.passed_on}

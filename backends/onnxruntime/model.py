"""The model of one rank: its sessions, inputs, outputs, and transfers to other stages."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from irc.backends.base import Arrays, Ports
from irc.backends.onnxruntime.session import Part, open_parts, run_part
from irc.backends.onnxruntime.stream import RankStream
from irc.backends.ranks.communicator import Communicator
from irc.backends.ranks.facts import mesh_of_facts, peer, ports_of_facts, writes_of_facts
from irc.backends.ranks.inputs import Sizes, sized
from irc.errors import Error


class RankModel:
    """The model of one rank with its sessions; all shapes and arrays are this rank's shards.

    `folder` holds it; `facts` is what the ONNX backend's `emit` returned. `threads` and
    `low_memory` are as OnnxRuntimeProgram has them. `outputs` has the model's name of every result,
    `states` the result of every state. `taken` are the inputs from the caller; other stages
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
    ) -> None:
        mesh = mesh_of_facts(facts)
        self.rank, self._is_single = rank, len(facts["ranks"]) == 1
        stage = facts["stages"][facts["ranks"][rank]["stage"]]
        self.ports: Ports = ports_of_facts(stage["ports"])
        self.grows: str | None = stage["grows"]
        self.writes = writes_of_facts(stage)
        self.outputs: dict[str, str] = {r["result"]: r["output"] for r in stage["results"]}
        self.states: dict[str, str] = {
            r["state"]: r["result"] for r in stage["results"] if "state" in r
        }
        self.receives = {peer(mesh, rank, e["stage"]): e["names"] for e in stage["receives"]}
        self.sends = {peer(mesh, rank, e["stage"]): e["names"] for e in stage["sends"]}
        received = {name for names in self.receives.values() for name in names}
        every = (*self.ports.inputs, *self.ports.states)
        self.taken = [port.name for port in every if port.name not in received]
        self.parts = open_parts(Path(folder), facts, rank, threads, low_memory)

    def check_room(self, needed: int, capacity: int) -> None:
        """An Error where a run would write beyond the end of a cache."""
        if needed > capacity:
            raise Error(
                f"this run fills the caches up to position {needed}, but they have room for "
                f"{capacity}; open the stream with a larger {self.grows or 'capacity'}"
            )

    def run(
        self, arrays: Mapping[str, np.ndarray], sizes: Sizes, communicator: Communicator
    ) -> Arrays:
        """Every input in, states too, every result out; nothing is kept.

        `sizes` has the symbols of the whole program's inputs.
        """
        first = self.parts.steps[0]
        if self._is_single and isinstance(first, Part):
            return self._run_at_once(first, arrays, sizes)
        states = {port.name: arrays[port.name] for port in self.ports.states}
        plain = {name: array for name, array in arrays.items() if name not in states}
        stream = RankStream(self, sizes, communicator, states)
        stream.check(plain, sizes)
        found = stream.advance(plain, sizes)
        return found | {self.states[name]: stream.held(name) for name in states}

    def _run_at_once(self, part: Part, arrays: Mapping[str, np.ndarray], sizes: Sizes) -> Arrays:
        """A run of the only rank, without the time that bindings take."""
        for write in self.writes:
            self.check_room(write.needed(arrays, sizes), sized([write.capacity], sizes)[0])
        found = run_part(part, [*self.outputs.values()], arrays)
        return dict(zip(self.outputs, found, strict=True))

"""What one rank loads and runs, read from the manifest; an Error where the manifest is damaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from irc.backends.base import Port, Ports
from irc.backends.ranks.ports import (
    Write,
    contradictions_named,
    mesh_of_facts,
    peer,
    ports_of_facts,
    writes_of_facts,
)
from irc.backends.tensorrt.builder.request import Profile
from irc.backends.tensorrt.facts import BindingFact
from irc.backends.tensorrt.target import Target
from irc.errors import Error
from irc.ir.mesh import Mesh
from irc.schema import checked, read_json


@dataclass(frozen=True)
class Binding:
    """The place in a file of the bytes of a weight that is an input of an engine."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    size: int


@dataclass(frozen=True)
class StagePlan:
    """What all ranks of a stage share; see facts.py of the backend.

    `outputs`: the engine's name of every result. `states`: the result of every state. `copied`:
    the states that the engine does not overwrite in place.
    """

    ports: Ports
    profiles: tuple[Profile, ...]
    writes: tuple[Write, ...]
    outputs: Mapping[str, str]
    states: Mapping[str, str]
    scalars: Mapping[str, tuple[str, ...]]
    groups: Mapping[str, tuple[str, ...]]
    copied: frozenset[str]

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> StagePlan:
        """The stage of an entry in the manifest."""
        results = facts["results"]
        return cls(
            ports_of_facts(facts["ports"]),
            tuple(checked(each, Profile, "the manifest") for each in facts["profiles"]),
            writes_of_facts(facts),
            {r["result"]: r["output"] for r in results},
            {r["state"]: r["result"] for r in results if r.get("state") is not None},
            {name: tuple(axes) for name, axes in facts["scalars"].items()},
            {key: tuple(axes) for key, axes in facts["groups"].items()},
            frozenset(facts["copied"]),
        )

    @property
    def inputs(self) -> dict[str, Port]:
        """Plain inputs and states by name."""
        return {port.name: port for port in (*self.ports.inputs, *self.ports.states)}


@dataclass(frozen=True)
class RankPlan:
    """What one rank runs.

    `number`: of its stage. `receives` and `sends` name the values of other stages by the rank they
    come from and go to; `taken` are the inputs that the caller provides.
    """

    rank: int
    mesh: Mesh
    target: Target
    number: int
    stages: tuple[StagePlan, ...]
    engine: Path
    bindings: Path | None
    base: Path
    receives: Mapping[int, tuple[str, ...]]
    sends: Mapping[int, tuple[str, ...]]
    taken: tuple[str, ...]

    @classmethod
    def of_facts(cls, folder: Path, facts: Mapping[str, Any], rank: int) -> RankPlan:
        """The plan of a rank; `facts` is what the backend's `emit` returned."""
        with contradictions_named(folder):
            return _plan(folder, facts, rank)

    @property
    def stage(self) -> StagePlan:
        """The stage that this rank runs."""
        return self.stages[self.number]

    def others(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks of this rank's group along mesh axes, itself included."""
        return tuple(next(group for group in self.mesh.groups(axes) if self.rank in group))


def _plan(folder: Path, facts: Mapping[str, Any], rank: int) -> RankPlan:
    mesh, target = mesh_of_facts(facts), Target.parse(facts["target"])
    entry = facts["ranks"][rank]
    stage = facts["stages"][entry["stage"]]
    if facts["engine"].get("strip"):
        raise Error(
            f"the engines of {folder} were built without their weights (--strip), to be refitted "
            "by another program; compile without --strip to run them here"
        )
    if facts.get("probe"):  # an artifact of irc 0.1
        raise Error(
            f"the engines of {folder} use TensorRT's own collectives, which irc does not connect "
            "any more; compile again"
        )
    if not entry["engine"]:
        raise Error(
            f"{folder} has no engines, since it was compiled with --no-build; build them where "
            f"{target.flavour} is installed: irc compile {folder} -o NEW --backend {target.flavour}"
        )
    receives = {peer(mesh, rank, e["stage"]): tuple(e["names"]) for e in stage["receives"]}
    received = {name for names in receives.values() for name in names}
    stages = tuple(StagePlan.of_facts(each) for each in facts["stages"])
    return RankPlan(
        rank,
        mesh,
        target,
        entry["stage"],
        stages,
        folder / entry["engine"],
        folder / entry["bindings"] if entry.get("bindings") else None,
        Path(facts["base"]) if facts.get("base") else folder,
        receives,
        {peer(mesh, rank, e["stage"]): tuple(e["names"]) for e in stage["sends"]},
        tuple(name for name in stages[entry["stage"]].inputs if name not in received),
    )


def read_bindings(path: Path, folder: Path, base: Path) -> list[Binding]:
    """The weights that a rank binds; an Error where the file is damaged."""
    return [
        Binding(
            name,
            fact["dtype"],
            tuple(fact["shape"]),
            (base if fact["under"] == "base" else folder) / fact["file"],
            fact["offset"],
            fact["bytes"],
        )
        for name, fact in read_json(path, dict[str, BindingFact]).items()
    ]

"""What one rank loads and runs, from the manifest; bad facts are Errors that say what to do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from irc.backends.base import Port, Ports
from irc.backends.onnx.stages import stage_axes
from irc.backends.ranks.facts import (
    Write,
    mesh_of_facts,
    peer,
    ports_of_facts,
    writes_of_facts,
)
from irc.backends.tensorrt.runtime.profiles import Profile
from irc.backends.tensorrt.target import Target
from irc.errors import Error
from irc.mesh import Mesh


@dataclass(frozen=True)
class Binding:
    """Where the bytes of a weight lie that an engine takes as an input."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    offset: int
    size: int


@dataclass(frozen=True)
class StagePlan:
    """What the ranks of a stage have in common; see facts.py of the backend."""

    ports: Ports
    profiles: tuple[Profile, ...]
    writes: tuple[Write, ...]
    outputs: Mapping[str, str]
    """The engine's name of every result."""
    states: Mapping[str, str]
    """The result of every state."""
    scalars: Mapping[str, tuple[str, ...]]
    groups: Mapping[str, tuple[str, ...]]
    native: bool
    """Whether the engine has collectives of its own, besides those of plugins."""
    copied: frozenset[str]
    """The states that the engine does not overwrite itself."""

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> StagePlan:
        """The stage of an entry in the manifest."""
        results = facts["results"]
        return cls(
            ports_of_facts(facts["ports"]),
            tuple(Profile.of_facts(each) for each in facts["profiles"]),
            writes_of_facts(facts),
            {r["result"]: r["output"] for r in results},
            {r["state"]: r["result"] for r in results if r.get("state") is not None},
            {name: tuple(axes) for name, axes in facts["scalars"].items()},
            {key: tuple(axes) for key, axes in facts["groups"].items()},
            bool(facts["natives"]),
            frozenset(facts["copied"]),
        )

    @property
    def inputs(self) -> dict[str, Port]:
        """Plain inputs and states by name."""
        return {port.name: port for port in (*self.ports.inputs, *self.ports.states)}


@dataclass(frozen=True)
class RankPlan:
    """What one rank runs. `taken` are the inputs that the caller gives; `receives` and `sends`
    name the values of other stages by the rank they come from and go to."""

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
    probe: Path | None
    """The engine that tries collectives of TensorRT's own, where there are any."""

    @classmethod
    def of_facts(cls, folder: Path, facts: Mapping[str, Any], rank: int) -> RankPlan:
        """The plan of a rank; `facts` is what the backend's `emit` returned."""
        try:
            return _plan(folder, facts, rank)
        except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
            raise Error(
                f"the manifest of {folder} does not say how rank {rank} runs ({error!r}); "
                "compile again"
            ) from error

    @property
    def stage(self) -> StagePlan:
        """The stage that this rank runs."""
        return self.stages[self.number]

    def others(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """The ranks of a group along mesh axes that this one belongs to, this one too."""
        return tuple(next(group for group in self.mesh.groups(axes) if self.rank in group))

    def stage_ranks(self) -> tuple[int, ...]:
        """The ranks that run the same stage."""
        axes = stage_axes(self.mesh)
        return self.others(axes) if axes else (self.rank,)


def _plan(folder: Path, facts: Mapping[str, Any], rank: int) -> RankPlan:
    mesh = mesh_of_facts(facts)
    entry = facts["ranks"][rank]
    stage = facts["stages"][entry["stage"]]
    if facts["engine"].get("strip"):
        raise Error(
            f"the engines of {folder} were built without their weights (--strip), to be refitted "
            "by a program of yours; compile without --strip to run them here"
        )
    if not entry["engine"]:
        flavour = Target.parse(facts["target"]).flavour
        raise Error(
            f"{folder} has no engines: {flavour} was not there when it was compiled. Build them "
            f"where it is: irc compile {folder} -o NEW --backend {flavour}"
        )
    receives = {peer(mesh, rank, e["stage"]): tuple(e["names"]) for e in stage["receives"]}
    received = {name for names in receives.values() for name in names}
    stages = tuple(StagePlan.of_facts(each) for each in facts["stages"])
    return RankPlan(
        rank,
        mesh,
        Target.parse(facts["target"]),
        entry["stage"],
        stages,
        folder / entry["engine"],
        folder / entry["bindings"] if entry.get("bindings") else None,
        Path(facts["base"]) if facts.get("base") else folder,
        receives,
        {peer(mesh, rank, e["stage"]): tuple(e["names"]) for e in stage["sends"]},
        tuple(name for name in stages[entry["stage"]].inputs if name not in received),
        folder / facts["probe"]["engine"] if facts["probe"] else None,
    )


def read_bindings(path: Path, folder: Path, base: Path) -> list[Binding]:
    """The weights that a rank binds; an Error where the file is damaged."""
    try:
        found: Any = json.loads(path.read_bytes())
        return [
            Binding(
                name,
                fact["dtype"],
                tuple(map(int, fact["shape"])),
                (base if fact["under"] == "base" else folder) / fact["file"],
                int(fact["offset"]),
                int(fact["bytes"]),
            )
            for name, fact in found.items()
        ]
    except OSError as error:
        raise Error(f"cannot read {path}: {error.strerror or error}; compile again") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Error(f"{path} is damaged ({error!r}); compile again") from None

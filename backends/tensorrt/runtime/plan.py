"""What one rank loads and runs, read from the manifest; an Error where the manifest is damaged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from irc.backends.cuda.execute.gpu_rank import RankFacts, Stage, symbols_of
from irc.backends.cuda.execute.upload import Range
from irc.backends.ranks.ports import (
    Sizes,
    contradictions_named,
    mesh_of_facts,
    peer,
    ports_of_facts,
    sized,
    writes_of_facts,
)
from irc.backends.tensorrt.builder.request import Profile
from irc.backends.tensorrt.facts import BindingFact
from irc.backends.tensorrt.target import Target
from irc.errors import Error
from irc.ir.dims import Dim, DimLike
from irc.schema import checked, read_json


@dataclass(frozen=True)
class Binding:
    """A weight that is an input of an engine, and where its bytes are."""

    dtype: str
    shape: tuple[int, ...]
    range: Range


@dataclass(frozen=True)
class StagePlan(Stage):
    """What all ranks of a stage share; see facts.py of the backend.

    `outputs`: the engine's name of every result. `copied`: the states that the engine does not
    overwrite in place.
    """

    profiles: tuple[Profile, ...]
    outputs: Mapping[str, str]
    scalars: Mapping[str, tuple[str, ...]]
    groups: Mapping[str, tuple[str, ...]]
    copied: frozenset[str]

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> StagePlan:
        """The stage of an entry in the manifest."""
        results = facts["results"]
        return cls(
            ports_of_facts(facts["ports"]),
            writes_of_facts(facts),
            {r["state"]: r["result"] for r in results if r.get("state") is not None},
            tuple(checked(profile, Profile, "the manifest") for profile in facts["profiles"]),
            {r["result"]: r["output"] for r in results},
            {name: tuple(axes) for name, axes in facts["scalars"].items()},
            {key: tuple(axes) for key, axes in facts["groups"].items()},
            frozenset(facts["copied"]),
        )

    def profile(self, sizes: Sizes) -> int:
        """The number of the first profile that accepts inputs of these sizes."""
        accepting = (
            n for n, profile in enumerate(self.profiles) if not self._refusal(profile, sizes)
        )
        return next(accepting, 0)

    def padded(self, sizes: Sizes) -> Sizes:
        """The sizes, or larger ones that a profile accepts; an Error says why none does.

        Only tokens of a model with caches are padded: no token attends to the padding behind it,
        and the next step overwrites it.
        """
        reasons = [self._refusal(profile, sizes) for profile in self.profiles]
        if not all(reasons) or not self.profiles:
            return sizes
        for profile in self.profiles:
            grown = sizes | self._too_small(profile, sizes)
            if not self._refusal(profile, grown):
                return grown
        raise Error(
            f"no profile of the engine accepts these inputs ({'; '.join(reasons)}); use inputs of "
            "other sizes, or compile with wider --dims"
        )

    def _refusal(self, profile: Profile, sizes: Sizes) -> str:
        """The first dimension of inputs that does not fit a profile; "" where all do."""
        for name, dim, size, low, high in self._dims(profile, sizes):
            if not low <= size <= high:
                shown = f"{dim}={size}" if isinstance(dim, Dim) else str(size)
                return f"{profile.name}: {name} has {shown} and must have {low} to {high}"
        return ""

    def _too_small(self, profile: Profile, sizes: Sizes) -> Sizes:
        """The symbols of tokens below the minimum of a profile, with that minimum."""
        kept = {name for port in self.ports.states for name in symbols_of(port)}
        plain = {name for port in self.ports.inputs for name in symbols_of(port)}
        may_grow = plain - kept if self.writes else set[str]()
        return {
            str(dim): low
            for _, dim, size, low, _ in self._dims(profile, sizes)
            if size < low and str(dim) in may_grow
        }

    def _dims(self, profile: Profile, sizes: Sizes) -> Iterator[tuple[str, DimLike, int, int, int]]:
        """(input, dimension, its size, minimum, maximum) of all dimensions."""
        for name, (lows, _, highs) in profile.shapes.items():
            for dim, low, high in zip(self.inputs[name].shape, lows, highs, strict=True):
                yield name, dim, sized((dim,), sizes)[0], low, high


@dataclass(frozen=True)
class RankPlan(RankFacts[StagePlan]):
    """What one rank runs. `stages` has those of all ranks."""

    target: Target
    stages: tuple[StagePlan, ...]
    engine: Path
    bindings: Mapping[str, Binding]

    @classmethod
    def of_facts(cls, folder: Path, facts: Mapping[str, Any], rank: int) -> RankPlan:
        """The plan of a rank; `facts` is what the backend's `emit` returned."""
        with contradictions_named(folder):
            return _plan(folder, facts, rank)


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
    receives, sends = (
        {peer(mesh, rank, e["stage"]): tuple(e["names"]) for e in stage[way]}
        for way in ("receives", "sends")
    )
    stages = tuple(StagePlan.of_facts(stage) for stage in facts["stages"])
    base = Path(facts["base"]) if facts.get("base") else folder
    return RankPlan(
        rank,
        mesh,
        stages[entry["stage"]],
        receives,
        sends,
        target,
        stages,
        folder / entry["engine"],
        _bindings(folder / entry["bindings"], base) if entry.get("bindings") else {},
    )


def _bindings(path: Path, base: Path) -> dict[str, Binding]:
    """The weights that a rank binds, by name; an Error where the file is damaged."""
    found: dict[str, Binding] = {}
    for name, fact in read_json(path, dict[str, BindingFact]).items():
        file = (base if fact["under"] == "base" else path.parent) / fact["file"]
        place = Range(file, fact["offset"], fact["bytes"])
        found[name] = Binding(fact["dtype"], tuple(fact["shape"]), place)
    return found

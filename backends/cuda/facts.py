"""The facts of the manifest about a program of plans: ports, and the ranks that run them.

Dtypes of ports are the module's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

from irc.backends.base import local_ports_of, ports_of
from irc.backends.onnx.facts import PortFacts, TransferFact, port_facts, sharding_of, transfers
from irc.backends.onnx.growth import writes_of
from irc.backends.onnx.stages import Stage, stages_of
from irc.ir.core import Function, Module
from irc.ir.dims import Dim

TEXT = "module.irc"  # the localized module, in the artifact's folder


class ResultFact(TypedDict, total=False):
    """The name of a result, and of the state that it overwrites."""

    result: str
    state: str


class StageFact(TypedDict):
    """A pipeline stage, with the ports of one rank; `function` is its name in the module.

    `writes` as of growth.py.
    """

    function: str
    ports: PortFacts
    results: list[ResultFact]
    writes: list[dict[str, str]]
    receives: list[TransferFact]
    sends: list[TransferFact]


class RankFact(TypedDict):
    """The stage that a rank runs."""

    stage: int


class CudaFacts(TypedDict):
    """What the backend's `emit` returns.

    `axes`: the mesh, slowest axis first; `ports` over all ranks; `results`: the names of all
    results in order, states among them; `base`: the folder that checkpoint files are relative to,
    None for the artifact's.
    """

    axes: list[tuple[str, int]]
    ports: PortFacts
    results: list[str]
    ranks: list[RankFact]
    stages: list[StageFact]
    base: str | None


def facts_of(module: Module, folder: Path, base: Path | None = None) -> dict[str, Any]:
    """The facts about a module emitted into `folder`; its checkpoint files are below `base`."""
    main, stages = module.main, stages_of(module)
    numbers = {rank: i for i, stage in enumerate(stages) for rank in stage.ranks}
    start = (base or Path()).resolve()
    return {
        "axes": [list(axis) for axis in module.mesh.axes],
        "ports": port_facts(ports_of(main), sharding_of(main), str),
        "results": list(main.result_names()),
        "ranks": [{"stage": numbers[rank]} for rank in range(module.mesh.ranks)],
        "stages": [_stage(stage) for stage in stages],
        "base": None if start == folder.resolve() else str(start),
    }


def _stage(stage: Stage) -> dict[str, Any]:
    function = stage.function
    states = {i: str(function.args[at].name) for i, at in function.aliases().items()}
    names = function.result_names()
    return {
        "function": function.name,
        "ports": port_facts(local_ports_of(function), {}, str),
        "results": [
            {"result": name} | ({"state": states[i]} if i in states else {})
            for i, name in enumerate(names)
        ],
        "writes": writes_of(function),
        "receives": transfers(stage.receives),
        "sends": transfers(stage.sends),
    }


def sizes_of(module: Module, function: Function) -> dict[str, dict[str, int]]:
    """Sizes of the symbols: the typical ones, and the least, but typical ones in states."""
    typical = {name: bounds[1] for name, bounds in module.dims.items()}
    states = [function.args[at].type.shape for at in function.aliases().values()]
    kept = {s for shape in states for d in shape if isinstance(d, Dim) for s in d.symbols()}
    least = {
        name: typical[name] if name in kept else max(1, low)
        for name, (low, _, _) in module.dims.items()
    }
    return {"typical": typical} | ({"least": least} if least != typical else {})

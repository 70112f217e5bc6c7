"""What the manifest says about a program of plans, and what each of its ranks runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from irc.analysis.stages import stages_of
from irc.backends.base import local_ports_of, ports_of
from irc.backends.cuda.execute.gpu_rank import RankFacts, Stage
from irc.backends.onnx.facts import port_facts, sharding_of
from irc.backends.onnx.growth import writes_of
from irc.backends.ranks.ports import peer, writes_of_facts
from irc.ir.core import Function, Module
from irc.ir.dims import Dim

TEXT = "module.irc"  # the localized module, in the artifact's folder


class CudaFacts(TypedDict):
    """What the backend's `emit` returns, besides the module.

    `base`: the folder that checkpoint files are relative to, None for the artifact's. `choices`: a
    sentence with the hash of the choices that were measured.
    """

    base: str | None
    choices: NotRequired[str]


def base_of(folder: Path, base: Path | None = None) -> str | None:
    """The `base` of a module emitted into `folder`, whose checkpoint files are below `base`."""
    start = (base or Path()).resolve()
    return None if start == folder.resolve() else str(start)


@dataclass(frozen=True)
class PlanStage(Stage):
    """The function of a stage, and the names of all its results in order."""

    function: str
    results: tuple[str, ...]


def facts_of_rank(module: Module, rank: int) -> RankFacts[PlanStage]:
    """What a rank of a localized module runs."""
    stage = next(stage for stage in stages_of(module) if rank in stage.ranks)
    receives, sends = (
        {peer(module.mesh, rank, number): tuple(names) for number, names in values.items()}
        for values in (stage.receives, stage.sends)
    )
    return RankFacts(rank, module.mesh, _stage(stage.function), receives, sends)


def _stage(function: Function) -> PlanStage:
    writes = writes_of_facts({"writes": writes_of(function)})
    ports, results = local_ports_of(function), tuple(function.result_names())
    return PlanStage(ports, writes, _states(function), function.name, results)


def _states(function: Function) -> dict[str, str]:
    """The result that overwrites each state."""
    names = function.result_names()
    return {str(function.args[at].name): names[i] for i, at in function.aliases().items()}


def sharding_facts(module: Module) -> dict[str, Any]:
    """What ShardedPorts takes."""
    main, stages = module.main, stages_of(module)
    numbers = {rank: i for i, stage in enumerate(stages) for rank in stage.ranks}
    states = [{v: k for k, v in _states(stage.function).items()} for stage in stages]
    return {
        "axes": module.mesh.axes,
        "ports": port_facts(ports_of(main), sharding_of(main), str),
        "results": main.result_names(),
        "ranks": [{"stage": numbers[rank]} for rank in range(module.mesh.ranks)],
        "stages": [
            {"results": [{"result": n, "state": of.get(n)} for n in stage.function.result_names()]}
            for stage, of in zip(stages, states, strict=True)
        ],
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

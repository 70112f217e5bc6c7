"""The facts of the manifest about emitted models: ports, files, and the ranks that run them.

They are the same for one rank and for many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

from irc.analysis.stages import Stage
from irc.backends.base import Port, Ports, local_ports_of, ports_of
from irc.backends.onnx.emitter import Emitter
from irc.backends.onnx.growth import growing, writes_of
from irc.backends.onnx.storage import Locations
from irc.ir.core import Function, Module
from irc.ir.types import Axes

MODEL = "rank{}.onnx"


class PortFact(TypedDict):
    """An input or output; a sharded one has `axes`, the mesh axes of each dimension.

    `computed` is the dtype that the models have in place of the module's, `dtype`; `fixed` is as in
    Port.
    """

    name: str
    dtype: str
    computed: NotRequired[str]
    fixed: NotRequired[bool]
    shape: list[int | str]
    axes: NotRequired[list[list[str]]]


class PortFacts(TypedDict):
    """The ports of a program, or of the model of one rank."""

    inputs: list[PortFact]
    states: list[PortFact]
    outputs: list[PortFact]


class ResultFact(TypedDict):
    """The names of a result: its own, the model's, and that of the input of the same memory."""

    result: str
    output: str
    state: NotRequired[str]


class TransferFact(TypedDict):
    """The values that one stage receives from another stage, or sends to it."""

    stage: int
    names: list[str]


class StageFact(TypedDict):
    """A pipeline stage, with ports as the model of one rank has them; see growth.py."""

    ports: PortFacts
    results: list[ResultFact]
    writes: list[dict[Literal["past", "step", "capacity"], str]]
    grows: str | None
    receives: list[TransferFact]
    sends: list[TransferFact]


class RankFact(TypedDict):
    """A rank's model, the weight files beside it, and those of the checkpoint below `base`."""

    stage: int
    model: str
    weights: list[str]
    files: list[str]


class ProgramFacts(TypedDict):
    """A program: the mesh, slowest axis first, and the ports over all ranks.

    `results` are the names of all results in order, states among them; `base` is the folder that
    checkpoint files are relative to.
    """

    axes: list[tuple[str, int]]
    ports: PortFacts
    results: list[str]
    base: str | None


class OnnxFacts(ProgramFacts):
    """What the ONNX backend's `emit` returns."""

    ranks: list[RankFact]
    stages: list[StageFact]


def facts_of(
    module: Module,
    function: Function,
    stages: Sequence[Stage],
    emitters: Sequence[Emitter],
    located: Locations,
) -> dict[str, Any]:
    """The facts about a function whose stages are emitted."""
    numbers = {rank: i for i, stage in enumerate(stages) for rank in stage.ranks}
    return {
        "axes": [list(axis) for axis in module.mesh.axes],
        "ports": port_facts(ports_of(function), sharding_of(function), emitters[0].dtype),
        "results": list(function.result_names()),
        "base": located.base,
        "ranks": [
            {
                "stage": numbers[rank],
                "model": MODEL.format(rank),
                "weights": located.inside[rank],
                "files": located.files[rank],
            }
            for rank in range(module.mesh.ranks)
        ],
        "stages": [_stage(*pair) for pair in zip(stages, emitters, strict=True)],
    }


def _stage(stage: Stage, emitter: Emitter) -> dict[str, Any]:
    return {
        "ports": port_facts(local_ports_of(stage.function), {}, emitter.dtype),
        "results": emitter.results(),
        "writes": writes_of(stage.function),
        "grows": growing(stage.function),
        "receives": transfers(stage.receives),
        "sends": transfers(stage.sends),
    }


def transfers(names: Mapping[int, list[str]]) -> list[dict[str, Any]]:
    """The values that a stage receives, or sends, by the number of the other stage."""
    return [{"stage": number, "names": used} for number, used in names.items()]


def sharding_of(function: Function) -> dict[tuple[str, bool], tuple[Axes, ...]]:
    """(name, whether it is a result) -> the mesh axes that shard each dimension."""
    args = {(str(a.name), False): a.type.global_type for a in function.args}
    results = zip(
        function.result_names(),
        [value.type.global_type for value in function.returned],
        strict=True,
    )
    types = args | {(name, True): type for name, type in results}
    return {key: type.axes for key, type in types.items() if any(type.axes)}


def port_facts(
    ports: Ports, sharding: Mapping[tuple[str, bool], tuple[Axes, ...]], dtype: Callable[[str], str]
) -> dict[str, list[dict[str, Any]]]:
    """The entries of ports; `sharding` as of `sharding_of`, `dtype` is that in the models."""

    def fact(port: Port, result: bool) -> dict[str, Any]:
        shape = [dim if isinstance(dim, int) else str(dim) for dim in port.shape]
        entry = {"name": port.name, "dtype": port.dtype, "shape": shape}
        if (computed := dtype(port.dtype)) != port.dtype:
            entry["computed"] = computed
        if port.fixed:
            entry["fixed"] = True
        axes = sharding.get((port.name, result))
        return entry if axes is None else entry | {"axes": [list(over) for over in axes]}

    return {
        "inputs": [fact(port, False) for port in ports.inputs],
        "states": [fact(port, False) for port in ports.states],
        "outputs": [fact(port, True) for port in ports.outputs],
    }

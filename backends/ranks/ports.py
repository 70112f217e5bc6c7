"""The ports of a program: what the manifest says about them, checked inputs, shards per rank."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from irc.analysis.stages import PIPELINE
from irc.backends.base import Arrays, Port, Ports
from irc.backends.reference.inputs import bind_inputs
from irc.errors import Error
from irc.ir.core import Function
from irc.ir.dims import Dim, DimLike, bind
from irc.ir.dtypes import dtype, numpy_dtype
from irc.ir.layouts import join_arrays, split_array
from irc.ir.mesh import Mesh
from irc.ir.types import Axes, TensorType
from irc.text.literals import parse_dim
from irc.weights.checkpoint import convert

Sizes = dict[str, int]
CALLS = 64  # whose sizes are kept


class Inputs:
    """The arguments of a call: each has the dtype of its port, or f32, i8 or u8 in place of a
    narrower one, and is rounded."""

    def __init__(self, name: str, ports: Sequence[Port]) -> None:
        self._ports = {port.name: port for port in ports}
        self._function = Function(name, [(p.name, TensorType(p.dtype, p.shape)) for p in ports])
        # ports whose arrays are taken as they are
        self._plain = {p.name: numpy_dtype(p.dtype) for p in ports if p.computed in ("", p.dtype)}
        self._sizes: dict[Any, Sizes] = {}  # of calls

    def bind(self, given: Mapping[str, Any]) -> tuple[dict[str, np.ndarray], Sizes]:
        """(contiguous arrays by name as they are computed, the size of every symbol), or an
        Error."""
        arrays = {name: self._array(name, value) for name, value in given.items()}
        key = tuple((name, array.dtype, array.shape) for name, array in arrays.items())
        sizes = self._sizes.get(key)
        if sizes is None:
            _, sizes = bind_inputs(self._function, arrays, {})
            if len(self._sizes) == CALLS:
                self._sizes.clear()
            self._sizes[key] = sizes  # a decode step looks like one before
        for name, array in arrays.items():
            if array.dtype != self._plain.get(name):
                port = self._ports[name]
                arrays[name] = convert(array, port.computed or port.dtype)
        return arrays, sizes

    def _array(self, name: str, value: Any) -> np.ndarray:
        array = np.asarray(value)
        if array.dtype == self._plain.get(name) and array.flags.c_contiguous:
            return array
        port = self._ports.get(name)
        wider = "" if port is None else dtype(port.dtype).wider
        if port is not None and wider and array.dtype == numpy_dtype(wider):
            array = convert(array, port.dtype)
        return np.ascontiguousarray(array) if array.ndim else array


def sized(shape: Sequence[Any], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """A shape with its symbols replaced by their sizes."""
    bound = tuple(bind(dim, sizes) for dim in shape)
    for dim in bound:
        if isinstance(dim, Dim):
            raise Error(f"{next(dim.symbols())} has no size: no input has this dimension")
    return cast("tuple[int, ...]", bound)


@dataclass(frozen=True)
class Write:
    """A run writes `step` tokens behind the `past` ones into caches of `capacity`."""

    past: str
    step: DimLike
    capacity: DimLike

    def needed(self, inputs: Mapping[str, np.ndarray], sizes: Sizes) -> int:
        """The number of positions that the caches need for this run."""
        past = inputs[self.past].tolist()
        if past and min(past) < 0:
            raise Error(f"the input {self.past} counts tokens, but it has {min(past)}")
        return max(past, default=0) + sized([self.step], sizes)[0]


@contextmanager
def contradictions_named(folder: Path) -> Generator[None]:
    """Turn failures about names or numbers of a manifest that do not fit into an Error."""
    try:
        yield
    except (LookupError, StopIteration, ValueError) as error:
        raise Error(
            f"the manifest of {folder} contradicts itself ({error!r}); compile again"
        ) from error


def writes_of_facts(stage: Mapping[str, Any]) -> tuple[Write, ...]:
    """The writes into caches by the ranks of a stage."""
    return tuple(
        Write(w["past"], parse_dim(w["step"]), parse_dim(w["capacity"])) for w in stage["writes"]
    )


def port_of_fact(fact: Mapping[str, Any], state: bool = False) -> Port:
    """A port from its entry in the manifest."""
    shape = tuple(d if isinstance(d, int) else parse_dim(d) for d in fact["shape"])
    axes = tuple(map(tuple, fact.get("axes", ())))
    TensorType(fact["dtype"], shape, axes)  # an Error where they do not fit
    computed = fact.get("computed", "")
    numpy_dtype(computed or fact["dtype"])
    return Port(fact["name"], fact["dtype"], shape, state, computed, fact.get("fixed", False))


def ports_of_facts(facts: Mapping[str, Any]) -> Ports:
    """The ports in the manifest."""
    return Ports(
        tuple(port_of_fact(port) for port in facts["inputs"]),
        tuple(port_of_fact(port, state=True) for port in facts["states"]),
        tuple(port_of_fact(port) for port in facts["outputs"]),
    )


def mesh_of_facts(facts: Mapping[str, Any]) -> Mesh:
    """The mesh that a module was emitted for."""
    mesh = Mesh(tuple((name, size) for name, size in facts["axes"]))
    stages = [entry["stage"] for entry in facts["ranks"]]
    if len(stages) != mesh.ranks or not 0 <= min(stages) <= max(stages) < len(facts["stages"]):
        raise ValueError(f"the mesh ({mesh}), and ranks of the stages {stages}")
    return mesh


def peer(mesh: Mesh, rank: int, stage: int) -> int:
    """The rank at the position of `rank` in another pipeline stage."""
    return next(group for group in mesh.groups((PIPELINE,)) if rank in group)[stage]


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
        results = self._results(facts)
        self.results = {name: results[name] for name in facts["results"]}

    def _results(self, facts: Mapping[str, Any]) -> dict[str, Result]:
        states = {port.name: port for port in self.ports.states}
        outputs = {port.name: port for port in self.ports.outputs}
        axes = _axes(facts["ports"]["outputs"])
        results: dict[str, Result] = {}
        for number, stage in enumerate(facts["stages"]):
            for fact in stage["results"]:
                name, state = fact["result"], fact.get("state")
                if state is not None:
                    results[name] = Result(states[state], self._args[state], number)
                elif name in outputs:  # and no value for another stage
                    results[name] = Result(outputs[name], axes[name], number)
        return results

    def shards(self, rank: int, names: Sequence[str], arrays: Mapping[str, np.ndarray]) -> Arrays:
        """A rank's shards of the global inputs of these names, as far as `arrays` has them."""
        if self.mesh.ranks == 1:
            return {name: arrays[name] for name in names if name in arrays}
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

    def global_results(self, of_ranks: Sequence[Arrays], sizes: Sizes) -> Arrays:
        """The global results from those of all ranks."""
        given = set[str]().union(*of_ranks)
        return {
            name: self.join(result, {r: of_ranks[r][name] for r in self.ranks_with(result)}, sizes)
            for name, result in self.results.items()
            if name in given
        }


def _axes(facts: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Axes, ...]]:
    """Per port the mesh axes that shard each dimension."""
    return {
        fact["name"]: tuple(tuple(axes) for axes in fact.get("axes", [()] * len(fact["shape"])))
        for fact in facts
    }

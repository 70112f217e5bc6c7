"""Reads what the manifest says about ranks: the mesh, ports, peers, writes into caches."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from irc.backends.base import Port, Ports
from irc.backends.onnx.stages import AXIS
from irc.backends.ranks.inputs import Sizes, sized
from irc.errors import Error
from irc.ir.dims import DimLike
from irc.ir.dtypes import numpy_dtype
from irc.ir.mesh import Mesh
from irc.ir.types import TensorType
from irc.text.literals import parse_dim


@dataclass(frozen=True)
class Write:
    """A run writes `step` tokens behind the `past` ones into caches of `capacity`."""

    past: str
    step: DimLike
    capacity: DimLike

    def needed(self, inputs: Mapping[str, np.ndarray], sizes: Sizes) -> int:
        """The number of positions that the caches need for this run."""
        past = inputs[self.past]
        if past.size and past.min() < 0:
            raise Error(f"the input {self.past} counts tokens, but it has {past.min()}")
        return int(past.max(initial=0)) + sized([self.step], sizes)[0]


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
    return Port(fact["name"], fact["dtype"], shape, state, computed)


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
    return next(group for group in mesh.groups((AXIS,)) if rank in group)[stage]

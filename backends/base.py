"""What a backend is: it says what it cannot do, writes an artifact folder, loads and runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from irc.core import Function, Module, Op
from irc.dims import Dim, DimLike, Shape, bind
from irc.errors import Error, did_you_mean
from irc.types import TensorType

Array: TypeAlias = np.ndarray
Arrays: TypeAlias = dict[str, Array]


@dataclass(frozen=True)
class Port:
    """One argument or result of a program. `state` marks memory that a result overwrites."""

    name: str
    dtype: str
    shape: Shape
    state: bool = False


@dataclass(frozen=True)
class Ports:
    """The plain inputs, the states (as arguments), and the results that are no state."""

    inputs: tuple[Port, ...]
    states: tuple[Port, ...]
    outputs: tuple[Port, ...]


@dataclass(frozen=True)
class Gap:
    """An operation that a backend cannot run, and why."""

    op: Op
    reason: str


class Stream(Protocol):
    """A program with its states between steps, such as one conversation and its KV cache."""

    def step(self, inputs: Mapping[str, Array]) -> Arrays:
        """Run once over the plain inputs, advance the states, return the plain outputs."""
        ...


class Program(Protocol):
    """Something loaded that runs on numpy arrays, named and shaped as in the main function."""

    @property
    def ports(self) -> Ports:
        """What goes in, what stays, what comes out."""
        ...

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        """Every argument in (states too), every result out; nothing is kept."""
        ...

    def open(self, sizes: Mapping[str, int]) -> Stream:
        """A stream whose states are zeros; `sizes` gives the symbols in their shapes."""
        ...


@runtime_checkable
class Backend(Protocol):
    """One way to execute a module."""

    name: str
    default_pipeline: str  # of one rank
    sharded_pipeline: str  # of several, from an unsharded module to the text of a rank

    def unsupported(self, module: Module) -> list[Gap]:
        """Everything in the module that this backend cannot run, all at once."""
        ...

    def covers(self, cls: type[Op]) -> bool:
        """Whether it has operations of this class itself, without their expansion."""
        ...

    def emit(self, module: Module, folder: Path, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Write what this backend needs into an existing folder; returns facts for the manifest.

        `notes` among them are sentences for the user, and not written; neither are `hashes`, the
        checksums of files that it knows already.

        Options: `base`, the folder that relative paths in `module.files` start from; `output`,
        which the folder is called in the end; others are the backend's own.
        """
        ...

    def load(self, folder: Path, manifest: Mapping[str, Any], **options: Any) -> Program:
        """The program that `emit` wrote into `folder`; options are the backend's own."""
        ...


def ports_of(function: Function) -> Ports:
    """The ports of a function, whole over all ranks; what a result overwrites is a state."""
    args = [function.argument_layout(arg) for arg in function.args]
    return _ports(function, args, function.result_layouts())


def local_ports_of(function: Function) -> Ports:
    """The same of one rank: shapes are its parts'."""
    args = [arg.type for arg in function.args]
    return _ports(function, args, [value.type for value in function.returned])


def _ports(function: Function, args: list[TensorType], results: list[TensorType]) -> Ports:
    aliases = function.aliases()
    stateful = set(aliases.values())
    inputs: list[Port] = []
    states: list[Port] = []
    for arg, type in zip(function.args, args, strict=True):
        port = Port(str(arg.name), type.dtype, type.shape, arg.index in stateful)
        (states if port.state else inputs).append(port)
    outputs = [
        Port(name, type.dtype, type.shape)
        for i, (name, type) in enumerate(zip(function.result_names(), results, strict=True))
        if i not in aliases
    ]
    return Ports(tuple(inputs), tuple(states), tuple(outputs))


def check_plain(inputs: Mapping[str, object], ports: Ports) -> None:
    """An Error where a stream is fed a state, which it keeps itself."""
    states = {port.name for port in ports.states}
    for name in inputs:
        if name in states:
            hint = did_you_mean(name, [port.name for port in ports.inputs])
            raise Error(f"{name} is a state that the stream keeps{hint}; leave it out")


def state_shape(port: Port, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a state once its symbols have sizes; an Error names one that has none."""
    return tuple(_size(port, dim, sizes) for dim in port.shape)


def _size(port: Port, dim: DimLike, sizes: Mapping[str, int]) -> int:
    bound = bind(dim, sizes)
    if isinstance(bound, Dim):
        missing = next(bound.symbols())
        raise Error(
            f"the state {port.name} has a dimension {dim}, but {missing} has no size"
            f"{did_you_mean(missing, sizes)}; give it when the stream is opened"
        )
    return bound


def report(gaps: list[Gap], backend: str) -> Error:
    """One Error that lists every gap with its place in the user's source."""
    error = Error(f"the backend {backend} cannot run this module")
    for gap in gaps:
        where = f"{gap.op.loc.where()}: " if gap.op.loc is not None else ""
        error.add_note(f"{where}{gap.op.opname}: {gap.reason}")
    return error

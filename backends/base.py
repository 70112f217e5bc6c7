"""The backend interface: what runs a module, writes an artifact's program, loads and runs it."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self, TypeAlias

import numpy as np

from irc.artifact.folder import ArtifactFolder
from irc.artifact.manifest import Progress, silent
from irc.backends.commands import Commands
from irc.errors import Error, did_you_mean
from irc.ir.core import Function, Module, Op
from irc.ir.dims import Dim, Shape, bind
from irc.ir.types import TensorType
from irc.ops import Call
from irc.ops.fused_attention import cache_writes
from irc.pipeline.options import options_of

Array: TypeAlias = np.ndarray
Arrays: TypeAlias = dict[str, Array]


@dataclass(frozen=True)
class Port:
    """One argument or result of a program. `state` marks memory that a result overwrites.

    `computed` is the dtype in which the program computes it, "" where that is its own. `fixed`
    marks a state [B, ...] of one size for any number of tokens, as that of a recurrence; other
    states, such as caches of keys and values, have a place for every token.
    """

    name: str
    dtype: str
    shape: Shape
    state: bool = False
    computed: str = field(default="", compare=False)
    fixed: bool = False


@dataclass(frozen=True)
class Ports:
    """The plain inputs, the states (as arguments), and the results that are not states."""

    inputs: tuple[Port, ...]
    states: tuple[Port, ...]
    outputs: tuple[Port, ...]


@dataclass(frozen=True)
class Unsupported:
    """An operation that a backend cannot run, and why."""

    op: Op
    reason: str


@dataclass(frozen=True)
class Emitted:
    """What a backend wrote into an artifact folder.

    `facts` become the manifest's `program` (JSON). `notes` are sentences for the user. `hashes` are
    the checksums (`sha256:...`) of written files that are known already, by name in the folder.
    """

    facts: Mapping[str, Any]
    notes: Sequence[str] = ()
    hashes: Mapping[str, str] = field(default_factory=dict[str, str])


class Stream(Protocol):
    """A program with its states between steps, such as conversations and their KV caches.

    Row i of a state, along its dimension 0, belongs to sequence i of a batch.
    """

    def step(self, inputs: Mapping[str, Array], first: int = 0) -> Arrays:
        """Run once over the plain inputs, advance the states, return the plain outputs.

        Inputs of fewer rows than the states have run rows `first`, `first + 1`, ... of them, where
        no ranks share the rows.
        """
        ...

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Let row `targets[i]` of all states be what row `sources[i]` was before the call."""
        ...

    def clear_rows(self, rows: Sequence[int]) -> None:
        """Fill these rows of all states with zeros."""
        ...


class Program(Protocol):
    """A loaded program over numpy arrays, named and shaped as in the main function."""

    @property
    def ports(self) -> Ports:
        """Inputs, states and outputs."""
        ...

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        """All results for all arguments, states among both; nothing is kept."""
        ...

    def open(self, sizes: Mapping[str, int]) -> Stream:
        """A stream whose states are zeros; `sizes` are the symbols in their shapes."""
        ...


@dataclass(frozen=True)
class NoOptions:
    """The options of a backend that has none."""


class Backend(ABC):
    """One way to run a module. The abstract members are required; the others have defaults."""

    name: str
    options: Any = NoOptions()  # of irc.compile and irc compile, see irc/pipeline/options.py
    load_options: Any = NoOptions()  # the defaults of those of `load` that have a flag
    records = False  # whether `load` has the option `recorder`, see recorder.py
    rank_is_process = False  # whether every rank needs a process of its own, as on GPUs
    default_pipeline: str = ""  # for one rank
    sharded_pipeline: str = "inline, cse, shard, rewrite-embeddings, pipeline, localize"

    @property
    def facts(self) -> type[Any]:
        """The types of what `emit` returns, see irc/schema.py."""
        return dict[str, Any]

    @property
    def commands(self) -> Commands:
        """Its part of irc's commands."""
        return Commands()

    @abstractmethod
    def unsupported(self, module: Module) -> list[Unsupported]:
        """All operations of the module that this backend cannot run."""

    @abstractmethod
    def covers(self, cls: type[Op]) -> bool:
        """Whether it runs operations of this class without their expansion."""

    @abstractmethod
    def emit(
        self, module: Module, folder: Path, *, base: Path | None = None, progress: Progress = silent
    ) -> Emitted:
        """Write the program of a module into an existing folder.

        Relative paths in `module.files` start at `base`.
        """

    @abstractmethod
    def load(self, folder: Path, manifest: Mapping[str, Any], **options: Any) -> Program:
        """The program that `emit` wrote into `folder`; the options are the backend's own.

        `manifest` is the artifact's, with the facts of `emit` at its top level.
        """

    def begin(self, options: Mapping[str, Any]) -> None:  # noqa: B027
        """What must happen before a source is read, such as loading files that declare operations.

        `options` are all those of the compilation. By default nothing.
        """

    def configured(self, options: Mapping[str, Any]) -> Self:
        """This backend with other `options`, by keyword; an Error about a wrong one."""
        chosen = copy(self)
        chosen.options = options_of(type(self.options), options, f"the backend {self.name}")
        return chosen

    def remembered(self, artifact: ArtifactFolder) -> Mapping[str, Any]:
        """The options of an artifact that it has when it is compiled again."""
        return {}

    @property
    def needs_bundle(self) -> bool:
        """Whether the options need the weights in the artifact."""
        return False

    def opens(self, manifest: Mapping[str, Any]) -> str:
        """A sentence about what opens the files of an artifact beside irc, or ""."""
        return ""

    def finish(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Write what else the options ask for into a folder whose manifest has these facts."""
        return

    def check(self, module: Module, base: Path) -> list[str]:
        """Raise the errors that `emit` would raise about a module without writing anything.

        Returns notes for the user.
        """
        return []


def ports_of(function: Function) -> Ports:
    """The ports of a function with global shapes; what a result overwrites is a state."""
    args = [arg.type.global_type for arg in function.args]
    return _ports(function, args, [value.type.global_type for value in function.returned])


def local_ports_of(function: Function) -> Ports:
    """The ports of a function with the shapes of one rank's shards."""
    args = [arg.type for arg in function.args]
    return _ports(function, args, [value.type for value in function.returned])


def _ports(function: Function, args: list[TensorType], results: list[TensorType]) -> Ports:
    aliases = function.aliases()
    stateful, growing = set(aliases.values()), set(growing_args(function))
    inputs: list[Port] = []
    states: list[Port] = []
    for arg, type in zip(function.args, args, strict=True):
        state, symbolic = arg.index in stateful, any(isinstance(n, Dim) for n in type.shape[1:])
        fixed = state and not symbolic and arg.index not in growing
        port = Port(str(arg.name), type.dtype, type.shape, state, fixed=fixed)
        (states if port.state else inputs).append(port)
    outputs = [
        Port(name, type.dtype, type.shape)
        for i, (name, type) in enumerate(zip(function.result_names(), results, strict=True))
        if i not in aliases
    ]
    return Ports(tuple(inputs), tuple(states), tuple(outputs))


def growing_args(function: Function) -> Iterator[int]:
    """The arguments in which operations write tokens, here or in a function called from here.

    A cache that is part of an argument, or another view of it, counts as well.
    """
    for op in function:
        caches = [write.cache for write in cache_writes(op)]
        if isinstance(op, Call):
            caches = [op.values[at] for at in growing_args(op.callee)]
        for cache in caches:
            while (producer := cache.producer) is not None and producer.operands:
                cache = producer.operands[0]
            if cache.owner is function:
                yield cache.index


def check_plain(inputs: Mapping[str, object], ports: Ports) -> None:
    """An Error where the inputs of a stream name a state, which the stream keeps itself."""
    states = {port.name for port in ports.states}
    for name in inputs:
        if name in states:
            hint = did_you_mean(name, [port.name for port in ports.inputs])
            raise Error(f"{name} is a state that the stream keeps{hint}; leave it out")


@dataclass(frozen=True)
class StateRows:
    """The rows that the states of a stream have, along their dimension 0.

    `symbol` is that dimension in all states; "" without a common one, as where it is `2*B` since
    two ranks share the rows. `sizes` are those that the stream was opened for.
    """

    symbol: str
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, states: Sequence[Port], sizes: Mapping[str, int]) -> StateRows:
        """Those of states with global shapes."""
        dims = {port.shape[0] if port.shape else 1 for port in states}
        dim = dims.pop() if len(dims) == 1 else 1
        is_symbol = isinstance(dim, Dim) and [*dim.symbols()] == [str(dim)]
        return cls(str(dim) if is_symbol else "", dict(sizes))

    @property
    def count(self) -> int:
        """The number of rows; 0 without a common symbol."""
        return self.sizes.get(self.symbol, 0)

    def chosen(self, sizes: Mapping[str, int], first: int) -> slice | None:
        """The rows from `first` on that a call of these sizes runs; None for all.

        An Error where the call does not fit the states.
        """
        count = sizes.get(self.symbol, self.count)
        fits = 0 <= first <= self.count - count
        for name, size in sizes.items():
            opened = self.sizes.get(name, size)
            if not fits if name == self.symbol else size != opened:
                raise Error(
                    f"the stream was opened for {name}={opened}, "
                    f"but these inputs have {name}={size}{f' from row {first} on' * (first > 0)}"
                    f"{'' if self.symbol else '; a call of this program takes all rows'}"
                )
        if not fits:
            raise Error(f"a call of this program takes all rows, found one from row {first} on")
        return None if count == self.count else slice(first, first + count)

    def check(self, *rows: Sequence[int]) -> None:
        """An Error unless these are numbers of rows."""
        if not self.symbol:
            raise Error(
                "the rows of these states cannot be moved or cleared: they have no symbol in "
                "common, or ranks share them; compile for a mesh without dp"
            )
        for row in itertools.chain(*rows):
            if not 0 <= row < self.count:
                raise Error(f"the stream has rows 0 to {self.count - 1}, found row {row}")


def state_shape(port: Port, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of a state as numbers; an Error names a symbol without a size."""
    shape: list[int] = []
    for dim in port.shape:
        bound = bind(dim, sizes)
        if isinstance(bound, Dim):
            missing = next(bound.symbols())
            what = f"{missing} has no size{did_you_mean(missing, sizes)}"
            raise Error(f"the state {port.name} has a dimension {dim}, but {what}; give its size")
        shape.append(bound)
    return tuple(shape)


def check_supported(backend: Backend, module: Module) -> None:
    """One Error that lists every unsupported operation with its place in the user's source."""
    refused = backend.unsupported(module)
    if refused:
        raise report(refused, backend.name)


def report(unsupported: Sequence[Unsupported], backend: str) -> Error:
    """The Error about operations that a backend cannot run."""
    error = Error(f"the backend {backend} cannot run this module")
    reasons: dict[str, list[Op]] = {}
    for refused in unsupported:
        reasons.setdefault(f"{refused.op.opname}: {refused.reason}", []).append(refused.op)
    for reason, (first, *others) in reasons.items():
        where = f"{first.loc.where()}: " if first.loc is not None else ""
        more = f" ({len(others)} more like it)" if others else ""
        error.add_note(f"{where}{reason}{more}")
    return error

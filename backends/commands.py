"""What a backend adds to irc's commands: its part of show, bench, cache, plugins, ops, doctor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from irc.analysis.memory import Buffer
from irc.analysis.sizes import LocalSizes
from irc.analysis.steps import Step, steps_of
from irc.analysis.topology import Topology
from irc.analysis.topology_fit import Measurement
from irc.artifact.folder import ArtifactFolder
from irc.artifact.manifest import Progress
from irc.ir.core import Module
from irc.report import Report

if TYPE_CHECKING:
    from irc.backends.base import Program
    from irc.backends.measure import Plan
    from irc.backends.ranks.communicator import Communicator

Ranges: TypeAlias = Mapping[str, tuple[int, int, int]]


@dataclass(frozen=True)
class Shown:
    """What `irc show` was asked about: a source, how to read its module, a scope, sizes."""

    source: str
    module: Callable[[], Module]
    scope: str | None
    dims: Ranges


@dataclass(frozen=True)
class Benched:
    """What `irc bench WORD` was asked about: an artifact, its module and its loaded program, sizes,
    inputs at any sizes, and the file of `-o`, "" for the artifact itself."""

    artifact: ArtifactFolder
    module: Module
    program: Program
    dims: Mapping[str, int]
    inputs: Callable[[Mapping[str, int]], Mapping[str, Any]]
    file: str


@dataclass(frozen=True)
class Linted:
    """What `irc lint` was asked about: ONNX models, rules to skip, whether to list every node.

    `refusal` is why irc itself cannot compile a file, or ""; `check_bytes` raises an Error that
    names the damaged byte of one.
    """

    models: Sequence[Path]
    ignore: Sequence[str]
    every_node: bool
    refusal: Callable[[Path], str]
    check_bytes: Callable[[Path], None]


@dataclass(frozen=True)
class Finding:
    """One line of `irc doctor`; `ok` is None for an optional package that is absent."""

    what: str
    ok: bool | None
    detail: str


@dataclass(frozen=True)
class PluginPage:
    """A plugin in `irc plugins`: its names, a summary, its facts, and the page about it."""

    name: str
    names: tuple[str, ...]
    version: str
    summary: str
    facts: Mapping[str, Any]
    text: str


class Commands:
    """The part of a backend in irc's commands; a backend without one has these defaults.

    `shows` are the flags of `irc show` that it adds, with their help, `benches` the words of
    `irc bench`. Two backends that share their commands return the same object.
    """

    shows: Mapping[str, str] = {}
    benches: Mapping[str, str] = {}
    lints = False  # whether it has `lint` and `rules`

    def show(self, flag: str, shown: Shown) -> Report:
        """The answer to `irc show --FLAG`."""
        raise NotImplementedError(flag)

    def describe(self, artifact: ArtifactFolder) -> Mapping[str, str]:
        """What `irc show --stats` and `irc bench` say about an artifact beside its module."""
        return {}

    def steps(self, module: Module, sizes: LocalSizes, topology: Topology) -> Sequence[Step]:
        """What one rank of each stage of a localized module runs, in order; see Step."""
        return steps_of(module, sizes, topology)

    def buffers(self, module: Module, sizes: LocalSizes) -> Mapping[str, Sequence[Buffer]]:
        """Where values lie from step to step, by function, where the backend decides that."""
        return {}

    def bench(self, word: str, benched: Benched, progress: Progress) -> Report:
        """The answer to `irc bench WORD`; where ranks are processes, all of them call it."""
        raise NotImplementedError(word)

    def cache(self, folder: Path | None, action: str) -> Report | None:
        """List, measure (size) or delete (clear) what the backend keeps in a folder."""
        return None

    def load_plugins(self, files: Sequence[str]) -> None:
        """Run the user's files that register plugins, where the backend has some."""

    def plugins(self) -> Sequence[PluginPage]:
        """The registered plugins."""
        return ()

    def importable(self) -> Mapping[tuple[str, str], tuple[str, Callable[..., Any]]]:
        """Nodes of ONNX files, by their keys: their operations, and what reads their fields."""
        return {}

    def lowerings(self, target: str, op: str | None, markdown: bool) -> Report | None:
        """What each operation, or one, becomes for a target; None without targets."""
        return None

    def lint(self, linted: Linted) -> Report:
        """What the backend's library would drop or miscompute in models without an error."""
        raise NotImplementedError

    def rules(self) -> Report:
        """The rules of `lint`."""
        raise NotImplementedError

    def device_count(self) -> int:
        """The number of GPUs here, for `irc bench collectives`."""
        return 0

    def measure(
        self, plan: Plan, communicator: Communicator, progress: Progress
    ) -> tuple[list[Measurement], str]:
        """The times of collectives between GPUs, and what was measured."""
        raise NotImplementedError

    def findings(self) -> Sequence[Finding]:
        """What `irc doctor` says about the libraries that it needs."""
        return ()

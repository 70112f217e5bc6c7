"""The reference backend: an artifact is the module's text, a program interprets it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from irc.backends.base import Arrays, Gap, Ports, check_plain, local_ports_of, ports_of, state_shape
from irc.backends.lowering import STRUCTURE
from irc.core import Module, Op
from irc.dtypes import numpy_dtype
from irc.errors import Error
from irc.ops.collective import Collective
from irc.text import parse_module

from .evaluate import Run
from .weights import Given, Weights

TEXT = "module.irc"


class ReferenceBackend:
    """Numpy, every rank in one process: slow, and the oracle for everything."""

    name = "reference"
    default_pipeline = ""
    sharded_pipeline = "inline, cse, shard, rewrite-embeddings, pipeline, localize"

    def unsupported(self, module: Module) -> list[Gap]:
        """Operations of third parties that say neither what they mean nor what they expand to."""
        return [Gap(op, "has neither evaluate nor expand") for op in module.ops() if not _runs(op)]

    def covers(self, cls: type[Op]) -> bool:
        """Whether the class says in numpy what it means, or is structure."""
        if cls.opname in STRUCTURE or issubclass(cls, Collective):
            return True
        return cls.evaluate is not Op.evaluate

    def emit(self, module: Module, folder: Path, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Write the module's text; its weights stay where they are."""
        (folder / TEXT).write_text(str(module), encoding="utf-8")
        base = Path(options.get("base") or ".").resolve()
        return {} if base == folder.resolve() else {"base": str(base)}

    def load(self, folder: Path, manifest: Mapping[str, Any], **options: Any) -> ReferenceProgram:
        """The program of `module.irc`; relative paths start at `base`, or at the folder."""
        if options:
            raise Error(f"the reference backend has no option {next(iter(options))}")
        path = folder / TEXT
        module = parse_module(path.read_text(encoding="utf-8"), str(path))
        return ReferenceProgram(module, manifest.get("base", folder))


def _runs(op: Op) -> bool:
    if op.opname in ("call", "return") or op.composite or isinstance(op, Collective):
        return True
    return type(op).evaluate is not Op.evaluate


class ReferenceProgram:
    """A module with its weights, which are read once and kept."""

    def __init__(
        self, module: Module, base: Path | str | None = None, weights: Given | None = None
    ) -> None:
        self.module = module
        self.weights = Weights(module, base, weights)
        self._ports = ports_of(module.main)

    @property
    def ports(self) -> Ports:
        """What goes in, what stays, what comes out."""
        return self._ports

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Every argument in (states too), every result out, whole; nothing is kept."""
        return Run(self.module, inputs, weights=self.weights).whole()

    def open(self, sizes: Mapping[str, int]) -> ReferenceStream:
        """A stream whose states are zeros; `sizes` gives the symbols in their shapes."""
        return ReferenceStream(self, sizes)


class ReferenceStream:
    """The states of a program between steps, by the name of their argument, per rank."""

    def __init__(self, program: ReferenceProgram, sizes: Mapping[str, int]) -> None:
        self.program = program
        module = program.module
        ranks = module.mesh.ranks if module.local else 1
        self.states: dict[str, list[np.ndarray]] = {}
        function = module.main
        for port in local_ports_of(function).states:
            zeros = np.zeros(state_shape(port, sizes), numpy_dtype(port.dtype))
            self.states[port.name] = [zeros] * ranks
        names = function.result_names()
        self._kept = {names[i]: str(function.args[a].name) for i, a in function.aliases().items()}

    def step(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """Run once over the plain inputs, advance the states, return the whole outputs."""
        check_plain(inputs, self.program.ports)
        module, weights = self.program.module, self.program.weights
        states = self.states if module.local else {k: v[0] for k, v in self.states.items()}
        done = Run(module, {**inputs, **states}, weights=weights)
        ranks = done.ranks()
        for result, state in self._kept.items():
            self.states[state] = [results[result] for results in ranks]
        return {name: array for name, array in done.whole().items() if name not in self._kept}

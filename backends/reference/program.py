"""The reference backend: the program is the module's text, interpreted with numpy."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from irc.artifact.manifest import Progress, silent
from irc.backends.base import (
    Arrays,
    Backend,
    Emitted,
    Ports,
    StateRows,
    Unsupported,
    check_plain,
    local_ports_of,
    ports_of,
    state_shape,
)
from irc.backends.lowering import STRUCTURE
from irc.backends.recorder import Recorder
from irc.errors import Error
from irc.ir.core import Module, Op
from irc.ir.dtypes import numpy_dtype
from irc.ops.collective import Collective
from irc.text import parse_module

from .evaluate import Run
from .weights import Arrays as WeightArrays
from .weights import Weights

TEXT = "module.irc"


class ReferenceBackend(Backend):
    """Numpy, all ranks in one process: slow; other backends are compared with it."""

    name = "reference"
    records = True

    def unsupported(self, module: Module) -> list[Unsupported]:
        """Operations of third parties without `evaluate` and `expand`."""
        why = "has neither evaluate nor expand"
        return [
            Unsupported(op, why)
            for op in module.ops()
            if not (op.composite or self.covers(type(op)))
        ]

    def covers(self, cls: type[Op]) -> bool:
        """Whether the class has a meaning in numpy, or is structure."""
        if cls.opname in STRUCTURE or issubclass(cls, Collective):
            return True
        return cls.evaluate is not Op.evaluate

    def emit(
        self, module: Module, folder: Path, *, base: Path | None = None, progress: Progress = silent
    ) -> Emitted:
        """Write the module's text; its weights stay in the checkpoint."""
        (folder / TEXT).write_text(str(module), encoding="utf-8")
        start = (base or Path()).resolve()
        return Emitted({} if start == folder.resolve() else {"base": str(start)})

    def load(self, folder: Path, manifest: Mapping[str, Any], **options: Any) -> ReferenceProgram:
        """The program of `module.irc`; relative paths start at `base`, or at the folder."""
        if options:
            raise Error(f"the reference backend has no option {next(iter(options))}")
        path = folder / TEXT
        module = parse_module(path.read_text(encoding="utf-8"), str(path))
        return ReferenceProgram(module, manifest.get("base", folder))


class ReferenceProgram:
    """A module and its weights, which are read once; `recorder` gets the times of operations, of
    all ranks together."""

    def __init__(
        self, module: Module, base: Path | str | None = None, weights: WeightArrays | None = None
    ) -> None:
        self.module = module
        self.weights = Weights(module, base, weights)
        self.ports: Ports = ports_of(module.main)
        self.recorder: Recorder | None = None

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        """All results for all arguments, states among both; nothing is kept."""
        return self.evaluated(inputs).joined()

    def evaluated(self, inputs: Mapping[str, Any]) -> Run:
        """A run over global arrays, or lists of those of each rank."""
        return Run(self.module, inputs, weights=self.weights, recorder=self.recorder)

    def open(self, sizes: Mapping[str, int]) -> ReferenceStream:
        """A stream whose states are zeros; `sizes` are the symbols in their shapes."""
        return ReferenceStream(self, sizes)


class ReferenceStream:
    """The states of a program between steps, by the name of their argument, per rank."""

    def __init__(self, program: ReferenceProgram, sizes: Mapping[str, int]) -> None:
        self.program, self.rows = program, StateRows.of(program.ports.states, sizes)
        module = program.module
        ranks = module.mesh.ranks if module.local else 1
        self.states: dict[str, list[np.ndarray]] = {}
        function = module.main
        for port in local_ports_of(function).states:
            shape, kind = state_shape(port, sizes), numpy_dtype(port.dtype)
            self.states[port.name] = [np.zeros(shape, kind) for _ in range(ranks)]
        names = function.result_names()
        self._kept = {names[i]: str(function.args[a].name) for i, a in function.aliases().items()}

    def step(self, inputs: Mapping[str, np.ndarray], first: int = 0) -> Arrays:
        """See Stream."""
        ports = self.program.ports
        check_plain(inputs, ports)
        module = self.program.module
        batches = [p.name for p in ports.inputs if p.shape and str(p.shape[0]) == self.rows.symbol]
        counts = [(self.rows.symbol, len(inputs[name])) for name in batches if name in inputs]
        rows = self.rows.chosen(dict(counts), first) or ...
        # copies, since results may be views of them
        parts = {name: [array[rows].copy() for array in s] for name, s in self.states.items()}
        states = parts if module.local else {k: v[0] for k, v in parts.items()}
        done = self.program.evaluated({**inputs, **states})
        for rank, results in enumerate(done.ranks()):
            for result, state in self._kept.items():
                self.states[state][rank][rows] = results[result]
        return {name: array for name, array in done.joined().items() if name not in self._kept}

    def copy_rows(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See Stream."""
        self.rows.check(sources, targets)
        for array in itertools.chain(*self.states.values()):
            array[list(targets)] = array[list(sources)]

    def clear_rows(self, rows: Sequence[int]) -> None:
        """See Stream."""
        self.rows.check(rows)
        for array in itertools.chain(*self.states.values()):
            array[list(rows)] = 0

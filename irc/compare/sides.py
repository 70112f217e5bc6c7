"""The two sides of a comparison: what computes activations, and at which points."""

from __future__ import annotations

import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from ..errors import Error
from ..generation.inputs import cache_range, complete
from ..ir.core import Function, Module, Result, Value
from ..ir.dims import bind
from ..ir.dtypes import widened
from ..ir.layouts import join_arrays, split_array
from ..ir.mesh import Mesh
from ..ir.types import TensorType
from ..ops.control import Call, Return
from ..text import parse_module
from ..text.printer import print_module
from .measure import limit_of, measure
from .points import Point, points_of

Array: TypeAlias = np.ndarray[Any, Any]
Arrays: TypeAlias = dict[str, Array]
# Takes an activation; returns the array with which the side goes on, None for the same.
Visit: TypeAlias = Callable[[Point, Array], "Array | None"]
_PROBES = 64  # values that a program returns at once


class Side(ABC):
    """One model. `takes`: whether it goes on with the arrays that a visit returns.

    After a run `apart` has the points at which ranks differ that should agree, with the error.
    """

    takes = True

    def __init__(self, title: str, points: Sequence[Point]) -> None:
        self.title, self.points = title, points
        self.apart: dict[Point, float] = {}

    def without_padding(self, inputs: Arrays) -> Arrays:
        """Random inputs without the token for padding, which some models treat in other ways."""
        return inputs

    @abstractmethod
    def run(self, inputs: Arrays, chosen: Collection[Point], visit: Visit) -> None:
        """Compute the model, and visit the chosen points in program order, results last."""


class ModuleSide(Side):
    """A module in numpy, all ranks in this process; weights are read as they are used."""

    def __init__(self, module: Module, title: str) -> None:
        super().__init__(title, points_of(module))
        self.module = module

    def run(self, inputs: Arrays, chosen: Collection[Point], visit: Visit) -> None:
        """See Side."""
        from ..backends.reference.evaluate import Run
        from ..backends.reference.weights import Weights

        class Unkept(dict[Any, Any]):
            def __setitem__(self, key: Any, value: Any) -> None:
                return

        by_value = {point.value: point for point in chosen if not point.result}
        by_name = {point.result: point for point in chosen}
        module, weights = self.module, Weights(self.module, None)
        weights.known = Unkept()

        def visited(point: Point, type: TensorType, arrays: list[Array]) -> None:
            axes = type.axes if module.local else ()
            whole, gap = joined(type, arrays, module.mesh)
            if gap > limit_of([type.dtype])[0]:
                self.apart[point] = max(gap, self.apart.get(point, 0.0))
            if (new := visit(point, whole)) is not None:
                for rank, array in enumerate(arrays):
                    arrays[rank] = split_array(new, axes, module.mesh, rank).astype(array.dtype)

        def observe(value: Value, arrays: list[Array]) -> None:
            if value in by_value:
                visited(by_value[value], value.type.global_type, arrays)

        run = Run(module, program_inputs(module, inputs), weights=weights, observe=observe)
        names, values = module.main.result_names(), module.main.returned
        for name, value, arrays in zip(names, values, run.results, strict=True):
            if name in by_name:
                visited(by_name[name], value.type.global_type, arrays)


def program_inputs(module: Module, inputs: Mapping[str, Array]) -> Arrays:
    """Those of the inputs that a module has, and the positions and caches that they imply."""
    from ..backends.base import ports_of

    ports = ports_of(module.main)
    names = {port.name for port in (*ports.inputs, *ports.states)}
    given = {name: array for name, array in inputs.items() if name in names}
    return complete(ports, given, cache_range(ports, module.dims))


def joined(type: TensorType, arrays: Sequence[Array], mesh: Mesh) -> tuple[Array, float]:
    """The global array of a value from those of all ranks, and the largest relative L2 error
    between ranks that should hold the same part of it."""
    parts = [widened(array) for array in arrays]
    if len(parts) == 1:
        return parts[0], 0.0
    first: dict[tuple[int, ...], Array] = {}
    gap = 0.0
    for rank, part in enumerate(parts):
        other = first.setdefault(tuple(mesh.index(rank, axes) for axes in type.axes), part)
        gap = max(gap, measure(part, other, float("inf")).relative_l2)
    sizes = [
        bound if isinstance(bound := bind(dim, {}), int) else n * mesh.group_size(axes)
        for dim, axes, n in zip(type.shape, type.axes, parts[0].shape, strict=True)
    ]
    return join_arrays(parts, type.axes, mesh, sizes), gap


class ProgramSide(Side):
    """A module compiled by a backend, which returns its activations, some at a time."""

    takes = False

    def __init__(self, module: Module, title: str, backend: str) -> None:
        from ..backends import get

        super().__init__(title, points_of(module))
        self.module, self.backend = module, backend
        if get(backend).rank_is_process and module.mesh.ranks > 1:
            raise Error(
                f"{title}: expected one rank, found {module.mesh.ranks}: activations of ranks that "
                "are processes are not read; give --backend reference or onnx (of B: --against)"
            )

    def run(self, inputs: Arrays, chosen: Collection[Point], visit: Visit) -> None:
        """See Side. The program is written once for every 64 points."""
        from ..driver.build import compile

        places = [place for place, point in enumerate(self.points) if point in chosen]
        for start in range(0, len(places), _PROBES):
            names = {i: self.points[i].result or f"irc_probe_{i}" for i in places[start:][:_PROBES]}
            module = parse_module(print_module(self.module, locs=True), self.module.name)
            points = points_of(module)
            added = {name: points[i].value for i, name in names.items() if not points[i].result}
            add_results(module, added)
            with tempfile.TemporaryDirectory(prefix="irc-compare-") as folder:
                built = compile(
                    module, Path(folder, "probes"), backend=self.backend, pipeline="dce"
                )
                results = built.program.run(program_inputs(module, inputs))
            for i, name in names.items():
                visit(self.points[i], widened(np.array(results.pop(name))))


def add_results(module: Module, values: Mapping[str, Value | None]) -> None:
    """Let the main function return some values besides, also of functions that it calls."""
    added: dict[Function, dict[str, Value]] = {f: {} for f in module.functions.values()}
    for name, value in values.items():
        if value is not None and value.producer is not None and value.producer.parent is not None:
            added[value.producer.parent][name] = value
    for function, own in added.items():  # a function comes before those that call it
        for op in function:
            if isinstance(op, Call) and added[op.callee]:
                new = op.rebuilt(op.operands)
                function.insert(new, op)
                for old, result in zip(op.results, new.results, strict=False):
                    old.replace_by(result)
                own |= zip(added[op.callee], new.results[len(op.results) :], strict=True)
                op.erase()
        before = function.last
        if own and before is not None:
            named = function.results or map(Result, function.result_names())
            function.results = (*named, *map(Result, own))
            function.insert(Return([*before.operands, *own.values()]), before).loc = before.loc
            before.erase()

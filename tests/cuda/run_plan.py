"""Runs whole plans on the host: launches by emulate.py, collectives and copies by numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from irc.backends.cuda.codegen.kernels import number
from irc.backends.cuda.plan import Argument, Buffer, Launch, LibraryCall, Plan
from irc.backends.cuda.plan.build import Planner
from irc.backends.cuda.plan.product import Product
from irc.backends.reference.inputs import Input, bind_sizes
from irc.backends.reference.weights import Weights
from irc.ir.core import Module
from irc.ir.dtypes import dtype, numpy_dtype, packed, unpacked
from irc.ir.layouts import join_arrays, split_array
from irc.ir.types import TensorType
from irc.ops.collective import REDUCTIONS
from tests.cuda.emulate import Memory, prepare, run_kernel
from tests.cuda.library_calls import product_of
from tests.cuda.verify_plan import verify_plan

Array: TypeAlias = np.ndarray[Any, Any]


class View(Memory):
    """Bytes of other memory."""

    def __init__(self, memory: Memory, offset: int, nbytes: int) -> None:
        self.memory, self.offset = memory, offset
        self.bytes = memory.bytes[offset : offset + nbytes]

    @property
    def address(self) -> int:
        return self.memory.address + self.offset

    def check(self, what: str) -> None:
        self.memory.check(what)


class HostRank:
    """The memory of one rank's plan."""

    def __init__(self, planner: Planner, plan: Plan, weights: Weights) -> None:
        verify_plan(plan)
        self.plan = plan
        arena = Memory(plan.arena)
        self.memory: dict[str, Memory] = {}
        for name, buffer in plan.buffers.items():
            if buffer.place == "arena":
                self.memory[name] = View(arena, buffer.offset, buffer.nbytes)
                continue
            self.memory[name] = Memory(buffer.nbytes)
            if buffer.place == "zeros":
                self.memory[name].bytes[:] = 0
            if buffer.place == "weight":
                self.set(name, weights.get(planner.weights[name], planner.rank))

    def set(self, name: str, array: Array) -> None:
        """Fill a buffer."""
        buffer = self.plan.buffers[name]
        assert array.shape == buffer.shape, (name, array.shape, buffer.shape)
        flat = packed(array) if dtype(buffer.dtype).bits == 4 else np.ascontiguousarray(array)
        self.memory[name].bytes[:] = flat.reshape(-1).view(np.uint8)

    def get(self, name: str) -> Array:
        """The elements of a buffer."""
        return elements(self.memory[name].bytes, self.plan.buffers[name])

    def at(self, argument: Argument) -> Memory:
        """The memory of a pointer argument."""
        return self.memory[argument.buffer]

    def launch(self, step: Launch) -> None:
        """One launch; memory of constant arguments must stay as it is."""
        arguments = [self.at(a) if isinstance(a, Argument) else a for a in step.arguments]
        kernel = self.plan.kernels[step.kernel]
        run_kernel(kernel, step.grid, arguments, step.shared)


def elements(data: Array, buffer: Buffer) -> Array:
    """Bytes of a buffer as an array."""
    if dtype(buffer.dtype).bits == 4:
        count = int(np.prod(buffer.shape, dtype=np.int64))
        return unpacked(data, buffer.dtype)[:count].reshape(buffer.shape)
    return data.copy().view(numpy_dtype(buffer.dtype)).reshape(buffer.shape)


def run_steps(ranks: Sequence[HostRank], module: Module) -> None:
    """All steps of one plan per rank, in lockstep."""
    prepare(kernel for rank in ranks for kernel in rank.plan.kernels.values())
    for steps in zip(*(rank.plan.steps for rank in ranks), strict=True):
        first = steps[0]
        if isinstance(first, LibraryCall) and first.library == "nccl":
            _collective(ranks, [step for step in steps if isinstance(step, LibraryCall)], module)
            continue
        for rank, step in zip(ranks, steps, strict=True):
            if isinstance(step, Launch):
                rank.launch(step)
            elif step.library == "cublaslt":
                _library_call(rank, step)
            else:
                _memory_call(rank, step)


def _memory_call(rank: HostRank, step: LibraryCall) -> None:
    assert step.library == "memory", f"{step.library} does not run on the host"
    count = int(str(step.settings["nbytes"]))
    target = rank.at(step.arguments[-1]).bytes
    if step.function == "zero":
        target[:count] = 0
    else:
        target[:count] = rank.at(step.arguments[0]).bytes[:count]


def _library_call(rank: HostRank, step: LibraryCall) -> None:
    *read, y = step.arguments
    buffers = rank.plan.buffers
    arrays = [elements(rank.at(a).bytes, buffers[a.buffer]) for a in read]
    found = product_of(Product.of(step.settings), arrays)
    rank.at(y).bytes[: found.nbytes] = found.reshape(-1).view(np.uint8)


def _collective(ranks: Sequence[HostRank], steps: Sequence[LibraryCall], module: Module) -> None:
    settings = steps[0].settings
    axes = tuple(str(settings["axis"]).split("."))
    for group in module.mesh.groups(axes):
        sources = [ranks[r].get(steps[r].arguments[0].buffer).reshape(-1) for r in group]
        with np.errstate(invalid="ignore"):  # infinities of both signs
            found = _combined(steps[0].function, sources, str(settings["op"]), settings["root"])
        for r, array in zip(group, found, strict=True):
            name = steps[r].arguments[1].buffer
            ranks[r].set(name, array.reshape(ranks[r].plan.buffers[name].shape))


def _combined(function: str, parts: Sequence[Array], op: str, root: Any) -> Sequence[Array]:
    count = len(parts)
    if function in ("all_reduce", "reduce", "reduce_scatter"):
        total = reduce(REDUCTIONS[op], parts).astype(parts[0].dtype)
        if function == "reduce_scatter":
            return np.split(total, count)
        return [total if function == "all_reduce" or i == root else 0 * total for i in range(count)]
    if function in ("all_gather", "gather"):
        joined = np.concatenate(parts)
        keep = function == "all_gather"
        return [joined if keep or i == root else np.zeros_like(joined) for i in range(count)]
    if function == "broadcast":
        return [parts[root]] * count
    if function == "scatter":
        return np.split(parts[root], count)
    assert function == "all_to_all", function
    pieces = [np.split(part, count) for part in parts]
    return [np.concatenate(arrived) for arrived in zip(*pieces, strict=True)]


class HostProgram:
    """Plans of a module's main function, one per rank, on the host."""

    def __init__(self, module: Module, base: Path | str | None = None, fused: bool = False) -> None:
        self.module, self.weights = module, Weights(module, base)
        count = module.mesh.ranks if module.local else 1
        self.planners = [Planner(module, rank=rank, fused=fused) for rank in range(count)]

    def run(self, inputs: Mapping[str, Any], **sizes: int) -> dict[str, Array]:
        """All results by name, with global shapes, as `evaluate` gives them."""
        function, mesh = self.module.main, self.module.mesh
        given = dict(inputs)
        if self.module.local:
            axes = {str(arg.name): arg.type.global_type.axes for arg in function.args}
            given = {
                name: [split_array(array, axes[name], mesh, p.rank) for p in self.planners]
                for name, array in inputs.items()
            }
        found = self.ranks(given, **sizes)
        return {
            name: self._joined(layout, [results[name] for results in found])
            for name, layout in zip(
                function.result_names(),
                [value.type.global_type for value in function.returned],
                strict=True,
            )
        }

    def ranks(self, inputs: Mapping[str, Any], **sizes: int) -> list[dict[str, Array]]:
        """The results of every rank, as `evaluate_ranks` gives them, for an array or a list."""
        ranks = [self._rank(planner, inputs, sizes) for planner in self.planners]
        run_steps(ranks, self.module)
        names = self.module.main.result_names()
        return [
            {name: rank.get(buffer) for name, buffer in zip(names, rank.plan.results, strict=True)}
            for rank in ranks
        ]

    def _rank(
        self, planner: Planner, inputs: Mapping[str, Any], sizes: Mapping[str, int]
    ) -> HostRank:
        args: list[Input] = []
        for arg in self.module.main.args:
            given = inputs[str(arg.name)]
            array = given[planner.rank] if isinstance(given, list) else given
            args.append(Input(str(arg.name), arg.type, np.asarray(array)))
        self.sizes = bind_sizes(args, sizes)
        rank = HostRank(planner, planner.plan(self.sizes), self.weights)
        for each in args:
            rank.set(f"%{each.name}", each.array)
        return rank

    def _joined(self, layout: TensorType, arrays: Sequence[Array]) -> Array:
        if not (self.module.local and layout.sharded):
            return arrays[0]
        shape = [number(dim, self.sizes) for dim in layout.shape]
        return join_arrays(arrays, layout.axes, self.module.mesh, shape)

"""Runs whole plans on the host: launches by emulate.py, collectives and copies by numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from irc.backends.cuda.codegen.kernels import number
from irc.backends.cuda.plan import Argument, Launch, LibraryCall, Plan
from irc.backends.cuda.plan.build import Planner
from irc.backends.cuda.plan.product import Product
from irc.backends.cuda.plan.regime import Target
from irc.backends.cuda.tuning import device_of
from irc.backends.ranks.communicator import CollectiveCall
from irc.backends.reference.inputs import Input, bind_sizes
from irc.backends.reference.weights import Weights
from irc.ir.core import Module
from irc.ir.dtypes import dtype, numpy_dtype, packed, unpacked
from irc.ir.layouts import join_arrays, split_array
from irc.ir.types import TensorType
from tests.cuda.emulate import Access, Memory, prepare, run_kernel
from tests.cuda.library_calls import product_of
from tests.cuda.verify_plan import verify_plan
from tests.ranks.collectives import meant

Array: TypeAlias = np.ndarray[Any, Any]


class HostRank:
    """The memory of one rank's plan."""

    def __init__(self, planner: Planner, plan: Plan, weights: Weights) -> None:
        verify_plan(plan)
        self.plan = plan
        arena = Memory(plan.arena)
        self.memory: dict[str, Memory] = {}
        for name, buffer in plan.buffers.items():
            if buffer.place == "arena":
                self.memory[name] = Memory(0)
                self.memory[name].bytes = arena.bytes[buffer.offset :][: buffer.nbytes]
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
        data, buffer = self.memory[name].bytes, self.plan.buffers[name]
        if dtype(buffer.dtype).bits == 4:
            count = int(np.prod(buffer.shape, dtype=np.int64))
            return unpacked(data, buffer.dtype)[:count].reshape(buffer.shape)
        return data.copy().view(numpy_dtype(buffer.dtype)).reshape(buffer.shape)

    def launch(self, step: Launch) -> None:
        """One launch, which uses its arguments as the plan says."""
        given = [each for each in step.arguments if isinstance(each, Argument)]
        names = [f"{self.plan.buffers[each.buffer].place} {each.buffer}" for each in given]
        access = Access(
            names,
            step.early if step.early or step.programmatic else None,
            [i for i, each in enumerate(given) if not each.written],
        )
        arguments = [
            self.memory[a.buffer] if isinstance(a, Argument) else a for a in step.arguments
        ]
        kernel = self.plan.kernels[step.kernel]
        run_kernel(kernel, step.grid, arguments, step.shared, access=access)


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
    first, target = (rank.memory[step.arguments[i].buffer].bytes for i in (0, -1))
    target[:count] = 0 if step.function == "zero" else first[:count]


def _library_call(rank: HostRank, step: LibraryCall) -> None:
    *read, y = step.arguments
    found = product_of(Product.of(step.settings), [rank.get(each.buffer) for each in read])
    rank.memory[y.buffer].bytes[: found.nbytes] = found.reshape(-1).view(np.uint8)


def _collective(ranks: Sequence[HostRank], steps: Sequence[LibraryCall], module: Module) -> None:
    function, settings = steps[0].function, steps[0].settings
    for group in module.mesh.groups(tuple(str(settings["axis"]).split("."))):
        call = CollectiveCall(
            function, str(settings["op"]), tuple(group), int(str(settings["root"] or 0))
        )
        sources = [ranks[r].get(steps[r].arguments[0].buffer).reshape(-1) for r in group]
        for r, array in zip(group, meant(call, sources), strict=True):
            name = steps[r].arguments[1].buffer
            ranks[r].set(name, array.reshape(ranks[r].plan.buffers[name].shape))


class HostProgram:
    """Plans of a module's main function, one per rank, on the host."""

    def __init__(
        self,
        module: Module,
        base: Path | str | None = None,
        fused: bool = False,
        target: Target | None = None,
    ) -> None:
        self.module, self.weights = module, Weights(module, base)
        count = module.mesh.ranks if module.local else 1
        self.planners = [
            Planner(module, rank=rank, fused=fused, device=device_of(target))
            for rank in range(count)
        ]

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

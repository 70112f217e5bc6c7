"""What a module will need and how fast it can run, per rank, before anything is built."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ..core import Function, Module, Value
from ..dims import exact_divide, symbol
from .communication import Message, message, messages
from .cost import Cost, cost_of, operations, total
from .memory import Memory, memory
from .sizes import LocalSizes
from .stages import PIPELINE, stage_of
from .topology import Topology


@dataclass(frozen=True)
class Phase:
    """One run of a module at some sizes, all its stages one after the other; times in microseconds.

    `tokens` is how many it works on, of all rows, and `past` how many stand in the caches before.
    `cost` and `messages` are those of one rank of every stage. `roofline_us` is arithmetic or
    memory, whichever takes longer, operation by operation; `kernels_us` what starting the kernels
    costs; `collectives_us` the communication. `memory` is by stage.
    """

    name: str
    sizes: Mapping[str, int]
    tokens: int
    past: int
    cost: Cost
    messages: tuple[Message, ...]
    memory: tuple[Memory, ...]
    roofline_us: float
    kernels_us: float
    collectives_us: float

    @property
    def us(self) -> float:
        """The whole run."""
        return self.roofline_us + self.kernels_us + self.collectives_us


def phase(
    name: str,
    module: Module,
    sizes: LocalSizes,
    topology: Topology,
    tokens: int = 1,
    stored: str | None = None,
) -> Phase:
    """The forecast of one run of the main function; of either view.

    `stored` is the float dtype of the checkpoint, see `weight_bytes`.
    """
    stages = functions_by_stage(module)
    costs = [
        cost_of(op, sizes) for stage in stages for function in stage for op in operations(function)
    ]
    found = [m for stage in stages for f in stage for m in messages(f, sizes, topology)]
    found += hand_overs(module, sizes, topology)
    kernels = sum(cost.kernels for cost in costs) * topology.device.kernel_us
    return Phase(
        name,
        dict(sizes.symbols),
        tokens,
        sizes.past,
        total(costs),
        tuple(found),
        tuple(memory(stage, sizes, topology.device, stored) for stage in stages),
        sum(cost.time(topology.device) for cost in costs) - kernels,
        kernels,
        sum(each.us for each in found),
    )


def functions_by_stage(module: Module) -> list[list[Function]]:
    """What the ranks of each pipeline stage run; without stages, the main function."""
    found: dict[int, list[Function]] = {}
    for op in module.main:
        if stage_of(op) >= 0:
            found.setdefault(stage_of(op), []).append(op.attributes["callee"])
    return [found[stage] for stage in sorted(found)] or [[module.main]]


def hand_overs(module: Module, sizes: LocalSizes, topology: Topology) -> list[Message]:
    """What every stage sends to the next."""
    taken: dict[int, dict[Value, None]] = {}
    for op in module.main:
        for value in op.operands:
            maker = value.producer
            if maker is not None and 0 <= stage_of(maker) < stage_of(op):
                taken.setdefault(stage_of(maker), {})[value] = None
    totals = [sum(sizes.bytes(v.type) for v in taken[stage]) for stage in sorted(taken)]
    return [message("send", (PIPELINE,), size, sizes.mesh, topology) for size in totals]


def sizes_after(module: Module, given: Mapping[str, int], past: int = 0) -> LocalSizes:
    """Sizes for the symbols that a module has now, from those it had before any pass.

    A pass that splits a symbol S over the axis tp puts 2*S_tp in its place.
    """
    found: dict[str, int] = {}
    for name, (_, typical, _) in module.dims.items():
        old = name if name in given else _split_symbol(name, given, module.mesh.names)
        if old is None:
            found[name] = typical
        else:
            found[name] = given[old] if old == name else -(-given[old] // _parts(module, name))
    return LocalSizes(module.mesh, {**given, **found}, past)


def _split_symbol(name: str, known: Iterable[str], axes: Collection[str]) -> str | None:
    """The symbol that `name` is a part of: the longest one that only axes follow."""
    suffix = "(_(" + "|".join(map(re.escape, axes)) + "))+_*"
    for old in sorted(known, key=len, reverse=True):
        if name.startswith(old) and axes and re.fullmatch(suffix, name[len(old) :]):
            return old
    return None


def _parts(module: Module, name: str) -> int:
    """The factor that a new symbol has in the shapes of arguments: how many parts there are."""
    function = module.main
    shapes = (function.argument_layout(arg).shape for arg in function.args)
    found = (exact_divide(dim, symbol(name)) for shape in shapes for dim in shape)
    return next((factor for factor in found if isinstance(factor, int) and factor), 1)

"""The forecast of a module: memory, communication and time per rank, before anything is built."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ..ir.core import Module
from ..ir.dims import exact_divide, symbol
from .communication import Message, message, messages
from .cost import Cost, cost_of, operations, total
from .memory import Memory, memory
from .sizes import LocalSizes
from .stages import PIPELINE, Stages
from .topology import Topology


@dataclass(frozen=True)
class Phase:
    """One run of a module at some sizes, all its stages one after the other; times in microseconds.

    `tokens` counts the new tokens of all rows, `past` those in the caches before. `cost` and
    `messages` are those of one rank of every stage. `roofline_us` is arithmetic or memory,
    whichever takes longer, operation by operation; `kernels_us` the start of the kernels;
    `collectives_us` the communication. `memory` is by stage.
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
        """The time of the run."""
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
    stages = Stages(module.main).functions()
    costs = [
        cost_of(op, sizes) for stage in stages for function in stage for op in operations(function)
    ]
    sent = [m for stage in stages for f in stage for m in messages(f, sizes, topology)]
    sent += stage_transfers(module, sizes, topology)
    kernels = sum(cost.kernels for cost in costs) * topology.device.kernel_us
    return Phase(
        name,
        dict(sizes.symbols),
        tokens,
        sizes.past,
        total(costs),
        tuple(sent),
        tuple(memory(stage, sizes, topology.device, stored) for stage in stages),
        sum(cost.time(topology.device) for cost in costs) - kernels,
        kernels,
        sum(transfer.us for transfer in sent),
    )


def stage_transfers(module: Module, sizes: LocalSizes, topology: Topology) -> list[Message]:
    """The transfer from every stage to the next."""
    totals = [sum(sizes.bytes(v.type) for v in sent) for sent in Stages(module.main).transfers()]
    return [message("send", (PIPELINE,), size, sizes.mesh, topology) for size in totals]


def sizes_after(module: Module, given: Mapping[str, int], past: int = 0) -> LocalSizes:
    """Sizes for the symbols that a module has now, from those it had before any pass.

    A pass that shards a symbol S over the axis tp replaces it by 2*S_tp.
    """
    values: dict[str, int] = {}
    for name, (_, typical, _) in module.dims.items():
        old = name if name in given else _split_symbol(name, given, module.mesh.names)
        if old is None:
            values[name] = typical
        else:
            values[name] = given[old] if old == name else -(-given[old] // _parts(module, name))
    return LocalSizes(module.mesh, {**given, **values}, past)


def _split_symbol(name: str, symbols: Iterable[str], axes: Collection[str]) -> str | None:
    """The symbol of which `name` is a shard: the longest one that only axes follow."""
    suffix = "(_(" + "|".join(map(re.escape, axes)) + "))+_*"
    for old in sorted(symbols, key=len, reverse=True):
        if name.startswith(old) and axes and re.fullmatch(suffix, name[len(old) :]):
            return old
    return None


def _parts(module: Module, name: str) -> int:
    """The factor of a new symbol in the shapes of arguments: the number of shards."""
    function = module.main
    shapes = (arg.type.global_type.shape for arg in function.args)
    factors = (exact_divide(dim, symbol(name)) for shape in shapes for dim in shape)
    return next((factor for factor in factors if isinstance(factor, int) and factor), 1)

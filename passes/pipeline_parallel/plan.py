"""Where the main function is divided into stages: cost of layers, bytes sent between stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from irc.analysis.cost import cost_of, operations
from irc.analysis.partition import balanced_cuts
from irc.analysis.sizes import LocalSizes, typical_sizes
from irc.errors import Error
from irc.ir.core import Function, Module, Op, Value, Weight
from irc.ir.dims import Dim

from .layers import Groups, alive_between, groups_of
from .recompute import FLOPS_PER_BYTE, recomputed
from .split import home

# By how much the costliest stage may exceed the least possible to send fewer bytes. Between
# layers there is little to gain; inside them some places are far better than others.
LAYER_SLACK, OPERATION_SLACK = 0.05, 0.25
UNKNOWN = 64  # elements along a dim that the module gives no range for


class Work(NamedTuple):
    """The floating-point operations of a group, and the bytes of the weights it reads."""

    flops: float
    weights: int

    @property
    def price(self) -> float:
        """The bytes from memory that take as long."""
        return self.weights + self.flops / FLOPS_PER_BYTE


class Plan:
    """The groups that the main function can be cut between, at typical sizes and for one rank.

    `alive[i]` are the values that a cut before group `i` sends and `handed[i]` their bytes;
    `obstacles[i]` says why there can be none, where that is so. `repeated` are the operations that
    every stage runs for itself.
    """

    def __init__(self, module: Module) -> None:
        self.main = module.main
        self.sizes = LocalSizes(module.mesh, _symbol_sizes(module))
        self.repeated = recomputed(self.main, self.sizes)
        self.groups = groups_of(self.main, self.repeated)
        self.work = _work(self.groups, self.sizes)
        self.alive = alive_between(self.groups.place, self.groups.count)
        self.handed = [self.bytes(values) for values in self.alive]
        self.obstacles = _obstacles(self.main, self.groups, self.alive)

    def bytes(self, values: Sequence[Value]) -> int:
        """The bytes of values on one rank."""
        return sum(self.sizes.bytes(value.type) for value in values)

    def balanced(self, stages: int) -> list[int]:
        """The groups at which the stages after the first begin, by cost."""
        groups, allowed = self.groups, [obstacle is None for obstacle in self.obstacles]
        if groups.count < stages:
            beside = "" if groups.names else " beside those that every stage can run for itself"
            raise Error(
                f"@{self.main.name} has {groups.count} {groups.kind}{beside}, too few for "
                f"{stages} stages"
            )
        slack = LAYER_SLACK if groups.names else OPERATION_SLACK
        handed = self.handed if groups.names else _at_least_usual(self.handed)
        begins = balanced_cuts([work.price for work in self.work], handed, allowed, stages, slack)
        if begins is None:
            why = next(obstacle for obstacle in self.obstacles[1:] if obstacle is not None)
            raise Error(
                f"@{self.main.name} cannot be cut into {stages} stages: only {sum(allowed[1:])} of "
                f"{len(allowed) - 1} places between its {groups.kind} are possible; {why}"
            )
        return begins

    def check(self, begins: list[int]) -> None:
        """An Error where stages cannot begin at these layers."""
        groups = self.groups
        if not groups.names:
            raise Error(
                f"cuts counts layers, but no operation of @{self.main.name} has a module scope "
                "with a number in it, such as layers.0; leave cuts out"
            )
        for begin in begins:
            if begin >= groups.count:
                raise Error(f"there is no layer {begin} to cut at; the last is {groups.count - 1}")
            obstacle = self.obstacles[begin]
            if obstacle is not None:
                raise Error(f"no stage can begin at layer {begin}: {obstacle}")


def _at_least_usual(handed: list[int]) -> list[int]:
    """Bytes without the outliers below: a few rows before a head are no reason to cut just there.

    Between the layers of a transformer, and inside at one place or two, the hidden states alone
    are alive, which is about one place in ten.
    """
    usual = sorted(handed[1:])[len(handed) // 10]
    return [max(usual, size) for size in handed]


def weights_of(ops: Sequence[Op]) -> dict[Weight, None]:
    """The weights that operations use, each once, in order of first use."""
    return {v: None for op in ops for v in op.operands if isinstance(v, Weight)}


def _symbol_sizes(module: Module) -> dict[str, int]:
    """The typical size of every symbol, a guess where the module gives no range."""
    types = {v.type for op in module.ops() for v in (*op.operands, *op.results)}
    types |= {arg.type for arg in module.main.args}
    dims = {dim for type in types for dim in type.shape if isinstance(dim, Dim)}
    symbols = {name for dim in dims for name in dim.symbols()}
    return dict.fromkeys(symbols, UNKNOWN) | typical_sizes(module)


def _work(groups: Groups, sizes: LocalSizes) -> list[Work]:
    flops = [0.0] * groups.count
    read: list[dict[Weight, None]] = [{} for _ in flops]
    for op, group in groups.place.items():
        parts = list(operations(op.attributes["callee"])) if op.opname == "call" else [op]
        flops[group] += sum(cost_of(part, sizes).flops for part in parts)
        read[group] |= weights_of([op, *parts])
    held = [sum(sizes.bytes(weight.type) for weight in weights) for weights in read]
    return [Work(f, w) for f, w in zip(flops, held, strict=True)]


def _obstacles(main: Function, groups: Groups, alive: list[list[Value]]) -> list[str | None]:
    """Per group the reason why no stage can begin there, if there is one."""
    reasons: list[str | None] = [None] * groups.count
    for group, values in enumerate(alive):
        for value in values:
            if value.type.partial:
                reasons[group] = (
                    f"%{value.name or '_'} crosses the place before {groups.name(group)} as "
                    f"{value.type}; put an all_reduce before it"
                )
    returned, place = main.returned, groups.place
    for at, index in main.aliases().items():
        state = main.args[index]
        users = [place[user] for user in state.users if user in place]
        users += [home(returned[at], place, state)] if users else []
        for group in range(min(users, default=0) + 1, max(users, default=0) + 1):
            reasons[group] = (
                f"the state %{state.name} is used before and after {groups.name(group)} begins, "
                "and a state belongs to one stage"
            )
    return reasons

"""Chooses how the weights of products and lookups are sharded over tp and ep, by the cost.

A parameter is column-parallel (its outputs are sharded), row-parallel (it is contracted with shards
of its inputs, and the result is a partial sum), vocabulary-parallel, or replicated. The cost is the
time of the collectives that all choices cause together; parameters at equal places of equal layers
are one kind and have one choice. Pairs of column- and row-parallel products are Shoeybi et al.,
2019; the search changes one kind at a time, or all that begin or end at one group of dimensions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from irc.analysis.communication import slowest_link
from irc.analysis.cost import PER_GB, cost_of
from irc.analysis.sizes import LocalSizes, typical_sizes
from irc.analysis.topology import Topology
from irc.analysis.topology_file import default_topology
from irc.analysis.units import amount
from irc.ir.core import Module, Value
from irc.ir.dims import Dim, DimLike
from irc.ir.mesh import Mesh
from irc.ir.types import Axes
from irc.ops import Embedding

from .pad_blocks import keeps_blocks
from .structure import Group, Parameter, Place, Slot, Structure

if TYPE_CHECKING:
    from .plan import Plan

REPLICATED_SHARE = 0.045  # of the bytes of all parameters: at most so many are replicated to save
_SIZE = 64  # of symbols without a range
Choice = int | None  # the dimension of a parameter that is sharded; None: it is replicated
IsOpen = Callable[[Structure, Parameter], bool] | None


class Layout(NamedTuple):
    """How a weight is sharded, as in a row of a plan, and why."""

    splits: tuple[tuple[int, Axes], ...]
    why: str


def choose(plan: Plan, is_open: IsOpen) -> dict[str, Layout]:
    """Layouts, by name, of the weights of products and lookups for which the plan has no row.

    Parameters that are not `is_open` get none and are replicated; without it all get one.
    """
    if plan.module.mesh.group_size(plan.mesh_axes(("tp",))) == 1:
        return {}
    return Search(plan, is_open).layouts()


def is_end(structure: Structure, parameter: Parameter) -> bool:
    """Whether a parameter is a table of lookups, or gives results of the model."""
    if any(isinstance(op, Embedding) for op in parameter.ops):
        return True
    outputs = [e for slot in parameter.slots.values() for e in slot.outputs]
    groups = [structure.groups.get(structure.group_of(e), Group()) for e in outputs]
    return any(group.small or "return" in group.ends.values() for group in groups)


@cache
def _topology() -> Topology:
    return default_topology()


class Prices:
    """Times in us, of collectives over some axes and of products that all ranks repeat."""

    def __init__(self, module: Module, axes: Axes) -> None:
        self._group_size = module.mesh.group_size(axes)
        args = [arg for function in module.functions.values() for arg in function.args]
        dims = [dim for arg in args for dim in arg.type.shape if isinstance(dim, Dim)]
        names = dict.fromkeys((name for dim in dims for name in dim.symbols()), _SIZE)
        self._sizes = LocalSizes(Mesh(()), names | typical_sizes(module))
        self._link = slowest_link(module.mesh.groups(axes), _topology())
        self._times: dict[tuple[str, int], float] = {}

    def bytes(self, value: Value) -> int:
        """The bytes of a complete value."""
        return self._sizes.bytes(value.type.replicated)

    def gather(self, value: Value) -> float:
        """Of an all_gather."""
        return self._time("all_gather", self.bytes(value))

    def sum(self, value: Value) -> float:
        """Of an all_reduce."""
        return self._time("all_reduce", self.bytes(value))

    def _time(self, kind: str, size: int) -> float:
        key = (kind, size)
        if key not in self._times:
            self._times[key] = _topology().time(kind, self._group_size, size, self._link)
        return self._times[key]

    def replicated(self, parameter: Parameter) -> float:
        """Of what ranks repeat where a parameter is replicated, and what its memory is worth."""
        device = _topology().device
        costs = [cost_of(op, self._sizes) for op in parameter.ops]
        busy = sum(cost.time(device) - cost.kernels * device.kernel_us for cost in costs)
        memory = PER_GB * sum(map(self.bytes, parameter.weights)) / 1e9
        return (busy + memory) * (1 - 1 / self._group_size)


@dataclass
class Kind:
    """Parameters at equal places of equal layers, and the choices that they have."""

    first: Parameter
    options: list[Choice]
    count: int = 0
    bytes: int = 0
    is_fixed: bool = False


Picks = frozenset[tuple[int, int]]  # kinds, with a dimension of each


@dataclass(frozen=True)
class Term:
    """A part of the cost: `time` where any of `begins` is chosen, and that of the `gathers` then.

    A gather is needed unless all its readers are chosen.
    """

    begins: Picks
    time: float
    gathers: tuple[tuple[float, Picks], ...] = ()

    @property
    def picks(self) -> Picks:
        """All kinds that it depends on."""
        return self.begins.union(*(readers for _, readers in self.gathers))

    def cost(self, choices: list[Choice]) -> float:
        """In us."""
        if not any(choices[kind] == dim for kind, dim in self.begins):
            return 0.0
        time = self.time
        for gather, readers in self.gathers:
            if not all(choices[kind] == dim for kind, dim in readers):
                time += gather
        return time


class Search:
    """The search for the choices of least cost."""

    def __init__(self, plan: Plan, is_open: IsOpen) -> None:
        self._plan, axes = plan, plan.mesh_axes(("tp",))
        self._prices = Prices(plan.module, axes)
        self._structure = Structure(plan.module, axes)
        self._begins = self._beginnings()
        self._kinds: list[Kind] = []
        self._kind_of = self._classify(is_open)
        self._terms = self._cost_terms()
        self._touched: list[list[Term]] = [[] for _ in self._kinds]
        for term in self._terms:
            for kind in {kind for kind, _ in term.picks}:
                self._touched[kind].append(term)
        self._choices = self._replicate(self._search())

    # kinds of parameters, and what can be chosen

    def _beginnings(self) -> dict[int, list[Place]]:
        """The parameters and dimensions at which each group begins."""
        begins: dict[int, dict[Place, None]] = {}
        for number, parameter in enumerate(self._structure.parameters):
            for dim, slot in parameter.slots.items():
                for output in slot.outputs:
                    begins.setdefault(self._structure.group_of(output), {})[number, dim] = None
        return {group: list(places) for group, places in begins.items()}

    def _classify(self, is_open: IsOpen) -> list[int]:
        """Find the kinds; the kind of every parameter, by what is around it."""
        structure, bytes = self._structure, self._prices.bytes
        fixed = [self._fixed(parameter, is_open) for parameter in structure.parameters]
        own = [(p.weight.type, f) for p, f in zip(structure.parameters, fixed, strict=True)]
        around, labels, numbers = dict[int, int](), dict[Any, int](), dict[Any, int]()
        for group in dict.fromkeys([*self._begins, *structure.groups]):
            around[group] = labels.setdefault(self._label(group, own), len(labels))
        kind_of: list[int] = []
        for parameter, options, mine in zip(structure.parameters, fixed, own, strict=True):
            slots = frozenset(
                (
                    *(dim, slot.kind),
                    _counted(around[structure.group_of(e)] for e in slot.outputs),
                    _counted(around[structure.group_of(e)] for e in slot.inputs),
                    _counted(map(bytes, slot.sums)),
                )
                for dim, slot in parameter.slots.items()
            )
            number = numbers.setdefault((mine, slots), len(numbers))
            if number == len(self._kinds):
                free = [*options] or self._options(parameter)
                self._kinds.append(Kind(parameter, free, is_fixed=bool(options)))
            kind = self._kinds[number]
            kind.count += 1
            kind.bytes += sum(map(bytes, parameter.weights))
            kind_of.append(number)
        return kind_of

    def _label(self, number: int, own: list[Any]) -> Any:
        """What a group is like; groups that are alike have equal labels."""
        group, sizes = self._structure.groups.get(number, Group()), self._prices.bytes
        readers = (
            (sizes(value), _counted((own[n], dim) for n, dim in places))
            for value, places in group.readers.items()
        )
        begins = _counted((own[n], dim) for n, dim in self._begins.get(number, []))
        parts = (group.ends, group.sums, group.small)
        return begins, _counted(readers), *(_counted(map(sizes, values)) for values in parts)

    def _fixed(self, parameter: Parameter, is_open: IsOpen) -> tuple[Choice, ...]:
        """The one choice that is possible where a row of the plan makes it."""
        row = self._plan.row_of(parameter.weight)
        if row is not None:
            return (next((dim for dim, axes in row.splits if "tp" in axes), None),)
        return () if is_open is None or is_open(self._structure, parameter) else (None,)

    def _options(self, parameter: Parameter) -> list[Choice]:
        """The dimensions that have an element for every rank; stacked products last."""
        experts, shape = self._experts(parameter), parameter.weight.type.shape
        axes = self._plan.mesh_axes(("tp",), [("ep",)] if experts is not None else [])
        least = max(2, self._plan.module.mesh.group_size(axes))
        dims = [dim for dim in parameter.slots if dim != experts and _at_least(shape[dim], least)]
        order = sorted(dims, key=lambda dim: (parameter.slots[dim].stacked, dim))
        whole = [dim for dim in order if keeps_blocks(parameter.weight, dim, least, parameter.ops)]
        return [*(whole or order)] if axes and dims else [None]

    def _experts(self, parameter: Parameter) -> int | None:
        """The dimension that is sharded over ep."""
        if not self._plan.mesh_axes(("ep",)):
            return None
        return next((dim for dim, slot in parameter.slots.items() if self._is_experts(slot)), None)

    def _is_experts(self, slot: Slot) -> bool:
        """Whether a dimension stands for products of one group each, unlike heads and channels."""
        groups = (self._begins[self._structure.group_of(e)] for e in slot.outputs)
        parameters = self._structure.parameters
        return slot.stacked and all(parameters[n].slots[d].stacked for g in groups for n, d in g)

    # the cost

    def _cost_terms(self) -> dict[Term, int]:
        """Every part of the cost, and how often it is there."""
        terms = Counter[Term]()
        prices, members = self._prices, dict[Value, set[tuple[int, int]]]()
        for number, parameter in enumerate(self._structure.parameters):
            for dim, slot in parameter.slots.items():
                for value in slot.sums:
                    members.setdefault(value, set()).add((self._kind_of[number], dim))
        for value, picks in members.items():
            tables = all(map(_is_table, (self._kinds[kind].first for kind, _ in picks)))
            # rewrite-embeddings looks rows of tables up by columns where that takes less
            time = prices.gather(value) if tables else prices.sum(value)
            terms[Term(frozenset(picks), time)] += 1
        for number, places in self._begins.items():
            group = self._structure.groups.get(number, Group())
            ends = group.ends.keys() - self._structure.logits
            time = sum(sorted(map(prices.gather, [*ends, *group.small])))
            time += sum(map(prices.sum, group.sums))
            gathers = Counter(
                (prices.gather(value), self._picks(readers))
                for value, readers in group.readers.items()
                if value not in group.ends
            )
            costs = sorted((t * n, sorted(picks)) for (t, picks), n in gathers.items())
            key = tuple((t, frozenset(picks)) for t, picks in costs)
            terms[Term(self._picks(places), time, key)] += 1
        return terms

    def _picks(self, places: Iterable[Place]) -> Picks:
        return frozenset((self._kind_of[number], dim) for number, dim in places)

    def _change(self, choices: list[Choice], picks: Iterable[tuple[int, Choice]]) -> float:
        """The cost that other choices of some kinds add, in us."""
        new, kinds = choices.copy(), dict.fromkeys(kind for kind, _ in picks)
        for kind, choice in picks:
            new[kind] = choice
        touched = {id(term): term for kind in kinds for term in self._touched[kind]}
        return sum(
            self._terms[term] * (term.cost(new) - term.cost(choices)) for term in touched.values()
        )

    # the search

    def _search(self) -> list[Choice]:
        """The best choices that steps from any of two beginnings lead to."""
        moves = list(dict.fromkeys(self._moves()))
        starts = [[kind.options[at] for kind in self._kinds] for at in (0, -1)]
        minima = [self._descended(start, moves) for start in starts]
        return min(minima, key=lambda choices: round(self._total(choices), 3))

    def _total(self, choices: list[Choice]) -> float:
        return sum(count * term.cost(choices) for term, count in self._terms.items())

    def _descended(
        self, choices: list[Choice], moves: list[tuple[tuple[int, Choice], ...]]
    ) -> list[Choice]:
        """The choices after all moves that take less, again and again until none does."""
        better = True
        while better:
            better = False
            for move in moves:
                if self._change(choices, move) < -1e-6:
                    better = True
                    for kind, choice in move:
                        choices[kind] = choice
        return choices

    def _moves(self) -> Iterator[tuple[tuple[int, Choice], ...]]:
        """Changes of one kind, and of the kinds around one part of the cost."""
        for number, kind in enumerate(self._kinds):
            yield from (((number, option),) for option in kind.options)
        for term in self._terms:
            readers = frozenset[tuple[int, int]]().union(*(r for _, r in term.gathers))
            begins = self._possible(term.begins)
            others = [
                (kind, option)
                for kind, dim in sorted(term.begins)
                for option in self._kinds[kind].options
                if option != dim
            ]
            yield from (move for move in (begins, begins + self._possible(readers)) if move)
            yield from [tuple(others)] if others else []

    def _possible(self, picks: Picks) -> tuple[tuple[int, Choice], ...]:
        return tuple(pick for pick in sorted(picks) if pick[1] in self._kinds[pick[0]].options)

    def _replicate(self, choices: list[Choice]) -> list[Choice]:
        """Replicate parameters of little size where that saves more than it repeats.

        It is tried for one kind at a time, and for those around one part of the cost.
        """
        left = REPLICATED_SHARE * sum(kind.bytes for kind in self._kinds)
        left -= sum(k.bytes for k, c in zip(self._kinds, choices, strict=True) if c is None)
        tried = [(number,) for number in range(len(self._kinds))]
        tried += [tuple(sorted({kind for kind, _ in term.picks})) for term in self._terms]
        sizes = {kinds: sum(self._kinds[n].bytes for n in kinds) for kinds in tried}
        for kinds in sorted(sizes, key=lambda kinds: sizes[kinds]):
            open = [n for n in kinds if choices[n] is not None]
            size = sum(self._kinds[n].bytes for n in open)
            if open and size <= left and self._pays_replicated(open, choices):
                left -= size
                for number in open:
                    choices[number] = None
        return choices

    def _pays_replicated(self, numbers: list[int], choices: list[Choice]) -> bool:
        kinds = [self._kinds[number] for number in numbers]
        if any(kind.is_fixed or _is_table(kind.first) for kind in kinds):
            return False  # rewrite-embeddings decides about tables
        new = [None if n in numbers else choice for n, choice in enumerate(choices)]
        if any(self._has_sharded_inputs(kind.first, new) for kind in kinds):
            return False  # it would be contracted with shards all the same
        gain = -self._change(choices, [(number, None) for number in numbers])
        return gain > sum(kind.count * self._prices.replicated(kind.first) for kind in kinds)

    def _has_sharded_inputs(self, parameter: Parameter, choices: list[Choice]) -> bool:
        inputs = (e for slot in parameter.slots.values() for e in slot.inputs)
        begins = (self._begins.get(self._structure.group_of(e), []) for e in inputs)
        return any(choices[self._kind_of[n]] == dim for places in begins for n, dim in places)

    # the result

    def layouts(self) -> dict[str, Layout]:
        """The layout of every weight whose choice was open, by name."""
        result: dict[str, Layout] = {}
        whys = ["" if kind.is_fixed else self._why(n) for n, kind in enumerate(self._kinds)]
        for parameter, number in zip(self._structure.parameters, self._kind_of, strict=True):
            wanted = ((self._experts(parameter), "ep"), (self._choices[number], "tp"))
            for weight in parameter.weights if whys[number] else ():
                splits: dict[int, Axes] = {}
                for dim, axis in wanted:
                    for at in self._structure.same_dims(parameter, dim, weight):
                        splits[at] = (axis,)
                result[weight.name] = Layout(tuple(sorted(splits.items())), whys[number])
        return result

    def _why(self, number: int) -> str:
        """The choice of a kind, what it leads to, and what another one would cost."""
        kind, choice = self._kinds[number], self._choices[number]
        if choice is None and kind.options == [None]:
            experts = self._experts(kind.first) is not None
            return "experts" if experts else "no dimension can be sharded over so many ranks"
        others = (option for option in kind.options if option != choice)
        more = {o: self._change(self._choices, [(number, o)]) / kind.count for o in others}
        other = min(more, key=lambda option: more[option], default=None)
        if choice is None:
            return f"to shard it would take {more.get(other, 0):.0f} us more"
        slots = kind.first.slots
        why = f"{slots[choice].kind}, {self._effect(kind.first, choice)}"
        if other is None or other not in slots or slots[other].kind == slots[choice].kind:
            return why
        return f"{why} ({slots[other].kind} it would take {more[other]:.0f} us more)"

    def _effect(self, parameter: Parameter, dim: int) -> str:
        """Where the shards of a parameter lead to."""
        slot, structure = parameter.slots[dim], self._structure
        if not slot.outputs:
            return f"sums of {' and '.join(amount(self._prices.bytes(v)) for v in slot.sums)}"
        for group in (structure.groups.get(structure.group_of(e)) for e in slot.outputs):
            if group is None:
                continue
            for value, opname in group.ends.items():
                return f"{amount(self._prices.bytes(value))} gathered for {opname}"
            for places in group.readers.values():
                for number, at in places:
                    name = structure.parameters[number].weight.name
                    if self._choices[self._kind_of[number]] == at:
                        return f"contracted with @{name}"
                    return f"gathered for the product with @{name}"
            for value in group.sums:
                return f"sums of {amount(self._prices.bytes(value))}"
        return "which no operation gathers"


def _is_table(parameter: Parameter) -> bool:
    """Whether only lookups use it."""
    return all(isinstance(op, Embedding) for op in parameter.ops)


def _counted(items: Iterable[Any]) -> frozenset[Any]:
    return frozenset(Counter(items).items())


def _at_least(size: DimLike, count: int) -> bool:
    return isinstance(size, int) and size >= count

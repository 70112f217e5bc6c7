"""`prove`: which values of a module are those of another, by rules and by numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..analysis.sizes import LocalSizes
from ..argument_checks import check_kind
from ..errors import Error
from ..ir.core import Module
from ..ir.dtypes import dtype, is_float
from ..ir.verify import verify
from ..pipeline.instruments.numerics import compare
from ..weights import Ref
from .certificate import Certificate, Evidence, Status, worst
from .graph import Graph, Item, Step, graph_of
from .interface import interface
from .numbering import Numbering
from .regions import (
    INTEGERS,
    Array,
    Draw,
    Evaluator,
    Region,
    draws,
    fitted,
    is_exact,
    region,
    wholes,
)

DRAWS = 3
TOLERANCES = {"f64": 1e-9, "f32": 1e-5}  # by the dtype that is computed in
_CALLS = 3  # of a module whose states have other shapes
_MOST_TRIED = 3  # candidates of one value
_MOST_FAILED = 12  # values that differ from their namesakes, behind which only results are compared
_NAMES = re.compile(r'@\w+|"(?:[^"\\]|\\.)*"')  # of files, and of tensors in them


def prove(
    a: Module,
    b: Module,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    base: str = "",
    other_base: str | None = None,
) -> Certificate:
    """What of module B is equal to module A: every result, and every operation behind them.

    Equal means equal numbers, up to rounding: all is computed in f64 where that works. Inputs are
    never NaN or infinite, and rarely what a comparison with a rare constant needs.

    Values that no rule proves are evaluated on random inputs with the reference backend, on all
    ranks, region by region, `draws` times. Weights are random, the same for one reference in both
    modules; relative paths of files start at `base`, those of B at `other_base` if it is given.
    """
    for module in (a, b):
        check_kind("the module", module, Module, "one of irc, as irc.trace and irc.parse return")
        verify(module)
    bases = (base, base if other_base is None else other_base)
    return _Proof(a, b, draws, seed, bases).certificate()


@dataclass
class _Trial:
    """The outcome of a comparison: evidence, a difference, or a reason why there is neither."""

    evidence: Evidence | None = None
    difference: str = ""
    reason: str = ""


@dataclass
class _Outputs:
    """Two regions whose outputs are compared by name in several calls in turn.

    `fresh` are states by result whose first values are zeros, since those of B have more elements,
    behind those of A; only these are compared.
    """

    before: Region
    after: Region
    names: list[str]
    fresh: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def calls(self) -> int:
        """Several where states are not drawn."""
        return _CALLS if self.fresh else 1


class _Proof:
    """One proof: A is numbered, then B value by value, with the numbers of A where they agree."""

    def __init__(self, a: Module, b: Module, count: int, seed: int, bases: Sequence[str]) -> None:
        self.evaluator = Evaluator((a, b), bases)
        self.a, self.b = (graph_of(m, self.evaluator.weights.located) for m in (a, b))
        self.numbering = Numbering(self.evaluator.weights.known)
        keys = self.evaluator.weights.integers(a)
        self.limits = _Limits((self.b, self.a), keys)
        self.draws = draws(a, b, count, seed, keys, self.limits.at)
        self.done = Certificate()
        self.items: dict[int, Item] = {}  # of A, by tensor
        self.namesakes: dict[tuple[Any, ...], list[Item]] = {}  # of A, by name and by scope
        self.supported: set[Item] = set()
        self.trials: dict[Any, _Trial] = {}
        self.failed: list[str] = []
        self.assumed: dict[Item, str] = {}  # values that could not be evaluated, and why

    def certificate(self) -> Certificate:
        """The certificate."""
        reasons, notes = interface(self.a, self.b)
        self.done.reasons, self.done.notes = reasons, notes
        self._number(self.a)
        self.known = {*self.numbering.terms}
        for item in self.a.items():
            if item.tensor is not None:
                self.items.setdefault(item.tensor, item)
                for key in (item.name, ""):
                    self.namesakes.setdefault((key, item.scope, *item.kind), []).append(item)
        self._number(self.b, self._pair)
        self.done.results = {n: self._result(n) for n in {**self.a.results, **self.b.results}}
        self._count()
        rounding = len(_casts(self.a) ^ _casts(self.b))
        if rounding:
            self.done.notes.append(f"rounding differs: {rounding} casts of floats")
        self.done.identities = self.numbering.used
        found = [trial.evidence for trial in self.trials.values()]
        self.done.evidence = [one for one in found if one is not None and one.count]
        if not self.done.certified and self.failed:
            self.done.difference = self.failed[0]
        return self.done

    def _number(self, graph: Graph, then: Callable[[Step], None] | None = None) -> None:
        self.numbering.begin(graph)
        for step in graph.steps:
            self.numbering.enter(step)
            if then is not None:
                then(step)

    def _pair(self, step: Step) -> None:
        """Look for values of A that the results of a step of B are, by numbers."""
        for item in step.results:
            is_new = item.tensor is not None and item.tensor not in self.known
            if item.fixed or not is_new or len(self.failed) >= _MOST_FAILED:
                continue
            for other in self._candidates(item, step) if is_float(item.type.dtype) else ():
                trial = self._compare(other, item)
                if trial.evidence is not None and other.tensor is not None:
                    trial.evidence.count += 1
                    self.numbering.merge(item, other.tensor)
                    self.supported.add(item)
                    self.failed = []
                    break
                if trial.difference and item.name == other.name:
                    self.failed.append(f"{_described(item)}: {trial.difference}")
                if trial.reason and item.name == other.name and other.tensor is not None:
                    self.numbering.merge(item, other.tensor)
                    self.assumed[item] = f"{_described(item)}: {trial.reason}"
                    break

    def _candidates(self, item: Item, step: Step) -> Iterator[Item]:
        """Values of A that an item may be: of its name, its operands, others of its scope."""
        place = (item.scope, *item.kind)
        named = self.namesakes.get((item.name, *place), []) if item.name != "_" else []
        found = named if len(named) <= _MOST_TRIED else []
        operands = [self.items.get(o.tensor or -1) for o in step.operands if o.kind == item.kind]
        found = [*found, *(o for o in operands if o is not None and not o.fixed)]
        if not named:
            found += self.namesakes.get(("", *place), [])
        yield from {o.tensor: o for o in found[: len(operands) + _MOST_TRIED]}.values()

    def _is_cut(self, item: Item) -> bool:
        """Whether a region may begin at an item: a float tensor of A, whole or in equal shards."""
        is_plain = not item.type.global_type.partial and not self.numbering.is_padded(item.type)
        known = item.tensor in self.items and is_float(item.type.dtype)
        return known and is_plain and not item.fixed

    def _compare(self, a: Item, b: Item) -> _Trial:
        """Evaluate both behind their common values; regions of equal layers once."""
        after = region(self.b, (b,), lambda item: item is not b and self._is_cut(item))
        cuts = {item.tensor for item in after.leaves if item.step is not None}
        before = region(self.a, (a,), lambda item: item.tensor in cuts and self._is_cut(item))
        key = _signature(before, after, self.evaluator.weights.is_random)
        if key not in self.trials:
            self.trials[key] = self._evaluated(_Outputs(before, after, [b.name]))
        return self.trials[key]

    def _evaluated(self, both: _Outputs) -> _Trial:
        """Evaluate in f64, else in f32; in the dtypes of the module where floats only move."""
        item = both.after.outputs[0]
        exact = is_exact(both.before) and is_exact(both.after)
        reason, tolerances = "", {"": 0.0} if exact else TOLERANCES
        for kind, tolerance in tolerances.items():
            try:
                difference = self._first_difference(both, kind, tolerance)
            except Error as error:
                reason = error.message
                continue
            if difference:
                return _Trial(difference=difference)
            name = f"%{item.name}" if len(both.names) == 1 else "all results"
            count, drawn = len(both.after.steps), self._drawn(both)
            shown, kind = [str(draw) for draw in drawn], kind or item.type.dtype
            limit = _limit_of_sizes(both, drawn)
            return _Trial(Evidence(name, item.scope, count, shown, kind, tolerance, limit))
        return _Trial(reason=reason)

    def _drawn(self, both: _Outputs) -> list[Draw]:
        parts = (both.before, both.after)
        return [fitted(draw, i, parts, self.limits.at) for i, draw in enumerate(self.draws)]

    def _first_difference(self, both: _Outputs, kind: str, tolerance: float) -> str:
        for draw in self._drawn(both):
            states: list[dict[str, Array]] = [{}, {}]
            for call in range(both.calls):
                now = replace(draw, seed=draw.seed + 1000 * call)
                results = self._called(both, now, kind, states)
                for name, x, y in zip(both.names, *results, strict=True):
                    first = y[tuple(map(slice, x.shape))] if name in both.fresh else y
                    difference = compare(x, first, tolerance)
                    if difference is not None:
                        return difference if len(both.names) == 1 else f"{name}: {difference}"
                    if np.isfinite(x.astype(np.float64)).sum() < x.size / 2:
                        raise Error(f"most numbers of {name} are infinite or NaN")
                if both.calls > 1:
                    named = [dict(zip(both.names, arrays, strict=True)) for arrays in results]
                    kept = self.a.states()
                    states = [{kept[n]: one[n] for n in kept if n in one} for one in named]
        return ""

    def _called(
        self, both: _Outputs, draw: Draw, kind: str, states: list[dict[str, Array]]
    ) -> list[list[Array]]:
        """The outputs of both regions, whose integers are as wide as both take."""
        given = [dict(one) for one in states]
        for part, one in zip((both.before, both.after), given, strict=True):
            for name in both.fresh.values() if not one else ():
                item = part.graph.arguments[name]
                one[name] = np.zeros_like(draw.tensor(item, part.graph.module))
        for integers in INTEGERS:
            now = replace(draw, integers=integers)
            try:
                pairs = zip((both.before, both.after), given, strict=True)
                return [self.evaluator.outputs(part, now, kind, one) for part, one in pairs]
            except Error:
                if integers == INTEGERS[-1]:
                    raise
        return []

    def _result(self, name: str) -> Status:
        """The status of a result of either module."""
        a, b = self.a.results.get(name), self.b.results.get(name)
        if a is None or b is None:
            self.done.reasons.append(f"the result {name} is in one module only")
            return "neither"
        behind = region(self.b, (b,), lambda item: False)
        items = [b, *(item for step in behind.steps for item in step.results)]
        assumed = [self.assumed[item] for item in items if item in self.assumed]
        if a.tensor is not None and a.tensor == b.tensor and not assumed:
            return "proved" if self.supported.isdisjoint(items) else "supported"
        trial = self._of_results()
        if trial.evidence is not None:
            trial.evidence.count = 1
            self.supported.add(b)
            return "supported"
        reasons = [trial.difference or trial.reason, *assumed[:3]]
        self.done.reasons += [one for one in reasons if one not in self.done.reasons]
        if trial.difference:
            self.failed.append(f"{_described(b)}: {trial.difference}")
        return "neither"

    def _of_results(self) -> _Trial:
        """Evaluate both modules from their arguments on."""
        if "results" not in self.trials:
            names = [name for name in self.a.results if name in self.b.results]
            before, after = (
                region(graph, [graph.results[name] for name in names], lambda item: False)
                for graph in (self.a, self.b)
            )
            a, b = self.a, self.b
            states = {n: arg for n, arg in a.states().items() if b.states().get(n) == arg}
            fresh = {
                n: arg
                for n, arg in states.items()
                if _is_longer(a.results[n], b.results[n])
                and _is_longer(a.arguments[arg], b.arguments[arg])
            }
            other = [
                f"{n} is {y[n].type} instead of {x[n].type}"
                for x, y, known in (
                    (a.arguments, b.arguments, [*fresh.values()]),
                    (a.results, b.results, [*fresh]),
                )
                for n in x
                if n in y and n not in known and x[n].kind != y[n].kind
            ]
            why = ", ".join(dict.fromkeys(other))
            both = _Outputs(before, after, names, fresh)
            self.trials["results"] = _Trial(reason=why) if other else self._evaluated(both)
        return self.trials["results"]

    def _count(self) -> None:
        """Count the operations of B that results need, by the status of what they make."""
        statuses: dict[Item, Status] = {}
        for name, item in self.b.results.items():
            statuses[item] = worst([statuses.get(item, "proved"), self.done.results[name]])
        for step in reversed(self.b.steps):
            used = [item for item in step.results if item in statuses]
            if not used:
                continue
            status = worst([self._own(item, statuses[item]) for item in used])
            self.done.counts[status] += 1
            for operand in step.operands:
                statuses[operand] = worst([statuses.get(operand, "proved"), status])

    def _own(self, item: Item, users: Status) -> Status:
        if item in self.supported:
            return "supported"
        if item in self.assumed:
            return "neither"
        return "proved" if item.tensor in self.known else users


def _limit_of_sizes(both: _Outputs, drawn: Sequence[Draw]) -> str:
    """Says where integers of regions are beyond the sizes that were drawn, though dims are not."""
    items = [*both.after.leaves, *(item for step in both.after.steps for item in step.results)]
    dims = [dim for item in items for dim in item.type.global_type.shape]
    symbols = {name for dim in dims if not isinstance(dim, int) for name in dim.symbols()} - {"B"}
    largest = max((draw.sizes.get(name, 0) for draw in drawn for name in symbols), default=0)
    high = {name: part[2] for name, part in both.after.graph.module.dims.items()}
    beyond = [c for part in (both.before, both.after) for c in wholes(part) if c >= largest]
    can_be = any(high.get(name, largest + 1) > largest for name in symbols)
    return f"sizes up to {largest} drawn" if beyond and can_be else ""


def _is_longer(a: Item, b: Item) -> bool:
    """Whether B has the elements of A, and more behind them."""
    (kind, shape, varying), (other, longer, varies) = a.kind, b.kind
    if (kind, varying, len(shape)) != (other, varies, len(longer)) or shape == longer:
        return False
    return all(
        n == m or (isinstance(n, int) and isinstance(m, int) and n < m)
        for n, m in zip(shape, longer, strict=True)
    )


def _casts(graph: Graph) -> set[tuple[int, str]]:
    """The casts behind results that make floats narrower: what they cast, and to what."""
    found: set[tuple[int, str]] = set()
    for step in region(graph, [*graph.results.values()], lambda item: False).steps:
        if step.op.opname == "cast":
            x, y = step.operands[0], step.results[0]
            kinds = dtype(x.type.dtype), dtype(y.type.dtype)
            if kinds[0].is_float and kinds[1].is_float and kinds[1].bits <= kinds[0].bits:
                found.add((-1 - x.part if x.tensor is None else x.tensor, kinds[1].name))
    return found


def _described(item: Item) -> str:
    """The name of a value, with the line of the user's script or its scope."""
    loc = item.step.op.loc if item.step is not None else None
    return f"%{item.name}" + (f" at {loc.where()}" if loc is not None else "")


class _Limits:
    """The largest numbers of integer arguments that are ids of a table, positions or lengths.

    Arguments of a dtype in `keys` are looked up among keys; they are no ids themselves.
    """

    def __init__(self, graphs: Sequence[Graph], keys: Container[str]) -> None:
        self._uses: list[tuple[str, Module, Step, str]] = []  # an argument and what takes it
        for graph in graphs:
            for step in graph.steps:
                for (name, _), item in zip(step.op.named_operands(), step.operands, strict=True):
                    is_limited = name in step.op.safe_values or name == "lengths"
                    if not is_limited or is_float(item.type.dtype):
                        continue
                    is_id = step.op.opname == "embedding"
                    for leaf in region(graph, (item,), _never if is_id else _is_computed).leaves:
                        known = is_id and leaf.type.dtype in keys
                        if leaf.name in graph.arguments and not known:
                            self._uses.append((leaf.name, graph.module, step, name))

    def at(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """By argument, for sizes of symbols."""
        limits: dict[str, int] = {}
        for argument, module, step, name in self._uses:
            most = _most(module, step, name, LocalSizes(module.mesh, sizes))
            limits[argument] = max(0, min(most, limits.get(argument, most)))
        return limits


def _most(module: Module, step: Step, name: str, sizes: LocalSizes) -> int:
    """The largest number of an operand: an id, a position, a length; of others 1."""
    op = step.op
    if op.opname == "embedding":
        return _rows(module, step.operands[1]) - 1
    shapes = [tuple(map(sizes.dim, item.type.global_type.shape)) for item in step.operands]
    if op.opname == "cache_update":
        return shapes[0][2] - shapes[1][1]
    if op.opname == "fused_attention":
        return shapes[3][2] - (0 if name == "lengths" else shapes[0][1])
    if op.opname == "attention":
        keys = shapes[1][2 if len(shapes[1]) == 4 else 1]
        return keys if name == "lengths" else keys - shapes[0][1]
    return shapes[0][1] if name == "lengths" else 1


def _never(item: Item) -> bool:
    return False


def _is_computed(item: Item) -> bool:
    return item.step is None or not item.step.op.moves_data


def _rows(module: Module, table: Item) -> int:
    """The rows of a table; of one that varies, those of all ranks."""
    whole = table.type.global_type
    rows = whole.shape[0] if isinstance(whole.shape[0], int) else 1
    return rows * (module.mesh.ranks if whole.varying else 1)


def _signature(
    before: Region, after: Region, is_random: Callable[[Module, Ref], bool]
) -> tuple[Any, ...]:
    """What is equal of regions that differ in the names of values and random weights only."""
    names: dict[str, int] = {}

    def renamed(match: re.Match[str]) -> str:
        return str(names.setdefault(match[0], len(names)))

    places: dict[Item, int] = {}
    tensors: dict[Any, int] = {}
    parts: list[Any] = []
    for part in (before, after):
        parts.append(part.graph.module.local)
        for item in part.leaves:
            places[item] = len(places)
            text = "" if item.ref is None else str(item.ref)
            drawn = item.weight is None or is_random(part.graph.module, item.weight.ref)
            reference = _NAMES.sub(renamed, text) if drawn else text
            same = tensors.setdefault(item.tensor, len(tensors))
            name = item.name if not is_float(item.type.dtype) and not text else ""
            parts.append((reference, name, same, item.type))
        for step in part.steps:
            operands = tuple(places[item] for item in step.operands)
            for item in step.results:
                places[item] = len(places)
            types = tuple(item.type for item in step.results)
            op = step.op
            parts.append((op.opname, repr(op.attributes), op.present, operands, types))
        parts += [places[item] for item in part.outputs]
    return tuple(parts)

"""The products and lookups of a module, and the groups of dimensions that are sharded together.

The sharding rules of operations say where an axis on a dimension goes. Dimensions of values that a
rule joins are one group: a shard of one is a shard of all behind it. A group begins at the output
features of products and lookups; it ends at contractions, which make it a partial sum, and at
operations that need the dimension replicated, before which it is gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from irc.ir.core import Function, Module, Op, Value, Weight
from irc.ir.sharding import operand_words, parse_rule, result_words
from irc.ir.types import Axes
from irc.ops import (
    Argmax,
    Attention,
    Constant,
    DynamicScale,
    Full,
    Linear,
    Matmul,
    Slice,
    Split,
    Topk,
)
from irc.ops.quant import QuantizedOp

from ..next_tokens import NextTokens
from ..shared.bounds import needs_complete
from ..shared.local_operation import is_local, with_axes
from ..shared.parameters import rounded, segments_of
from .pad_heads import by_head
from .segments import Projection, cut_refusal

_INDICES = {"i32", "i64", "bool"}  # dtypes of weights that are no parameters of a product

Place = tuple[int, int]  # the number of an operand or result, and a dimension of it


class Word(NamedTuple):
    """A name in the sharding rule of an operation, and where it stands.

    `passes` says that a rank can compute its shard alone.
    """

    operands: tuple[Place, ...]
    results: tuple[Place, ...]
    passes: bool


@dataclass
class Slot:
    """One dimension of a parameter: what its shards make of the results of its operations.

    `outputs` are elements whose group is sharded then; `sums` are partial sums, `inputs` the
    elements that are contracted with it. `stacked`: it stands for one product each.
    """

    outputs: list[int] = field(default_factory=list[int])
    sums: list[Value] = field(default_factory=list[Value])
    inputs: list[int] = field(default_factory=list[int])
    stacked: bool = False

    @property
    def kind(self) -> str:
        """The name of a shard of the dimension."""
        if self.stacked:
            return "stacked"
        if self.outputs:
            return "column-parallel"
        return "row-parallel" if self.inputs else "vocabulary-parallel"


@dataclass
class Parameter:
    """Weights that are one matrix or table: its elements, or codes with their scales.

    `slots` has the dimensions that can be sharded, of `weight`, the largest of `weights`.
    """

    weights: list[Weight]
    elements: dict[Weight, list[int]]
    slots: dict[int, Slot]
    ops: list[Op]

    @property
    def weight(self) -> Weight:
        """The largest."""
        return self.weights[0]


@dataclass
class Group:
    """What happens where a group of dimensions is sharded.

    `ends` are gathered. `readers` are gathered for products that are not sharded along the group:
    per value, (number of the parameter, dimension). `sums` become partial sums; `small` values are
    exchanged.
    """

    ends: dict[Value, str] = field(default_factory=dict[Value, str])
    readers: dict[Value, list[Place]] = field(default_factory=dict[Value, list[Place]])
    sums: list[Value] = field(default_factory=list[Value])
    small: list[Value] = field(default_factory=list[Value])


class Structure:
    """The parameters and groups of a module, for shards over axes of a mesh.

    `parameters` are those of products and lookups; `groups` are by the number of `group_of`.
    """

    def __init__(self, module: Module, axes: Axes) -> None:
        self._module, self._axes = module, axes
        self._group_size = module.mesh.group_size(axes)
        self.logits: set[Value] = set()  # results that next-tokens need not gather
        self._parents: list[int] = []
        self._first: dict[Value, int] = {}  # the number of the first dimension of a value
        self._words: dict[object, list[Word]] = {}
        self._origins: dict[Value, Weight | None] = {}  # of values that weights alone make
        self._uses: list[tuple[Weight, int, Op, str, int]] = []
        self._products: dict[Weight, list[Op]] = {}
        self._ends: list[tuple[int, Value, str]] = []
        self._sums: list[tuple[int, Value]] = []
        self._small: list[tuple[int, Value]] = []
        self._complete: set[int] = set()  # elements of which there is a complete copy
        self._partial: set[Value] = set()  # what may be a partial sum
        self._passed: dict[Value, Value] = {}
        self._segments: dict[Value, bool] = {}
        self._padded = set(_with_padded_heads(module, self._group_size))
        for function in module.functions.values():
            for op in function:
                self._visit(function, op)
        self.parameters = self._parameters()
        self.groups = self._groups()

    # elements: the dimensions of values, in disjoint sets

    def element(self, value: Value, dim: int) -> int:
        """The number of a dimension of a value."""
        first = self._first.get(value)
        if first is None:
            first = self._first[value] = len(self._parents)
            self._parents.extend(range(first, first + value.type.ndim + 1))
        return first + dim

    def group_of(self, element: int) -> int:
        """The number of the group of an element."""
        parents = self._parents
        while parents[element] != element:
            parents[element] = parents[parents[element]]
            element = parents[element]
        return element

    def same_dims(self, parameter: Parameter, dim: int | None, weight: Weight) -> Iterator[int]:
        """The dimensions of one weight of a parameter that are shards where `dim` is."""
        if dim is None or weight is parameter.weight:
            yield from () if dim is None else (dim,)
            return
        group = self.group_of(parameter.elements[parameter.weight][dim])
        for at, element in enumerate(parameter.elements[weight]):
            if self.group_of(element) == group and weight.type.shape[at] != 1:
                yield at

    def _join(self, elements: Iterable[int]) -> None:
        first, *others = map(self.group_of, elements)
        for other in others:
            self._parents[self.group_of(other)] = self.group_of(first)

    # operations

    def _visit(self, function: Function, op: Op) -> None:
        if op.opname == "return":
            self._return(function, op)
            return
        origins = [self._origin(value) for value in op.operands]
        words = self._words_of(op)
        contracted = [at for word in words if not word.results for at, _ in word.operands]
        if len({*contracted}) > 1 and all(is_weight for is_weight, _ in origins):
            # a product of weights: the smaller one takes the place of activations
            origins[min(contracted, key=lambda at: _count(op.operands[at]))] = (False, None)
        if op.operands and all(is_weight for is_weight, _ in origins):
            self._derive(op, [weight for _, weight in origins if weight is not None], words)
        elif isinstance(op, (Constant, Full)):
            self._origins[op.result] = None
        else:
            self._follow(
                op,
                [weight for _, weight in origins],
                words,
                [is_weight for is_weight, _ in origins],
            )

    def _return(self, function: Function, op: Op) -> None:
        aliases = function.aliases()
        named = zip(function.result_names(), op.operands, strict=True)
        self.logits |= {value for name, value in named if name == NextTokens.result}
        for at, value in enumerate(op.operands):
            state = function.args[aliases[at]] if at in aliases else None
            for dim in _sized(value):
                element = self.element(value, dim)
                if state is None:
                    self._ends.append((element, value, op.opname))
                else:
                    self._join([element, self.element(state, dim)])

    def _origin(self, value: Value) -> tuple[bool, Weight | None]:
        """Whether weights alone make a value, and the first of them."""
        if value.type.dtype in _INDICES:
            return False, None
        if isinstance(value, Weight):
            return True, value
        return value in self._origins, self._origins.get(value)

    def _derive(self, op: Op, weights: list[Weight], words: list[Word]) -> None:
        """Parameters of several weights, or in another order."""
        for result in op.results:
            self._origins[result] = weights[0] if weights else None
        if weights:  # the element behind the last dimension stands for the whole weight
            self._join(self.element(weight, weight.type.ndim) for weight in weights)
        for word in words:
            if word.passes:
                self._join(self._elements(op, word))

    def _elements(self, op: Op, word: Word) -> Iterator[int]:
        for at, dim in word.operands:
            yield self.element(op.operands[at], dim)
        for at, dim in word.results:
            yield self.element(op.results[at], dim)

    def _follow(
        self, op: Op, weights: list[Weight | None], words: list[Word], constant: list[bool]
    ) -> None:
        """The shards that an operation passes on, sums or ends."""
        adds_up = False
        for word in words:
            data = [(at, dim) for at, dim in word.operands if not constant[at]]
            of_weights = [(at, dim) for at, dim in word.operands if weights[at] is not None]
            if not word.results or op.selects:
                for at, _ in of_weights:
                    self._note_product(op, weights[at])
            if not word.passes:
                self._stop(op, data)
                continue
            if isinstance(op, Attention) and op in self._padded:
                scores = [place for place in data if op.operands[place[0]] in (op.bias, op.mask)]
                self._stop(op, scores)  # heads of zeros are put between those that there are
                data = [place for place in data if place not in scores]
            joined = self._begun(op, [self.element(op.operands[at], dim) for at, dim in data])
            joined += [self.element(op.results[at], dim) for at, dim in word.results]
            if joined:
                self._join(joined)
            if not word.results and data and not of_weights:
                self._sums.append((joined[0], op.results[0]))
            adds_up |= not word.results
            kind = "sum" if not word.results else "stack" if data else "output"
            for at, dim in of_weights:
                weight = weights[at]
                assert weight is not None
                element = self.element(op.operands[at], dim)
                self._uses.append((weight, element, op, kind, joined[0] if joined else -1))
        self._note_sums(op, adds_up, any(weight is not None for weight in weights))

    def _begun(self, op: Op, elements: list[int]) -> list[int]:
        """The elements of operands on whose shards those of a result depend.

        Where a complete copy of one is there already, elementwise operations use that, if other
        operands are complete: the solver does so.
        """
        if len(elements) > 1 and op.sharding and parse_rule(op.sharding).is_elementwise:
            return [e for e in elements if e not in self._complete] or elements
        return elements

    def _note_product(self, op: Op, weight: Weight | None) -> None:
        assert weight is not None
        ops = self._products.setdefault(weight, [])
        if op not in ops:
            ops.append(op)

    def _stop(self, op: Op, data: list[Place]) -> None:
        for at, dim in data:
            value = op.operands[at]
            element = self.element(value, dim)
            if isinstance(op, (Split, Slice)) and self._is_cut(op.x):
                self._join([element, *(self.element(part, dim) for part in op.results)])
            elif _has_exchange(op, dim):
                self._small += [(element, result) for result in op.results]
            else:
                self._ends.append((element, value, op.opname))
                self._complete.add(element)

    def _is_cut(self, merged: Value) -> bool:
        """Whether `cut_segments` takes a merged projection apart."""
        if merged not in self._segments:
            self._segments[merged] = _has_segments(merged, self._group_size)
        return self._segments[merged]

    # partial sums

    def _note_sums(self, op: Op, adds_up: bool, has_weights: bool) -> None:
        """Which results may be partial sums, and which of them only pass one on."""
        if adds_up:
            self._partial.update(op.results)
        operands = list(op.named_operands())
        partial = {name for name, value in operands if value in self._partial}
        group = next((names for names in op.sums if partial and partial <= names), None)
        if group is None or len(op.results) != 1 or (has_weights and isinstance(op, Linear)):
            return
        inside = [value for name, value in operands if name in group]
        if all(v in self._partial and self._stays_partial(v) for v in inside):
            self._partial.add(op.result)
            for value in inside:
                self._passed[value] = op.result

    def _stays_partial(self, value: Value) -> bool:
        """Whether no operation needs the complete sum, so that none gets it."""
        return not any(needs_complete(user, value) for user in value.users)

    def _completed(self, value: Value) -> Value:
        """Where a partial sum is completed: behind what passes it on."""
        while value in self._passed and sum(value.users.values()) == 1:
            value = self._passed[value]
        return value

    # rules

    def _words_of(self, op: Op) -> list[Word]:
        padded = op in self._padded
        key = (op.type_key(), padded)
        words = self._words.get(key)
        if words is None:
            words = self._words[key] = list(self._read(op, padded))
        return words

    def _read(self, op: Op, padded: bool) -> Iterator[Word]:
        text = op.sharding_rule()
        if text is None:
            for at, value in enumerate(op.operands):
                yield from (Word(((at, dim),), (), False) for dim in _sized(value))
            return
        rule = parse_rule(text.replace("g!", "h") if padded else text)
        places: dict[str, tuple[list[Place], list[Place]]] = {}
        sides = (
            zip(op.operands, (names for _, names in operand_words(op, rule)), strict=True),
            zip(op.results, result_words(rule, [r.type for r in op.results]), strict=True),
        )
        for side, values in enumerate(sides):
            for at, (value, names) in enumerate(values):
                for dim in _sized(value):
                    if names[dim] != "1":
                        places.setdefault(names[dim], ([], []))[side].append((at, dim))
        for name, (operands, results) in places.items():
            passes = name not in rule.replicated and bool(operands)
            # the solver adds a bias after the sum, and pads or repeats blocks of one scale
            mended = isinstance(op, Linear) and not results
            if not (padded or mended or isinstance(op, (QuantizedOp, DynamicScale))):
                passes = passes and self._is_local(op, operands)
            if operands:
                yield Word(tuple(operands), tuple(results), passes)

    def _is_local(self, op: Op, places: list[Place]) -> bool:
        wanted: list[list[Axes]] = [[()] * value.type.ndim for value in op.operands]
        for at, dim in places:
            wanted[at][dim] = self._axes
        return is_local(with_axes(op, wanted), self._module.mesh)

    # what was read

    def _parameters(self) -> list[Parameter]:
        whole: dict[int, list[Weight]] = {}
        for weight in self._module.weights.values():
            if weight in self._first:
                group = self.group_of(self.element(weight, weight.type.ndim))
                whole.setdefault(group, []).append(weight)
        parameters: list[Parameter] = []
        of_weight: dict[Weight, Parameter] = {}
        for weights in whole.values():
            ops = [op for weight in weights for op in self._products.get(weight, [])]
            if not ops:
                continue
            weights.sort(key=lambda weight: -_count(weight))
            elements = {w: [self.element(w, dim) for dim in range(w.type.ndim)] for w in weights}
            parameters.append(Parameter(weights, elements, {}, ops))
            of_weight |= dict.fromkeys(weights, parameters[-1])
        for weight, element, op, kind, other in self._uses:
            parameter = of_weight.get(weight)
            if parameter is not None:
                self._note_use(parameter, element, op, kind, other)
        return parameters

    def _note_use(self, parameter: Parameter, element: int, op: Op, kind: str, other: int) -> None:
        group, own = self.group_of(element), parameter.elements[parameter.weight]
        dim = next((i for i, e in enumerate(own) if self.group_of(e) == group), None)
        if dim is None:
            return
        slot = parameter.slots.setdefault(dim, Slot())
        slot.stacked |= kind == "stack"
        if kind == "sum":
            slot.sums.append(self._completed(op.results[0]))
        else:
            slot.outputs.append(other)
        if other >= 0 and kind != "output":
            slot.inputs.append(other)

    def _groups(self) -> dict[int, Group]:
        groups: dict[int, Group] = {}

        def of(element: int) -> Group:
            return groups.setdefault(self.group_of(element), Group())

        for element, value, opname in self._ends:
            of(element).ends.setdefault(value, opname)
        for element, value in self._sums:
            of(element).sums.append(self._completed(value))
        for element, value in self._small:
            of(element).small.append(value)
        values = {
            element: value
            for value, first in self._first.items()
            for element in range(first, first + value.type.ndim)
        }
        for number, parameter in enumerate(self.parameters):
            for dim, slot in parameter.slots.items():
                for element in slot.inputs:
                    readers = of(element).readers
                    readers.setdefault(values[element], []).append((number, dim))
        return groups


def _count(value: Value) -> int:
    count = 1
    for size in value.type.shape:
        count *= size if isinstance(size, int) else 1
    return count


def _sized(value: Value) -> Iterator[int]:
    """The dimensions of a value of a fixed size of more than 1."""
    for dim, size in enumerate(value.type.shape):
        if isinstance(size, int) and size > 1:
            yield dim


def _has_exchange(op: Op, dim: int) -> bool:
    """Whether ranks with shards of a dimension exchange candidates in place of the values."""
    match op:
        case Argmax():
            return dim == op.dim % op.x.type.ndim
        case Topk():
            return dim == op.dim % op.x.type.ndim and isinstance(op.k, int)
        case DynamicScale():
            return dim == op.x.type.ndim - 1 and not op.block
        case _:
            return False


def _has_segments(merged: Value, group_size: int) -> bool:
    projection = Projection.of(merged)
    segments = segments_of(merged) if projection is not None else None
    if projection is None or segments is None:
        return False
    return cut_refusal(projection, segments, group_size) is None


# -- attention whose heads `pad_heads` makes divide


def _with_padded_heads(module: Module, group_size: int) -> Iterator[Op]:
    """The operations by head around every attention that can be sharded after padding."""
    for op in module.ops():
        if isinstance(op, Attention):
            yield from _around(op, group_size)


def _around(op: Attention, group_size: int) -> list[Op]:
    features, kv_heads = op.q.type.shape[2], op.key_heads
    if not isinstance(features, int) or not isinstance(kv_heads, int):
        return []
    heads = features // op.head_dim
    user = next(iter(rounded(op.result).users), None)
    if (heads % group_size == 0 == kv_heads % group_size) or not isinstance(user, (Linear, Matmul)):
        return []
    ops: list[Op] = [op]
    for value, count in ((op.q, heads), (op.k, kv_heads), (op.v, kv_heads)):
        path = _path(value, count, group_size)
        if path is None:
            return []
        ops += path
    return ops


def _path(value: Value, heads: int, group_size: int) -> list[Op] | None:
    """The operations between a projection, or a segment of one, and an operand of attention."""
    ops: list[Op] = []
    while value.type.ndim != 3 or Projection.of(value) is None:
        op = value.producer
        if op is None:
            return None
        if isinstance(op, (Split, Slice)) and _has_segments(op.x, group_size):
            return ops
        if not by_head(op, heads):
            return None
        ops.append(op)
        value = op.operands[1] if op.opname == "cache_update" else op.operands[0]
    return ops

"""Numbers of tensors: values of two modules that compute the same by the same rules share one.

Every value denotes a global tensor. In the global view axes and `{sum}` are layouts of it. In the
local view an operation whose results have the types that its sharding rule gives computes one
rank's part of the operation on the global tensors, and a collective that converts a layout changes
nothing. What is made in another way, by rank numbers or over padding, gets a number of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeAlias

from ..errors import Error
from ..ir.core import Op, Value
from ..ir.declare import expanded_results, placeholder, types_of
from ..ir.expansion import in_order
from ..ir.layouts import uneven
from ..ir.mesh import Mesh
from ..ir.sharding import operand_words, parse_rule, result_words
from ..ir.types import TensorType
from ..ops.collective import Exchange
from ..weights import ConcatRef, Ref, Slice
from ..weights.sources import Known, ref_shape
from .graph import Graph, Item, Step
from .identities import Term, simplified
from .references import unsharded

Key: TypeAlias = tuple[Hashable, ...]
Pair: TypeAlias = tuple[int | None, int]  # the numbers of a tensor, and of what the ranks hold


class Numbering:
    """The table of numbers, into which modules are put one after the other.

    `terms` says what each tensor is; `used` counts the identities that were applied. `known` gives
    the shapes of weights in files.
    """

    def __init__(self, known: Known) -> None:
        self._known = known
        self.numbers: dict[Key, int] = {}
        self.terms: dict[int, Term] = {}
        self.used: dict[str, int] = {}
        self._forms: dict[Key, list[tuple[Op, list[int]]]] = {}
        self._done: dict[Key, list[int | None]] = {}
        self._mesh, self._ranks = Mesh(), ""

    def begin(self, graph: Graph) -> None:
        """Number the arguments and the weights of a graph."""
        module = graph.module
        self._mesh, self._ranks = module.mesh, str(module.mesh) if module.local else ""
        for name, item in graph.arguments.items():
            whole = item.type.global_type
            if not whole.varying:
                item.tensor = self._leaf(("argument", name), whole)
            item.part = self._part(item.type, item.tensor, ("argument", name))
        for item in graph.weights.values():
            assert item.ref is not None
            ref, whole = item.ref, item.type.global_type
            plain = None if whole.varying else unsharded(ref, whole)
            key = ("stored", str(ref))
            if plain is not None:
                item.tensor = self._reference(plain, whole)
            elif not whole.varying:
                item.tensor = self._leaf(key, whole)
            item.part = self._part(item.type, item.tensor, key)

    def enter(self, step: Step) -> None:
        """Number the results of a step, whose operands are numbered."""
        types = tuple(item.type for item in step.results)
        pairs = self._pairs(step.op, step.operands, types)
        for item, pair in zip(step.results, pairs, strict=True):
            item.tensor, item.part = pair

    def merge(self, item: Item, tensor: int) -> None:
        """Take an item for a tensor that numbers support."""
        item.tensor = tensor
        item.part = self._part(item.type, tensor, ("merged", item.part))

    def _number(self, key: Key) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def _leaf(self, key: Key, whole: TensorType) -> int:
        """The number of a tensor that is no operation on others."""
        return self._term(Term("leaf", (), whole.shape, whole.dtype, {"key": key}))

    def _term(self, term: Term) -> int:
        number = self._number(term.key)
        self.terms.setdefault(number, term)
        return number

    def _simplified(self, term: Term) -> int:
        found = simplified(term, self.terms, self.used)
        return found if isinstance(found, int) else self._term(found)

    def _reference(self, ref: Ref, whole: TensorType) -> int:
        """The number of what a reference without shards is: joins and slices are operations."""
        last = ref.steps[-1] if ref.steps else None
        if last is None and isinstance(ref, ConcatRef):
            parts = tuple(self._reference(part, self._typed(part, whole)) for part in ref.parts)
            return self._term(Term("concat", parts, whole.shape, whole.dtype, {"dim": ref.dim}))
        if isinstance(last, Slice) and sum(part is not None for part in last.ranges) == 1:
            joined = replace(ref, steps=ref.steps[:-1])
            base = self._reference(joined, self._typed(joined, whole))
            (found,) = [(i, *part) for i, part in enumerate(last.ranges) if part is not None]
            attributes = {"dim": found[0], "start": found[1], "stop": found[2]}
            return self._simplified(Term("slice", (base,), whole.shape, whole.dtype, attributes))
        return self._leaf(("reference", str(ref)), whole)

    def _typed(self, ref: Ref, like: TensorType) -> TensorType:
        """The type of a reference of the dtype of another, which has its shape if it has none."""
        shape = ref_shape(ref, Mesh(), self._known)
        return like.replicated if shape is None else TensorType(like.dtype, shape)

    def _part(self, type: TensorType, tensor: int | None, own: Key) -> int:
        """The number of what the ranks hold: by tensor and layout, where these tell."""
        whole = type.global_type
        if tensor is not None and not whole.partial and not self.is_padded(type):
            return self._number(("part", tensor, self._ranks if type.of else "", repr(type)))
        return self._number(("own", *own, self._ranks, repr(type)))

    def is_padded(self, type: TensorType) -> bool:
        """Whether the last shards have padding."""
        whole = type.global_type
        return any(map(self._is_padded, whole.shape, whole.axes))

    def _is_padded(self, size: Any, axes: tuple[str, ...]) -> bool:
        return bool(axes) and uneven(size, self._mesh.group_size(axes))

    def _pairs(self, op: Op, operands: Sequence[Item], types: Sequence[TensorType]) -> list[Pair]:
        tensors = self._tensors(op, operands, types)
        parts = [item.part for item in operands]
        if op.commutative:
            parts.sort()
        own = (self._ranks, op.opname, repr(op.attributes), op.present, *parts)
        pairs: list[Pair] = []
        for i, type in enumerate(types):
            tensor, key = tensors[i], (*own, i)
            if tensor is None and not type.global_type.varying:
                # values of the ranks that are taken for parts of a tensor define it
                tensor = self._leaf(("defined", *key, repr(type)), type.global_type)
            pairs.append((tensor, self._part(type, tensor, key)))
        return pairs

    def _tensors(
        self, op: Op, operands: Sequence[Item], types: Sequence[TensorType]
    ) -> list[int | None]:
        """The numbers of the global results; None where no rule gives them."""
        wholes = [type.global_type for type in types]
        repeated = op.repeated()
        if repeated is not None and not wholes[0].varying:
            attributes = {"value": repr(repeated)}
            return [self._term(Term("full", (), wholes[0].shape, wholes[0].dtype, attributes))]
        inputs = [item.tensor for item in operands]
        known = [number for number in inputs if number is not None]
        if len(known) < len(inputs) or any(whole.varying for whole in wholes):
            return [None] * len(types)
        if isinstance(op, Exchange):
            return [known[0] if self._converts(op, operands[0].type, types[0]) else None]
        layouts = [repr(type) for type in (*[item.type for item in operands], *types)]
        key = (self._ranks, op.opname, op.present, repr(op.attributes), *known, *layouts)
        if key not in self._done:
            self._done[key] = self._computed(op, operands, known, types)
        return self._done[key]

    def _computed(
        self, op: Op, operands: Sequence[Item], known: list[int], types: Sequence[TensorType]
    ) -> list[int | None]:
        is_part, numbers = self._follows_rule(op, types), None
        is_spread = any(value.type.of is not None for value in op.operands)
        has_forms = type(op).localized is not Op.localized and "shape" not in op.attribute_types
        form = (op.opname, op.present, *known)
        if is_part and has_forms and is_spread:
            numbers = self._global_form(op, self._forms.get(form, ()), types)
        if numbers is None and op.composite:
            numbers = self._expanded(op, operands)
        if numbers is None and is_part:
            layouts = [repr(item.type) for item in operands] if has_forms and is_spread else []
            numbers = [self._simplified(term) for term in _terms(op, known, types, layouts)]
        if numbers is not None and has_forms and not is_spread:
            self._forms.setdefault(form, []).append((op, numbers))
        return [None] * len(types) if numbers is None else [*numbers]

    def _global_form(
        self, op: Op, forms: Iterable[tuple[Op, list[int]]], types: Sequence[TensorType]
    ) -> list[int] | None:
        """The numbers of the global operation of which this is one rank's version."""
        for whole, numbers in forms:
            shapes = [result.type.global_type.shape for result in whole.results]
            if shapes == [type.global_type.shape for type in types]:
                with suppress(Error):
                    attributes = whole.localized(tuple(type.replicated for type in types))
                    if repr(attributes) == repr(op.attributes):
                        return numbers
        return None

    def _follows_rule(self, op: Op, types: Sequence[TensorType]) -> bool:
        """Whether one rank's operation is, by its sharding rule, part of the one on the tensors."""
        if all(v.type.of is None for v in op.operands) and all(type.of is None for type in types):
            return True
        if type(op).local_rule is not Op.local_rule or types_of(op) != tuple(types):
            return False
        view = placeholder(
            op, tuple(Value(v.type.global_type, None, i) for i, v in enumerate(op.operands))
        )
        text = view.sharding_rule()
        if text is None:
            return False
        rule = parse_rule(text)
        kept = {name for names in result_words(rule, types) for name in names}
        return not any(
            name not in kept and self._is_padded(size, axes)
            for value, (_, names) in zip(view.operands, operand_words(view, rule), strict=True)
            for name, size, axes in zip(names, value.type.shape, value.type.axes, strict=True)
        )

    def _converts(self, op: Exchange, x: TensorType, result: TensorType) -> bool:
        """Whether a collective changes nothing but how the tensor is distributed."""
        before, after = x.global_type, result.global_type
        if before.shape != after.shape or types_of(op) != (result,):
            return False
        kind = op.attributes.get("op")
        return kind is None or (kind == "sum" and {*op.axes} <= {*before.partial})

    def _expanded(self, op: Op, operands: Sequence[Item]) -> list[int] | None:
        """The numbers of the results of a composite operation, by those of its expansion."""
        stand_ins = tuple(Value(item.type, None, i) for i, item in enumerate(operands))
        try:
            results = expanded_results(placeholder(op, stand_ins).expand())
        except Error:
            return None
        scope = dict(zip(stand_ins, operands, strict=True))
        for part in in_order(results):
            inner = [scope[value] for value in part.operands]
            types = [value.type for value in part.results]
            pairs = self._pairs(part, inner, types)
            for value, (tensor, number) in zip(part.results, pairs, strict=True):
                scope[value] = Item(value.type, "", tensor=tensor, part=number)
        numbers = [scope[value].tensor for value in results]
        known = [number for number in numbers if number is not None]
        return known if len(known) == len(numbers) else None


def _terms(op: Op, known: list[int], types: Sequence[TensorType], layouts: list[str]) -> list[Term]:
    """The results as operations on the global tensors."""
    attributes: dict[str, Any] = {"present": op.present, **op.attributes, "layouts": layouts}
    attributes = {name: value for name, value in attributes.items() if value not in ((), [])}
    if op.opname in ("concat", "split", "slice"):
        attributes["dim"] %= types[0].ndim
    if "shape" in attributes:
        attributes["shape"] = types[0].global_type.shape
    inputs = tuple(sorted(known) if op.commutative else known)
    return [
        Term(op.opname, inputs, type.global_type.shape, type.dtype, attributes, i)
        for i, type in enumerate(types)
    ]

"""The global types of local values: derived by the sharding rules, and checked where recorded.

A local operation is one rank's part of the operation on the global values, so that the same rule
gives the global types of its results. Where the rule refuses, each rank computes something of its
own: the results vary over the axes in question. A result may be recorded as another part than is
derived where it varies, see decision 0020.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import Error
from .core import Op, Value, placeholder
from .dims import Dim, DimLike, exact_divide
from .sharding import (
    Words,
    axes_by_name,
    check_replicated,
    in_order,
    operand_words,
    parse_rule,
    result_words,
    spread_types,
)
from .types import TensorType

_SUM, _VARIES = -1, -2  # places of axes that shard no dimension


class Derived(NamedTuple):
    """The global types of results; why the rule refuses, and the axes that vary because of it."""

    types: tuple[TensorType, ...]
    refusal: Error | None = None
    forced: tuple[str, ...] = ()


def local_types(op: Op, outs: tuple[TensorType, ...]) -> tuple[TensorType, ...]:
    """The local result types `outs` with the global types that the rule gives."""
    if op.records or not outs:
        return outs
    derived = _derived(op, outs)
    if derived.refusal is not None and not _is_own(op):
        raise derived.refusal
    return tuple([o.part_of(whole) for o, whole in zip(outs, derived.types, strict=True)])


def _is_own(op: Op) -> bool:
    """Whether what each rank computes by itself has a meaning where the rule refuses."""
    types = [value.type.global_type for value in op.operands]
    if any(type.partial for type in types):
        return False
    return bool(op.moves_data or op.per_shard or any(type.varying for type in types))


def recorded_refusal(op: Op, index: int, derived: TensorType, written: TensorType) -> str | None:
    """Why a result that is derived as one local type cannot be recorded as another.

    None where it can; the empty text where the two types say it all.
    """
    if written is derived:
        return None
    if written.replicated is not derived.replicated or written.sharded or derived.sharded:
        return ""
    wanted = written.global_type
    if not op.operands and op.records:
        return ""  # a rank has the order of its axes
    if not op.operands:
        number = op.repeated()
        placed = any(wanted.axes) or (wanted.partial and number == 0)
        return None if wanted.varying or (number is not None and placed) else ""
    rule_types = Derived((derived.global_type,))
    if not op.records:
        outs = tuple([result.type.replicated for result in op.results])
        rule_types = _derived(op, outs, wanted if "shape" in op.attribute_types else None)
    type = rule_types.types[0 if op.records else index]
    if _may_be(type, wanted, rule_types.forced):
        return None
    refusal = op.refusal() if op.records else rule_types.refusal
    return refusal.message if refusal is not None else ""


def _may_be(derived: TensorType, wanted: TensorType, forced: tuple[str, ...]) -> bool:
    """Whether a value of one global type may be recorded as of another.

    Every axis keeps its place; what varies may be taken for shards or terms of a sum, by which it
    defines their global value, and anything may be taken for what varies.
    """
    here, there = _places(derived), _places(wanted)
    for axis in here.keys() | there.keys():
        place, other = here.get(axis), there.get(axis)
        defines = place == _VARIES and axis not in forced and other is not None
        if place != other and other != _VARIES and not defines:
            return False
    order = (*derived.spread, *wanted.varying)
    return all(in_order(axes, tuple(dict.fromkeys(order))) for axes in wanted.axes)


def _places(type: TensorType) -> dict[str, int]:
    """Per axis the dimension that it shards, or what it does to the value."""
    places = {axis: dim for dim, axes in enumerate(type.axes) for axis in axes}
    places |= dict.fromkeys(type.partial, _SUM)
    return places | dict.fromkeys(type.varying, _VARIES)


def _derived(op: Op, outs: Sequence[TensorType], written: TensorType | None = None) -> Derived:
    """The global types of the results of a local operation that does not communicate."""
    types = [value.type.global_type for value in op.operands]
    every = tuple(dict.fromkeys([axis for type in types for axis in type.spread]))
    varies = tuple([TensorType(o.dtype, o.shape, varying=every) for o in outs])
    if all(len(type.spread) == len(type.varying) for type in types):
        return Derived(varies)
    try:
        view = _view(op, written)
        text = view.local_rule()
        if text is None:
            return Derived(varies, Error(f"{op.opname} has no sharding rule"), every)
        return _by_rule(op, view, text, outs)
    except Error as error:
        return Derived(varies, error, every)


def _by_rule(op: Op, view: Op, text: str, outs: Sequence[TensorType]) -> Derived:
    rule = parse_rule(text)
    where = axes_by_name(view, rule)
    refusal = None
    try:
        check_replicated(view, rule, where)
    except Error as error:
        refusal = error
    forced = tuple(a for name in sorted(rule.replicated) for a in where.pop(name, ()))
    _check_positions(view, rule.positions & where.keys(), where)
    types = spread_types(view, rule, where, tuple(outs), view.local_sums())
    words = result_words(rule, types)
    own = [names for _, names in operand_words(view, rule)]
    sized = [_sized(op, own, type, names) for type, names in zip(types, words, strict=True)]
    own = [type.replace(varying=(*type.varying, *forced)) for type in sized]
    return Derived(tuple(own), refusal, forced)


def _check_positions(view: Op, names: frozenset[str], where: dict[str, tuple[str, ...]]) -> None:
    """Positions in a sharded dimension are those of the rank: an operand varies over its axes."""
    for name in sorted(names):
        if not any(in_order(where[name], value.type.varying) for value in view.operands):
            over = ".".join(where[name])
            raise Error(
                f"{view.opname} must know where the shard of a rank of {over} begins: a dimension "
                f"is sharded over {over}, but no operand is made of that rank number",
                view,
            )


def _view(op: Op, written: TensorType | None) -> Op:
    """The operation over the global types of its operands, for its rule.

    Where the shape of the result is an attribute, it is that of the type `written`; if there is
    none, shapes stay local.
    """
    types = [value.type.global_type for value in op.operands]
    if "shape" in op.attribute_types and written is None:
        types = [
            TensorType(t.dtype, v.type.shape, t.axes, t.partial, t.varying)
            for t, v in zip(types, op.operands, strict=True)
        ]
    view = placeholder(op, tuple([Value(type, None, i) for i, type in enumerate(types)]))
    if "shape" in op.attribute_types and written is not None:
        view.shape = written.shape  # pyright: ignore[reportAttributeAccessIssue]
    return view


def _sized(op: Op, words: list[Words], type: TensorType, names: Words) -> TensorType:
    """A result type with global sizes: those of the operands' dimensions of the same names."""
    shape = [
        _global_size(op, words, name, size) if axes else size
        for name, size, axes in zip(names, type.shape, type.axes, strict=True)
    ]
    return type.replace(shape=tuple(shape)) if any(type.axes) else type


def _global_size(op: Op, words: list[Words], name: str, size: DimLike) -> DimLike:
    pairs = [
        (value.type.shape[names.index(name)], value.type.global_type.shape[names.index(name)])
        for value, names in zip(op.operands, words, strict=True)
        if name in names and value.type.global_type.axes[names.index(name)]
    ]
    for local, whole in pairs:
        if local == size:
            return whole
    local, whole = pairs[0]
    ratio = exact_divide(whole, local)
    if ratio is None and not isinstance(whole, Dim) and not isinstance(local, Dim):
        ratio = -(-whole // local)
    if ratio is None:
        raise Error(f"{op.opname} divides a shard of a dimension of unknown size", op)
    return size * ratio


def origin(value: Value, axis: str) -> tuple[Op | None, str]:
    """The operation from which on a value varies or is partial over an axis, and what to do."""
    while True:
        op = value.producer
        if op is None:
            return None, f"%{value.name} is its part on one rank: gather it over {axis}"
        before = [v for v in op.operands if axis in _unplaced(v)]
        if not before:
            break
        value = before[0]
    derived = _derived(op, [result.type.replicated for result in op.results])
    if derived.refusal is not None and not op.records:
        return op, derived.refusal.message
    return op, f"put an all_reduce or an all_gather over {axis} behind the {op.opname}"


def _unplaced(value: Value) -> tuple[str, ...]:
    type = value.type.global_type
    return (*type.varying, *type.partial)

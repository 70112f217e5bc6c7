"""The usual case: the same operation on local operands, with padding masked where it matters."""

from __future__ import annotations

from typing import Any

from irc.errors import Error
from irc.ir.core import Op, Value
from irc.ir.declare import placeholder
from irc.ir.dtypes import is_float
from irc.ir.layouts import uneven
from irc.ir.sharding import operand_words, parse_rule

from ..shared.local_operation import local_attributes
from .builder import Builder


def local_operation(builder: Builder, op: Op) -> tuple[Value, ...]:
    """One rank's version of an operation, by its sharding rule."""
    operands = [builder.local(value) for value in op.operands]
    view = placeholder(
        op, tuple(Value(builder.type(value), None, i) for i, value in enumerate(op.operands))
    )
    view.results = op.results
    if any(value.type.sharded for value in view.operands):
        _mask_sums(builder, op, view, operands)
        _mask_integers(builder, view, operands)
    attributes = local_attributes(view, builder.mesh)
    changed = {name: new for name, new in attributes.items() if new is not getattr(op, name)}
    return builder.add_all(op.rebuilt(operands, **changed))


def _mask_sums(builder: Builder, op: Op, view: Op, operands: list[Value]) -> None:
    """Mask the padding of every dimension that is summed over, unless it is zero."""
    text = view.sharding_rule()
    if text is None:
        raise Error(f"{op.opname} has no sharding rule; gather its operands before it")
    rule = parse_rule(text)
    words = [names for _, names in operand_words(view, rule)]
    for value, names in zip(view.operands, words, strict=True):
        for name, axes in zip(names, value.type.axes, strict=True):
            if name in rule.positions and builder.mesh.group_size(axes) > 1:
                raise Error(f"{op.opname} must know where a rank's shard begins")
    kept = {word for words in rule.results for word in words} | {"1"}
    for name in {name: None for names in words for name in names}:
        leading = name.startswith(".") and "..." in kept
        if name not in kept and not leading:
            _mask_name(builder, op, name, words, operands)


def _mask_name(
    builder: Builder, op: Op, name: str, words: list[tuple[str, ...]], operands: list[Value]
) -> None:
    """Mask the summed dimension: one factor of a product must be zero, the others finite."""
    places = {
        at: names.index(name)
        for at, names in enumerate(words)
        if name in names and _is_padded(builder, op.operands[at], names.index(name))
    }
    states = {at: builder.padding.state(op.operands[at], dim) for at, dim in places.items()}
    holders = [name for at, (name, _) in enumerate(op.named_operands()) if at in places]
    added = any(sum(name in group for name in holders) > 1 for group in op.sums)
    masked = [at for at, s in states.items() if s == "unknown" or (added and s == "finite")]
    if not masked and "zero" not in states.values():
        masked = list(states)[:1]
    for at in masked:
        _mask(builder, op.operands[at], places[at], at, operands, 0)


def _mask_integers(builder: Builder, view: Op, operands: list[Value]) -> None:
    """Replace padding of indices and divisors by numbers that are safe."""
    for at, (name, value) in enumerate(view.named_operands()):
        safe = view.safe_values.get(name)
        if safe is None or is_float(value.type.dtype):
            continue
        for dim in range(value.type.ndim):
            if _is_padded(builder, value, dim):
                _mask(builder, value, dim, at, operands, safe)


def _is_padded(builder: Builder, value: Value, dim: int) -> bool:
    type = builder.type(value)
    return uneven(type.shape[dim], builder.mesh.group_size(type.axes[dim]))


def _mask(
    builder: Builder, value: Value, dim: int, at: int, operands: list[Value], fill: int
) -> None:
    type = builder.type(value)
    size: Any = type.shape[dim]
    operands[at] = builder.masked(operands[at], dim, size, type.axes[dim], fill)

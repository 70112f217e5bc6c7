"""The usual case: the same operation over one rank's operands, padding masked where it counts."""

from __future__ import annotations

from typing import Any

from irc.core import Op, Value
from irc.declare import placeholder
from irc.dtypes import is_float
from irc.errors import Error
from irc.layouts import uneven
from irc.ops import Linear, Matmul
from irc.sharding import operand_words, parse_rule

from ..one_rank import local_attributes
from .builder import Builder

# Integers with which an operation may go wrong, and what it is safe with: (operand, safe number).
_CAREFUL = {
    "gather": ("indices", 0),
    "gather_elements": ("indices", 0),
    "scatter_elements": ("indices", 0),
    "embedding": ("ids", 0),
    "cache_update": ("past", 0),
    "attention": ("past", 0),
    "floor_div": ("y", 1),
    "mod": ("y", 1),
}


def plain(builder: Builder, op: Op) -> tuple[Value, ...]:
    """One rank's version of an operation, by its sharding rule."""
    operands = [builder.local(value) for value in op.operands]
    whole = placeholder(
        op, tuple(Value(builder.type(value), None, i) for i, value in enumerate(op.operands))
    )
    whole.results = op.results
    if any(value.type.sharded for value in whole.operands):
        _mask_sums(builder, op, whole, operands)
        _mask_integers(builder, whole, operands)
    attributes = local_attributes(whole, builder.mesh)
    changed = {name: new for name, new in attributes.items() if new is not getattr(op, name)}
    return builder.add_all(op.rebuilt(operands, **changed))


def _mask_sums(builder: Builder, op: Op, whole: Op, operands: list[Value]) -> None:
    """Put zeros for the padding of every dimension that is summed over, where it is not zeros."""
    text = op.sharding_rule()
    if text is None:
        raise Error(f"{op.opname} has no sharding rule; gather its operands before it")
    rule = parse_rule(text)
    words = [names for _, names in operand_words(whole, rule)]
    for value, names in zip(whole.operands, words, strict=True):
        for name, axes in zip(names, value.type.axes, strict=True):
            if name in rule.positions and builder.mesh.ways(axes) > 1:
                raise Error(f"{op.opname} has to know where a rank's part begins, and cannot")
    kept = {word for words in rule.results for word in words} | {"1"}
    for name in {name: None for names in words for name in names}:
        leading = name.startswith(".") and "..." in kept
        if name not in kept and not leading:
            _mask_name(builder, op, name, words, operands)


def _mask_name(
    builder: Builder, op: Op, name: str, words: list[tuple[str, ...]], operands: list[Value]
) -> None:
    """Of a product one factor has to be zero in the padding, if the others are finite there."""
    places = {
        at: names.index(name)
        for at, names in enumerate(words)
        if name in names and _is_padded(builder, op.operands[at], names.index(name))
    }
    states = {at: builder.tails.state(op.operands[at], dim) for at, dim in places.items()}
    if isinstance(op, (Linear, Matmul)):
        masked = [at for at, state in states.items() if state == "unknown"]
        if not masked and "zero" not in states.values():
            masked = list(states)[:1]
    else:
        masked = [at for at, state in states.items() if state != "zero"]
    for at in masked:
        _mask(builder, op.operands[at], places[at], at, operands, 0)


def _mask_integers(builder: Builder, whole: Op, operands: list[Value]) -> None:
    """Keep padding from being looked up or divided by."""
    name, safe = _CAREFUL.get(whole.opname, (None, 0))
    for at, (operand, value) in enumerate(whole.named_operands()):
        if operand != name or is_float(value.type.dtype):
            continue
        for dim in range(value.type.rank):
            if _is_padded(builder, value, dim):
                _mask(builder, value, dim, at, operands, safe)


def _is_padded(builder: Builder, value: Value, dim: int) -> bool:
    type = builder.type(value)
    return uneven(type.shape[dim], builder.mesh.ways(type.axes[dim]))


def _mask(
    builder: Builder, value: Value, dim: int, at: int, operands: list[Value], fill: int
) -> None:
    type = builder.type(value)
    size: Any = type.shape[dim]
    operands[at] = builder.masked(operands[at], dim, size, type.axes[dim], fill)

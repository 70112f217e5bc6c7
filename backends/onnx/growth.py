"""The writes of a run to key-value caches; whether caches may start small or a run be repeated.

A cache [B, H, C, D] may be bound with fewer than C positions as long as nothing reads past the
tokens it holds. That is so where C occurs in the caches only, and every attention over them says
by `past` or `lengths` which keys are filled.
"""

from __future__ import annotations

from typing import Any

from irc.ir.core import Function, Op, Value
from irc.ir.dims import Dim
from irc.ops.fused_attention import cache_writes


def writes_of(function: Function) -> list[dict[str, str]]:
    """Per kind of cache {past, step, capacity}: a run writes `step` tokens after the `past` ones.

    `past` is an argument; step and capacity are dimensions as text. ONNX Runtime checks
    positions that are computed in the graph.
    """
    writes: list[dict[str, str]] = []
    for cache_write in (each for op in function for each in cache_writes(op)):
        past = cache_write.past
        if not _is_arg(past):
            continue
        step, capacity = cache_write.new.type.shape[1], cache_write.capacity
        write = {"past": str(past.name), "step": str(step), "capacity": str(capacity)}
        if write not in writes:
            writes.append(write)
    return writes


def growing(function: Function) -> str | None:
    """The symbol of the capacity, if it may be smaller than the caller asked for."""
    states = set(function.aliases().values())
    capacities = {write.capacity for op in function for write in cache_writes(op)}
    if len(capacities) != 1 or len(writes_of(function)) != 1:
        return None
    symbol = str(*capacities)
    plain = [arg for arg in function.args if arg.index not in states]
    if not _mentions((*capacities,), symbol) or any(_mentions(arg, symbol) for arg in plain):
        return None
    return symbol if all(_independent(op, symbol) for op in function) else None


def _mentions(thing: Any, symbol: str) -> bool:
    """Whether a symbol occurs in the type of a value, or in the value of an attribute."""
    if isinstance(thing, Value):
        return any(_mentions(dim, symbol) for dim in thing.type.shape)
    if isinstance(thing, tuple):
        return any(_mentions(item, symbol) for item in thing)
    return isinstance(thing, Dim) and symbol in thing.symbols()


def _independent(op: Op, symbol: str) -> bool:
    """Whether the results stay the same when the capacity is another."""
    if any(_mentions(value, symbol) for value in op.attributes.values()):
        return False
    writes = cache_writes(op)
    if not all(_is_arg(write.cache) and _is_arg(write.past) for write in writes):
        return False
    if writes and "causal" not in op.attributes:  # no attention, so rows are only written
        return True
    if op.opname == "return" or not any(_mentions(v, symbol) for v in (*op.operands, *op.results)):
        return True
    if op.opname != "attention" and not writes:
        return False
    has_past = bool(writes) or "past" in op.present
    bounded = "lengths" in op.present or (op.attributes["causal"] and has_past)
    aligned = has_past or not (op.attributes["causal"] or op.attributes["window"])
    return bounded and aligned


def _is_arg(value: Value) -> bool:
    return isinstance(value.owner, Function)

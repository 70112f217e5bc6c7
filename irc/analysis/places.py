"""Names of operations and values for messages."""

from __future__ import annotations

from ..ir.core import Op, Value, Weight


def named(op: Op) -> str:
    """`the linear at llama.py:97 in layers.0.mlp`, or by its result where it has no location."""
    if op.loc is not None:
        return f"the {op.opname} at {op.loc.where()}"
    names = [result.name for result in op.results if result.name is not None]
    return f"the {op.opname} %{names[0]}" if names else f"a {op.opname}"


def value_name(value: Value) -> str:
    """`@embed.weight`, `%x`, or `%_` where it has no name."""
    return f"@{value.name}" if isinstance(value, Weight) else f"%{value.name or '_'}"

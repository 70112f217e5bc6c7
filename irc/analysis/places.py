"""Names of operations and groups of ranks for messages."""

from __future__ import annotations

from collections.abc import Sequence

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


def listed(ranks: Sequence[int]) -> str:
    """`ranks 0, 1 and 5`, at most eight of them."""
    shown = [str(rank) for rank in ranks[:8]]
    if len(ranks) > 8:
        return f"{len(ranks)} ranks ({', '.join(shown)}, ...)"
    head = f"{', '.join(shown[:-1])} and " if len(shown) > 1 else ""
    return f"rank{'s' if len(shown) > 1 else ''} {head}{shown[-1]}"

"""Names of operations, values and layers for messages."""

from __future__ import annotations

import re

from ..ir.core import Op, Value, Weight

REPLICATED = "stays replicated:"  # in notes, between the name of a weight and the reason
_PART = re.compile(r"(?<=\.)\d+(?=\.|$)")  # as in layers.3.mlp
_END = re.compile(r"(?<=[A-Za-z_])\d+$")  # as in %k3


def named(op: Op) -> str:
    """`the linear at llama.py:97 in layers.0.mlp`, or by its result where it has no location."""
    if op.loc is not None:
        return f"the {op.opname} at {op.loc.where()}"
    names = [result.name for result in op.results if result.name is not None]
    return f"the {op.opname} %{names[0]}" if names else f"a {op.opname}"


def value_name(value: Value) -> str:
    """`@embed.weight`, `%x`, or `%_` where it has no name."""
    return f"@{value.name}" if isinstance(value, Weight) else f"%{value.name or '_'}"


def general(name: str) -> str:
    """A name with * for the numbers in it."""
    name = _PART.sub("*", name)
    return _END.sub("*", name) if name[:1] in ("@", "%") else name

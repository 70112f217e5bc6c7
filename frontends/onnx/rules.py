"""The table of operators that can be read: what makes operations of a node, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from irc.core import Op, Value
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.entry import Entry, Node

Made: TypeAlias = Entry | Value | Op | Sequence[Entry | Value | None]
Rule: TypeAlias = Callable[[Builder, Node], Made]
# What a node asks that its rule cannot do, or None, by attributes and counts of operands alone.
Refusal: TypeAlias = Callable[[Node], str | None]

MICROSOFT = "com.microsoft"
_OF_PLUGINS = ("plugin_version", "plugin_namespace")


@dataclass(frozen=True)
class Reading:
    """How nodes of one kind are read.

    What ONNX forbids is refused, and attributes that are not `known`. Where that is None, the kind
    is none of ONNX, and `refuses` alone decides.
    """

    rule: Rule
    known: frozenset[str] | None
    refuses: Refusal | None = None


Table: TypeAlias = Mapping[tuple[str, str], Reading]  # by domain and kind

TABLE: dict[tuple[str, str], Reading] = {}


def reads(
    *kinds: str, known: str = "", domain: str = "", refuses: Refusal | None = None
) -> Callable[[Rule], Rule]:
    """Put a rule into the table for some kinds of nodes, with the attributes that it knows."""

    def keep(rule: Rule) -> Rule:
        for kind in kinds:
            assert (domain, kind) not in TABLE
            TABLE[domain, kind] = Reading(rule, frozenset(known.split()), refuses)
        return rule

    return keep


def refusal(node: Node, table: Table = TABLE) -> str | None:
    """Why a node cannot be read, or None if it can."""
    reading = table.get((node.domain, node.kind))
    if reading is None and not node.attributes.keys().isdisjoint(_OF_PLUGINS):
        return "it is a plugin's; name the file that registers that with --load"
    if reading is None:
        return "irc has no operation for it" + _HINTS.get(node.kind, "")
    if reading.known is not None and node.misuse is not None:
        return node.misuse
    for name, value in node.attributes.items():
        if reading.known is not None and name not in reading.known:
            return f"its attribute {name}={_shown(value)} is unknown"
    return reading.refuses(node) if reading.refuses is not None else None


_QUANTIZED = "; quantize weights only, for DequantizeLinear, and leave activations floats"
_HINTS: dict[str, str] = dict.fromkeys(
    (
        "QuantizeLinear",
        "DynamicQuantizeLinear",
        "MatMulInteger",
        "QLinearMatMul",
        "MatMulNBits",
    ),
    _QUANTIZED,
)


def only(name: str, *allowed: Any) -> Refusal:
    """Refuses every other value of an attribute."""

    def refuse(node: Node) -> str | None:
        value = node.attributes.get(name, allowed[0])
        return (
            None
            if value in allowed
            else f"its attribute {name}={_shown(value)} has no meaning here"
        )

    return refuse


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."

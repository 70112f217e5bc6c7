"""The table of operators that can be read: what makes operations of a node, what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.entry import Entry, Node
from irc.frontends.onnx.model import schema_of
from irc.ir.core import Op, Value
from irc.onnx_format.operators import Row

if TYPE_CHECKING:
    from onnx import NodeProto

Made: TypeAlias = Entry | Value | Op | Sequence[Entry | Value | None]
Rule: TypeAlias = Callable[[Builder, Node], Made]
# Why a node cannot be read, or None: by its attributes and the number of its operands alone.
Refusal: TypeAlias = Callable[[Node], str | None]

MICROSOFT = "com.microsoft"
_OF_PLUGINS = ("plugin_version", "plugin_namespace")


@dataclass(frozen=True)
class Reading:
    """How nodes of one kind are read.

    What ONNX forbids is refused, and attributes that are not `known`. Where `known` is None, the
    operator is a plugin's, and its rule alone decides.
    """

    rule: Rule
    known: frozenset[str] | None
    refuses: Refusal | None = None


Table: TypeAlias = Mapping[tuple[str, str], Reading]  # by domain and kind

TABLE: dict[tuple[str, str], Reading] = {}


def entries_of(b: Builder, result: Made) -> list[Entry | None]:
    """What a rule gives, as an entry for each result of the node."""
    if isinstance(result, Op):
        result = result.results
    many = [result] if isinstance(result, (Entry, Value)) else result
    return [b.entry(one) if isinstance(one, Value) else one for one in many]


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


def row_rule(cls: type[Op], row: Row) -> Rule:
    """The rule of an operator that is one operation, whose operands are the node's inputs."""

    def rule(b: Builder, node: Node) -> Made:
        operands = [b.get(node.input(i)) for i in range(len(node.inputs))]
        make: Any = cls
        return b.add(make(*[operands] if cls.variadic else operands, **row.to_irc(node.attributes)))

    return rule


def refusal(node: Node, table: Table = TABLE) -> str | None:
    """Why a node cannot be read, or None if it can."""
    reading = table.get((node.domain, node.kind))
    if reading is None and not node.attributes.keys().isdisjoint(_OF_PLUGINS):
        return "it is a plugin's; name the file that registers that with --load"
    if reading is None:
        return node.misuse or "irc has no operation for it" + _HINTS.get(node.kind, "")
    if reading.known is not None and node.misuse is not None:
        return node.misuse
    for name, value in node.attributes.items():
        if reading.known is not None and name not in reading.known:
            return f"its attribute {name}={_shown(value)} is unknown"
    return reading.refuses(node) if reading.refuses is not None else None


_HINTS = {
    "MatMulNBits": "; quantize in the form of QuantizeLinear and DequantizeLinear (QDQ)",
    "DynamicQuantizeLSTM": "; name other operators to quantize_dynamic in op_types_to_quantize",
}


def only(name: str, *allowed: Any) -> Refusal:
    """Refuses every other value of an attribute."""

    def refuse(node: Node) -> str | None:
        value = node.attributes.get(name, allowed[0])
        supported = value in allowed
        return None if supported else f"its attribute {name}={_shown(value)} is not supported"

    return refuse


def made_by(entry: Entry | None, kind: str) -> Node | None:
    """The standard node that made a value, if it is of this kind."""
    node = entry.node if entry is not None else None
    return node if node is not None and node.kind == kind and not node.domain else None


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."


def is_wrong(node: Node) -> bool:
    """Whether ONNX forbids a node of a standard operator, or does not know its attributes."""
    schema = schema_of(node.kind, node.opset)
    unknown = schema is not None and not node.attributes.keys() <= set(schema.attributes)
    return not node.domain and (unknown or node.misuse is not None)


def misuse(node: NodeProto, opset: int) -> str | None:
    """What is wrong with a node of a standard operator; None for one that ONNX does not know."""
    schema = schema_of(node.op_type, opset)
    if schema is None:
        return None
    given, least, most = len(node.input), schema.min_input, schema.max_input
    optional = [formal.option == formal.option.Optional for formal in schema.inputs]
    is_complete = all(name or may for name, may in zip(node.input, optional, strict=False))
    if not least <= given <= most or not is_complete:
        more = "" if least == most else " or more" if most > 99 else f" to {most}"
        return f"it has {given} inputs, and the operator takes {least}{more}"
    if not schema.min_output <= len(node.output) <= schema.max_output:
        return f"it has {len(node.output)} outputs"
    for attribute in node.attribute:
        known = schema.attributes.get(attribute.name)
        if known is not None and int(known.type.value) != attribute.type:
            return f"its attribute {attribute.name} is of another type"
    for name, known in schema.attributes.items():
        if known.required and name not in [attribute.name for attribute in node.attribute]:
            return f"it lacks the attribute {name}"
    return None

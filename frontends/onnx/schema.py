"""Whether a node has the operands and attributes that its operator has in ONNX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from onnx import NodeProto


def misuse(node: NodeProto, opset: int) -> str | None:
    """What is wrong with a node of a standard operator; None for one that ONNX does not know."""
    import onnx.defs

    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
    given, least, most = len(node.input), schema.min_input, schema.max_input
    if not least <= given <= most or "" in node.input[:least]:
        return f"it has {given} inputs, and the operator takes {_range(least, most)}"
    if not schema.min_output <= len(node.output) <= schema.max_output:
        return f"it has {len(node.output)} outputs"
    for attribute in node.attribute:
        known = schema.attributes.get(attribute.name)
        if known is not None and int(cast("Any", known.type).value) != attribute.type:
            return f"its attribute {attribute.name} is of another type"
    for name, known in schema.attributes.items():
        if known.required and name not in [attribute.name for attribute in node.attribute]:
            return f"it lacks the attribute {name}"
    return None


def _range(least: int, most: int) -> str:
    return (
        str(least) if least == most else f"{least} or more" if most > 99 else f"{least} to {most}"
    )

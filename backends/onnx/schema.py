"""The ONNX schema of DistCollective, so that the checker and shape inference know it.

Names and values of the attributes are those of TensorRT 11, whose parser has the operator without
a domain. Models for CPUs have it in irc's domain, so that plain `onnx.checker` accepts them.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

from irc.backends.onnx.graph import COLLECTIVE, DOMAIN, OPSET, Attribute, attribute
from irc.ir.dtypes import DTYPES

_DEFAULTS: dict[str, Attribute] = {
    "collective_operation": "",
    "reduce_op": "none",
    "groups": (),
    "root": 0,
    "group_size": 0,
    "nb_rank": 1,
}
_DOC = """The collective `collective_operation` along dimension 0 among the ranks in `groups`.

`nb_rank` ranks take part; shard i is that of rank groups[i]. `root` is a position in `groups`, or
-1 where the operation has none. Ranks other than the root get zeros."""

_REGISTERING = Lock()  # ranks are loaded in threads


def register_schema() -> None:
    """Make `onnx.checker` and `onnx.shape_inference` know the operator; once is enough."""
    import onnx.reference  # looks at all schemas once, and refuses two of one name

    with _REGISTERING:
        for domain, version in (("", OPSET), (DOMAIN, 1)):
            if not onnx.defs.has(COLLECTIVE, domain):
                onnx.defs.register_schema(_schema(domain, version))


def _schema(domain: str, version: int) -> Any:
    import onnx.defs

    schema = onnx.defs.OpSchema(
        COLLECTIVE,
        domain,
        version,
        doc=_DOC,
        inputs=[onnx.defs.OpSchema.FormalParameter("x", "T")],
        outputs=[onnx.defs.OpSchema.FormalParameter("y", "T")],
        type_constraints=[("T", [f"tensor({dtype.onnx_name})" for dtype in DTYPES.values()], "")],
        attributes=[
            onnx.defs.OpSchema.Attribute(name, attribute(name, default), "")
            for name, default in _DEFAULTS.items()
        ],
    )
    schema.set_type_and_shape_inference_function(_infer)
    return schema


def _infer(context: Any) -> None:
    """The operand's type; gathers multiply dimension 0, scatters divide it.

    A damaged node, without its operand, its attributes or its result, gets none.
    """
    operand = context.get_input_type(0) if context.get_num_inputs() else None
    kind, size = (context.get_attribute(name) for name in ("collective_operation", "nb_rank"))
    if operand is None or kind is None or size is None or not context.get_num_outputs():
        return
    result = type(operand)()
    result.CopyFrom(operand)
    shape, ranks = result.tensor_type.shape, max(size.i, 1)
    if shape.dim and (b"gather" in kind.s or b"scatter" in kind.s):
        first = shape.dim[0]
        rows = first.dim_value if first.HasField("dim_value") else None
        first.Clear()
        if rows is not None:
            first.dim_value = rows * ranks if b"gather" in kind.s else rows // ranks
    context.set_output_type(0, result)

"""The ONNX schema of DistCollective, so that the checker and shape inference know it.

Names and values of the attributes are those of TensorRT 11, whose parser has the operator; it
has no domain there, so it is in that of ONNX here.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

from irc.backends.onnx.graph import COLLECTIVE, OPSET, Attribute, attribute
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
    import onnx.defs

    with _REGISTERING:
        if not onnx.defs.has(COLLECTIVE):
            onnx.defs.register_schema(_schema())


def _schema() -> Any:
    import onnx.defs

    schema = onnx.defs.OpSchema(
        COLLECTIVE,
        "",
        OPSET,
        doc=_DOC,
        inputs=[onnx.defs.OpSchema.FormalParameter("x", "T")],
        outputs=[onnx.defs.OpSchema.FormalParameter("y", "T")],
        type_constraints=[("T", [f"tensor({each.onnx_name})" for each in DTYPES.values()], "")],
        attributes=[
            onnx.defs.OpSchema.Attribute(name, attribute(name, default), "")
            for name, default in _DEFAULTS.items()
        ],
    )
    schema.set_type_and_shape_inference_function(_infer)
    return schema


def _infer(context: Any) -> None:
    """The operand's type; gathers multiply dimension 0, scatters divide it."""
    found = type(context.get_input_type(0))()
    found.CopyFrom(context.get_input_type(0))
    kind = context.get_attribute("collective_operation").s.decode()
    ranks = context.get_attribute("nb_rank").i
    if found.tensor_type.HasField("shape") and ("gather" in kind or "scatter" in kind):
        first = found.tensor_type.shape.dim[0]
        size = first.dim_value if first.HasField("dim_value") else None
        first.Clear()
        if size is not None:
            first.dim_value = size * ranks if "gather" in kind else size // ranks
    context.set_output_type(0, found)

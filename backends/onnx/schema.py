"""The ONNX schema of DistCollective, so that the checker and shape inference know it.

Names and values of the attributes are those of TensorRT 11, whose parser has the operator; it
belongs to no domain there, so it stands in ONNX's own.
"""

from __future__ import annotations

from threading import Lock
from typing import Any

from irc.backends.onnx.graph import COLLECTIVE, DTYPES, OPSET, attribute
from irc.backends.onnx.lower_collective import OPERATIONS

_DOC = """The collective `collective_operation` along dimension 0 among the ranks in `groups`.

`nb_rank` ranks take part; part i is that of rank groups[i]. `root` is a position in `groups`, or -1
where the operation has none. What ranks other than the root get is zero."""

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
        type_constraints=[("T", _types(), "every dtype")],
        attributes=_attributes(onnx.defs.OpSchema),
    )
    schema.set_type_and_shape_inference_function(_infer)
    return schema


def _types() -> list[str]:
    names = {"f64": "double", "f32": "float", "f16": "float16", "bf16": "bfloat16", "bool": "bool"}
    names |= {"f8e4m3": "float8e4m3fn", "f8e5m2": "float8e5m2"}
    integers = {kind: kind.replace("i", "int").replace("u", "uint") for kind in DTYPES}
    return [f"tensor({names.get(kind, integers[kind])})" for kind in DTYPES]


def _attributes(schema: Any) -> list[Any]:
    text = [
        schema.Attribute(name, schema.AttrType.STRING, about, required=True)
        for name, about in (
            ("collective_operation", ", ".join(OPERATIONS.values())),
            ("reduce_op", "sum, max, min, prod or none"),
        )
    ]
    groups = schema.Attribute("groups", attribute("groups", ()), "the ranks, in order of parts")
    numbers = [
        schema.Attribute(name, attribute(name, default), about)
        for name, default, about in (
            ("root", 0, "a position in groups"),
            ("group_size", 0, "how many groups has"),
            ("nb_rank", 1, "how many ranks take part"),
        )
    ]
    return [*text, groups, *numbers]


def _infer(context: Any) -> None:
    """The operand's type; gathers multiply dimension 0, scatters divide it."""
    found = type(context.get_input_type(0))()
    found.CopyFrom(context.get_input_type(0))
    kind = context.get_attribute("collective_operation").s.decode()
    ranks = context.get_attribute("nb_rank").i
    if found.tensor_type.HasField("shape") and kind in _SCALES:
        first = found.tensor_type.shape.dim[0]
        known = first.HasField("dim_value")
        size = first.dim_value
        first.Clear()
        if known:
            first.dim_value = size * ranks if _SCALES[kind] == "grows" else size // ranks
    context.set_output_type(0, found)


_SCALES = {"all_gather": "grows", "gather": "grows", "reduce_scatter": "cut", "scatter": "cut"}

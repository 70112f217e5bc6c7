"""The ONNX schema of a plugin, so that ONNX's checker and shape inference know its node."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock
from typing import Any

from irc.errors import Error

from .instance import Instance
from .spec import SPECS, PluginSpec, Tensor, find

# The names that ONNX gives to dtypes in type constraints, and their numbers in models.
_TYPES = {
    "f64": ("double", 11),
    "f32": ("float", 1),
    "f16": ("float16", 10),
    "bf16": ("bfloat16", 16),
    "f8e4m3": ("float8e4m3fn", 17),
    "f8e5m2": ("float8e5m2", 19),
    "i64": ("int64", 7),
    "i32": ("int32", 6),
    "i16": ("int16", 5),
    "i8": ("int8", 3),
    "i4": ("int4", 22),
    "u8": ("uint8", 2),
    "u4": ("uint4", 21),
    "bool": ("bool", 9),
}
_NAMES = {number: kind for kind, (_, number) in _TYPES.items()}

_HOLDERS: dict[str, PluginSpec] = {}  # the plugins that ONNX has a schema of
_REGISTERING = Lock()  # ranks are loaded in threads


def register_schemas() -> None:
    """Make `onnx.checker` and `onnx.shape_inference` know every plugin; any number of calls.

    A plugin called as an operator of ONNX has none, nor has the second of two of one name.
    """
    import onnx.defs

    with _REGISTERING:
        for spec in SPECS.values():
            holder = _HOLDERS.get(spec.name)
            if holder is None and onnx.defs.has(spec.name):
                continue
            if holder is not None and SPECS.get(holder.key) is holder:
                continue
            if holder is not None:  # its file was taken back
                onnx.defs.deregister_schema(spec.name, 1, "")
            onnx.defs.register_schema(schema_of(spec))
            _HOLDERS[spec.name] = spec


def schema_of(spec: PluginSpec) -> Any:
    """The schema: a node without a domain, whose attributes are all strings.

    Where tensors depend on fields, inputs and outputs after the first are optional here; shape
    inference, which reads the fields, is exact.
    """
    import onnx.defs

    schema = onnx.defs.OpSchema(
        spec.name,
        "",
        1,
        doc=spec.doc,
        inputs=_parameters(spec, "inputs"),
        outputs=_parameters(spec, "outputs"),
        type_constraints=_constraints(spec),
        attributes=_attributes(spec, onnx.defs.OpSchema),
    )
    schema.set_type_and_shape_inference_function(lambda context: _infer(spec, context))
    return schema


def _tensors(spec: PluginSpec, which: str) -> tuple[Tensor, ...] | None:
    found = getattr(spec, which)
    return None if callable(found) else found


def _parameters(spec: PluginSpec, which: str) -> list[Any]:
    import onnx.defs

    formal = onnx.defs.OpSchema.FormalParameter
    tensors = _tensors(spec, which)
    if tensors is None:
        variadic = onnx.defs.OpSchema.FormalParameterOption.Variadic
        about = f"the {which}, which depend on the attributes"
        return [formal(which, "Any", about, param_option=variadic, is_homogeneous=False)]
    return [formal(each.name, _constraint(spec, each), each.doc) for each in tensors]


def _constraint(spec: PluginSpec, tensor: Tensor) -> str:
    return tensor.dtype if tensor.dtype in spec.types else f"tensor({_TYPES[tensor.dtype][0]})"


def _constraints(spec: PluginSpec) -> list[tuple[str, list[str], str]]:
    inputs, outputs = (_tensors(spec, which) for which in ("inputs", "outputs"))
    named = {
        name: [f"tensor({_TYPES[kind][0]})" for kind in kinds] for name, kinds in spec.types.items()
    }
    used = [tensor.dtype for tensor in (*(inputs or ()), *(outputs or ()))]
    kept = {name: kinds for name, kinds in named.items() if name in used}
    if inputs is None or outputs is None:
        kept["Any"] = sorted({kind for kinds in named.values() for kind in kinds})
    return [(name, kinds, "") for name, kinds in kept.items()]


def _attributes(spec: PluginSpec, schema: Any) -> list[Any]:
    import onnx.helper

    found = [
        schema.Attribute("plugin_version", onnx.helper.make_attribute("plugin_version", "1"), ""),
        schema.Attribute(
            "plugin_namespace", onnx.helper.make_attribute("plugin_namespace", ""), ""
        ),
    ]
    for field in spec.fields:
        if field.required:
            kind = schema.AttrType.STRING
            found.append(schema.Attribute(field.name, kind, field.doc, required=True))
        else:
            value = onnx.helper.make_attribute(field.name, field.encode(field.default))
            found.append(schema.Attribute(field.name, value, field.doc))
    return found


def plugin_of_node(node: Any) -> Instance:
    """The plugin that an ONNX node means; an Error names the node and what is wrong with it."""
    place = node.name or node.op_type
    for attribute in node.attribute:
        if attribute.type != attribute.STRING:
            raise Error(f"{place}: the attribute {attribute.name} has to be a string")
    texts = {attribute.name: attribute.s.decode("utf-8", "replace") for attribute in node.attribute}
    version, namespace = texts.pop("plugin_version", "1"), texts.pop("plugin_namespace", "")
    try:
        return Instance.from_texts(find(node.op_type, version, namespace), texts, version)
    except Error as error:
        raise Error(f"{place}: {error.message}") from None


def _infer(spec: PluginSpec, context: Any) -> None:
    """Types and shapes of the outputs, as far as those of the inputs are known."""
    from onnx import shape_inference

    try:
        plugin = _plugin(spec, context)
        given = [context.get_input_type(i) for i in range(context.get_num_inputs())]
        kinds = [_NAMES.get(each.tensor_type.elem_type, "") for each in given]
        made = plugin.output_dtypes(kinds)
        shapes = _shapes(plugin, given)
    except Error as error:
        raise shape_inference.InferenceError(error.message) from None
    for position, kind in enumerate(made):
        found = type(given[0])()
        found.tensor_type.elem_type = _TYPES[kind][1]
        for size in shapes[position] if shapes else ():
            dim = found.tensor_type.shape.dim.add()
            if isinstance(size, int):
                dim.dim_value = size
            elif isinstance(size, _Symbol) and size.name:
                dim.dim_param = size.name
        if shapes and not shapes[position]:
            found.tensor_type.shape.SetInParent()
        context.set_output_type(position, found)


def _plugin(spec: PluginSpec, context: Any) -> Instance:
    given = context.get_attribute("plugin_version")
    version = given.s.decode("utf-8", "replace") if given is not None else "1"
    find(spec.name, version, spec.namespace)
    found = {field.name: context.get_attribute(field.name) for field in spec.fields}
    texts = {
        name: each.s.decode("utf-8", "replace") for name, each in found.items() if each is not None
    }
    return Instance.from_texts(spec, texts, version)


def _shapes(plugin: Instance, given: Sequence[Any]) -> Sequence[Any] | None:
    if not all(each.tensor_type.HasField("shape") for each in given):
        return None
    shapes = [
        tuple(
            dim.dim_value if dim.HasField("dim_value") else _Symbol(dim.dim_param)
            for dim in each.tensor_type.shape.dim
        )
        for each in given
    ]
    return plugin.output_shapes(shapes)


class _Symbol:
    """A dim that is not known; what is computed from it has no name."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def _unknown(self, other: Any) -> _Symbol:
        return _Symbol()

    __add__ = __radd__ = __sub__ = __rsub__ = _unknown
    __mul__ = __rmul__ = __floordiv__ = __rfloordiv__ = _unknown

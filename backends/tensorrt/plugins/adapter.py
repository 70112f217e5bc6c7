"""A PluginSpec as TensorRT knows plugins: an IPluginV3 and its creator, for either library.

`trt` is the module `tensorrt` or `tensorrt_rtx` (or one that plays it); nothing here imports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from irc.errors import Error

from ..nodes import NAMESPACE
from .expressions import Expression, unwrapped
from .fields import Values
from .instance import Instance, keep_failure
from .spec import SPECS, PluginSpec, TensorDesc, find

# Names of DataType members, which both libraries have.
DATA_TYPES = {
    "f32": "FLOAT",
    "f16": "HALF",
    "bf16": "BF16",
    "f8e4m3": "FP8",
    "i64": "INT64",
    "i32": "INT32",
    "i8": "INT8",
    "i4": "INT4",
    "u8": "UINT8",
    "bool": "BOOL",
}


def register_creators(trt: Any) -> list[str]:
    """Register a creator for every plugin, and version of it, that the library has not got yet.

    Returns the names of those that were new. Any number of calls is right.
    """
    registry = trt.get_plugin_registry()
    new: list[str] = []
    for spec in SPECS.values():
        for version in (spec.version, *spec.reads):
            if registry.get_creator(spec.name, version, spec.namespace) is not None:
                continue
            creator = creator_class(trt)(spec, version)
            if not registry.register_creator(creator, spec.namespace):
                raise Error(f"TensorRT refused the plugin {spec.name}, version {version}")
            _CREATORS.append(creator)
            new.append(spec.name)
    return new


_CREATORS: list[Any] = []  # the registry of the library does not keep them alive
_CLASSES: dict[tuple[str, Any], Any] = {}


def creator_class(trt: Any) -> Any:
    """The creator class for this library: creator(spec, version)."""
    key = ("creator", trt)
    if key not in _CLASSES:
        _CLASSES[key] = _creator_class(trt)
    return _CLASSES[key]


def plugin_class(trt: Any) -> Any:
    """The plugin class for this library: plugin(instance, version, the node's name)."""
    key = ("plugin", trt)
    if key not in _CLASSES:
        _CLASSES[key] = _plugin_class(trt)
    return _CLASSES[key]


def make_plugin(trt: Any, name: str, values: Values, namespace: str = NAMESPACE) -> Any:
    """A plugin for `network.add_plugin_v3(tensors, [], plugin)` of full TensorRT."""
    return plugin_class(trt)(Instance(find(name, namespace=namespace), values))


def field_texts(fields: Any) -> dict[str, str]:
    """The texts in a PluginFieldCollection; strings end in a NUL there."""
    texts: dict[str, str] = {}
    for field in fields:
        raw = b"" if field.data is None else np.asarray(field.data).tobytes()
        texts[str(field.name)] = raw.split(b"\0", 1)[0].decode()
    return texts


def kept(label: str, error: Exception) -> Exception:
    """The error with the node's name before it, kept for `take_failure`.

    TensorRT prints what a plugin raises and goes on to fail with a code.
    """
    if label and type(error) is Error:
        error = Error(f"{label}: {error.message}")
    keep_failure(error)
    return error


def _creator_class(trt: Any) -> Any:
    class Creator(trt.IPluginCreatorV3One):
        """Makes plugins of one spec from the fields in a node or an engine."""

        def __init__(self, spec: PluginSpec, version: str) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.spec = spec
            self.name, self.plugin_version = spec.name, version
            self.plugin_namespace = spec.namespace
            self.field_names = trt.PluginFieldCollection(
                [
                    trt.PluginField(field.name, np.array([]), trt.PluginFieldType.CHAR)
                    for field in spec.fields
                ]
            )

        def create_plugin(self, name: str, field_collection: Any, phase: Any) -> Any:
            """The plugin of these fields, for the node of that name."""
            try:
                texts = field_texts(field_collection)
                for given in ("plugin_version", "plugin_namespace"):
                    texts.pop(given, None)
                body = Instance.from_texts(self.spec, texts, self.plugin_version)
                return plugin_class(trt)(body, self.plugin_version, name)
            except Exception as error:
                raise kept(name, error) from None

    return Creator


def _plugin_class(trt: Any) -> Any:
    bases = (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuild, trt.IPluginV3OneRuntime)
    to_dtype = {getattr(trt.DataType, name): kind for kind, name in DATA_TYPES.items()}
    to_data_type = {kind: data_type for data_type, kind in to_dtype.items()}

    def dtypes_of(given: Sequence[Any]) -> list[str]:
        return [to_dtype.get(each, str(each)) for each in given]

    def descs(given: Sequence[Any]) -> tuple[TensorDesc, ...]:
        return tuple(TensorDesc(tuple(d.dims), to_dtype.get(d.type, str(d.type))) for d in given)

    class Plugin(*bases):
        """The plugin's four faces in one object; all state is in `body`."""

        def __init__(self, body: Instance, version: str = "", label: str = "") -> None:
            for base in bases:
                base.__init__(self)
            self.body, self.label = body, label
            spec = body.spec
            self.plugin_name, self.plugin_namespace = spec.name, spec.namespace
            self.plugin_version = version or spec.version
            self.num_outputs = len(spec.outputs_for(body.values))
            self.timing_cache_id = ""
            # Made here, where an error is seen: what get_fields_to_serialize raises is not.
            self._data = {
                name: np.frombuffer(text.encode() + b"\0", np.int8)
                for name, text in body.texts().items()
            }

        def get_capability_interface(self, type: Any) -> Any:
            return self

        def clone(self) -> Any:
            return Plugin(self.body.clone(), self.plugin_version, self.label)

        def get_fields_to_serialize(self) -> Any:
            return trt.PluginFieldCollection(
                [
                    trt.PluginField(name, data, trt.PluginFieldType.CHAR)
                    for name, data in self._data.items()
                ]
            )

        def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
            try:
                given = dtypes_of(input_types)
                return [to_data_type[each] for each in self.body.output_dtypes(given)]
            except Exception as error:
                raise kept(self.label, error) from None

        def get_output_shapes(
            self, inputs: Sequence[Any], shape_inputs: Sequence[Any], expr_builder: Any
        ) -> list[Any]:
            try:
                given = [tuple(Expression(trt, expr_builder, d) for d in dims) for dims in inputs]
                shapes = self.body.output_shapes(given)
                return [trt.DimsExprs(unwrapped(expr_builder, each)) for each in shapes]
            except Exception as error:
                raise kept(self.label, error) from None

        def supports_format_combination(self, pos: int, in_out: Any, num_inputs: int) -> bool:
            tensors = [each.desc for each in in_out[: pos + 1]]
            if tensors[pos].format != trt.TensorFormat.LINEAR:
                return False
            return self.body.supports(pos, dtypes_of([each.type for each in tensors]))

        def configure_plugin(self, inp: Any, out: Any) -> None:
            pass

        def get_workspace_size(self, inp: Any, out: Any) -> int:
            given, made = (
                tuple(
                    TensorDesc(tuple(d.max), to_dtype.get(d.desc.type, str(d.desc.type)))
                    for d in each
                )
                for each in (inp, out)
            )
            return self.body.spec.workspace(self.body.values, given, made)

        def get_valid_tactics(self) -> list[int]:
            return []

        def set_tactic(self, tactic: int) -> None:
            pass

        def attach_to_context(self, resource_context: Any) -> Any:
            return self.clone()

        def on_shape_change(self, inp: Any, out: Any) -> None:
            try:
                self.body.prepare(descs(inp), descs(out))
            except Exception as error:
                raise kept(self.label, error) from None

        def enqueue(
            self,
            input_desc: Any,
            output_desc: Any,
            inputs: Sequence[int],
            outputs: Sequence[int],
            workspace: int,
            stream: int,
        ) -> None:
            try:
                self.body.enqueue(inputs, outputs, workspace, stream)
            except Exception as error:
                raise kept(self.label, error) from None

    return Plugin

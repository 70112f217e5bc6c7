"""A PluginSpec as TensorRT knows plugins: an IPluginV3 and its creator, for either library.

`trt` is the module `tensorrt` or `tensorrt_rtx` (or one that plays it); nothing here imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

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
        _CLASSES[key] = _derived(_Creator, trt, (trt.IPluginCreatorV3One,))
    return _CLASSES[key]


def plugin_class(trt: Any) -> Any:
    """The plugin class for this library: plugin(instance, version, the node's name)."""
    key = ("plugin", trt)
    if key not in _CLASSES:
        faces = ("IPluginV3", "IPluginV3OneCore", "IPluginV3OneBuild", "IPluginV3OneRuntime")
        _CLASSES[key] = _derived(_Plugin, trt, tuple(getattr(trt, face) for face in faces))
    return _CLASSES[key]


def _derived(methods: type, trt: Any, bases: tuple[Any, ...]) -> Any:
    """A class of these methods that derives from the library's own classes too."""

    class Derived(methods, *bases):
        library = _Library(trt, bases)

    Derived.__name__ = Derived.__qualname__ = methods.__name__.removeprefix("_")
    Derived.__doc__ = methods.__doc__
    return Derived


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


class _Library:
    """One of the libraries: its dtypes and fields in our terms, and the bases of a class."""

    def __init__(self, trt: Any, bases: tuple[Any, ...]) -> None:
        self.trt, self.bases = trt, bases
        self._data_types = {kind: getattr(trt.DataType, name) for kind, name in DATA_TYPES.items()}
        self._dtypes = {data_type: kind for kind, data_type in self._data_types.items()}

    def begin(self, made: Any) -> None:
        """Initialize what an object has of the library."""
        for base in self.bases:
            base.__init__(made)

    def data_types(self, dtypes: Sequence[str]) -> list[Any]:
        """Our dtypes as the library has them."""
        return [self._data_types[each] for each in dtypes]

    def dtype(self, data_type: Any) -> str:
        """The library's dtype as ours, or the library's name of one that we have not."""
        return self._dtypes.get(data_type, str(data_type))

    def dtypes(self, data_types: Sequence[Any]) -> list[str]:
        """The same of several."""
        return [self.dtype(each) for each in data_types]

    def descs(self, given: Sequence[Any]) -> tuple[TensorDesc, ...]:
        """What tensors are like that a plugin is run on."""
        return tuple(TensorDesc(tuple(d.dims), self.dtype(d.type)) for d in given)

    def largest(self, given: Sequence[Any]) -> tuple[TensorDesc, ...]:
        """What tensors are like at the upper ends of their ranges."""
        return tuple(TensorDesc(tuple(d.max), self.dtype(d.desc.type)) for d in given)

    def fields(self, texts: Mapping[str, Any]) -> Any:
        """Fields of characters by name."""
        kind = self.trt.PluginFieldType.CHAR
        return self.trt.PluginFieldCollection(
            [self.trt.PluginField(name, data, kind) for name, data in texts.items()]
        )


class _Creator:
    """Makes plugins of one spec from the fields in a node or an engine."""

    library: _Library

    def __init__(self, spec: PluginSpec, version: str) -> None:
        self.library.begin(self)
        self.spec = spec
        self.name, self.plugin_version = spec.name, version
        self.plugin_namespace = spec.namespace
        self.field_names = self.library.fields({field.name: np.array([]) for field in spec.fields})

    def create_plugin(self, name: str, field_collection: Any, phase: Any) -> Any:
        """The plugin of these fields, for the node of that name."""
        try:
            texts = field_texts(field_collection)
            for given in ("plugin_version", "plugin_namespace"):
                texts.pop(given, None)
            body = Instance.from_texts(self.spec, texts, self.plugin_version)
            return plugin_class(self.library.trt)(body, self.plugin_version, name)
        except Exception as error:
            raise kept(name, error) from None


Method = TypeVar("Method", bound=Callable[..., Any])


def _told(method: Method) -> Method:
    """The method, whose errors name the node and are kept."""

    @wraps(method)
    def told(self: _Plugin, *given: Any) -> Any:
        try:
            return method(self, *given)
        except Exception as error:
            raise kept(self.label, error) from None

    return cast("Method", told)


class _Plugin:
    """The plugin's four faces in one object; all state is in `body`."""

    library: _Library

    def __init__(self, body: Instance, version: str = "", label: str = "") -> None:
        self.library.begin(self)
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

    # ---------------------------------------------------------------- of all times

    def get_capability_interface(self, type: Any) -> Any:
        return self

    def clone(self) -> Any:
        return type(self)(self.body.clone(), self.plugin_version, self.label)

    def get_fields_to_serialize(self) -> Any:
        return self.library.fields(self._data)

    # ---------------------------------------------------------------- while an engine is built

    @_told
    def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
        library = self.library
        return library.data_types(self.body.output_dtypes(library.dtypes(input_types)))

    @_told
    def get_output_shapes(
        self, inputs: Sequence[Any], shape_inputs: Sequence[Any], expr_builder: Any
    ) -> list[Any]:
        trt = self.library.trt
        given = [tuple(Expression(trt, expr_builder, d) for d in dims) for dims in inputs]
        shapes = self.body.output_shapes(given)
        return [trt.DimsExprs(unwrapped(expr_builder, each)) for each in shapes]

    def supports_format_combination(self, pos: int, in_out: Any, num_inputs: int) -> bool:
        tensors = [each.desc for each in in_out[: pos + 1]]
        if tensors[pos].format != self.library.trt.TensorFormat.LINEAR:
            return False
        return self.body.supports(pos, self.library.dtypes([each.type for each in tensors]))

    def configure_plugin(self, inp: Any, out: Any) -> None:
        pass

    def get_workspace_size(self, inp: Any, out: Any) -> int:
        given, made = self.library.largest(inp), self.library.largest(out)
        return self.body.spec.workspace(self.body.values, given, made)

    def get_valid_tactics(self) -> list[int]:
        return []

    # ---------------------------------------------------------------- while an engine runs

    def set_tactic(self, tactic: int) -> None:
        pass

    def attach_to_context(self, resource_context: Any) -> Any:
        return self.clone()

    @_told
    def on_shape_change(self, inp: Any, out: Any) -> None:
        self.body.prepare(self.library.descs(inp), self.library.descs(out))

    @_told
    def enqueue(
        self,
        input_desc: Any,
        output_desc: Any,
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        self.body.enqueue(inputs, outputs, workspace, stream)

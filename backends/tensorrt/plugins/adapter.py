"""A PluginSpec as TensorRT expects plugins: an IPluginV3 and its creator, for either library.

`trt` is the module `tensorrt` or `tensorrt_rtx` (or a substitute); nothing here imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from typing import Any

import numpy as np

from irc.errors import Error
from irc.ir.dtypes import DTYPES

from .instance import Instance, keep_failure
from .spec import SPECS, PluginSpec, TensorDesc

# Members of TensorRT's DataType by irc's names.
DATA_TYPES = {name: each.tensorrt for name, each in DTYPES.items() if each.tensorrt}

_CREATORS: list[Any] = []  # kept alive here, since the registry of the library does not


def register_creators(trt: Any) -> list[str]:
    """Register a creator for every plugin that the library lacks, and return their names."""
    registry = trt.get_plugin_registry()
    new: list[str] = []
    for spec in SPECS.values():
        if registry.get_creator(spec.name, spec.version, spec.namespace) is not None:
            continue
        creator = creator_class(trt)(spec)
        if not registry.register_creator(creator, spec.namespace):
            raise Error(f"TensorRT refused the plugin {spec.name}, version {spec.version}")
        _CREATORS.append(creator)
        new.append(spec.name)
    return new


@cache
def creator_class(trt: Any) -> Any:
    """The creator class for this library: creator(spec)."""
    return _derived(_Creator, trt, (trt.IPluginCreatorV3One,))


@cache
def plugin_class(trt: Any) -> Any:
    """The plugin class for this library: plugin(instance, the node's name)."""
    names = ("IPluginV3", "IPluginV3OneCore", "IPluginV3OneBuild", "IPluginV3OneRuntime")
    return _derived(_Plugin, trt, tuple(getattr(trt, name) for name in names))


def _derived(methods: type, trt: Any, bases: tuple[Any, ...]) -> Any:
    """A class with these methods that derives from the library's own classes too."""

    class Derived(methods, *bases):
        library = _Library(trt, bases)

    Derived.__name__ = Derived.__qualname__ = methods.__name__.removeprefix("_")
    Derived.__doc__ = methods.__doc__
    return Derived


def field_texts(fields: Any) -> dict[str, str]:
    """The strings in a PluginFieldCollection, where they end in a NUL."""
    texts: dict[str, str] = {}
    for field in fields:
        raw = b"" if field.data is None else np.asarray(field.data).tobytes()
        texts[str(field.name)] = raw.split(b"\0", 1)[0].decode()
    return texts


def kept(label: str, error: Exception) -> Exception:
    """The error with the node's name first, kept for `take_failure`."""
    if label and type(error) is Error:
        error = Error(f"{label}: {error.message}")
    keep_failure(error)
    return error


class Expression:
    """A dim of an input while TensorRT builds: multiplied and divided by integers, it is known
    later. `node` is an IDimensionExpr."""

    def __init__(self, trt: Any, builder: Any, node: Any) -> None:
        self._trt, self._builder, self.node = trt, builder, node

    def __mul__(self, other: int) -> Expression:
        return self._with("PROD", other)

    def __floordiv__(self, other: int) -> Expression:
        return self._with("FLOOR_DIV", other)

    def _with(self, operation: str, other: int) -> Expression:
        kind = getattr(self._trt.DimensionOperation, operation)
        node = self._builder.operation(kind, self.node, self._builder.constant(other))
        return Expression(self._trt, self._builder, node)

    @property
    def known(self) -> int | None:
        """Its value, where that is constant."""
        return int(self.node.get_constant_value()) if self.node.is_constant() else None


class _Library:
    """A TensorRT library: conversions of dtypes and fields, and the bases of a class."""

    def __init__(self, trt: Any, bases: tuple[Any, ...]) -> None:
        self.trt, self.bases = trt, bases
        self.data_types = {name: getattr(trt.DataType, each) for name, each in DATA_TYPES.items()}
        self._names = {data_type: name for name, data_type in self.data_types.items()}

    def initialize(self, derived: Any) -> None:
        """Call the constructors of the library's classes."""
        for base in self.bases:
            base.__init__(derived)

    def dtypes(self, data_types: Sequence[Any]) -> list[str]:
        """irc's names of TensorRT's dtypes; TensorRT's name of one that irc lacks."""
        return [self._names.get(each, str(each)) for each in data_types]

    def descs(self, tensors: Sequence[Any]) -> tuple[TensorDesc, ...]:
        """Shapes and dtypes of tensors at run time."""
        names = self.dtypes([each.type for each in tensors])
        pairs = zip(tensors, names, strict=True)
        return tuple(TensorDesc(tuple(each.dims), name) for each, name in pairs)

    def fields(self, texts: Mapping[str, Any]) -> Any:
        """A PluginFieldCollection of characters by name."""
        kind = self.trt.PluginFieldType.CHAR
        return self.trt.PluginFieldCollection(
            [self.trt.PluginField(name, data, kind) for name, data in texts.items()]
        )


class _Creator:
    """Makes plugins of one spec from the fields in a node or an engine."""

    library: _Library

    def __init__(self, spec: PluginSpec) -> None:
        self.library.initialize(self)
        self.spec = spec
        self.name, self.plugin_version = spec.name, spec.version
        self.plugin_namespace = spec.namespace
        self.field_names = self.library.fields({field.name: np.array([]) for field in spec.fields})

    def create_plugin(self, name: str, field_collection: Any, phase: Any) -> Any:
        """The plugin with these fields, for the node called `name`."""
        try:
            texts = field_texts(field_collection)
            for own in ("plugin_version", "plugin_namespace"):
                texts.pop(own, None)
            return plugin_class(self.library.trt)(Instance(self.spec, texts), name)
        except Exception as error:
            raise kept(name, error) from None


def _labelled(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, whose errors name the node and are kept."""

    @wraps(method)
    def run(self: _Plugin, *arguments: Any) -> Any:
        try:
            return method(self, *arguments)
        except Exception as error:
            raise kept(self.label, error) from None

    return run


class _Plugin:
    """The four interfaces of a plugin in one object; all state is in `body`."""

    library: _Library

    def __init__(self, body: Instance, label: str = "") -> None:
        self.library.initialize(self)
        self.body, self.label = body, label
        self.plugin_name, self.plugin_version = body.spec.name, body.spec.version
        self.plugin_namespace = body.spec.namespace
        self.num_outputs = len(body.outputs)
        self.timing_cache_id = ""
        # Made here, where errors are seen: TensorRT drops those of get_fields_to_serialize.
        self._data = {
            name: np.frombuffer(text.encode() + b"\0", np.int8)
            for name, text in body.texts().items()
        }

    def get_capability_interface(self, type: Any) -> Any:
        return self

    def clone(self) -> Any:
        return type(self)(self.body.clone(), self.label)

    def get_fields_to_serialize(self) -> Any:
        return self.library.fields(self._data)

    # ---------------------------------------------------------------- while an engine is built

    @_labelled
    def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
        names = self.body.output_dtypes(self.library.dtypes(input_types))
        return [self.library.data_types[name] for name in names]

    @_labelled
    def get_output_shapes(
        self, inputs: Sequence[Any], shape_inputs: Sequence[Any], expr_builder: Any
    ) -> list[Any]:
        trt = self.library.trt
        shapes = [tuple(Expression(trt, expr_builder, d) for d in dims) for dims in inputs]
        return [
            trt.DimsExprs(
                [
                    dim.node if isinstance(dim, Expression) else expr_builder.constant(int(dim))
                    for dim in shape
                ]
            )
            for shape in self.body.output_shapes(shapes)
        ]

    def supports_format_combination(self, pos: int, in_out: Any, num_inputs: int) -> bool:
        tensors = [each.desc for each in in_out[: pos + 1]]
        linear = tensors[pos].format == self.library.trt.TensorFormat.LINEAR
        return linear and self.body.supports(pos, self.library.dtypes([t.type for t in tensors]))

    def configure_plugin(self, inp: Any, out: Any) -> None:
        pass

    def get_workspace_size(self, inp: Any, out: Any) -> int:
        return 0

    def get_valid_tactics(self) -> list[int]:
        return []

    # ---------------------------------------------------------------- while an engine runs

    def set_tactic(self, tactic: int) -> None:
        pass

    def attach_to_context(self, resource_context: Any) -> Any:
        return self.clone()

    @_labelled
    def on_shape_change(self, inp: Any, out: Any) -> None:
        self.body.prepare(self.library.descs(inp), self.library.descs(out))

    @_labelled
    def enqueue(
        self,
        input_desc: Any,
        output_desc: Any,
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        self.body.enqueue(inputs, outputs, stream)

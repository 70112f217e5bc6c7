"""One description of a plugin, from which everything that knows the plugin is made.

The adapter for TensorRT, the ONNX schema, the numpy reference, the page of documentation and the
negotiation of versions all read a PluginSpec; nothing about a plugin is written anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from irc.backends.tensorrt.nodes import NAMESPACE
from irc.dtypes import DTYPES
from irc.errors import Error, did_you_mean
from irc.user_files import homes_of, watch

from .fields import Field, Values

Dim: TypeAlias = Any  # an int, or an expression of the library; has + - * and // with these
Shape: TypeAlias = tuple[Dim, ...]
Array: TypeAlias = Any
Upgrade: TypeAlias = Callable[[Mapping[str, str]], Mapping[str, str]]


@dataclass(frozen=True)
class Tensor:
    """An input or output: its name, its dtype and what it holds.

    `dtype` is a dtype of irc, or the name of a type variable of the spec (one dtype for all tensors
    that name it).
    """

    name: str
    dtype: str
    doc: str = ""


@dataclass(frozen=True)
class TensorDesc:
    """What is known of a tensor when work is enqueued: its whole shape and its dtype."""

    shape: tuple[int, ...]
    dtype: str


# inputs, outputs (device pointers), workspace (device pointer), stream (handle)
Launch: TypeAlias = Callable[[Sequence[int], Sequence[int], int, int], None]
# fields, inputs, outputs -> what enqueues this work; called anew when shapes change
Enqueue: TypeAlias = Callable[[Values, Sequence[TensorDesc], Sequence[TensorDesc]], Launch]


def _nothing_to_check(values: Values) -> None:
    pass


def _no_workspace(
    values: Values, inputs: Sequence[TensorDesc], outputs: Sequence[TensorDesc]
) -> int:
    return 0


@dataclass(frozen=True)
class PluginSpec:
    """A plugin.

    `version` changes whenever fields, tensors or meaning do; `reads` maps an older version to what
    makes this version's field texts from that one's. `types` gives the dtypes of each type
    variable. `inputs` and `outputs` may depend on the fields.

    `shapes(fields, *input shapes)` gives the output shapes. Dims are integers, or expressions with
    `+ - * //`; it raises an Error where the shapes do not fit.
    `meaning(fields, *inputs)` gives the outputs in numpy, as an array or a tuple. Where
    `collective` is set, every input is a list of arrays, one per rank of the group in order, and
    the result is a list with each rank's tuple of outputs.
    `enqueue(fields, inputs, outputs)` makes, for shapes that are known, the function that puts the
    work on a stream: `launch(input pointers, output pointers, workspace pointer, stream)`. The work
    must be capturable in a CUDA graph; an Error that it raises reaches the caller.
    `workspace(fields, inputs, outputs)` is the size of the workspace in bytes.
    `check(fields)` raises an Error where fields contradict each other.
    `operation` names the operation of irc, if any, that a node in an ONNX file is read as: its
    operands are the inputs, and its attributes the fields of their names.
    """

    name: str
    version: str
    inputs: tuple[Tensor, ...] | Callable[[Values], tuple[Tensor, ...]]
    outputs: tuple[Tensor, ...] | Callable[[Values], tuple[Tensor, ...]]
    shapes: Callable[..., Sequence[Shape]]
    meaning: Callable[..., Any]
    enqueue: Enqueue
    doc: str
    fields: tuple[Field, ...] = ()
    types: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    namespace: str = NAMESPACE
    collective: bool = False
    check: Callable[[Values], None] = _nothing_to_check
    workspace: Callable[[Values, Sequence[TensorDesc], Sequence[TensorDesc]], int] = _no_workspace
    reads: Mapping[str, Upgrade] = field(default_factory=dict[str, Upgrade])
    operation: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """What a node and an engine call it by: (namespace, name)."""
        return self.namespace, self.name

    def inputs_for(self, values: Values) -> tuple[Tensor, ...]:
        """The inputs of a plugin with these fields."""
        return self.inputs(values) if callable(self.inputs) else self.inputs

    def outputs_for(self, values: Values) -> tuple[Tensor, ...]:
        """The outputs of a plugin with these fields."""
        return self.outputs(values) if callable(self.outputs) else self.outputs

    def allowed(self, tensor: Tensor) -> tuple[str, ...]:
        """The dtypes that a tensor may have."""
        return self.types.get(tensor.dtype, (tensor.dtype,))

    def output_dtypes(self, values: Values, given: Sequence[str]) -> tuple[str, ...]:
        """The dtypes of the outputs from those of the inputs; an Error where they do not fit."""
        bound: dict[str, str] = {}
        tensors = self.inputs_for(values)
        if len(given) != len(tensors):
            names = ", ".join(each.name for each in tensors)
            raise Error(f"{self.name} takes {len(tensors)} inputs ({names}), not {len(given)}")
        for tensor, dtype in zip(tensors, given, strict=True):
            allowed = self.allowed(tensor)
            if dtype not in allowed:
                raise Error(f"{self.name}: {tensor.name} is {dtype}, not {' or '.join(allowed)}")
            if bound.setdefault(tensor.dtype, dtype) != dtype:
                raise Error(
                    f"{self.name}: {tensor.name} is {dtype}, but must be {bound[tensor.dtype]} "
                    "as the inputs before it"
                )
        outputs = self.outputs_for(values)
        return tuple(bound.get(tensor.dtype, tensor.dtype) for tensor in outputs)

    def output_shapes(self, values: Values, given: Sequence[Shape]) -> tuple[Shape, ...]:
        """The shapes of the outputs from those of the inputs."""
        return tuple(tuple(each) for each in self.shapes(values, *given))


SPECS: dict[tuple[str, str], PluginSpec] = {}


def homes(spec: PluginSpec) -> set[str]:
    """The modules that a spec's functions are from."""
    return homes_of(spec.shapes, spec.meaning, spec.enqueue)


watch("plugin", SPECS, homes)


def register(spec: PluginSpec) -> PluginSpec:
    """Make a plugin known; a second one of its name is an Error."""
    _check(spec)
    if SPECS.get(spec.key, spec) is not spec:
        raise Error(f"there is a plugin {spec.name} in the namespace {spec.namespace!r} already")
    SPECS[spec.key] = spec
    return spec


def find(name: str, version: str = "", namespace: str = NAMESPACE) -> PluginSpec:
    """The plugin of this name, in a version that reads `version`; an Error says what to do."""
    spec = SPECS.get((namespace, name))
    others = [space for space, each in SPECS if each == name]
    if spec is None and others:
        raise Error(
            f"the plugin {name} is in the namespace {others[0]!r}, not in {namespace!r}; name that"
        )
    if spec is None:
        known = [each for _, each in SPECS]
        near = did_you_mean(name, known, "name the file that registers it with --plugin")
        raise Error(f"no plugin called {name!r} in the namespace {namespace!r}{near}")
    if version and version != spec.version and version not in spec.reads:
        raise Error(
            f"version {version} of the plugin {name} is wanted, and here is version "
            f"{spec.version}: build the engine again, or use the irc that built it"
        )
    return spec


def require(wanted: Mapping[str, str], namespace: str = NAMESPACE) -> None:
    """An Error unless every plugin (name to version) is here in a version that fits."""
    for name, version in wanted.items():
        where, _, plain = name.rpartition("::")
        find(plain, version, where or namespace)


def versions() -> dict[str, str]:
    """The version of every plugin by name; names outside our namespace read `space::Name`."""
    return {shown(*key): spec.version for key, spec in sorted(SPECS.items())}


def shown(namespace: str, name: str) -> str:
    """What a plugin is called where namespaces may differ."""
    return name if namespace == NAMESPACE else f"{namespace}::{name}"


def _check(spec: PluginSpec) -> None:
    """An Error where a spec cannot be right whatever the fields are."""
    if not spec.name.isidentifier() or not spec.version or not spec.doc.strip():
        raise Error(f"plugin {spec.name!r} needs a name that is a word, a version, and a doc")
    if spec.version in spec.reads:
        raise Error(
            f"plugin {spec.name}: reads names older versions, and {spec.version} is its own"
        )
    names = [each.name for each in spec.fields]
    if len(set(names)) < len(names) or set(names) & {"plugin_version", "plugin_namespace"}:
        raise Error(f"plugin {spec.name}: fields {names} clash with each other or with TensorRT's")
    for kinds in spec.types.values():
        for kind in kinds:
            if kind not in DTYPES:
                raise Error(f"plugin {spec.name}: no dtype {kind!r}{did_you_mean(kind, DTYPES)}")

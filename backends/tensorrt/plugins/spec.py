"""The description of a plugin and its fields, and the registry of all plugins.

ONNX parsers pass integers to plugins as 32 bits, so every field is a string in the node and in the
engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from irc.backends.tensorrt.nodes import NAMESPACE
from irc.errors import Error, did_you_mean
from irc.extensions.user_files import defining_modules, files, is_users, run, watch
from irc.ir.dtypes import dtype

Dim: TypeAlias = Any  # an int, or a dim that is known later: `* int` and `// int` work on both
Shape: TypeAlias = tuple[Dim, ...]
FieldType: TypeAlias = Literal["text", "int", "float"]
Values: TypeAlias = Mapping[str, Any]

_EXPECTED = {"text": "text", "int": "an integer of 64 bits", "float": "a number"}


@dataclass(frozen=True)
class Field:
    """One field: name, type, default (None where it is required), allowed texts (any if empty)."""

    name: str
    type: FieldType = "text"
    default: str | float | None = None
    choices: tuple[str, ...] = ()
    doc: str = ""

    def parsed(self, given: Any) -> Any:
        """The value of a string, or a checked value; an Error where it has another type."""
        try:
            value = {"text": _text, "int": _integer, "float": float}[self.type](given)
        except (TypeError, ValueError, OverflowError):
            raise Error(f"{self.name} is {given!r}; expected {_EXPECTED[self.type]}") from None
        if self.choices and value not in self.choices:
            near = did_you_mean(value, self.choices)
            raise Error(f"{self.name} is {value!r}; expected {', '.join(self.choices)}{near}")
        return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(value)
    return value


def _integer(value: Any) -> int:
    number = int(value)
    if (not isinstance(value, str) and number != value) or not -(2**63) <= number < 2**63:
        raise ValueError(value)
    return number


@dataclass(frozen=True)
class Tensor:
    """An input or output: its name, its dtype, and a line about it.

    `dtype` is a dtype of irc, or a type variable of the spec: one dtype for all tensors that name
    it.
    """

    name: str
    dtype: str
    doc: str = ""


@dataclass(frozen=True)
class TensorDesc:
    """The shape and dtype of a tensor at run time."""

    shape: tuple[int, ...]
    dtype: str


def known(dim: Dim) -> int | None:
    """The value of a dim, None where it is known only when the engine runs."""
    return dim if isinstance(dim, int) else dim.known


Tensors: TypeAlias = tuple[Tensor, ...] | Callable[[Values], tuple[Tensor, ...]]
# input pointers, output pointers (on the device), stream (handle)
Launch: TypeAlias = Callable[[Sequence[int], Sequence[int], int], None]
Enqueue: TypeAlias = Callable[[Values, Sequence[TensorDesc], Sequence[TensorDesc]], Launch]


def _accept(values: Values) -> None:
    pass


@dataclass(frozen=True)
class PluginSpec:
    """A plugin.

    `version` changes whenever fields, tensors or results do. `types` lists the dtypes of each type
    variable. `inputs` and `outputs` are tensors, or functions of the fields.

    `shapes(fields, *input shapes)` returns the output shapes; it raises an Error where shapes do
    not fit. Dims are ints, or objects with `* int` and `// int` whose value is known later.
    `enqueue(fields, inputs, outputs)` returns, for known shapes, the function that enqueues the
    work: `launch(input pointers, output pointers, stream)`. A CUDA graph must be able to capture
    it; an Error that it raises reaches the caller.
    `check(fields)` raises an Error where fields contradict each other.
    `operation` names the operation, if any, that a node in an ONNX file is imported as: its
    operands are the inputs, its attributes the fields of their names.
    """

    name: str
    version: str
    inputs: Tensors
    outputs: Tensors
    shapes: Callable[..., Sequence[Shape]]
    enqueue: Enqueue
    doc: str
    fields: tuple[Field, ...] = ()
    types: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    namespace: str = NAMESPACE
    check: Callable[[Values], None] = _accept
    operation: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """(namespace, name), which identifies the plugin."""
        return self.namespace, self.name

    def parsed(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The values of all fields, with defaults, from strings or values; an Error names the
        plugin and the field."""
        known = [each.name for each in self.fields]
        for name in given:
            if name not in known:
                raise Error(f"{self.name} has no field {name!r}{did_you_mean(name, known)}")
        values: dict[str, Any] = {}
        for each in self.fields:
            value = given.get(each.name, each.default)
            if value is None:
                raise Error(f"{self.name} needs the field {each.name!r}: {each.doc}")
            try:
                values[each.name] = each.parsed(value)
            except Error as error:
                raise Error(f"{self.name}: {error.message}") from None
        return values


SPECS: dict[tuple[str, str], PluginSpec] = {}
_NO_PLUGIN = "registers no plugin; call register(PluginSpec(...)) in it"


def modules_of(spec: PluginSpec) -> set[str]:
    """The names of the modules that define a spec's functions."""
    return defining_modules(spec.shapes, spec.enqueue)


watch("plugin", SPECS, modules_of)


def register(spec: PluginSpec) -> PluginSpec:
    """Add a plugin to the registry; a second one of its name is an Error."""
    _check(spec)
    if SPECS.get(spec.key, spec) is not spec:
        raise Error(f"there is a plugin {spec.name} in the namespace {spec.namespace!r} already")
    SPECS[spec.key] = spec
    return spec


def find(name: str, version: str = "", namespace: str = NAMESPACE) -> PluginSpec:
    """The plugin of this name and version (any if empty); an Error says what to do."""
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
    if version and version != spec.version:
        raise Error(
            f"expected version {version} of the plugin {name}, found version {spec.version}; "
            "build the engine again, or use the irc that built it"
        )
    return spec


def require(versions: Mapping[str, str]) -> None:
    """An Error unless every plugin (display name to version) is registered in that version."""
    for name, version in versions.items():
        namespace, _, plain = name.rpartition("::")
        find(plain, version, namespace or NAMESPACE)


def versions() -> dict[str, str]:
    """The version of every plugin by display name."""
    return {display_name(*key): spec.version for key, spec in sorted(SPECS.items())}


def display_name(namespace: str, name: str) -> str:
    """`Name` in irc's own namespace, `space::Name` in others."""
    return name if namespace == NAMESPACE else f"{namespace}::{name}"


def load(paths: Iterable[str | Path]) -> list[str]:
    """Run Python files that register plugins, once per process, and return the plugins' names.

    Their output goes to standard error. An Error names the line at which a file fails; then that
    file registers nothing.
    """
    found = [run(path, ("plugin",), _NO_PLUGIN) for path in paths]
    return [name for file in found for _, name in file.registered["plugin"]]


def files_of(names: Iterable[str]) -> list[str]:
    """The users' files that registered the plugins of these display names.

    An Error where no file did, since the process that builds an engine can only load files.
    """
    paths = {key: str(file.path) for file in files() for key in file.registered.get("plugin", ())}
    known = {display_name(*key): key for key in SPECS}
    found: dict[str, None] = {}
    for name in names:
        key = known[name]
        if key in paths:
            found[paths[key]] = None
        elif is_users(modules_of(SPECS[key])):
            raise Error(
                f"no file registers the plugin {name}, and engines are built in another process; "
                "give --plugin with the file that calls register(PluginSpec(...))"
            )
    return list(found)


def users() -> list[PluginSpec]:
    """All plugins that irc does not ship."""
    return [spec for spec in SPECS.values() if is_users(modules_of(spec))]


def _check(spec: PluginSpec) -> None:
    """An Error where a spec is wrong whatever the fields are."""
    if not spec.name.isidentifier() or not spec.version or not spec.doc.strip():
        raise Error(f"plugin {spec.name!r} needs an identifier as name, a version, and a doc")
    names = [each.name for each in spec.fields]
    if len(set(names)) < len(names) or set(names) & {"plugin_version", "plugin_namespace"}:
        raise Error(f"plugin {spec.name}: fields {names} clash with each other or with TensorRT's")
    for kind in (kind for kinds in spec.types.values() for kind in kinds):
        try:
            dtype(kind)
        except Error as error:
            raise Error(f"plugin {spec.name}: {error.message}") from None

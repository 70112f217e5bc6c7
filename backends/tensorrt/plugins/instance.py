"""A plugin with its fields: what it says about types and shapes, and what it puts on a stream.

It needs no TensorRT: the adapter hands it what the library asks, and a harness or a test may drive
it in the same way.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from irc.errors import Error

from ..nodes import NAMESPACE
from .fields import Values, decode, encode
from .spec import Array, Launch, PluginSpec, Shape, TensorDesc, find


class Instance:
    """One plugin of a network or an engine. `values` are its fields."""

    __slots__ = ("_launch", "spec", "values")

    def __init__(self, spec: PluginSpec, values: Values) -> None:
        texts = encode(spec.name, spec.fields, values)
        self.spec = spec
        self.values = decode(spec.name, spec.fields, texts)
        spec.check(self.values)
        self._launch: Launch | None = None

    @classmethod
    def from_texts(cls, spec: PluginSpec, texts: Mapping[str, str], version: str = "") -> Instance:
        """The plugin whose fields a node or an engine of that version has as text."""
        if version and version != spec.version:
            texts = spec.reads[version](texts)
        return cls(spec, decode(spec.name, spec.fields, texts))

    def texts(self) -> dict[str, str]:
        """All fields as they travel."""
        return encode(self.spec.name, self.spec.fields, self.values)

    def clone(self) -> Instance:
        """An equal plugin, which is not yet prepared for any shapes."""
        return Instance(self.spec, self.values)

    def output_dtypes(self, given: Sequence[str]) -> tuple[str, ...]:
        """See PluginSpec.output_dtypes."""
        return self.spec.output_dtypes(self.values, given)

    def output_shapes(self, given: Sequence[Shape]) -> tuple[Shape, ...]:
        """See PluginSpec.output_shapes."""
        return self.spec.output_shapes(self.values, given)

    def supports(self, position: int, dtypes: Sequence[str]) -> bool:
        """Whether tensor `position` (inputs, then outputs) fits with those before it."""
        tensors = self.spec.inputs_for(self.values) + self.spec.outputs_for(self.values)
        tensor = tensors[position]
        if dtypes[position] not in self.spec.allowed(tensor):
            return False
        alike = [i for i in range(position) if tensors[i].dtype == tensor.dtype]
        return all(dtypes[i] == dtypes[position] for i in alike)

    def prepare(self, inputs: Sequence[TensorDesc], outputs: Sequence[TensorDesc]) -> None:
        """Get ready for these shapes, which hold until the next call."""
        wanted = self.output_shapes([each.shape for each in inputs])
        found = tuple(each.shape for each in outputs)
        if wanted != found:
            raise Error(f"{self.spec.name}: outputs of {found} were given where {wanted} belong")
        self._launch = self.spec.enqueue(self.values, inputs, outputs)

    def enqueue(
        self, inputs: Sequence[int], outputs: Sequence[int], workspace: int, stream: int
    ) -> None:
        """Put the work on a stream; pointers are on the device, the stream is a handle."""
        launch = self._launch
        if launch is None:
            raise Error(f"{self.spec.name} was asked to work before it knew its shapes")
        launch(inputs, outputs, workspace, stream)


def fields_of(spec: PluginSpec, version: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a node of that version by name; an Error where the texts do not fit."""
    found = find(spec.name, version, spec.namespace)
    return Instance.from_texts(found, texts, version).values


def attributes_of(name: str, values: Values, namespace: str = NAMESPACE) -> dict[str, str]:
    """The string attributes of an ONNX node: version, namespace and all fields."""
    spec = find(name, namespace=namespace)
    own = {"plugin_version": spec.version, "plugin_namespace": spec.namespace}
    return own | Instance(spec, values).texts()


def evaluate(
    spec: PluginSpec, values: Values, ranks: Sequence[Sequence[Array]]
) -> list[tuple[Array, ...]]:
    """What the plugin means in numpy: each rank's outputs from each rank's inputs."""
    plugin = Instance(spec, values)
    if spec.collective:
        found = spec.meaning(plugin.values, *(list(each) for each in zip(*ranks, strict=True)))
        return [_tuple(each) for each in found]
    return [_tuple(spec.meaning(plugin.values, *inputs)) for inputs in ranks]


def _tuple(found: Any) -> tuple[Array, ...]:
    return (found,) if isinstance(found, np.ndarray | np.generic) else tuple(found)


class _Failures(threading.local):
    first: BaseException | None = None


_FAILURES = _Failures()


def keep_failure(error: BaseException) -> None:
    """Remember what went wrong in this thread, where the library hides it from its caller."""
    _FAILURES.first = _FAILURES.first or error


def take_failure() -> BaseException | None:
    """The first thing that went wrong in a plugin in this thread since the last call."""
    found, _FAILURES.first = _FAILURES.first, None
    return found

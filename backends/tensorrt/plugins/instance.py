"""A plugin with the values of its fields: its types, shapes and work, without TensorRT."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from irc.errors import Error

from ..nodes import NAMESPACE
from .spec import Launch, PluginSpec, Shape, Tensor, TensorDesc, Tensors, Values, find


class Instance:
    """One plugin of a network or an engine. `values` are its fields, as values or as strings."""

    def __init__(self, spec: PluginSpec, values: Values) -> None:
        self.spec = spec
        self.values = spec.parsed(values)
        spec.check(self.values)
        self.inputs, self.outputs = self._tensors(spec.inputs), self._tensors(spec.outputs)
        self._launch: Launch | None = None

    def _tensors(self, tensors: Tensors) -> tuple[Tensor, ...]:
        return tensors(self.values) if callable(tensors) else tensors

    def texts(self) -> dict[str, str]:
        """All fields as strings."""
        return {name: str(value) for name, value in self.values.items()}

    def clone(self) -> Instance:
        """An equal plugin, not prepared for any shapes."""
        return Instance(self.spec, self.values)

    def output_dtypes(self, dtypes: Sequence[str]) -> tuple[str, ...]:
        """The dtypes of the outputs from those of the inputs; an Error where they do not fit."""
        name, bound = self.spec.name, dict[str, str]()
        if len(dtypes) != len(self.inputs):
            names = ", ".join(each.name for each in self.inputs)
            raise Error(
                f"{name}: expected {len(self.inputs)} inputs ({names}), found {len(dtypes)}"
            )
        for tensor, dtype in zip(self.inputs, dtypes, strict=True):
            allowed = self.spec.types.get(tensor.dtype, (tensor.dtype,))
            expected = bound.setdefault(tensor.dtype, dtype)
            if dtype not in allowed or dtype != expected:
                shown = " or ".join(allowed if dtype not in allowed else (expected,))
                raise Error(f"{name}: {tensor.name} is {dtype}, expected {shown}")
        return tuple(bound.get(tensor.dtype, tensor.dtype) for tensor in self.outputs)

    def output_shapes(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        """The shapes of the outputs from those of the inputs."""
        return tuple(tuple(each) for each in self.spec.shapes(self.values, *shapes))

    def supports(self, position: int, dtypes: Sequence[str]) -> bool:
        """Whether the dtype of tensor `position` (inputs, then outputs) fits those before it."""
        tensors = (*self.inputs, *self.outputs)
        variable, dtype = tensors[position].dtype, dtypes[position]
        if dtype not in self.spec.types.get(variable, (variable,)):
            return False
        return all(dtypes[i] == dtype for i in range(position) if tensors[i].dtype == variable)

    def prepare(self, inputs: Sequence[TensorDesc], outputs: Sequence[TensorDesc]) -> None:
        """Prepare for these shapes, until the next call."""
        expected = self.output_shapes([each.shape for each in inputs])
        found = tuple(each.shape for each in outputs)
        if expected != found:
            raise Error(f"{self.spec.name}: expected outputs of {expected}, found {found}")
        self._launch = self.spec.enqueue(self.values, inputs, outputs)

    def enqueue(self, inputs: Sequence[int], outputs: Sequence[int], stream: int) -> None:
        """Enqueue the work; pointers are on the device, the stream is a handle."""
        if self._launch is None:
            raise Error(f"{self.spec.name}: enqueue was called before the shapes were known")
        self._launch(inputs, outputs, stream)


def fields_of(spec: PluginSpec, version: str, texts: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a node of that version by name; an Error where the strings do not fit."""
    return Instance(find(spec.name, version, spec.namespace), texts).values


def attributes_of(name: str, values: Values, namespace: str = NAMESPACE) -> dict[str, str]:
    """The string attributes of an ONNX node: version, namespace and all fields."""
    spec = find(name, namespace=namespace)
    own = {"plugin_version": spec.version, "plugin_namespace": spec.namespace}
    return own | Instance(spec, values).texts()


class _Failures(threading.local):
    first: BaseException | None = None


_FAILURES = _Failures()


def keep_failure(error: BaseException) -> None:
    """Keep an error of this thread for `take_failure`, since TensorRT hides it from its caller."""
    _FAILURES.first = _FAILURES.first or error


def take_failure() -> BaseException | None:
    """The first error of a plugin in this thread since the last call."""
    found, _FAILURES.first = _FAILURES.first, None
    return found

"""The part of TensorRT's Python module that plugins use, so that they run without TensorRT.

`PluginHost` does what an engine does when it is loaded and run: it creates the plugin from
serialised fields, attaches it to a context, sets the shapes, and calls enqueue with addresses.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from irc.backends.tensorrt.plugins import TensorDesc, find
from irc.backends.tensorrt.plugins.adapter import DATA_TYPES, creator_class
from irc.backends.tensorrt.plugins.spec import NAMESPACE


class DataType(Enum):
    """As TensorRT's."""

    FLOAT, HALF, INT8, INT32, BOOL, UINT8, FP8, BF16, INT64, INT4 = range(10)


class TensorFormat(Enum):
    """As TensorRT's, as far as plugins use it."""

    LINEAR, CHW4 = range(2)


class PluginFieldType(Enum):
    """As TensorRT's, as far as plugins use it."""

    CHAR = 7


class PluginCapabilityType(Enum):
    """As TensorRT's."""

    CORE, BUILD, RUNTIME = range(3)


# TensorRT's interfaces: bases without behaviour.
_INTERFACES = ("IPluginV3", "IPluginV3OneCore", "IPluginV3OneBuild", "IPluginV3OneRuntime")
globals().update((name, type(name, (), {})) for name in (*_INTERFACES, "IPluginCreatorV3One"))


@dataclass
class PluginField:
    """As TensorRT's."""

    name: str
    data: Any
    type: PluginFieldType


PluginFieldCollection = list
DimsExprs = list


@dataclass
class PluginTensorDesc:
    """As TensorRT's."""

    dims: tuple[int, ...]
    type: DataType
    format: TensorFormat = TensorFormat.LINEAR


class Registry:
    """As TensorRT's plugin registry."""

    def __init__(self) -> None:
        self.creators: dict[tuple[str, str, str], Any] = {}

    def get_creator(self, name: str, version: str, namespace: str = "") -> Any:
        """The creator, or None."""
        return self.creators.get((name, version, namespace))

    def register_creator(self, creator: Any, namespace: str = "") -> bool:
        """Whether the name was new."""
        key = (creator.name, creator.plugin_version, namespace)
        return self.creators.setdefault(key, creator) is creator


REGISTRY = Registry()


def get_plugin_registry() -> Registry:
    """As TensorRT's."""
    return REGISTRY


def described(desc: TensorDesc) -> PluginTensorDesc:
    """A tensor as TensorRT describes it to plugins."""
    return PluginTensorDesc(desc.shape, DataType[DATA_TYPES[desc.dtype]])


class PluginHost:
    """A loaded engine of one plugin node, in an execution context of its own."""

    def __init__(self, name: str, fields: Mapping[str, str], namespace: str = NAMESPACE) -> None:
        spec = find(name, namespace=namespace)
        creator = creator_class(sys.modules[__name__])(spec)
        serialised = [
            PluginField(key, np.frombuffer(text.encode() + b"\0", np.int8), PluginFieldType.CHAR)
            for key, text in fields.items()
        ]
        engine = creator.create_plugin("node", serialised, None)
        self.plugin = engine.attach_to_context(None)
        self.runtime = self.plugin.get_capability_interface(PluginCapabilityType.RUNTIME)
        self.inputs: list[PluginTensorDesc] = []
        self.outputs: list[PluginTensorDesc] = []

    def shapes(self, inputs: Sequence[TensorDesc]) -> list[TensorDesc]:
        """Set the shapes of the inputs; returns the outputs."""
        body = self.plugin.body
        dtypes = body.output_dtypes([desc.dtype for desc in inputs])
        shapes = body.output_shapes([desc.shape for desc in inputs])
        outputs = [TensorDesc(shape, kind) for shape, kind in zip(shapes, dtypes, strict=True)]
        self.inputs = [described(desc) for desc in inputs]
        self.outputs = [described(desc) for desc in outputs]
        self.runtime.on_shape_change(self.inputs, self.outputs)
        return outputs

    def enqueue(self, inputs: Sequence[int], outputs: Sequence[int], stream: int) -> None:
        """Enqueue the plugin on a stream."""
        self.runtime.enqueue(self.inputs, self.outputs, inputs, outputs, 0, stream)

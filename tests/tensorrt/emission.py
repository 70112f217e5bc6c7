"""The ONNX graph of a module for TensorRT, the library's error for it, reports of its engines."""

from __future__ import annotations

import json
from collections.abc import Sequence

import onnx

from irc.backends.onnx.per_rank import Template
from irc.backends.onnx.storage import Storage
from irc.backends.tensorrt.builder.report import Layer, Report
from irc.backends.tensorrt.lowering.emitter import TensorRTEmitter
from irc.backends.tensorrt.ranges import profiles_of
from irc.backends.tensorrt.target import Target
from irc.driver import Artifact
from irc.ir.core import Module
from irc.ir.dims import Dim
from irc.weights.checkpoint import Reader
from tests.tensorrt.refusal import refusal

RTX = Target.parse("tensorrt-rtx-1.7")


def emitted(
    module: Module, target: Target = RTX, outside: bool = True, avoided: Sequence[str] = ()
) -> onnx.ModelProto:
    """The model of a module without weights in files; of several ranks, the model they share."""
    storage = Storage(Reader(module, None), module.mesh)
    ranks = range(module.mesh.ranks)
    where = target, outside, avoided
    emitter = TensorRTEmitter(module, module.main, storage, ranks, *where)
    emitter.emit()
    template = Template(emitter, storage)
    return template.shared() if outside else template.model(0)


def problem(module: Module) -> str:
    """The error of the library for an engine of a module, also for one without an input, or ""."""
    dims = [dim for arg in module.main.args for dim in arg.type.shape if isinstance(dim, Dim)]
    ranges = {name: (1, 2, 4) for dim in dims for name in dim.symbols()}
    (profiles,) = profiles_of([module.main], ranges)
    return refusal(emitted(module).SerializeToString(), RTX, profiles)[1]


def reports(artifact: Artifact) -> list[Report]:
    """The reports of the engines of all stages."""
    stages = artifact.manifest["program"]["stages"]
    texts = [(artifact.folder / stage["report"]).read_text() for stage in stages]
    return [Report.from_json(json.loads(text)) for text in texts]


def layers(artifact: Artifact) -> tuple[Layer, ...]:
    """The kernels of the only engine."""
    (report,) = reports(artifact)
    return report.layers

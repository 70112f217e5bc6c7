"""What the ONNX checker and its shape inference find wrong with written models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx

from irc.backends.onnx import backend
from irc.backends.onnx.schema import register_schema
from irc.ir.core import Module


def emit_checked(module: Module, folder: Path, **options: Any) -> dict[str, Any]:
    """The facts of a module that is emitted, all of whose models are checked."""
    facts = backend.emit(module, folder, **options).facts
    for path in sorted(folder.glob("rank*.onnx")):
        check_model(path.read_bytes())
    return dict(facts)


def check_model(data: bytes) -> None:
    """Raise what is wrong with a model, whose external initializers are checked as inputs."""
    register_schema()
    model = onnx.load_model_from_string(data)
    copy = onnx.load_model_from_string(data)
    del copy.graph.initializer[:]
    for each in model.graph.initializer:
        if not each.external_data:
            copy.graph.initializer.append(each)
            continue
        copy.graph.input.append(
            onnx.helper.make_tensor_value_info(each.name, each.data_type, list(each.dims))
        )
    onnx.checker.check_model(copy)
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)

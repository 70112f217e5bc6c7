"""Shared by the tests of reading ONNX: small models, and what ONNX Runtime makes of them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import irc
import irc.passes
from irc.backends.onnx import backend
from irc.backends.reference import evaluate
from irc.frontends.onnx import import_onnx
from irc.ir.verify import verify
from irc.pipeline import run_pipeline
from irc.text import parse_module

KINDS = {
    "f32": TensorProto.FLOAT,
    "f16": TensorProto.FLOAT16,
    "i64": TensorProto.INT64,
    "i32": TensorProto.INT32,
    "u8": TensorProto.UINT8,
    "i8": TensorProto.INT8,
    "f64": TensorProto.DOUBLE,
    "bool": TensorProto.BOOL,
}
Arrays = Mapping[str, np.ndarray[Any, Any]]
OPSET = 23


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Any],
    outputs: Sequence[str],
    initial: Arrays | None = None,
    opset: int = OPSET,
    **more: Any,
) -> onnx.ModelProto:
    """A model whose inputs are (dtype, shape); the results have whatever type they have."""
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info(n, KINDS[kind], shape)
            for n, (kind, shape) in inputs.items()
        ],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in (initial or {}).items()],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_model(graph, opset_imports=imports, **more)
    made.ir_version = 10
    return made


def i64(*values: int) -> np.ndarray[Any, Any]:
    return np.array(values, np.int64)


def kind_of(array: np.ndarray[Any, Any]) -> str:
    """irc's name of the dtype of an array."""
    number = helper.np_dtype_to_tensor_dtype(array.dtype)
    return next(name for name, each in KINDS.items() if each == number)


def saved(made: onnx.ModelProto, folder: Path, name: str = "model.onnx") -> Path:
    """The file with a model in it, as bytes that were not looked at."""
    path = folder / name
    path.write_bytes(made.SerializeToString())
    return path


def read(path: Path, **options: Any) -> irc.Module:
    """The module of a file, verified, whose text reads back as itself."""
    module = import_onnx(path, **options)
    verify(module)
    assert str(parse_module(str(module))) == str(module)
    return module


def on_ort(path: Path, inputs: Arrays) -> list[np.ndarray[Any, Any]]:
    """What ONNX Runtime computes."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options)
    return [np.asarray(array) for array in session.run(None, dict(inputs))]


def on_emitted(module: irc.Module, inputs: Arrays, folder: Path) -> list[np.ndarray[Any, Any]]:
    """What ONNX Runtime computes of the file that irc writes of a module."""
    run_pipeline(module, backend.default_pipeline)
    out = folder / "out"
    out.mkdir(exist_ok=True)
    facts = backend.emit(module, out, base=folder).facts
    return list(backend.load(out, facts, threads=1).run(inputs).values())


def compared(path: Path, inputs: Arrays, close: float = 1e-5, **options: Any) -> irc.Module:
    """The module of a file, for which the reference gives what ONNX Runtime gives for the file."""
    module = read(path, **options)
    named = {arg.name: inputs[name] for arg, name in zip(module.main.args, inputs, strict=True)}
    found = evaluate(module, named)  # pyright: ignore[reportArgumentType]
    wanted = on_ort(path, inputs)
    assert len(found) == len(wanted)
    for got, want in zip(found.values(), wanted, strict=True):
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        np.testing.assert_allclose(got, want, rtol=close, atol=close)
    return module

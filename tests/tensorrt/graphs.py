"""Small ONNX graphs written by hand, and requests to build them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from irc.backends.tensorrt.builder.build import BuildRequest, Profile
from irc.backends.tensorrt.options import EngineOptions
from irc.backends.tensorrt.target import Target

F16, F32, BF16 = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.BFLOAT16
I32, I64 = TensorProto.INT32, TensorProto.INT64
TARGET = Target.parse("tensorrt-rtx-1.7/sm_80+sm_89")
Dims = Sequence[int | str]


def value(name: str, dims: Dims, dtype: int = F16) -> onnx.ValueInfoProto:
    """A typed input or output."""
    return helper.make_tensor_value_info(name, dtype, list(dims))


def node(
    where: str, kind: str, inputs: Sequence[str], output: str, line: int = 0, **attributes: Any
) -> onnx.NodeProto:
    """A node called as irc's emitter calls them, for an operation `scope/opname`."""
    made = helper.make_node(
        kind, list(inputs), [output], name=f"{where}/{kind}.{output}", **attributes
    )
    if line:
        made.metadata_props.add(key="loc", value=f"model.py:{line}")
    return made


def weight(name: str, *shape: int, dtype: type = np.float16) -> onnx.TensorProto:
    """A constant inside the model."""
    return numpy_helper.from_array(np.full(shape, 0.5, dtype), name)


def save(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: Sequence[onnx.TensorProto] = (),
    values: Sequence[onnx.ValueInfoProto] = (),
) -> Path:
    """Write the model."""
    graph = helper.make_graph(
        list(nodes), "g", list(inputs), list(outputs), list(weights), value_info=list(values)
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    path.write_bytes(model.SerializeToString())
    return path


def relu(path: Path) -> Path:
    """The smallest model: y = relu(x), f16[4, 64]."""
    nodes = [node("model/relu", "Relu", ["x"], "y", line=3)]
    return save(path, nodes, [value("x", [4, 64])], [value("y", [4, 64])])


def gemm(path: Path, comm: str | None = None) -> Path:
    """y = relu(x @ W) over a dynamic batch, with a collective of two ranks before the relu."""
    nodes = [node("layers.0/linear", "MatMul", ["x", "W"], "a", line=11)]
    if comm is not None:
        collective = {
            "collective_operation": comm,
            "reduce_op": "sum" if "reduce" in comm else "none",
            "root": 0 if comm in ("broadcast", "reduce") else -1,
            "group_size": 2,
            "groups": [0, 1],
            "nb_rank": 2,
        }
        nodes.append(node(f"layers.0/{comm}", "DistCollective", ["a"], "b", line=12, **collective))
    nodes.append(node("layers.0/relu", "Relu", [nodes[-1].output[0]], "y", line=13))
    return save(path, nodes, [value("x", ["B", 64])], [value("y", ["B", 128])], [W])


W = weight("W", 64, 128)


def attention(path: Path, dtype: int = BF16) -> Path:
    """A decode step: caches written in place, then attention over their valid part."""
    heads, kv, slots, size = 4, 2, 128, 32
    nodes = [
        node("l.0/write", "TensorScatter", ["pk", "k", "wi"], "nk", axis=-2),
        node("l.0/write", "TensorScatter", ["pv", "v", "wi"], "nv", axis=-2),
        node(
            "l.0/attention",
            "TRT_Attention",
            ["q", "nk", "nv", "", "", "kl"],
            "o",
            line=21,
            causal_kind="lower_right",
        ),
    ]
    cache = ["B", kv, slots, size]
    inputs = [
        value("q", ["B", heads, "S", size], dtype),
        value("k", ["B", kv, "S", size], dtype),
        value("v", ["B", kv, "S", size], dtype),
        value("pk", cache, dtype),
        value("pv", cache, dtype),
        value("wi", ["B"], I32),
        value("kl", ["B"], I32),
    ]
    outputs = [value("o", ["B", heads, "S", size], dtype)]
    outputs += [value("nk", cache, dtype), value("nv", cache, dtype)]
    return save(path, nodes, inputs, outputs)


def profile(name: str, path: Path, **dims: tuple[int, int, int]) -> Profile:
    """The profile of a model whose dynamic dimensions have these bounds."""
    shapes: dict[str, Any] = {}
    for each in onnx.load(path, load_external_data=False).graph.input:
        found = [d.dim_param or d.dim_value for d in each.type.tensor_type.shape.dim]
        if any(isinstance(d, str) for d in found):
            shapes[each.name] = tuple(
                tuple(dims[d][i] if isinstance(d, str) else d for d in found) for i in range(3)
            )
    return Profile(name, shapes)


def asked(
    model: Path, profiles: Sequence[Profile] = (), base: Path | None = None, **options: Any
) -> BuildRequest:
    """A request for an engine beside the model, by default without the cache."""
    engine, chosen = model.with_suffix(".engine"), {"caching": False, **options}
    return BuildRequest(model, engine, TARGET, tuple(profiles), EngineOptions.of(chosen), base=base)

"""Small ONNX models from short texts, and requests to build them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from irc.backends.onnx import graph
from irc.backends.tensorrt.builder.request import BuildRequest, Profile
from irc.backends.tensorrt.options import EngineOptions
from irc.backends.tensorrt.target import Target
from irc.pipeline.options import options_of

F16, F32 = TensorProto.FLOAT16, TensorProto.FLOAT
DTYPES = graph.DTYPES | {"f4e2m1": TensorProto.FLOAT4E2M1}
TARGET = Target.parse("tensorrt-rtx-1.7/sm_80+sm_89")
HALF = "x:f16[4,64]", "y:f16[4,64]"


def node(kind: str, inputs: str, outputs: str = "y", domain: str = "", /, **attributes: Any) -> Any:
    """A node whose operands are words, "-" for one that is absent; empty lists are left out."""
    names = ["" if word == "-" else word for word in inputs.split()]
    present = {key: held for key, held in attributes.items() if held != []}
    return helper.make_node(kind, names, outputs.split(), domain=domain, **present)


def collective(operation: str, x: str, y: str = "y", **attributes: Any) -> NodeProto:
    """A collective of two ranks, computed by TensorRT itself."""
    known = {"collective_operation": operation, "root": -1}
    known["reduce_op"] = "sum" if "reduce" in operation else "none"
    known |= {"nb_rank": 2, "group_size": 2, "groups": [0, 1]}
    return node("DistCollective", x, y, **(known | attributes))


def at(operation: str, line: int, made: NodeProto) -> NodeProto:
    """A node called as irc's emitter calls those of an operation `scope/opname` in model.py."""
    made.name = f"{operation}/{made.op_type}.{made.output[0]}"
    made.metadata_props.add(key="loc", value=f"model.py:{line}")
    return made


def value(text: str) -> ValueInfoProto:
    """The value `x:f16[4,S]`."""
    name, _, rest = text.partition(":")
    dtype, _, dims = rest.rstrip("]").partition("[")
    shape = [int(dim) if dim.lstrip("-").isdecimal() else dim for dim in dims.split(",") if dim]
    return helper.make_tensor_value_info(name, DTYPES[dtype], shape)


def constant(text: str, number: float = 1) -> TensorProto:
    """The constant `w:i8[4,8]`, filled with one number."""
    info = value(text)
    kind = info.type.tensor_type
    shape = [dim.dim_value for dim in kind.shape.dim]
    numbers = [number] * int(np.prod(shape))
    return helper.make_tensor(info.name, kind.elem_type, shape, numbers, raw=False)


def model(
    nodes: NodeProto | Sequence[NodeProto],
    inputs: str = "x:f16[4,8]",
    outputs: str = "y:f16[4,8]",
    constants: Sequence[TensorProto] = (),
) -> ModelProto:
    """A model of nodes; inputs and outputs are words."""
    body = list(nodes) if isinstance(nodes, Sequence) else [nodes]
    sources, results = (list(map(value, text.split())) for text in (inputs, outputs))
    made = helper.make_graph(body, "g", sources, results, list(constants))
    domains = sorted({each.domain for each in body} - {""})
    imports = [helper.make_opsetid("", 24), *(helper.make_opsetid(each, 1) for each in domains)]
    return helper.make_model(made, opset_imports=imports, ir_version=11)


def saved(folder: Path, *parts: Any) -> Path:
    """The file m.onnx with the model of these parts, see `model`."""
    path = folder / "m.onnx"
    path.write_bytes(model(*parts).SerializeToString())
    return path


def relu(folder: Path) -> Path:
    """y = relu(x)."""
    return saved(folder, at("model/relu", 3, node("Relu", "x")), *HALF)


def gemm(folder: Path) -> Path:
    """y = relu(sum over two ranks of x @ W) over a dynamic batch."""
    nodes = [
        at("layers.0/linear", 11, node("MatMul", "x W", "a")),
        at("layers.0/all_reduce", 12, collective("all_reduce", "a", "b")),
        at("layers.0/relu", 13, node("Relu", "b")),
    ]
    return saved(folder, nodes, "x:f16[B,64]", "y:f16[B,128]", [constant("W:f16[64,128]", 0.5)])


def attention(folder: Path) -> Path:
    """A decode step: caches written in place, then attention over their valid part."""
    attributes = {"causal_kind": "lower_right"}
    nodes = [
        at("l.0/write", 20, node("TensorScatter", "pk k wi", "nk", axis=-2)),
        at("l.0/write", 20, node("TensorScatter", "pv v wi", "nv", axis=-2)),
        at("l.0/attention", 21, node("TRT_Attention", "q nk nv - - kl", "o", **attributes)),
    ]
    query, new, cache = "bf16[B,4,S,32]", "bf16[B,2,S,32]", "bf16[B,2,128,32]"
    inputs = f"q:{query} k:{new} v:{new} pk:{cache} pv:{cache} wi:i32[B] kl:i32[B]"
    return saved(folder, nodes, inputs, f"o:{query} nk:{cache} nv:{cache}")


def external(folder: Path, location: str) -> Path:
    """y = x @ W, whose weight begins at byte 7 of a file."""
    tensor = TensorProto(name="W", data_type=F16, dims=[64, 128])
    tensor.data_location = TensorProto.EXTERNAL
    for key, entry in (("location", location), ("offset", 7), ("length", 64 * 128 * 2)):
        tensor.external_data.add(key=key, value=str(entry))
    folder.mkdir(exist_ok=True)
    return saved(folder, node("MatMul", "x W"), HALF[0], "y:f16[4,128]", [tensor])


def profile(name: str, path: Path, **dims: tuple[int, int, int]) -> Profile:
    """The profile of a model whose dynamic dimensions have these bounds, else (1, 4, 8)."""
    ranges, shapes = defaultdict(lambda: (1, 4, 8), dims), dict[str, Any]()
    for each in onnx.load(path, load_external_data=False).graph.input:
        found = [d.dim_param or d.dim_value for d in each.type.tensor_type.shape.dim]
        if any(isinstance(d, str) for d in found):
            shapes[each.name] = tuple(
                tuple(ranges[d][i] if isinstance(d, str) else d for d in found) for i in range(3)
            )
    return Profile(name, shapes)


def asked(
    path: Path, profiles: Sequence[Profile] = (), base: Path | None = None, **options: Any
) -> BuildRequest:
    """A request for an engine beside the model, by default without the cache."""
    engine, chosen = path.with_suffix(".engine"), {"caching": False, **options}
    return BuildRequest(
        path, engine, TARGET, tuple(profiles), options_of(EngineOptions, chosen), base=base
    )

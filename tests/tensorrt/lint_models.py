"""Small ONNX models for the linter's examples, from short texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

F16, F32, F64 = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.DOUBLE
I8, I32, U8, BOOL = TensorProto.INT8, TensorProto.INT32, TensorProto.UINT8, TensorProto.BOOL
F8, F4, I4 = TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT4E2M1, TensorProto.INT4
DTYPES = {"f16": F16, "f32": F32, "f64": F64, "bf16": TensorProto.BFLOAT16, "i8": I8, "i32": I32}
DTYPES |= {"i16": TensorProto.INT16, "i64": TensorProto.INT64, "u8": U8, "bool": BOOL}
DTYPES |= {"i4": I4, "f8": F8, "f4": F4}
RTX = "tensorrt-rtx-1.7/sm_80+sm_89+sm_120"
NEWEST = "tensorrt-rtx-1.7/sm_120"
FULL = "tensorrt-11.4/sm_90"


@dataclass(frozen=True)
class Example:
    """A model with a fault that a rule finds, and a similar model without it.

    `refused` is where TensorRT-RTX refuses the bad model: "parse", "build" or "crash", "" where it
    builds, None if it is not asked. It must then build the good one. `folders` may hold
    external data.
    """

    bad: ModelProto
    good: ModelProto | None = None
    refused: str | None = None
    target: str = RTX
    folders: tuple[Path, ...] = ()


def node(kind: str, inputs: str, outputs: str = "y", domain: str = "", /, **attributes: Any) -> Any:
    """A node whose operands are words, "-" for one that is absent; empty lists are left out."""
    names = ["" if word == "-" else word for word in inputs.split()]
    present = {key: held for key, held in attributes.items() if held != []}
    return helper.make_node(kind, names, outputs.split(), domain=domain, **present)


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
    graph = helper.make_graph(body, "g", sources, results, list(constants))
    domains = sorted({each.domain for each in body} - {""})
    imports = [helper.make_opsetid("", 24), *(helper.make_opsetid(each, 1) for each in domains)]
    return helper.make_model(graph, opset_imports=imports, ir_version=11)


def branch(made: NodeProto) -> Any:
    """A graph of one node, as a branch of If."""
    result = helper.make_tensor_value_info(made.output[0], F16, [4, 8])
    return helper.make_graph([made], "inner", [], [result])

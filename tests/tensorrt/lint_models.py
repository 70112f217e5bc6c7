"""Small ONNX models for the linter: one fault each, and the same without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

F16, F32, F64, BF16 = (
    TensorProto.FLOAT16,
    TensorProto.FLOAT,
    TensorProto.DOUBLE,
    TensorProto.BFLOAT16,
)
I8, I16, I32, I64 = TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64
I4, U4, U8, BOOL = TensorProto.INT4, TensorProto.UINT4, TensorProto.UINT8, TensorProto.BOOL
F8, F4 = TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT4E2M1
RTX = "tensorrt-rtx-1.7/sm_80+sm_89+sm_120"
NEWEST = "tensorrt-rtx-1.7/sm_120"
FULL = "tensorrt-11.4/sm_90"


@dataclass(frozen=True)
class Case:
    """A rule, a model that breaks it, and perhaps one that does not.

    `refused` is where TensorRT-RTX refuses the first: "parse", "build" or "crash", "" if it takes
    it, or None if that is not to be tried. The second is built then. `folders` are where data
    outside the model may lie.
    """

    rule: str
    bad: ModelProto
    good: ModelProto | None = None
    target: str = RTX
    refused: str | None = None
    folders: tuple[Path, ...] = ()


def node(kind: str, inputs: str, outputs: str = "y", domain: str = "", /, **attributes: Any) -> Any:
    """A node whose operands are words, "-" for one that is absent; no empty lists."""
    names = ["" if word == "-" else word for word in inputs.split()]
    given = {key: held for key, held in attributes.items() if held != []}
    return helper.make_node(kind, names, outputs.split(), domain=domain, **given)


def value(text: str) -> ValueInfoProto:
    """The value `x:f16[4,S]`."""
    name, _, rest = text.partition(":")
    dtype, _, dims = rest.rstrip("]").partition("[")
    shape = [int(dim) if dim.lstrip("-").isdecimal() else dim for dim in dims.split(",") if dim]
    return helper.make_tensor_value_info(name, NAMES[dtype], shape)


NAMES = {"f16": F16, "f32": F32, "f64": F64, "bf16": BF16, "i8": I8, "i16": I16, "i32": I32}
NAMES |= {"i64": I64, "i4": I4, "u4": U4, "u8": U8, "bool": BOOL, "f8": F8, "f4": F4}


def constant(text: str, number: float = 1) -> TensorProto:
    """The constant `w:i8[4,8]`, full of one number."""
    info = value(text)
    kind = info.type.tensor_type
    shape = [dim.dim_value for dim in kind.shape.dim]
    numbers = [number] * int(np.prod(shape))
    return helper.make_tensor(info.name, kind.elem_type, shape, numbers, raw=False)


def model(
    nodes: NodeProto | Sequence[NodeProto],
    inputs: str,
    outputs: str = "y:f16[4,8]",
    constants: Sequence[TensorProto] = (),
) -> ModelProto:
    """A model of nodes; inputs and outputs are words."""
    body = list(nodes) if isinstance(nodes, Sequence) else [nodes]
    given, made = (list(map(value, text.split())) for text in (inputs, outputs))
    graph = helper.make_graph(body, "g", given, made, list(constants))
    domains = sorted({each.domain for each in body} - {""})
    imports = [helper.make_opsetid("", 24), *(helper.make_opsetid(each, 1) for each in domains)]
    return helper.make_model(graph, opset_imports=imports, ir_version=11)

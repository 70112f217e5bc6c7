"""A fault of dtypes, operators or the network per case."""

from __future__ import annotations

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tests.tensorrt.lint_models import BOOL, F16, F32, F64, I32, Case, constant, model, node

ONE = "x:f16[4,8]"


def pair(kind: str, types: str, result: str = "y:f16[4,8]") -> ModelProto:
    """A node of two operands."""
    return model(node(kind, "x z"), types, result)


def cast(to: int) -> ModelProto:
    """A Cast there and back."""
    return model([node("Cast", "x", "t", to=to), node("Cast", "t", to=F16)], ONE)


def port(dtype: str) -> ModelProto:
    """An input of a type, handed through."""
    return model(node("Identity", "x"), f"x:{dtype}[4,8]", f"y:{dtype}[4,8]")


def stored(dtype: str) -> ModelProto:
    """A constant of a type that is added."""
    body = [node("Cast", "w", "c", to=F16), node("Add", "x c")]
    return model(body, ONE, constants=[constant(f"w:{dtype}[4,8]")])


def rotary(dtype: str) -> ModelProto:
    types = f"x:f16[1,4,2,64] c:{dtype}[1,2,32] s:{dtype}[1,2,32]"
    return model(node("RotaryEmbedding", "x c s"), types, "y:f16[1,4,2,64]")


def norm(scale: str, outputs: str = "y") -> ModelProto:
    types = "".join(f" {name}:f16[4,1]" for name in outputs.split()[1:])
    body = node("LayerNormalization", "x s", outputs)
    return model(body, f"{ONE} s:{scale}[8]", "y:f16[4,8]" + types)


def sequence() -> ModelProto:
    """An input that is a list of tensors."""
    made = model(node("Identity", "x"), ONE)
    kind = helper.make_tensor_type_proto(F16, [4, 8])
    for each in (*made.graph.input, *made.graph.output):
        each.type.CopyFrom(helper.make_sequence_type_proto(kind))
    return made


PRODUCT = "x:f16[4,8] z:{}[8,8]"

DTYPES = [
    *(
        Case(
            "mixed-dtypes",
            pair(kind, f"{ONE} z:f32[4,8]"),
            pair(kind, f"{ONE} z:f16[4,8]"),
            refused="parse",
        )
        for kind in ("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean", "PRelu")
    ),
    Case(
        "mixed-dtypes",
        pair("Less", f"{ONE} z:f32[4,8]", "y:bool[4,8]"),
        pair("Less", f"{ONE} z:f16[4,8]", "y:bool[4,8]"),
        refused="parse",
    ),
    Case(
        "mixed-dtypes",
        pair("MatMul", PRODUCT.format("f32")),
        pair("MatMul", PRODUCT.format("f16")),
        refused="parse",
    ),
    Case(
        "mixed-dtypes",
        model(node("Where", "c x z"), f"{ONE} c:bool[4,8] z:f32[4,8]"),
        model(node("Where", "c x z"), f"{ONE} c:bool[4,8] z:f16[4,8]"),
        refused="parse",
    ),
    Case(
        "mixed-dtypes",
        model(node("Concat", "x z", axis=0), f"{ONE} z:f32[4,8]", "y:f16[8,8]"),
        refused="parse",
    ),
    Case("mixed-dtypes", norm("f32"), norm("f16"), refused="parse"),
    Case("mixed-dtypes", rotary("f32"), rotary("f16"), refused="parse"),
    Case(
        "mixed-dtypes",
        model([node("Cast", "x", "c", to=F32), node("Relu", "x", "r"), node("Add", "c r")], ONE),
        refused="parse",
    ),
    Case(
        "operand-dtype",
        pair("Mul", "x:bool[4,8] z:bool[4,8]", "y:bool[4,8]"),
        pair("And", "x:bool[4,8] z:bool[4,8]", "y:bool[4,8]"),
        refused="parse",
    ),
    Case(
        "operand-dtype",
        pair("And", "x:i32[4,8] z:i32[4,8]", "y:bool[4,8]"),
        pair("Mul", "x:i32[4,8] z:i32[4,8]", "y:i32[4,8]"),
        refused="parse",
    ),
    Case(
        "operand-dtype",
        pair("MatMul", "x:i32[4,8] z:i32[8,8]", "y:i32[4,8]"),
        refused="parse",
    ),
    *(
        Case("cast-to", cast(to), cast(I32), refused="parse")
        for to in (
            TensorProto.UINT8,
            TensorProto.INT16,
            TensorProto.UINT32,
            TensorProto.UINT64,
            TensorProto.UINT4,
            TensorProto.FLOAT8E5M2,
            TensorProto.FLOAT8E8M0,
        )
    ),
    *(
        Case("cast-to", cast(to), cast(BOOL), "tensorrt-rtx-1.7/sm_120", "build")
        for to in (TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT4E2M1, TensorProto.INT4)
    ),
    Case(
        "cast-to",
        model(node("Cast", "x", to=F16), "x:f8[4,8]"),
        target="tensorrt-rtx-1.7/sm_120",
        refused="build",
    ),
    Case(
        "operand-dtype",
        pair("Add", "x:u8[4,8] z:u8[4,8]", "y:u8[4,8]"),
        pair("Add", "x:i8[4,8] z:i8[4,8]", "y:i8[4,8]"),
        refused="parse",
    ),
    Case("port-dtype", sequence(), refused="parse"),
    Case("double", cast(F64), cast(F32), refused=""),
    Case("double", port("f64"), port("f32"), refused=""),
    Case("port-dtype", port("i16"), port("i32"), refused="parse"),
    Case("constant-dtype", stored("i16"), stored("i32"), refused="parse"),
    Case("uint8-constant", stored("u8"), stored("i32"), refused=""),
    Case(
        "architecture-dtype",
        pair("Add", "x:bf16[4,8] z:bf16[4,8]", "y:bf16[4,8]"),
        pair("Add", f"{ONE} z:f16[4,8]"),
        "tensorrt-rtx-1.7/sm_75+sm_89",
        "build",
    ),
    Case("architecture-dtype", port("f8"), port("i8"), "tensorrt-rtx-1.7/sm_80+sm_89", "build"),
    Case("architecture-dtype", port("f4"), port("f16"), "tensorrt-rtx-1.7/sm_89", "build"),
    Case("architecture-dtype", port("i4"), port("i8"), "tensorrt-rtx-1.7/sm_75", "build"),
    Case("architecture-dtype", port("f4"), port("f16"), "tensorrt-11.4/sm_90"),
    Case(
        "architecture-f32-product",
        pair("MatMul", "x:f32[4,8] z:f32[8,8]", "y:f32[4,8]"),
        pair("MatMul", PRODUCT.format("f16")),
        "tensorrt-rtx-1.7/sm_75",
        "build",
    ),
]


def foreign(
    kind: str, domain: str, inputs: str = "x", types: str = ONE, result: str = "y:f16[4,8]"
) -> ModelProto:
    return model(node(kind, inputs, "y", domain), types, result)


def topk(k: int) -> ModelProto:
    numbers = numpy_helper.from_array(np.array([k]), "k")
    types = f"y:f16[1,{k}] i:i64[1,{k}]"
    return model(node("TopK", "x k", "y i"), "x:f16[1,50000]", types, [numbers])


def scatter(reduction: str) -> ModelProto:
    types = f"{ONE} i:i64[1,8] u:f16[1,8]"
    return model(node("ScatterElements", "x i u", reduction=reduction), types)


def called(name: str) -> ModelProto:
    """A call of a local function that is a Sigmoid."""
    made = foreign(name, "mine")
    body = [helper.make_node("Sigmoid", ["a"], ["b"])]
    opset = helper.make_opsetid("", 24)
    made.functions.append(helper.make_function("mine", name, ["a"], ["b"], body, [opset]))
    return made


def nested(depth: int) -> ModelProto:
    """A condition within a condition, so many times."""
    plain = branch(node("Relu", "x", "leaf"))
    graph = plain
    for level in range(depth):
        made = node("If", "c", f"out{level}", then_branch=graph, else_branch=plain)
        graph = branch(made)
    return model([*graph.node, node("Identity", graph.output[0].name)], f"{ONE} c:bool[]")


def branch(made: NodeProto) -> GraphProto:
    """A graph of one node."""
    result = helper.make_tensor_value_info(made.output[0], F16, [4, 8])
    return helper.make_graph([made], "inner", [], [result])


def experts(**attributes: int) -> ModelProto:
    types = "h:f16[1,4,64] e:i32[1,4,2] s:f16[1,4,2]"
    types += " g:f16[8,64,32] u:f16[8,64,32] d:f16[8,32,64]"
    return model(node("TRT_MoE", "h e s g u d", "y", "trt", **attributes), types, "y:f16[1,4,64]")


PLUGIN = {"plugin_version": "1", "plugin_namespace": "mine"}

OPERATORS = [
    Case(
        "unsupported-operator",
        pair("BitwiseAnd", "x:i32[4,8] z:i32[4,8]", "y:i32[4,8]"),
        refused="parse",
    ),
    Case(
        "unsupported-operator",
        model(node("DynamicQuantizeLinear", "x", "y s z"), "x:f32[4,8]", "y:u8[4,8]"),
        refused="parse",
    ),
    Case("missing-plugin", model(node("NonZero", "x"), ONE, "y:i64[2,N]"), refused="parse"),
    Case(
        "missing-plugin",
        model(node("NonZero", "x"), ONE, "y:i64[2,N]"),
        model(node("NonZero", "x", **PLUGIN), ONE, "y:i64[2,N]"),
    ),
    Case("contrib-operator", foreign("FastGelu", "com.microsoft"), refused="parse"),
    Case("contrib-operator", foreign("Normalizer", "ai.onnx.ml"), refused="parse"),
    Case("builtin-name", foreign("Relu", "mine"), foreign("Relu", ""), refused=""),
    Case("builtin-name", called("Relu"), called("MyRelu"), refused=""),
    Case(
        "builtin-name",
        foreign("Attention", "mine", "q k k", "q:f16[1,2,4,64] k:f16[1,2,4,64]", "y:f16[1,2,4,64]"),
        refused="",
    ),
    Case(
        "builtin-name",
        foreign("RotaryEmbedding", "com.microsoft", "x p c s", f"{ONE} p:i64[1,1]"),
        foreign("Gelu", "com.microsoft"),
    ),
    Case("topk-limit", topk(3841), topk(3840), refused="build"),
    Case("scatter-reduction", scatter("add"), scatter("none"), refused="parse"),
    Case("normalization-outputs", norm("f16", "y m i"), norm("f16"), refused="parse"),
    Case(
        "normalization-precision",
        model(node("RMSNormalization", "x s", stash_type=10), f"{ONE} s:f16[8]"),
        model(node("RMSNormalization", "x s", stash_type=1), f"{ONE} s:f16[8]"),
        refused="",
    ),
    Case(
        "rotary-heads",
        model(node("RotaryEmbedding", "x c c"), "x:f16[1,4,64] c:f16[1,4,32]", "y:f16[1,4,64]"),
        model(
            node("RotaryEmbedding", "x c c", num_heads=1),
            "x:f16[1,4,64] c:f16[1,4,32]",
            "y:f16[1,4,64]",
        ),
        refused="parse",
    ),
    Case("moe-architecture", experts(activation_type=1), refused="build"),
    Case("moe-architecture", experts(activation_type=1), target="tensorrt-11.4/sm_90+sm_100"),
    Case(
        "moe-activation",
        experts(),
        experts(activation_type=1),
        target="tensorrt-11.4/sm_100",
    ),
    Case("inner-depth", nested(25), nested(24)),
]


def tied(kind: str, second: str) -> ModelProto:
    """A table of rows that is looked up, and another operand of a product."""
    turn = [node("Transpose", second, "t", perm=[1, 0]), node("MatMul", "e t")]
    if kind == "Gemm":
        turn = [node("Gemm", f"e {second}", transB=1)]
    types = "w:f16[512,64] v:f16[512,64] i:i32[4]" if second == "v" else "w:f16[512,64] i:i32[4]"
    return model([node("Gather", "w i", "e"), *turn], types, "y:f16[4,512]")


NETWORK = [
    Case("untyped", model(node("Add", "x"), ONE), model(node("Add", "x x"), ONE)),
    Case(
        "unused-input", model(node("Relu", "x"), f"{ONE} u:f16[2]"), model(node("Relu", "x"), ONE)
    ),
    Case(
        "unused-input",
        model(node("CastLike", "x z"), f"{ONE} z:f32[1]", "y:f32[4,8]"),
        refused="",
    ),
    Case("tied-weights", tied("MatMul", "w"), tied("MatMul", "v"), refused=""),
    Case("tied-weights", tied("Gemm", "w"), tied("Gemm", "v"), refused=""),
    Case(
        "empty-input",
        model(node("Relu", "x"), "x:f16[0,8]", "y:f16[0,8]"),
        model(node("Relu", "x"), ONE),
        refused="",
    ),
]

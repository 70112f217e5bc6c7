"""Examples of the linter's rules about element types, operators and quantization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, helper, numpy_helper

from tests.tensorrt.graphs import DTYPES, F16, F32, constant, model, node, value
from tests.tensorrt.refusal import NEWEST, Example

X = "x:f16[4,8]"
RELU = model(node("Relu", "x"))


def pair(kind: str, dtype: str = "f16", other: str = "", **more: Any) -> ModelProto:
    """A node of two operands [4, 8], or [4, 8] and [8, 8] of a product, of one dtype or two."""
    rows = 8 if kind == "MatMul" else 4
    result = f"y:{dtype}[{8 if kind == 'Concat' else 4},8]"
    types = f"x:{dtype}[4,8] z:{other or dtype}[{rows},8]"
    return model(node(kind, "x z", **more), types, result)


def cast(to: str) -> ModelProto:
    """A Cast and its inverse."""
    return model([node("Cast", "x", "t", to=DTYPES[to]), node("Cast", "t", to=F16)])


def port(dtype: str) -> ModelProto:
    """An input of a type that is returned."""
    return model(node("Identity", "x"), f"x:{dtype}[4,8]", f"y:{dtype}[4,8]")


def stored(dtype: str) -> ModelProto:
    """A constant of a type that is added."""
    body = [node("Cast", "w", "c", to=F16), node("Add", "x c")]
    return model(body, constants=[constant(f"w:{dtype}[4,8]")])


def norm(scale: str) -> ModelProto:
    return model(node("LayerNormalization", "x s"), f"{X} s:{scale}[8]")


def where(dtype: str) -> ModelProto:
    return model(node("Where", "c x z"), f"{X} c:bool[4,8] z:{dtype}[4,8]")


def branches(*bodies: list[NodeProto]) -> ModelProto:
    """An If whose branches call their values alike."""
    made = [helper.make_graph(body, "b", [], [value("o:f16[4,8]")]) for body in bodies]
    chosen = {"then_branch": made[0], "else_branch": made[1]}
    return model(node("If", "c", **chosen), f"{X} c:bool[]")


WIDE = [node("Cast", "x", "t", to=F32), node("Exp", "t", "u"), node("Cast", "u", "o", to=F16)]
NARROW = [node("Exp", "x", "t"), node("Add", "t x", "o")]
MIXED = [node("Cast", "x", "t", to=F32), node("Add", "t x", "o")]
CAST_ADD = [node("Cast", "x", "c", to=F32), node("Relu", "x", "r"), node("Add", "c r")]

ELEMENT_TYPES = {
    "mixed-dtypes": (
        Example(pair("Add", "f16", "f32"), pair("Add"), "parsing"),
        Example(where("f32"), where("f16"), "parsing"),
        Example(pair("Concat", "f16", "f32", axis=0), None, "parsing"),
        Example(norm("f32"), norm("f16"), "parsing"),
        Example(model(CAST_ADD), None, "parsing"),
        Example(branches(NARROW, MIXED), branches(WIDE, NARROW), "parsing"),
    ),
    "operand-dtype": (
        Example(pair("Mul", "bool"), pair("And", "bool"), "parsing"),
        Example(pair("And", "i32"), pair("Mul", "i32"), "parsing"),
        Example(pair("MatMul", "i32"), None, "parsing"),
        Example(pair("Add", "u8"), pair("Add", "i8"), "parsing"),
    ),
    "cast-to": (
        *(Example(cast(to), cast("i32"), "parsing") for to in ("u8", "i16", "u4", "f8e5m2")),
        Example(
            model([node("Cast", "x", "t", to=DTYPES["u8"]), node("Identity", "t")], X, "y:u8[4,8]"),
            model(node("Cast", "x", to=DTYPES["u8"]), X, "y:u8[4,8]"),
            "parsing",
        ),
        *(Example(cast(to), cast("bool"), "building", NEWEST) for to in ("f8e4m3", "f4e2m1", "i4")),
        Example(model(node("Cast", "x", to=F16), "x:f8e4m3[4,8]"), None, "building", NEWEST),
    ),
    "double": (Example(cast("f64"), cast("f32"), ""), Example(port("f64"), port("f32"), "")),
    "tensor-dtype": (
        Example(port("i16"), port("i32"), "parsing"),
        Example(stored("i16"), stored("i32"), "parsing"),
    ),
    "architecture-dtype": (
        Example(pair("Add", "bf16"), pair("Add"), "building", "tensorrt-rtx-1.7/sm_75+sm_89"),
        Example(port("f8e4m3"), port("i8"), "building", "tensorrt-rtx-1.7/sm_80+sm_89"),
        Example(port("f4e2m1"), port("f16"), "building", "tensorrt-rtx-1.7/sm_89"),
        Example(port("i4"), port("i8"), "building", "tensorrt-rtx-1.7/sm_75"),
        Example(port("f4e2m1"), port("f16"), target="tensorrt-11.4/sm_90"),
    ),
    "architecture-f32-product": Example(
        pair("MatMul", "f32"), pair("MatMul"), "building", "tensorrt-rtx-1.7/sm_75"
    ),
}


def foreign(kind: str, domain: str) -> ModelProto:
    return model(node(kind, "x", "y", domain))


def topk(k: int) -> ModelProto:
    numbers = numpy_helper.from_array(np.array([k]), "k")
    types = f"y:f16[1,{k}] i:i64[1,{k}]"
    return model(node("TopK", "x k", "y i"), "x:f16[1,50000]", types, [numbers])


def scatter(reduction: str) -> ModelProto:
    types = f"{X} i:i64[1,8] u:f16[1,8]"
    return model(node("ScatterElements", "x i u", reduction=reduction), types)


def nonzero(**attributes: str) -> ModelProto:
    return model(node("NonZero", "x", **attributes), X, "y:i64[2,N]")


OPERATORS = {
    "unsupported-operator": (
        Example(pair("BitwiseAnd", "i32"), RELU, "parsing"),
        Example(foreign("FastGelu", "com.microsoft"), None, "parsing"),
        Example(foreign("Normalizer", "ai.onnx.ml"), None, "parsing"),
    ),
    "missing-plugin": (
        Example(nonzero(), RELU, "parsing"),
        Example(nonzero(), nonzero(plugin_version="1", plugin_namespace="mine")),
    ),
    "builtin-name": (
        Example(foreign("Relu", "mine"), foreign("Relu", ""), ""),
        Example(foreign("Sigmoid", "com.microsoft"), foreign("Gelu", "com.microsoft")),
    ),
    "topk-limit": Example(topk(3841), topk(3840), "building"),
    "scatter-reduction": Example(scatter("add"), scatter("none"), "parsing"),
}

K, N = 128, 64
ROWS, RESULT = f"x:f16[4,{K}]", f"y:f16[4,{N}]"


def weight(
    stored: str = "i8",
    scale: Sequence[int] = (N,),
    size: float = 0.5,
    zero: float | None = None,
    shape: Sequence[int] = (K, N),
    zeros: Sequence[int] | None = None,
    inputs: str = "",
    transposed: bool = False,
    rows: int | str = 4,
    **attributes: Any,
) -> ModelProto:
    """x times a quantized weight; `inputs` names those of w and s that are inputs of the model."""

    def text(name: str, dtype: str, dims: Sequence[int]) -> str:
        return f"{name}:{dtype}[{','.join(map(str, dims))}]"

    types = {"w": text("w", stored, shape), "s": text("s", "f16", scale)}
    numbers = {"w": 1.0, "s": size}
    if zero is not None:
        types["z"] = text("z", stored, scale if zeros is None else zeros)
        numbers["z"] = zero
    held = [constant(types[name], numbers[name]) for name in types if name not in inputs.split()]
    more = "".join(f" {types[name]}" for name in inputs.split())
    body = [node("DequantizeLinear", " ".join(types), "d", **({"axis": 1} | attributes))]
    if transposed:
        body.append(node("Transpose", "d", "t", perm=[1, 0]))
    body.append(node("MatMul", "x t" if transposed else "x d"))
    inner, outer = reversed(shape) if transposed else shape
    return model(body, f"x:f16[{rows},{inner}]{more}", f"y:f16[{rows},{outer}]", held)


def blocks(stored: str = "i4", size: int = 64, scale: float = 0.5, **more: Any) -> ModelProto:
    """Blocks along K."""
    return weight(stored, (K // size, N), scale, axis=0, block_size=size, **more)


def activation(zero: str = "") -> ModelProto:
    """Quantize and dequantize x."""
    attributes = {} if zero else {"output_dtype": DTYPES["i8"]}
    first = node("QuantizeLinear", f"x s {zero}", "q", **attributes)
    body = [first, node("DequantizeLinear", f"q s {zero}")]
    more = " z:i8[]" if zero else ""
    return model(body, ROWS + more, ROWS.replace("x", "y"), [constant("s:f16[]", 0.5)])


def gathered(first: str) -> ModelProto:
    """Rows of a quantized table, dequantized before or after the lookup."""
    held = [constant(f"w:i8[{K},{N}]"), constant("s:f16[]", 0.5)]
    body = [node("Gather", "w i", "g"), node("DequantizeLinear", "g s")]
    if first == "dequantize":
        body = [node("DequantizeLinear", "w s", "d"), node("Gather", "d i")]
    return model(body, "i:i64[3]", f"y:f16[3,{N}]", held)


CAST_INT8 = [node("Cast", "w", "c", to=10), node("Add", "x c")]
GOOD = weight()

QUANTIZED = {
    "zero-point": (
        Example(weight(zero=1), weight(zero=0), "parsing"),
        Example(weight(zero=0, zeros=(1,)), weight(zero=0, zeros=(N,)), "parsing"),
        Example(activation(zero="z"), activation(), "building"),
    ),
    "scale-positive": (
        Example(weight(size=0), GOOD, "parsing"),
        Example(weight(size=-1), blocks(scale=-1), "parsing"),
        Example(weight(size=float("nan")), GOOD, "parsing"),
    ),
    "block-shape": (
        Example(weight("i4", (3, N), axis=0, block_size=48), blocks(size=32), "parsing"),
        Example(weight("i4", (N,), axis=0, block_size=128), None, "parsing"),
        Example(weight("i4", (2, N // 2), axis=0, block_size=64), None, "parsing"),
        Example(weight("i4", (4, N), axis=0, block_size=64), None, ""),
    ),
    "even-count": Example(weight("i4", (3,), shape=(3, 3)), blocks(), "building"),
    "quantized-constant": (
        Example(gathered("gather"), gathered("dequantize"), "building"),
        Example(model(CAST_INT8, constants=[constant("w:i8[4,8]")]), None, "building"),
    ),
    "int4-blocks": (
        Example(weight("i4"), blocks(), ""),
        Example(blocks(size=8), blocks(size=16), ""),
        Example(
            weight("i4", (K, 1), axis=1, block_size=N),
            weight("i4", (N, 1), shape=(N, K), transposed=True, axis=1, block_size=K),
            "",
        ),
        Example(blocks(inputs="w s"), blocks(size=128), ""),
    ),
    "eight-bit-blocks": (
        Example(blocks("i8"), GOOD, ""),
        Example(blocks("f8e4m3", 128), weight("f8e4m3"), "", NEWEST),
    ),
    "fp4-activations": Example(blocks("f4e2m1", 16), blocks("i4", 16), "", NEWEST),
    "one-row": (
        Example(weight(rows=1), weight(rows=2), ""),
        Example(weight("f8e4m3", rows=1), weight("f8e4m3", rows="B"), "", NEWEST),
        Example(weight(rows=1), blocks(rows=1), ""),
    ),
}

TABLE = ELEMENT_TYPES | OPERATORS | QUANTIZED

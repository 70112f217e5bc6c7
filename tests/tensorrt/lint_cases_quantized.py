"""A fault of quantization per case: what is refused, and what does not fuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx import ModelProto, TensorProto

from tests.tensorrt.lint_models import F8, I8, NEWEST, U8, Case, constant, model, node

K, N = 128, 64
X, Y = f"x:f16[4,{K}]", f"y:f16[4,{N}]"


def weight(
    stored: str = "i8",
    scale: Sequence[int] = (N,),
    size: float = 0.5,
    zero: float | None = None,
    shape: Sequence[int] = (K, N),
    rows: int = 4,
    zeros: Sequence[int] | None = None,
    inputs: str = "",
    turned: bool = False,
    **attributes: Any,
) -> ModelProto:
    """x times a quantized weight; `inputs` says which of w and s are inputs of the model."""

    def text(name: str, dtype: str, dims: Sequence[int]) -> str:
        return f"{name}:{dtype}[{','.join(map(str, dims))}]"

    types = {"w": text("w", stored, shape), "s": text("s", "f16", scale)}
    numbers = {"w": 1.0, "s": size}
    if zero is not None:
        types["z"] = text("z", stored, scale if zeros is None else zeros)
        numbers["z"] = zero
    held = [constant(types[name], numbers[name]) for name in types if name not in inputs.split()]
    given = "".join(f" {types[name]}" for name in inputs.split())
    attributes = {"axis": 1} | attributes
    body = [node("DequantizeLinear", " ".join(types), "d", **attributes)]
    if turned:
        body.append(node("Transpose", "d", "t", perm=[1, 0]))
    body.append(node("MatMul", "x t" if turned else "x d"))
    inner, outer = reversed(shape) if turned else shape
    return model(body, f"x:f16[{rows},{inner}]{given}", f"y:f16[{rows},{outer}]", held)


def blocks(stored: str = "i4", size: int = 64, **more: Any) -> ModelProto:
    """Blocks along K."""
    return weight(stored, (K // size, N), axis=0, block_size=size, **more)


def activation(
    to: int = I8, scale: float = 0.5, zero: str = "", inputs: str = "", product: bool = False
) -> ModelProto:
    """Quantize and dequantize x, perhaps before a product with a quantized weight."""
    held = [] if "s" in inputs.split() else [constant("s:f16[]", scale)]
    given = {"s": " s:f16[]", "z": " z:i8[]"}
    attributes: dict[str, int] = {} if zero else {"output_dtype": to}
    body = [node("QuantizeLinear", f"x s {zero}", "q", **attributes)]
    last = "d" if product else "y"
    body.append(node("DequantizeLinear", f"q s {zero}", last))
    if product:
        held += [constant(f"w:{'f8' if to == F8 else 'i8'}[{K},{N}]"), constant("v:f16[]", 0.5)]
        body += [node("DequantizeLinear", "w v", "e"), node("MatMul", "d e")]
    extra = "".join(given[name] for name in inputs.split())
    return model(body, X + extra, Y if product else X.replace("x", "y"), held)


def gathered(first: str) -> ModelProto:
    """Rows of a quantized table, dequantized before or after they are looked up."""
    held = [constant(f"w:i8[{K},{N}]"), constant("s:f16[]", 0.5)]
    body = [node("Gather", "w i", "g"), node("DequantizeLinear", "g s")]
    if first == "dequantize":
        body = [node("DequantizeLinear", "w s", "d"), node("Gather", "d i")]
    return model(body, "i:i64[3]", f"y:f16[3,{N}]", held)


def fp4(scale: str, where: str) -> ModelProto:
    """Dynamic FP4 of an activation."""
    body = [
        node("TRT_FP4DynamicQuantize", "x s", "q b", "trt", axis=-1, block_size=16, scale_type=17),
        node("DequantizeLinear", "b g", "c"),
        node("DequantizeLinear", "q c", "y", axis=-1, block_size=16),
    ]
    held = [constant("g:f16[]")] + ([constant(scale)] if where == "inside" else [])
    given = f" {scale}" if where == "outside" else ""
    return model(body, f"x:f16[4,{K}]{given}", f"y:f16[4,{K}]", held)


def nvfp4(both: bool) -> ModelProto:
    """An FP4 weight with block scales in FP8; the activation is FP4, too, or as it comes."""
    body = [
        node("DequantizeLinear", "sw g", "cw"),
        node("DequantizeLinear", "w cw", "d", axis=0, block_size=16),
    ]
    if both:
        made = {"axis": -1, "block_size": 16, "scale_type": 17}
        body += [
            node("TRT_FP4DynamicQuantize", "x g", "q b", "trt", **made),
            node("DequantizeLinear", "b g", "c"),
            node("DequantizeLinear", "q c", "a", axis=-1, block_size=16),
        ]
    body.append(node("MatMul", "a d" if both else "x d"))
    held = [constant(f"w:f4[{K},{N}]"), constant(f"sw:f8[{K // 16},{N}]"), constant("g:f16[]")]
    return model(body, X, Y, held)


def dynamic() -> ModelProto:
    made = {"block_shape": [1, 64], "output_type": 17, "scale_type": 1}
    body = [
        node("TRT_DynamicQuantize", "x", "q b", "trt", **made),
        node("DequantizeLinear", "q b", "y", axis=-1, block_size=64),
    ]
    return model(body, X, f"y:f32[4,{K}]")


def microscaled(declared: str) -> ModelProto:
    body = [
        node("TRT_MXFP8DynamicQuantize", "x", "q b", "trt", axis=-1, block_size=32),
        node("TRT_MXFP8DequantizeLinear", "q b", "y", "trt", axis=-1, block_size=32),
    ]
    return model(body, X, f"y:{declared}[4,{K}]")


GOOD = weight()
ONE_MORE = (K // 16 + 1, N)

REFUSED = [
    Case("zero-point", weight(zero=1), weight(zero=0), refused="parse"),
    Case("zero-point", weight(zero=0, zeros=(1,)), weight(zero=0, zeros=(N,)), refused="parse"),
    Case("zero-point", activation(zero="z", inputs="z"), activation(), refused="build"),
    Case("quantized-dtype", weight("u8"), weight("i8"), refused="parse"),
    Case("quantized-dtype", activation(U8), activation(I8), refused="parse"),
    Case(
        "quantized-dtype",
        activation(TensorProto.FLOAT8E5M2),
        activation(F8),
        target=NEWEST,
        refused="parse",
    ),
    Case("scale-positive", weight(size=0), GOOD, refused="parse"),
    Case(
        "scale-positive",
        weight(size=-1),
        weight("i4", (2, N), axis=0, block_size=64, size=-1),
        refused="parse",
    ),
    Case("scale-positive", weight(size=float("nan")), GOOD, refused="parse"),
    Case(
        "block-shape",
        weight("i4", (3, N), axis=0, block_size=48),
        blocks(size=32),
        refused="parse",
    ),
    Case("block-shape", weight("i4", (N,), axis=0, block_size=128), refused="parse"),
    Case("block-shape", weight("i4", (2, N // 2), axis=0, block_size=64), refused="parse"),
    Case("block-shape", weight("i4", (4, N), axis=0, block_size=64), refused=""),
    Case("channel-scales", weight(scale=(N,), axis=0), weight(scale=(K,), axis=0), refused="parse"),
    Case("even-count", weight("i4", (3,), shape=(3, 3)), refused="build"),
    Case("quantized-constant", gathered("gather"), gathered("dequantize"), refused="build"),
    Case(
        "quantized-constant",
        model(
            [node("Cast", "w", "c", to=10), node("Add", "x c")],
            "x:f16[4,8]",
            constants=[constant("w:i8[4,8]")],
        ),
        refused="build",
    ),
    Case(
        "fp4-scale",
        fp4("s:f16[]", "outside"),
        fp4("s:f16[]", "inside"),
        target=NEWEST,
        refused="parse",
    ),
    Case("fp4-scale", fp4("s:f16[2]", "inside"), target=NEWEST, refused="parse"),
    Case("dynamic-quantize", dynamic(), activation(), target=NEWEST, refused="build"),
    Case("mxfp8-output", microscaled("f16"), microscaled("f32"), target=NEWEST, refused=""),
]

UNFUSED = [
    Case("int4-blocks", weight("i4"), blocks(), refused=""),
    Case("int4-blocks", weight("i4", ()), blocks(size=128), refused=""),
    Case("int4-blocks", blocks(size=8), blocks(size=16), refused=""),
    Case(
        "int4-blocks",
        weight("i4", (K, 1), axis=1, block_size=N),
        weight("i4", (N, 1), shape=(N, K), turned=True, axis=1, block_size=K),
        refused="",
    ),
    Case("int4-weight-input", blocks(inputs="w s"), blocks(), refused=""),
    Case("wide-blocks", blocks("i8"), weight("i8"), refused=""),
    Case("wide-blocks", blocks("f8"), weight("f8"), target=NEWEST, refused=""),
    Case("fp4-weight-only", nvfp4(False), nvfp4(True), target=NEWEST, refused=""),
    Case(
        "activation-scale",
        activation(inputs="s", product=True),
        activation(product=True),
        refused="",
    ),
    Case("single-row", weight(rows=1), weight(rows=2), refused=""),
    Case("single-row", weight("f8", rows=1), blocks(rows=1), target=NEWEST, refused=""),
]

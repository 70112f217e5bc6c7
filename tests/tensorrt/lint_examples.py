"""Examples of the linter's rules: a model with the fault, and a similar one without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onnx import ModelProto

from tests.tensorrt.graphs import DTYPES, F16, collective, constant, model, node


@dataclass(frozen=True)
class Example:
    """A model with a fault that a rule of the linter finds, and a similar model without it.

    `refused` is the step at which TensorRT-RTX refuses the bad model, "" where it builds, None if
    it is not tried. The good one must then build.
    """

    bad: ModelProto
    good: ModelProto | None = None
    refused: str | None = None


X = "x:f16[4,8]"
Q, K = "q:f16[1,4,8,64]", "k:f16[1,2,8,64]"
SHORT = f"q:f16[1,4,2,64] {K}"
RELU = model(node("Relu", "x"))


def attention(
    inputs: str = "q k k",
    more: str = "",
    types: str = f"{Q} {K}",
    kind: str = "TRT_Attention",
    **attributes: Any,
) -> ModelProto:
    """Attention of a scaled query and grouped heads; `more` are further inputs."""
    result = "y:" + types.split()[0].partition(":")[2]
    domain = "trt" if kind.startswith("TRT_") else ""
    operands = inputs.replace("q ", "qs ", 1)
    body = [node("Mul", "q half", "qs"), node(kind, operands, "y", domain, **attributes)]
    return model(body, f"{types} {more} half:f16[1]", result)


def plain(inputs: str = "q k k", more: str = "", **attributes: Any) -> ModelProto:
    """ONNX Attention."""
    return attention(inputs, more, kind="Attention", **attributes)


def all_reduce(**attributes: Any) -> ModelProto:
    """An all-reduce of two ranks."""
    return model(collective("all_reduce", "x", **attributes), X, "y:f16[4,8]")


def mine(**fields: Any) -> ModelProto:
    """One node of a plugin."""
    return model(node("Mine", "x", "y", "mine", plugin_version="1", **fields))


def foreign(kind: str, domain: str) -> ModelProto:
    """One node of another domain."""
    return model(node(kind, "x", "y", domain))


def cast(to: str) -> ModelProto:
    """A Cast and its inverse."""
    return model([node("Cast", "x", "t", to=DTYPES[to]), node("Cast", "t", to=F16)])


def port(dtype: str) -> ModelProto:
    """An input of a type that is returned."""
    return model(node("Identity", "x"), f"x:{dtype}[4,8]", f"y:{dtype}[4,8]")


def blocks(count: int) -> ModelProto:
    """x times an INT4 weight [128, 64] in blocks of 64 along K, with so many rows of scales."""
    held = [constant("w:i4[128,64]"), constant(f"s:f16[{count},64]", 0.5)]
    body = [node("DequantizeLinear", "w s", "d", axis=0, block_size=64), node("MatMul", "x d")]
    return model(body, "x:f16[4,128]", "y:f16[4,64]", held)


TABLE: dict[str, tuple[Example, ...]] = {
    "attention-valid-lengths": (
        Example(plain("q k k - - - n", "n:i64[1]"), attention("q k k - - n", "n:i32[1]")),
    ),
    "attention-causal-alignment": (
        Example(plain(types=SHORT, is_causal=1), attention(types=SHORT, causal_kind="lower_right")),
        Example(
            plain(types="q:f16[1,4,S,64] k:f16[1,2,C,64]", is_causal=1),
            plain(types="q:f16[1,4,S,64] k:f16[1,2,S,64]", is_causal=1),
        ),
    ),
    "trt-attention-attributes": (
        Example(attention(scale=0.125), attention(), ""),
        Example(attention(is_causal=1), attention(causal_kind="upper_left"), ""),
    ),
    "trt-attention-lengths": (
        Example(
            attention("q k k - l", "l:i32[1]"), attention("q k k - - l", "l:i32[1]"), "building"
        ),
        Example(attention("q k k - - - l", "l:i32[1]"), None, "unused"),
        Example(attention("q k k - - l", "l:f32[1]"), None, ""),
    ),
    "block-shape": (Example(blocks(4), blocks(2), ""),),
    "builtin-name": (
        Example(foreign("Relu", "mine"), foreign("Relu", ""), ""),
        Example(foreign("Sigmoid", "com.microsoft"), foreign("Gelu", "com.microsoft")),
    ),
    "plugin-integers": (
        Example(mine(size=1 << 40), mine(size=(1 << 31) - 1)),
        Example(mine(sizes=[1, -(1 << 31) - 1]), mine(sizes=[1, -(1 << 31)])),
    ),
    "double": (Example(cast("f64"), cast("f32"), ""), Example(port("f64"), port("f32"), "")),
    "collective-subgroup": (Example(all_reduce(groups=[1, 3]), all_reduce(), ""),),
    "untyped": (Example(model(node("Add", "x")), model(node("Add", "x x"))),),
}

"""A form of an operator that is refused per case."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import ModelProto, numpy_helper

from tests.tensorrt.lint_models import Case, constant, model, node

IMAGE = "x:f32[1,2,8,8]"


def pool(kind: str, outputs: str = "y", **attributes: Any) -> ModelProto:
    types = "y:f32[1,2,7,7]" + (" i:i64[1,2,7,7]" if outputs == "y i" else "")
    return model(node(kind, "x", outputs, kernel_shape=[2, 2], **attributes), IMAGE, types)


def reduced(axes: str) -> ModelProto:
    """The maximum along an axis that is an input, computed, or constant."""
    held = [numpy_helper.from_array(np.array([1]), "a")] if axes == "constant" else []
    body = [node("ReduceMax", "x a")]
    if axes == "computed":
        body = [node("Shape", "x", "s", start=0, end=1), node("Sub", "s s", "a"), *body]
    extra = " a:i64[1]" if axes == "input" else ""
    return model(body, "x:f16[4,8]" + extra, "y:f16[4,1]", held)


def resize(**attributes: Any) -> ModelProto:
    scales = numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "s")
    body = node("Resize", "x - s", mode="linear", **attributes)
    return model(body, IMAGE, "y:f32[1,2,16,16]", [scales])


def batch(training: int) -> ModelProto:
    held = [constant(f"{name}:f32[2]") for name in "sbmv"]
    outputs = "y p q" if training else "y"
    body = node("BatchNormalization", "x s b m v", outputs, training_mode=training)
    return model(body, IMAGE, "y:f32[1,2,8,8]", held)


def mod(**attributes: int) -> ModelProto:
    return model(node("Mod", "x z", **attributes), "x:f16[4,8] z:f16[4,8]")


def counted(dtype: str) -> ModelProto:
    held = [constant(f"{name}:{dtype}[]", number) for name, number in (("a", 0), ("b", 4))]
    held.append(constant(f"d:{dtype}[]"))
    body = [node("Range", "a b d", "r"), node("Cast", "r", "c", to=10), node("Add", "c x")]
    return model(body, "x:f16[4]", "y:f16[4]", held)


def suppressed() -> ModelProto:
    held = [constant("m:i64[1]", 3), constant("i:f32[1]", 0.5), constant("t:f32[1]", 0)]
    body = node("NonMaxSuppression", "b s m i t")
    return model(body, "b:f32[1,6,4] s:f32[1,1,6]", "y:i64[N,3]", held)


def celu(dtype: str) -> ModelProto:
    return model(node("Celu", "x"), f"x:{dtype}[4,8]", f"y:{dtype}[4,8]")


FORMS = [
    Case("constant-operand", reduced("input"), reduced("constant"), refused="parse"),
    Case("constant-operand", reduced("computed"), refused="parse"),
    Case(
        "operator-form",
        pool("AveragePool", dilations=[2, 2]),
        pool("AveragePool", dilations=[1, 1]),
        refused="parse",
    ),
    Case("operator-form", pool("MaxPool", dilations=[2, 1]), pool("MaxPool"), refused="parse"),
    Case("operator-form", pool("LpPool", p=3), pool("LpPool", p=2), refused="parse"),
    Case("operator-form", pool("MaxPool", "y i"), pool("MaxPool"), refused="parse"),
    Case("operator-form", batch(1), batch(0), refused="parse"),
    Case("operator-form", mod(), mod(fmod=1), refused="parse"),
    Case("operator-form", counted("f16"), counted("i32"), refused="parse"),
    Case("operator-form", celu("f16"), celu("f32"), refused="parse"),
    Case("operator-form", resize(antialias=1), resize(), refused="parse"),
    Case("missing-kernel", suppressed(), refused="build"),
]

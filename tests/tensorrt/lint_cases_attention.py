"""A fault of attention or of caches per case."""

from __future__ import annotations

from typing import Any

from onnx import ModelProto

from tests.tensorrt.lint_models import Case, model, node

Q, K = "q:f16[1,4,8,64]", "k:f16[1,2,8,64]"
SHORT = "q:f16[1,4,2,64]"


def attention(
    inputs: str = "q k k",
    types: str = f"{Q} {K}",
    kind: str = "TRT_Attention",
    outputs: str = "y",
    **attributes: Any,
) -> ModelProto:
    """Attention of grouped heads over what the types say."""
    domain = "trt" if kind.startswith("TRT_") else ""
    result = "y:" + types.split()[0].partition(":")[2]
    scaled = node("Mul", "q half", "qs")
    inputs = inputs.replace("q ", "qs ", 1)
    dtype = result[2:].partition("[")[0]
    half = f"half:{dtype}[1]"
    body = [scaled, node(kind, inputs, outputs, domain, **attributes)]
    extra = " p:f16[1,2,8,64]" if "p" in outputs.split() else ""
    return model(body, f"{types} {half}", result + extra)


def plain(inputs: str = "q k k", types: str = f"{Q} {K}", **attributes: Any) -> ModelProto:
    """ONNX Attention."""
    return attention(inputs, types, "Attention", **attributes)


def unscaled() -> ModelProto:
    """TRT_Attention on a query as it comes."""
    return model(node("TRT_Attention", "q k k", "y", "trt"), f"{Q} {K}", "y:f16[1,4,8,64]")


LENGTHS = f"{Q} {K} l:i32[1]"
MASK = f"{Q} {K} m:f16[1,1,8,8]"
SAME = "q:f16[1,4,8,64] k:f16[1,4,8,64]"
THREE = "q:f16[1,8,64] k:f16[1,8,64]"


def itself(**attributes: Any) -> ModelProto:
    """ONNX Attention of one tensor with itself."""
    return model(node("Attention", "q q q", **attributes), Q, "y:f16[1,4,8,64]")


ATTENTION = [
    Case("attention-of-itself", itself(scale=0.125), itself(scale=1.0), refused="crash"),
    Case(
        "attention-valid-lengths",
        plain("q k k - - - n", f"{Q} {K} n:i64[1]"),
        attention("q k k - - n", f"{Q} {K} n:i32[1]"),
    ),
    Case(
        "attention-causal-alignment",
        plain(types=f"{SHORT} {K}", is_causal=1),
        attention(types=f"{SHORT} {K}", causal_kind="lower_right"),
    ),
    Case("attention-causal-alignment", plain(types="q:f16[1,4,S,64] k:f16[1,2,C,64]", is_causal=1)),
    Case(
        "attention-past",
        plain("q k k - c c", f"{Q} {K} c:f16[1,2,8,64]"),
        plain(),
        refused="parse",
    ),
    Case("attention-outputs", plain(outputs="y p"), plain(), refused="parse"),
    Case("attention-softcap", plain(softcap=30.0), plain(softcap=0.0), refused="parse"),
    Case("attention-softmax-precision", plain(softmax_precision=1), plain(), refused="parse"),
    Case(
        "attention-mask-and-causal",
        plain("q k k m", MASK, is_causal=1),
        plain("q k k m", MASK),
        refused="parse",
    ),
    Case(
        "attention-mask-and-causal",
        attention("q k k m", MASK, causal_kind="lower_right"),
        attention("q k k m", MASK, causal_kind="none"),
        refused="parse",
    ),
    Case(
        "attention-mask-type",
        attention("q k k m", f"{Q} {K} m:f32[1,1,8,8]"),
        attention("q k k m", f"{Q} {K} m:bool[1,1,8,8]"),
        refused="build",
    ),
    Case("attention-mask-type", attention("q k k l", LENGTHS), refused="parse"),
    Case(
        "attention-mask-rank",
        attention("q k k m", f"{Q} {K} m:f16[1,1,1,8,8]"),
        attention("q k k m", MASK),
        refused="parse",
    ),
    Case(
        "attention-value-width",
        attention("q k v", f"{Q} {K} v:f16[1,2,8,32]"),
        attention("q k v", f"{Q} {K} v:f16[1,2,8,64]"),
        refused="parse",
    ),
    Case(
        "attention-heads",
        attention(types=f"{Q} k:f16[1,3,8,64]"),
        attention(),
        refused="parse",
    ),
    Case(
        "attention-heads",
        plain(types=THREE),
        plain(types=THREE, q_num_heads=4, kv_num_heads=4),
        refused="parse",
    ),
    Case(
        "attention-needs-decomposable",
        attention(types=SAME.replace("f16", "f32")),
        attention(types=SAME.replace("f16", "f32"), TRT_decomposable=1),
        refused="build",
    ),
    Case(
        "attention-needs-decomposable",
        plain(types=SAME.replace("64", "257")),
        plain(types=SAME.replace("64", "257"), TRT_decomposable=1),
        refused="build",
    ),
    Case(
        "attention-needs-decomposable",
        plain(types=THREE, q_num_heads=8, kv_num_heads=8),
        plain(types=THREE, q_num_heads=4, kv_num_heads=4),
        refused="build",
    ),
    Case(
        "attention-needs-decomposable",
        plain(types=THREE.replace("f16", "f32"), q_num_heads=4, kv_num_heads=4, is_causal=1),
        plain(types=THREE.replace("f16", "f32"), q_num_heads=4, kv_num_heads=4),
        refused="build",
    ),
    Case("attention-ranks", attention(nb_rank=2), attention(nb_rank=1), refused="build"),
    Case("trt-attention-attributes", attention(scale=0.125), attention(), refused=""),
    Case("trt-attention-attributes", attention(is_causal=1), attention(), refused=""),
    Case(
        "trt-attention-attributes",
        attention(causal_kind="bottom_right"),
        attention(causal_kind="lower_right"),
        refused="parse",
    ),
    Case(
        "trt-attention-lengths",
        attention("q k k - l", LENGTHS),
        attention("q k k - - l", LENGTHS),
        refused="build",
    ),
    Case("trt-attention-lengths", attention("q k k - - - l", LENGTHS), refused=""),
    Case("trt-attention-lengths", attention("q k k - - l", f"{Q} {K} l:f32[1]"), refused=""),
    Case("trt-attention-rank", attention(types=THREE), attention(), refused="parse"),
    Case(
        "trt-attention-packed",
        attention("q k k - l", "q:f16[8,4,64] k:f16[1,4,8,64] l:i32[2]", query_form="packed_nhd"),
        refused="build",
    ),
    Case("trt-attention-unscaled", unscaled(), attention(), refused=""),
    Case(
        "quantized-attention",
        attention("q k k -", kind="TRT_QuantizedAttention"),
        refused="parse",
    ),
    Case(
        "native-decode-attention",
        attention("q k k - - l", LENGTHS),
        attention("q k k - - l", LENGTHS, TRT_decomposable=1),
        target="tensorrt-11.0/sm_103",
    ),
]


def cache(
    types: str = "c:f16[1,2,64,16] u:f16[1,2,1,16] w:i32[1]",
    outputs: str = "",
    body: Any = None,
    **attributes: Any,
) -> ModelProto:
    """An update of one entry of a cache."""
    result = outputs or "y:" + types.split()[0].partition(":")[2]
    return model(body or node("TensorScatter", "c u w", **attributes), types, result)


WRITE = node("TensorScatter", "c u w", "n", axis=-2)
AGAIN = node("TensorScatter", "n u w", "y", axis=-2)
TWICE = node("TensorScatter", "c u w", "y", axis=-2)
BOTH = "y:f16[1,2,64,16] n:f16[1,2,64,16]"
COPY = "c:f16[1,2,63,16] u:f16[1,2,1,16]"

CACHES = [
    Case("cache-axis", cache(axis=1), cache(axis=2), refused="parse"),
    Case("cache-rank", cache("c:f16[1,64,16] u:f16[1,1,16] w:i32[1]"), cache(), refused="parse"),
    Case(
        "cache-capacity",
        cache("c:f16[1,2,C,16] u:f16[1,2,1,16] w:i32[1]"),
        cache("c:f16[B,2,64,16] u:f16[B,2,1,16] w:i32[B]"),
        refused="parse",
    ),
    Case("cache-mode", cache(mode="circular"), cache(mode="linear"), refused="parse"),
    Case("cache-dtype", cache("c:i8[1,2,64,16] u:i8[1,2,1,16] w:i32[1]"), cache(), refused="parse"),
    Case(
        "cache-is-an-input",
        cache(body=[node("Identity", "c", "t"), node("TensorScatter", "t u w")]),
        cache(),
        refused="build",
    ),
    Case("cache-is-an-input", cache(body=[WRITE, AGAIN], outputs=BOTH), refused="build"),
    Case(
        "cache-is-an-output",
        cache(body=[WRITE, node("Relu", "n")]),
        cache(body=[WRITE, node("Relu", "n")], outputs=BOTH),
        refused="build",
    ),
    Case(
        "cache-updated-twice",
        cache(body=[WRITE, TWICE], outputs=BOTH),
        cache(),
        refused="build",
    ),
    Case(
        "cache-copied",
        cache(COPY, "y:f16[1,2,64,16]", node("Concat", "c u", axis=2)),
        cache(),
        refused="",
    ),
    Case("native-cache-wrong", cache(), target="tensorrt-11.2/sm_121"),
    Case("native-cache-builds", cache(), target="tensorrt-11.2/sm_120"),
]

"""Examples of the linter's rules about attention, caches, collectives, plugins and files."""

from __future__ import annotations

from typing import Any

from onnx import ModelProto

from irc.backends.tensorrt.plugins import attributes_of
from tests.tensorrt.graphs import collective, model, node
from tests.tensorrt.graphs import value as typed
from tests.tensorrt.refusal import FULL, NEWEST, Example

X = "x:f16[4,8]"
Q, K = "q:f16[1,4,8,64]", "k:f16[1,2,8,64]"
SHORT = f"q:f16[1,4,2,64] {K}"
SAME = "q:f16[1,4,8,64] k:f16[1,4,8,64]"
THREE = "q:f16[1,8,64] k:f16[1,8,64]"


def attention(
    inputs: str = "q k k",
    more: str = "",
    types: str = f"{Q} {K}",
    kind: str = "TRT_Attention",
    **attributes: Any,
) -> ModelProto:
    """Attention of a scaled query, grouped heads by default; `more` are further inputs."""
    result = "y:" + types.split()[0].partition(":")[2]
    dtype = result[2:].partition("[")[0]
    domain = "trt" if kind.startswith("TRT_") else ""
    operands = inputs.replace("q ", "qs ", 1)
    body = [node("Mul", "q half", "qs"), node(kind, operands, "y", domain, **attributes)]
    return model(body, f"{types} {more} half:{dtype}[1]", result)


def plain(inputs: str = "q k k", more: str = "", **attributes: Any) -> ModelProto:
    """ONNX Attention."""
    return attention(inputs, more, kind="Attention", **attributes)


def flat(dtype: str, heads: int, **attributes: Any) -> ModelProto:
    """ONNX Attention of [B, S, H*D]."""
    types = THREE.replace("f16", dtype)
    return plain(types=types, q_num_heads=heads, kv_num_heads=heads, **attributes)


def itself(scale: float) -> ModelProto:
    """ONNX Attention of one tensor with itself."""
    return model(node("Attention", "q q q", scale=scale), Q, "y:f16[1,4,8,64]")


def rotary(
    table: str, x: str = "B,4,S,32", sin: str = "", positions: str = "", **more: Any
) -> ModelProto:
    """RotaryEmbedding with tables of these sizes, chosen by positions if there are some."""
    types = f"x:f16[{x}] c:f16[{table},16] s:f16[{sin or table},16]"
    types += f" p:i64[{positions}]" * bool(positions)
    made = node("RotaryEmbedding", "x c s p" if positions else "x c s", **more)
    return model(made, types, f"y:f16[{x}]")


F32 = SAME.replace("f16", "f32")
WIDE = SAME.replace("64", "257")

ATTENTION = {
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
    "attention-of-itself": Example(itself(0.125), itself(1.0), "crash"),
    "attention-mask-type": (
        Example(
            attention("q k k m", "m:f32[1,1,8,8]"),
            attention("q k k m", "m:bool[1,1,8,8]"),
            "building",
        ),
        Example(attention("q k k l", "l:i32[1]"), None, "parsing"),
    ),
    "attention-needs-decomposable": (
        Example(attention(types=F32), attention(types=F32, TRT_decomposable=1), "building"),
        Example(plain(types=WIDE), plain(types=WIDE, TRT_decomposable=1), "building"),
        Example(flat("f16", 8), flat("f16", 4), "building"),
        Example(flat("f32", 4, is_causal=1), flat("f32", 4), "building"),
    ),
    "rotary-sizes": (
        Example(rotary("1,S"), rotary("B,S"), "parsing"),
        Example(rotary("B,8"), None, "parsing"),
        Example(rotary("1,S", "4,S,128", num_heads=4), None, "parsing"),
        Example(rotary("B,S", sin="1,S"), None, "parsing"),
        Example(rotary("99", positions="1,S"), rotary("99", positions="B,S"), "parsing"),
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
}


def cache(
    types: str = "c:f16[1,2,64,16] u:f16[1,2,1,16] w:i32[1]",
    outputs: str = "",
    body: Any = None,
    **attributes: Any,
) -> ModelProto:
    """An update of one slot of a cache."""
    result = outputs or "y:" + types.split()[0].partition(":")[2]
    return model(body or node("TensorScatter", "c u w", **attributes), types, result)


WRITE = node("TensorScatter", "c u w", "n", axis=-2)
AGAIN = node("TensorScatter", "n u w", "y", axis=-2)
TWICE = node("TensorScatter", "c u w", "y", axis=-2)
BOTH = "y:f16[1,2,64,16] n:f16[1,2,64,16]"

CACHES = {
    "cache-is-an-input": (
        Example(
            cache(body=[node("Identity", "c", "t"), node("TensorScatter", "t u w")]),
            cache(),
            "building",
        ),
        Example(cache(body=[WRITE, AGAIN], outputs=BOTH), None, "building"),
    ),
    "cache-is-an-output": Example(
        cache(body=[WRITE, node("Relu", "n")]),
        cache(body=[WRITE, node("Relu", "n")], outputs=BOTH),
        "building",
    ),
    "cache-updated-twice": Example(cache(body=[WRITE, TWICE], outputs=BOTH), cache(), "building"),
    "native-cache-wrong": Example(cache(), model(node("Relu", "x")), target="tensorrt-11.2/sm_121"),
    "native-cache-builds": Example(
        cache(), model(node("Relu", "x")), target="tensorrt-11.2/sm_120"
    ),
}


def all_reduce(types: str = X, **attributes: Any) -> ModelProto:
    """An all-reduce of two ranks."""
    return model(collective("all_reduce", "x", **attributes), types, "y:" + types[2:])


NONE = model(node("Relu", "x"))

COLLECTIVES = {
    "collective-dtype": Example(
        all_reduce("x:f8e4m3[4,8]"), all_reduce("x:bf16[4,8]"), "building", NEWEST
    ),
    "collective-architecture": Example(all_reduce(), NONE, target="tensorrt-11.4/sm_75+sm_90"),
    "collective-subgroup": (
        Example(all_reduce(groups=[1, 3]), all_reduce(), target=FULL),
        Example(all_reduce(groups=[1, 3]), all_reduce(), ""),
    ),
    "collective-silent": Example(all_reduce(), NONE, target="tensorrt-11.0/sm_90"),
}

MINE = {"plugin_version": "1", "plugin_namespace": "mine"}
SUM = {"operation": "all_reduce", "reduce_op": "sum", "group": "tp", "group_size": 2}
OURS = model(node("IrcCollective", "x", **attributes_of("IrcCollective", SUM)))


def mine(kind: str = "Mine", **fields: Any) -> ModelProto:
    """One node of a plugin."""
    return model(node(kind, "x", "y", "mine", **MINE, **fields))


PLUGINS = {
    "plugin-integers": (
        Example(mine(size=1 << 40), mine(size=(1 << 31) - 1)),
        Example(mine(sizes=[1, -(1 << 31) - 1]), mine(sizes=[1, -(1 << 31)])),
    ),
    "unknown-plugin": (
        Example(mine("Nonesuch"), NONE, "parsing"),
        Example(model(node("Nonesuch", "x")), None, "parsing"),
        Example(mine("Relu"), None, ""),  # computed as ONNX's Relu
        Example(mine("Nonesuch"), OURS, target=FULL),
    ),
}


def named_twice() -> ModelProto:
    made = model(node("Relu", "x"))
    made.graph.input.append(typed(X))
    return made


SQUEEZE = model(node("Squeeze", "x"), "x:f16[B,1,8]", "y:f16[B,8]")
UNORDERED = model([node("Neg", "a"), node("Relu", "x", "a")])  # TensorRT sorts nodes
CYCLE = model([node("Add", "x b", "a"), node("Neg", "a", "b"), node("Relu", "a")])

FILES = {
    "malformed": (
        Example(model(node("Add", "x lost")), NONE, "parsing"),
        Example(model([node("Relu", "x"), node("Neg", "x")]), NONE, "parsing"),
        Example(CYCLE, UNORDERED, "parsing"),
        Example(model(node("Relu", "x", "z")), NONE, "parsing"),
        Example(named_twice(), NONE),
    ),
    "squeeze-axes": Example(
        SQUEEZE, model(node("Squeeze", "x", "y"), "x:f16[4,1]", "y:f16[4]"), ""
    ),
    "unused-input": Example(model(node("Relu", "x"), f"{X} u:f16[2]"), NONE, "unused"),
    "untyped": Example(model(node("Add", "x")), model(node("Add", "x x"))),
}

TABLE = ATTENTION | CACHES | COLLECTIVES | PLUGINS | FILES

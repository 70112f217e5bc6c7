"""Rules about element types: TensorRT's networks are strongly typed, and nothing is promoted."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Any

from onnx.onnx_ml_pb2 import TensorProto as T

from irc.backends.tensorrt.lint.graph import Graph, Node, dtype_name
from irc.backends.tensorrt.lint.rules import ANY, BUILDER, GRAPH, PARSED, WARNING, Where, table
from irc.backends.tensorrt.target import Target

_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Mod", "Max", "Min", "Sum", "Mean")
_ORDERED = ("Less", "LessOrEqual", "Greater", "GreaterOrEqual")
_NUMERIC = (*_ARITHMETIC, *_ORDERED, "Pow")
_REDUCTIONS = ("ReduceMax", "ReduceMin", "ReduceSum", "ReduceMean", "ReduceProd")
_PRODUCTS = ("MatMul", "Gemm", "Einsum")
_EVERY = range(1 << 16)
# The operands that must have one type, by operator.
_ALIKE: dict[str, Container[int]] = {
    **dict.fromkeys((*_ARITHMETIC, *_ORDERED, "Equal", "MatMul", "Concat", "Einsum"), _EVERY),
    **dict.fromkeys(("Gemm", "Range", "LayerNormalization", "RotaryEmbedding"), (0, 1, 2)),
    **dict.fromkeys(("Conv", "Attention", "TRT_Attention"), (0, 1, 2)),
    **dict.fromkeys(("PRelu", "TensorScatter", "TRT_KVCacheUpdate"), (0, 1)),
    **dict.fromkeys(("ScatterElements", "ScatterND"), (0, 2)),
    "Where": (1, 2),
}
# Types that Cast produces, and types of inputs, outputs and constants.
_CASTS = (T.FLOAT, T.FLOAT16, T.BFLOAT16, T.INT8, T.INT32, T.INT64, T.BOOL, T.DOUBLE)
_QUANTIZED = (T.FLOAT8E4M3FN, T.FLOAT4E2M1, T.INT4)
_TENSORS = (T.UNDEFINED, *_CASTS, *_QUANTIZED, T.UINT8, T.FLOAT8E8M0)
_INTEGERS = (T.INT8, T.INT32, T.INT64)
_HARDWARE = {"bf16": T.BFLOAT16, "i4": T.INT4, "f8e4m3": T.FLOAT8E4M3FN, "f4e2m1": T.FLOAT4E2M1}
# Operators refused on a type, and what to do.
_REFUSED: tuple[tuple[tuple[str, ...], Callable[[int], bool], str], ...] = (
    ((*_NUMERIC, *_REDUCTIONS), lambda d: d == T.BOOL, "cast to int32 first, or use And, Or, Xor"),
    (_NUMERIC, lambda d: d == T.UINT8, "cast to int32 first"),
    (("And", "Or", "Xor", "Not"), lambda d: d != T.BOOL, "compare with 0 first"),
    ((*_PRODUCTS, "Softmax"), lambda d: d in _INTEGERS, "cast to a float type first"),
)


def _mixed(node: Node) -> str:
    alike = _ALIKE.get(node.kind, ())
    found = dict.fromkeys(node.dtype(i) for i in range(len(node.inputs)) if i in alike)
    known = [dtype_name(dtype) for dtype in found if dtype]
    return " and ".join(known) if len(known) > 1 else ""


def _refused(node: Node) -> tuple[str, str] | None:
    dtype = node.dtype(0)
    for operators, refuses, instead in _REFUSED:
        if dtype and node.kind in operators and refuses(dtype):
            return dtype_name(dtype), instead
    return None


def _cast(node: Node) -> tuple[str, str] | None:
    to = node.get("to", 0)
    if node.dtype(0) in _QUANTIZED:
        return f"of {dtype_name(node.dtype(0))}", "write DequantizeLinear"
    if to in _QUANTIZED:
        return f"to {dtype_name(to)}", "write QuantizeLinear with a scale"
    if to == T.UINT8 and node.graph.outer is None and node.output in node.graph.outputs:
        return None
    return None if to in _CASTS else (f"to {dtype_name(to)}", "cast to int32, or to a float type")


def _doubles(graph: Graph, target: Target) -> Iterator[tuple[Node | None, str]]:
    for node in graph.of_kind("Cast"):
        if node.get("to", 0) == T.DOUBLE:
            yield node, "the result"
    for name in (*graph.inputs, *graph.initializers):
        if graph.tensor(name).dtype == T.DOUBLE:
            yield None, name


def _tensors(graph: Graph, target: Target) -> Iterator[tuple[None, tuple[str, str]]]:
    found = {name: each.data_type for name, each in graph.initializers.items()}
    ports = (*graph.inputs, *graph.outputs) if graph.outer is None else ()
    for name, dtype in (found | {name: graph.tensor(name).dtype for name in ports}).items():
        if dtype not in _TENSORS:
            yield None, (name, dtype_name(dtype))


def _hardware(graph: Graph, target: Target) -> Iterator[tuple[Node, Any]]:
    """The first node of each type that an architecture of the target lacks."""
    for name, dtype in _HARDWARE.items():
        lacking = target.lacks(name)
        found = next((node for node in graph.nodes if dtype in node.dtypes()), None)
        if lacking is not None and found is not None:
            yield found, (dtype_name(dtype), *lacking)


def _f32_product(graph: Graph, target: Target) -> Iterator[tuple[Node, tuple[()]]]:
    products = (node for node in graph.of_kind(*_PRODUCTS) if node.dtype(0) == T.FLOAT)
    yield from ((node, ()) for node in [next(products, None)] if node is not None)


RULES = table(
    {
        ("mixed-dtypes", ANY, f"{BUILDER}: validateTypes"): (
            _mixed,
            "the operands of {kind} are {}; write a Cast, so that they have one type",
        ),
        ("operand-dtype", ANY, PARSED): (_refused, "{kind} is refused on {}; {}"),
        ("cast-to", "Cast", PARSED): (_cast, "a Cast {} is refused; {}"),
        ("double", GRAPH, f"{BUILDER}: DOUBLE is converted to FLOAT"): (
            _doubles,
            "{} is float64, which silently becomes float32; make it float32 if that is enough",
            WARNING,
        ),
        ("tensor-dtype", GRAPH, BUILDER): (
            _tensors,
            "{} is {}, which TensorRT does not have; use a tensor of int32 or of a float type",
        ),
        ("architecture-dtype", GRAPH, f"{BUILDER}: HW-specific datatypes"): (
            _hardware,
            "{} needs sm_{}, and {target} has older ones; give --target {}, or use another type",
        ),
        ("architecture-f32-product", GRAPH, f"{BUILDER}: check_turing_op_compatibility"): (
            _f32_product,
            "{kind} in float32 has no kernel on sm_75; use float16 there",
            Where(flavour="tensorrt-rtx", architectures=(75,)),
        ),
    }
)

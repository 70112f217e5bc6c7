"""Rules about element types: TensorRT's networks are strongly typed and promote nothing."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

from onnx.onnx_ml_pb2 import TensorProto as T

from irc.backends.tensorrt.lint.graph import Graph, Node, dtype_name
from irc.backends.tensorrt.lint.rules import BUILDER, IMPORTERS, Complaint, graph_rule, node_rule
from irc.backends.tensorrt.target import Target

_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Mod", "Max", "Min", "Sum", "Mean")
_ORDERED = ("Less", "LessOrEqual", "Greater", "GreaterOrEqual")
_LOGIC = ("And", "Or", "Xor", "Not")
_REDUCTIONS = ("ReduceMax", "ReduceMin", "ReduceSum", "ReduceMean", "ReduceProd")
_EVERY = range(1 << 16)
# Operands that have to be of one type, by kind of node.
_ALIKE: dict[str, Container[int]] = {
    **dict.fromkeys((*_ARITHMETIC, *_ORDERED, "Equal", "MatMul", "Concat", "Einsum"), _EVERY),
    **dict.fromkeys(("Gemm", "Range", "LayerNormalization", "RotaryEmbedding"), (0, 1, 2)),
    **dict.fromkeys(("Conv", "Attention", "TRT_Attention"), (0, 1, 2)),
    **dict.fromkeys(("PRelu", "TensorScatter", "TRT_KVCacheUpdate"), (0, 1)),
    **dict.fromkeys(("ScatterElements", "ScatterND"), (0, 2)),
    "Where": (1, 2),
}
# Types that a Cast can make, and those that a network can have as inputs or outputs.
_CASTS = (T.FLOAT, T.FLOAT16, T.BFLOAT16, T.INT8, T.INT32, T.INT64, T.BOOL, T.DOUBLE)
_PORTS = (*_CASTS, T.UINT8, T.INT4, T.FLOAT8E4M3FN, T.FLOAT4E2M1)
_QUANTIZED = (T.FLOAT8E4M3FN, T.FLOAT4E2M1, T.INT4)
_INTEGERS = (T.INT8, T.INT32, T.INT64)
_HARDWARE = {"bf16": T.BFLOAT16, "i4": T.INT4, "f8e4m3": T.FLOAT8E4M3FN, "f4e2m1": T.FLOAT4E2M1}
_PRODUCTS = ("MatMul", "Gemm", "Einsum")


@node_rule(source=f"{BUILDER}: validateTypes")
def mixed_dtypes(node: Node, target: Target) -> Iterator[str]:
    """Operands are of one type: nothing is promoted."""
    alike = _ALIKE.get(node.kind, ())
    given = dict.fromkeys(node.dtype(i) for i in range(len(node.inputs)) if i in alike)
    known = [dtype for dtype in given if dtype]
    if len(known) > 1:
        shown = " and ".join(map(dtype_name, known))
        yield f"the operands of {node.kind} are {shown}; write a Cast, so that they are of one type"


@node_rule(source=f"{IMPORTERS}; {BUILDER}")
def operand_dtype(node: Node, target: Target) -> Iterator[str]:
    """No arithmetic on bool, no logic on numbers, no product of integer matrices."""
    kind, dtype = node.kind, node.dtype(0)
    if not dtype:
        return
    if kind in (*_ARITHMETIC, *_ORDERED, "Pow", *_REDUCTIONS) and dtype == T.BOOL:
        yield f"{kind} is refused on bool; cast to int32 before, or use And, Or and Xor"
    elif kind in (*_ARITHMETIC, *_ORDERED, "Pow") and dtype == T.UINT8:
        yield f"{kind} is refused on uint8; cast to int32 before"
    elif kind in _LOGIC and dtype != T.BOOL:
        yield f"{kind} is refused on {dtype_name(dtype)}; compare with 0 before"
    elif kind in (*_PRODUCTS, "Softmax") and dtype in _INTEGERS:
        yield f"{kind} is refused on {dtype_name(dtype)}; cast to a float type before"


@node_rule("Cast", source=f"{IMPORTERS}; {BUILDER}")
def cast_to(node: Node, target: Target) -> Iterator[str]:
    """A Cast makes f32, f16, bf16, int8, int32, int64 or bool; quantized types need Q and DQ."""
    to = node.number("to", 0)
    if node.dtype(0) in _QUANTIZED:
        yield f"a Cast of {dtype_name(node.dtype(0))} does not build; write DequantizeLinear"
    elif to in _QUANTIZED:
        yield f"a Cast to {dtype_name(to)} does not build; write QuantizeLinear with a scale"
    elif to not in _CASTS:
        yield f"a Cast to {dtype_name(to)} is refused; cast to int32, or to a float type"


@graph_rule(source="TensorRT: DOUBLE is converted to FLOAT; " + BUILDER, severity="warning")
def double(graph: Graph, target: Target) -> Iterator[Complaint]:
    """float64 becomes float32 without a word."""
    message = "float64 silently becomes float32; make it float32 if that is enough"
    for node in graph.of_kind("Cast"):
        if node.number("to", 0) == T.DOUBLE:
            yield node, message
    for name in (*graph.inputs, *graph.initializers):
        if graph.tensor(name).dtype == T.DOUBLE:
            yield None, f"{name}: {message}"


@graph_rule(source=BUILDER)
def port_dtype(graph: Graph, target: Target) -> Iterator[Complaint]:
    """Inputs and outputs are tensors of the types that TensorRT has."""
    for each in (*graph.proto.input, *graph.proto.output):
        if each.type.WhichOneof("value") not in (None, "tensor_type") and graph.outer is None:
            yield None, f"{each.name} is no tensor; give sequences and options as tensors"
    for name in dict.fromkeys((*graph.inputs, *graph.outputs)):
        dtype = graph.tensor(name).dtype
        if dtype and dtype not in _PORTS and graph.outer is None:
            shown = dtype_name(dtype)
            yield None, f"{name} is {shown}, which TensorRT does not have; use int32 or a float"


@graph_rule(source=f"{BUILDER}: importInitializers")
def constant_dtype(graph: Graph, target: Target) -> Iterator[Complaint]:
    """Constants of a type that TensorRT has not cannot be imported."""
    for name, tensor in graph.initializers.items():
        if tensor.data_type not in (*_PORTS, T.FLOAT8E8M0):
            shown = dtype_name(tensor.data_type)
            yield None, f"the constant {name} is {shown}, which cannot be imported; use int32"


@graph_rule(source=f"{BUILDER}: ModelImporter.cpp", severity="warning")
def uint8_constant(graph: Graph, target: Target) -> Iterator[Complaint]:
    """uint8 constants become int32, four times the bytes."""
    for name, tensor in graph.initializers.items():
        users = graph.consumers.get(name, [])
        if tensor.data_type == T.UINT8 and not any("quantize" in n.kind.lower() for n in users):
            yield (
                None,
                f"the uint8 constant {name} becomes int32; write int32, or int8 with a scale",
            )


@graph_rule(source=f"{BUILDER}: 'Cannot compile for target(s), HW-specific datatypes'")
def architecture_dtype(graph: Graph, target: Target) -> Iterator[Complaint]:
    """The weakest architecture of the target decides which types there are. Told once per type."""
    for name, dtype in _HARDWARE.items():
        lacking = target.lacks(name)
        if lacking is None:
            continue
        floor, weakest = lacking
        found = _first(graph, lambda node, dtype=dtype: _touches(node, dtype))
        if found is not None:
            yield (
                found,
                f"{dtype_name(dtype)} needs sm_{floor}, and the target has sm_{weakest}; leave "
                "that architecture out, or use another type",
            )


@graph_rule(
    source=f"{BUILDER}: check_turing_op_compatibility",
    flavours=("tensorrt-rtx",),
    architectures=(75,),
)
def architecture_f32_product(graph: Graph, target: Target) -> Iterator[Complaint]:
    """Products of f32 matrices have no kernel on sm_75. Told once per graph."""
    found = _first(graph, lambda node: node.kind in _PRODUCTS and node.dtype(0) == T.FLOAT)
    if found is not None:
        yield found, f"{found.kind} in float32 has no kernel on sm_75; use float16 there"


def _first(graph: Graph, fits: Callable[[Node], bool]) -> Node | None:
    return next((node for node in graph.nodes if fits(node)), None)


def _touches(node: Node, dtype: int) -> bool:
    values = (*node.inputs, *node.outputs)
    return any(name and node.graph.tensor(name).dtype == dtype for name in values)

"""Rules about quantized values: what QuantizeLinear and DequantizeLinear take."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnx.onnx_ml_pb2 import TensorProto as T

from irc.backends.tensorrt.lint.graph import Graph, Node, Size, dtype_name, known_product
from irc.backends.tensorrt.lint.rules import (
    BUILDER,
    IMPORTERS,
    OPERATORS,
    Complaint,
    graph_rule,
    node_rule,
)
from irc.backends.tensorrt.target import Target

QUANTIZE = ("QuantizeLinear", "TRT_FP8QuantizeLinear", "TRT_INT4QuantizeLinear")
DEQUANTIZE = ("DequantizeLinear", "TRT_FP8DequantizeLinear", "TRT_INT4DequantizeLinear")
BOTH = (*QUANTIZE, *DEQUANTIZE)
ALL_DEQUANTIZE = (*DEQUANTIZE, "TRT_MXFP8DequantizeLinear", "TRT_BlockDequantize")
STORED = (T.INT8, T.INT4, T.FLOAT8E4M3FN, T.FLOAT4E2M1)  # the types that quantized values have
_HALVES = (T.INT4, T.FLOAT4E2M1)  # two to a byte


@node_rule(*BOTH, source=f"{IMPORTERS}: shiftIsAllZeros; {BUILDER}")
def zero_point(node: Node, target: Target) -> Iterator[str]:
    """Quantization is symmetric: a zero point is a constant of zeros, of the scale's size."""
    if not node.has(2):
        return
    zeros = node.constant(2)
    if not node.is_constant(2):
        yield "the zero point is computed; leave it out, and quantize symmetrically"
        return
    if zeros is not None and np.any(zeros.astype(np.float32)):
        yield "the zero point is not 0; move the values, so that quantization is symmetric"
    if _count(node.shape(2)) != _count(node.shape(1)):
        yield (
            f"the zero point has the shape {_shown(node.shape(2))} and the scale "
            f"{_shown(node.shape(1))}; leave the zero point out"
        )


@node_rule(*BOTH, source=f"{IMPORTERS}; {BUILDER}")
def quantized_dtype(node: Node, target: Target) -> Iterator[str]:
    """Quantized values are int8, int4, FP8 (e4m3) or FP4: nothing unsigned."""
    stored = stored_dtype(node)
    if stored and stored not in STORED:
        yield f"{dtype_name(stored)} is refused; use int8, int4, float8e4m3fn or float4e2m1"


@node_rule(*BOTH, source=f"{IMPORTERS}: scaleAllPositive; {BUILDER}")
def scale_positive(node: Node, target: Target) -> Iterator[str]:
    """Scales are positive numbers; those of int4 may be negative."""
    scale = node.constant(1)
    if scale is None or stored_dtype(node) == T.INT4:
        return
    values = scale.astype(np.float32)
    if not np.all(np.isfinite(values) & (values > 0)):
        yield "a scale is not positive; write a positive one (1 where all values are 0)"


@node_rule(*BOTH, source=f"{IMPORTERS}; {BUILDER}")
def block_shape(node: Node, target: Target) -> Iterator[str]:
    """Blocks: scales of the operand's rank, one blocked dimension, whole blocks."""
    values, scales = node.shape(0), node.shape(1)
    size = node.number("block_size", 0)
    if not size or values is None or scales is None:
        return
    if len(scales) != len(values):
        yield (
            f"the scales have {len(scales)} dimensions and the values {len(values)}; blocks need "
            "as many"
        )
        return
    axis = node.number("axis", 1) % len(values)
    for i, (whole, blocks) in enumerate(zip(values, scales, strict=True)):
        if not isinstance(whole, int) or not isinstance(blocks, int):
            continue
        if i != axis and whole != blocks:
            yield f"scales are {blocks} in dimension {i} of {whole}; only the axis may have blocks"
        elif i == axis and blocks * size != whole:
            yield (
                f"{blocks} blocks of {size} do not make the {whole} of dimension {i}; cut into "
                "whole blocks, and split over ranks at multiples of one"
            )


@node_rule(*BOTH, source=f"{IMPORTERS}; {BUILDER}")
def channel_scales(node: Node, target: Target) -> Iterator[str]:
    """Without blocks there is a scale for all values, or one per index of the axis."""
    values, scales = node.shape(0), node.shape(1)
    if node.number("block_size", 0) or values is None or scales is None or len(scales) == 0:
        return
    axis = node.number("axis", 1)
    if not -len(values) <= axis < len(values):
        return
    if len(scales) > 1 or _differ(scales[0], values[axis], 1):
        yield (
            f"the scales are {_shown(scales)} for axis {axis} of {_shown(values)}; give one per "
            "index, or write block_size"
        )


@node_rule(*BOTH, source=f"{BUILDER}: sub-byte quantization with odd tensor volume")
def even_count(node: Node, target: Target) -> Iterator[str]:
    """Types of four bits come in pairs."""
    count = _count(node.shape(0))
    if stored_dtype(node) in _HALVES and count is not None and count % 2:
        yield f"{count} values of four bits do not fill bytes; pad to an even number"


@graph_rule(source=f"{BUILDER}: Quantized constant is only allowed before DQ or a plugin")
def quantized_constant(graph: Graph, target: Target) -> Iterator[Complaint]:
    """A constant of a quantized type feeds DequantizeLinear and nothing else.

    Not even a Transpose or Gather: dequantize first, then gather; the kernels are fused.
    """
    constants = {name: each.data_type for name, each in graph.initializers.items()}
    for node in graph.of_kind("Constant"):
        value = node.attributes.get("value")
        if value is not None:
            constants[node.outputs[0]] = value.t.data_type
    for name, dtype in constants.items():
        if dtype not in STORED:
            continue
        for node in graph.consumers.get(name, []):
            zeros = node.kind in BOTH and node.input(2) == name  # a zero point, dropped
            known = node.kind in ALL_DEQUANTIZE or "plugin_version" in node.attributes
            if not known and not zeros:
                yield (
                    node,
                    f"the {dtype_name(dtype)} constant {name} may feed DequantizeLinear only; "
                    f"dequantize it before {node.kind}, or make it int32",
                )


@node_rule("TRT_FP4DynamicQuantize", source=f"{OPERATORS}; {BUILDER}")
def fp4_scale(node: Node, target: Target) -> Iterator[str]:
    """The global scale of FP4 is a constant of one element."""
    shape = node.shape(1)
    if node.has(1) and not node.is_constant(1):
        yield "the global scale is computed; calibrate it, and make it a constant"
    elif shape is not None and known_product(shape) not in (1, None):
        yield f"the global scale is {_shown(shape)}; give one number, also for merged weights"


@node_rule("TRT_DynamicQuantize", source=BUILDER, flavours=("tensorrt-rtx",))
def dynamic_quantize(node: Node, target: Target) -> Iterator[str]:
    """TRT_DynamicQuantize does not build on TensorRT-RTX."""
    yield "TRT_DynamicQuantize does not build here; use QuantizeLinear with a calibrated scale"


@node_rule("TRT_MXFP8DequantizeLinear", source=BUILDER, severity="warning")
def mxfp8_output(node: Node, target: Target) -> Iterator[str]:
    """Its result is f32, whatever the model declares."""
    declared = node.graph.tensor(node.outputs[0]).dtype
    if declared not in (0, T.FLOAT):
        yield f"the result is float32, not {dtype_name(declared)}; write a Cast after it"


def stored_dtype(node: Node) -> int:
    """The quantized type of a Q or DQ node, 0 where it cannot be told."""
    if node.kind in DEQUANTIZE:
        return node.dtype(0)
    if node.kind != "QuantizeLinear":
        return T.INT4 if "INT4" in node.kind else T.FLOAT8E4M3FN
    if node.has(2) and node.dtype(2):
        return node.dtype(2)
    return node.number("output_dtype", 0)  # without one TensorRT takes int8, ONNX uint8


def _count(shape: tuple[Size, ...] | None) -> int | None:
    return known_product(shape) if shape is not None else None


def _shown(shape: tuple[Size, ...] | None) -> str:
    return "unknown" if shape is None else str(list(shape)).replace("'", "")


def _differ(a: Size, b: Size, allowed: int) -> bool:
    return isinstance(a, int) and isinstance(b, int) and a not in (b, allowed)

"""Rules about quantized values: what Q and DQ nodes take, and which weights fuse with a product.

Which weights fuse was read from layer dumps; those rows are warnings.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from onnx.onnx_ml_pb2 import TensorProto as T

from irc.backends.tensorrt.lint.graph import Graph, Node, Shape, differ, dtype_name, element_count
from irc.backends.tensorrt.lint.rules import (
    BUILDER,
    GRAPH,
    IMPORTERS,
    LAYERS,
    PARSED,
    WARNING,
    table,
)

_QUANTIZE, _DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
_EITHER = f"{_QUANTIZE} {_DEQUANTIZE}"
_STORED = (T.INT8, T.INT4, T.FLOAT8E4M3FN, T.FLOAT4E2M1)
_FOUR_BITS = (T.INT4, T.FLOAT4E2M1)
_EIGHT_BITS = (T.INT8, T.FLOAT8E4M3FN)
_FUSED_BLOCKS = range(16, 129)  # sizes of INT4 blocks
_KEEP_VALUES = ("Transpose", "Reshape", "Cast", "Identity")


def _stored_dtype(node: Node) -> int:
    """The quantized type of a Q or DQ node, 0 where unknown."""
    if node.kind == _DEQUANTIZE:
        return node.dtype(0)
    if node.has(2) and node.dtype(2):
        return node.dtype(2)
    return node.get("output_dtype", 0)  # TensorRT's default is int8, ONNX's uint8


def _shown(shape: Shape) -> str:
    return "unknown" if shape is None else str(list(shape)).replace("'", "")


def _zero_point(node: Node) -> str:
    zeros = node.constant(2)
    if node.has(2) and not node.is_constant(2):
        return "is computed"
    if zeros is not None and np.any(zeros.astype(np.float32)):
        return "is not 0"
    shape, scale = node.shape(2), node.shape(1)
    if node.has(2) and element_count(shape) != element_count(scale):
        return f"has the shape {_shown(shape)} and the scale {_shown(scale)}"
    return ""


def _bad_scale(node: Node) -> bool:
    scale = node.constant(1)
    if scale is None or _stored_dtype(node) == T.INT4:
        return False
    values = scale.astype(np.float32)
    return not np.all(np.isfinite(values) & (values > 0))


def _bad_blocks(node: Node) -> tuple[int, str, str] | None:
    values, scales, size = node.shape(0), node.shape(1), node.get("block_size", 0)
    if not size or values is None or scales is None:
        return None
    axis = node.get("axis", 1) % (len(values) or 1)
    blocks = [v if i != axis or not isinstance(v, int) else v / size for i, v in enumerate(values)]
    fits = len(scales) == len(values) and not any(map(differ, blocks, scales))
    return None if fits else (size, _shown(values), _shown(scales))


def _odd_count(node: Node) -> int:
    count = element_count(node.shape(0)) or 0
    return count if count % 2 and _stored_dtype(node) in _FOUR_BITS else 0


def _quantized_constants(graph: Graph, target: object) -> Iterator[tuple[Node, tuple[str, str]]]:
    """Uses of quantized constants besides DequantizeLinear, plugins, and zero points."""
    for node in graph.nodes:
        known = node.kind == _DEQUANTIZE or node.kind.startswith("TRT_")
        if known or "plugin_version" in node.attributes:
            continue
        for i, name in enumerate(node.inputs):
            found = None if node.kind == _QUANTIZE and i == 2 else graph.find_constant(name)
            if found is not None and found.data_type in _STORED:
                yield node, (dtype_name(found.data_type), name)


def _product(node: Node) -> Node | None:
    """The product whose weight a DequantizeLinear returns, unless that is an activation."""
    before = node.producer(0)
    if before is not None and before.kind == _QUANTIZE:
        return None
    for user in node.users():
        last = node
        while user.kind in _KEEP_VALUES and len(user.users()) == 1:
            last, user = user, user.users()[0]
        if user.kind in ("MatMul", "Gemm") and user.input(1) == last.output:
            return user
    return None


def _int4(node: Node) -> str:
    """Why an INT4 weight does not fuse with its product, "" where it does."""
    product, size = _product(node), node.get("block_size", 0)
    if product is None or _stored_dtype(node) != T.INT4:
        return ""
    if not node.is_constant(0) or not node.is_constant(1):
        return "that is an input"
    if size not in _FUSED_BLOCKS:
        return f"in blocks of {size}" if size else "with a scale per channel or tensor"
    return "in blocks across outputs" if _across_outputs(node, product) else ""


def _across_outputs(node: Node, product: Node) -> bool:
    """Whether the blocks are along the dimension that is not summed."""
    transposed = product.kind == "Gemm" and bool(product.get("transB", 0))
    after = product.producer(1)
    while after is not None and after is not node:
        transposed ^= after.kind == "Transpose"
        after = after.producer(0)
    return node.get("axis", 1) % 2 == (0 if transposed else 1)


def _is_quantized(product: Node) -> bool:
    """Whether the activations of a product are codes."""
    before = product.producer(0)
    return before is not None and before.kind.endswith("DequantizeLinear")


def _eight_bits(node: Node) -> tuple[str, int | str] | None:
    """(dtype, size of blocks) of a weight of eight bits in blocks."""
    size, dtype = node.get("block_size", 0) or node.get("block_shape", []), node.dtype(0)
    if not size or dtype not in _EIGHT_BITS or _product(node) is None:
        return None
    return dtype_name(dtype), size if isinstance(size, int) else " x ".join(map(str, size))


def _fp4(node: Node) -> bool:
    """Whether an FP4 weight meets activations that are no codes."""
    product = _product(node) if _stored_dtype(node) == T.FLOAT4E2M1 else None
    return product is not None and not _is_quantized(product)


def _one_row(node: Node) -> str:
    """The dtype of a weight of eight bits whose product always has one row of floats."""
    product, dtype = _product(node), _stored_dtype(node)
    rows = product.shape(0) if product is not None else None
    if product is None or rows is None or dtype not in _EIGHT_BITS or _is_quantized(product):
        return ""
    return dtype_name(dtype) if all(size == 1 for size in rows[:-1]) else ""


RULES = table(
    {
        ("zero-point", _EITHER, f"{IMPORTERS}: shiftIsAllZeros; {BUILDER}"): (
            _zero_point,
            "the zero point {}; quantize symmetrically, and leave it out",
        ),
        ("scale-positive", _EITHER, f"{IMPORTERS}: scaleAllPositive; {BUILDER}"): (
            _bad_scale,
            "a scale is not positive; write a positive one (1 where all values are 0)",
        ),
        ("block-shape", _EITHER, PARSED): (
            _bad_blocks,
            "blocks of {} do not divide values {} into scales {}; divide only the axis, evenly, "
            "and shard it between blocks",
        ),
        ("even-count", _EITHER, f"{BUILDER}: sub-byte quantization with odd tensor volume"): (
            _odd_count,
            "{} values of four bits do not fill bytes; pad to an even number",
        ),
        ("quantized-constant", GRAPH, BUILDER): (
            _quantized_constants,
            "the {} constant {} may feed DequantizeLinear only; dequantize it before {kind}",
        ),
        ("int4-blocks", _DEQUANTIZE, LAYERS): (
            _int4,
            "an INT4 weight {} is dequantized before every product; use a constant, and blocks of "
            "128 along the inputs (K)",
            WARNING,
        ),
        ("eight-bit-blocks", f"{_DEQUANTIZE} TRT_BlockDequantize", LAYERS): (
            _eight_bits,
            "a weight of {} in blocks of {} is dequantized before every product; use a scale per "
            "channel or tensor",
            WARNING,
        ),
        ("fp4-activations", _DEQUANTIZE, LAYERS): (
            _fp4,
            "an FP4 weight is dequantized before every product with float activations; quantize "
            "these too, by TRT_FP4DynamicQuantize",
            WARNING,
        ),
        ("one-row", _DEQUANTIZE, LAYERS): (
            _one_row,
            "the product always has one row, for which a weight of {} is dequantized apart; make "
            "the batch dynamic, up to 2 or more, or use INT4 in blocks",
            WARNING,
        ),
    }
)

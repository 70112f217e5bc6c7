"""Rules about quantization that builds, and yet does not become a quantized product.

What fuses was read from the layer dumps of TensorRT-RTX 1.7.1.116; all are warnings.
"""

from __future__ import annotations

from collections.abc import Iterator

from onnx.onnx_ml_pb2 import TensorProto as T

from irc.backends.tensorrt.lint.graph import Node, known_product
from irc.backends.tensorrt.lint.quantization import DEQUANTIZE, QUANTIZE, stored_dtype
from irc.backends.tensorrt.lint.rules import BUILDER, node_rule
from irc.backends.tensorrt.target import Target

_LAYERS = f"layer dump of the {BUILDER}"
_BLOCKS = range(16, 129)  # the sizes of INT4 blocks that fuse
_KEEPS = ("Transpose", "Reshape", "Cast", "Identity")
_SLOW = "the weight is written out in full before every product"


@node_rule(*DEQUANTIZE, source=_LAYERS, severity="warning")
def int4_blocks(node: Node, target: Target) -> Iterator[str]:
    """INT4 weights fuse in blocks of 16 to 128 along the summed dimension, and no other way."""
    product = _weight_of(node)
    if product is None or stored_dtype(node) != T.INT4 or not node.is_constant(0):
        return
    size = node.number("block_size", 0)
    if not size:
        yield f"INT4 with a scale per channel or tensor does not fuse: {_SLOW}; use blocks of 128"
    elif size not in _BLOCKS:
        yield f"INT4 in blocks of {size} does not fuse: {_SLOW}; use blocks of 16 to 128"
    elif _along_output(node, product):
        yield f"INT4 in blocks across outputs does not fuse: {_SLOW}; cut along inputs (K)"


@node_rule(*DEQUANTIZE, source=_LAYERS, severity="warning")
def int4_weight_input(node: Node, target: Target) -> Iterator[str]:
    """INT4 weights fuse as constants only."""
    if _weight_of(node) is None or stored_dtype(node) != T.INT4:
        return
    if not node.is_constant(0) or not node.is_constant(1):
        yield f"INT4 weights that are inputs do not fuse: {_SLOW}; make them constants"


@node_rule(*DEQUANTIZE, source=_LAYERS, severity="warning")
def wide_blocks(node: Node, target: Target) -> Iterator[str]:
    """INT8 and FP8 weights fuse per tensor or channel, not in blocks."""
    stored = stored_dtype(node)
    if _weight_of(node) is None or not node.number("block_size", 0) or _nested(node):
        return
    if stored in (T.INT8, T.FLOAT8E4M3FN):
        yield f"{_name(stored)} in blocks does not fuse: {_SLOW}; use a scale per channel"


@node_rule(*DEQUANTIZE, source=_LAYERS, severity="warning")
def fp4_weight_only(node: Node, target: Target) -> Iterator[str]:
    """FP4 weights fuse only if the other operand is FP4, too."""
    product = _weight_of(node)
    if product is None or stored_dtype(node) != T.FLOAT4E2M1:
        return
    if not _quantized(product, 0):
        yield f"FP4 weights alone do not fuse: {_SLOW}; quantize the activation, too, or use INT4"


@node_rule(*QUANTIZE, source=_LAYERS, severity="warning")
def activation_scale(node: Node, target: Target) -> Iterator[str]:
    """A scale that is computed turns a product of FP8 or INT8 into one of floats."""
    if node.is_constant(0) or node.is_constant(1) or not node.has(1):
        return
    users = [each for each in node.users() if each.kind in DEQUANTIZE]
    if any(after.kind in ("MatMul", "Gemm") for each in users for after in each.users()):
        yield "the scale is computed, so that the product is not quantized; calibrate a constant"


@node_rule(*DEQUANTIZE, source=_LAYERS, severity="warning")
def single_row(node: Node, target: Target) -> Iterator[str]:
    """With one row for ever, INT8 and FP8 weights do not fuse. INT4 does."""
    product, stored = _weight_of(node), stored_dtype(node)
    if product is None or stored not in (T.INT8, T.FLOAT8E4M3FN) or _quantized(product, 0):
        return
    shape = product.shape(0)
    if shape is not None and len(shape) > 1 and known_product(shape[:-1]) == 1:
        yield (
            f"one row times {_name(stored)} weights does not fuse: {_SLOW}; leave the batch "
            "dynamic, with a maximum of 2 or more"
        )


def _weight_of(node: Node) -> Node | None:
    """The product whose weight this DequantizeLinear makes, if it is one.

    What it dequantizes is then not itself a quantized activation.
    """
    if any(before.kind in QUANTIZE for before in [node.producer(0)] if before is not None):
        return None
    for user in node.users():
        last = node
        while user.kind in _KEEPS and len(user.users()) == 1:
            last, user = user, user.users()[0]
        if user.kind in ("MatMul", "Gemm") and user.input(1) == last.outputs[0]:
            return user
    return None


def _origin(node: Node, i: int) -> Node | None:
    """The node that computes operand i, Transposes and the like left out."""
    found = node.producer(i)
    while found is not None and found.kind in _KEEPS:
        found = found.producer(0)
    return found


def _quantized(product: Node, i: int) -> bool:
    before = _origin(product, i)
    return before is not None and before.kind in DEQUANTIZE


def _nested(node: Node) -> bool:
    """Whether the scales are dequantized themselves, as those of NVFP4."""
    scales = node.producer(1)
    return scales is not None and scales.kind in DEQUANTIZE


def _along_output(node: Node, product: Node) -> bool:
    """Whether blocks lie along the dimension that is not summed."""
    axis = node.number("axis", 1) % 2
    turned = product.kind == "Gemm" and bool(product.number("transB", 0))
    after = product.producer(1)
    while after is not None and after is not node:
        if after.kind == "Transpose":
            turned = not turned
        after = after.producer(0)
    return axis == (0 if turned else 1)


def _name(dtype: int) -> str:
    return "INT8" if dtype == T.INT8 else "FP8"

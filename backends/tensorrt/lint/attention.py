"""Rules about attention: ONNX Attention as the parser reads it, and TRT_Attention."""

from __future__ import annotations

from onnx.onnx_ml_pb2 import TensorProto as T

from irc.backends.tensorrt.lint.graph import Node, Size, dtype_name
from irc.backends.tensorrt.lint.rules import ATTENTION, BUILDER, OPERATORS, WARNING, Where, table

PLAIN, OWN = "Attention", "TRT_Attention"
EITHER = f"{PLAIN} {OWN}"
_NARROWEST, _WIDEST = 9, 256  # head sizes of the fused kernels
_ATTRIBUTES = (  # of TRT_Attention
    *("causal_kind", "query_form", "kv_form", "TRT_normalization_op", "TRT_decomposable"),
    "nb_rank",
)
_INSTEAD = {
    "scale": "multiply the query by it first",
    "is_causal": 'write causal_kind "upper_left" or "lower_right"',
    "decomposable": "write TRT_decomposable",
    "normalization_op": "write TRT_normalization_op",
}


def _tokens(node: Node, i: int) -> Size:
    """The number of queries or keys of operand i: [B, H, S, D] or [B, S, H*D]."""
    shape = node.shape(i)
    return shape[-2] if shape is not None and len(shape) in (3, 4) else None


def _heads(node: Node, i: int) -> Size:
    shape = node.shape(i)
    if shape is None or len(shape) not in (3, 4):
        return None
    if len(shape) == 4:
        return shape[1]
    return node.get("q_num_heads" if i == 0 else "kv_num_heads", 0)


def _head_size(node: Node) -> Size:
    shape, heads = node.shape(0), _heads(node, 0)
    if shape is None or len(shape) != 3:
        return shape[-1] if shape else None
    hidden = shape[-1]
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None


def _unaligned(node: Node) -> tuple[Size, Size] | None:
    counts = _tokens(node, 0), _tokens(node, 1)
    differs = None not in counts and counts[0] != counts[1]
    return counts if differs and node.get("is_causal", 0) else None


def _mask_type(node: Node) -> tuple[str, str] | None:
    mask, query = node.dtype(3), node.dtype(0)
    wrong = mask and query and mask not in (T.BOOL, query)
    return (dtype_name(mask), dtype_name(query)) if wrong else None


def _unfused(node: Node) -> str:
    """Why no fused kernel computes this attention, "" where one does or none is needed."""
    if node.get("TRT_decomposable", 0):
        return ""
    if node.dtype(0) == T.FLOAT:
        flat = node.kind == PLAIN and len(node.shape(0) or ()) == 3
        even = _heads(node, 0) == _heads(node, 1) and not node.get("is_causal", 0)
        return "" if flat and even else "float32"  # the first is decomposed in any case
    size = _head_size(node)
    if isinstance(size, int) and size > _WIDEST:
        return f"a head size of {size}"
    if isinstance(size, int) and size < _NARROWEST and _tokens(node, 0) != 1:
        return f"a head size of {size} and more than one query"
    return ""


def _rotary_sizes(node: Node) -> tuple[str, str, Size, Size] | None:
    """(operand, dimension, its size, that of x) where a table of RotaryEmbedding differs from x."""
    x = node.shape(0)
    if x is None or len(x) not in (3, 4):
        return None
    wanted = ("batch size", x[0]), ("sequence length", x[-2])  # [B, H, S, D] or [B, S, H*D]
    tables = {3: "position_ids"} if node.has(3) else {1: "cos_cache", 2: "sin_cache"}
    for i, name in tables.items():
        for (what, size), found in zip(wanted, node.shape(i) or (), strict=False):
            is_symbol = isinstance(size, str) and isinstance(found, str)
            if None not in (size, found) and not is_symbol and size != found:
                return name, what, found, size
    return None


def _unknown_attribute(node: Node) -> tuple[str, str] | None:
    for name in node.attributes:
        if name not in _ATTRIBUTES:
            return name, _INSTEAD.get(name, "leave it out")
    return None


def _bad_lengths(node: Node) -> str:
    """What is wrong with the length inputs 4 (packed queries) and 5 (keys)."""
    if any(map(node.has, range(6, len(node.inputs)))):
        return "inputs after 5 are ignored"
    if node.has(4) and node.get("query_form", "padded_bhnd") == "padded_bhnd":
        return "input 4 holds offsets of packed queries, and these queries are padded"
    for i in (4, 5):
        if node.has(i) and node.dtype(i) not in (0, T.INT32, T.INT64):
            return f"input {i} holds lengths and is {dtype_name(node.dtype(i))}"
    return ""


RULES = table(
    {
        ("attention-valid-lengths", PLAIN, ATTENTION): (
            lambda node: node.has(6),
            "the parser drops nonpad_kv_seqlen (input 6), so that padding is attended to; write "
            "TRT_Attention with the lengths as input 5, and causal_kind lower_right if causal",
        ),
        ("attention-causal-alignment", PLAIN, ATTENTION): (
            _unaligned,
            "is_causal aligns the first of {} queries with the first of {} keys; in a decoder "
            "write TRT_Attention with causal_kind lower_right",
            WARNING,
        ),
        ("attention-of-itself", PLAIN, f"{BUILDER}: ends the process"): (
            lambda node: node.input(0) == node.input(1) and node.get("scale", 0.0) != 1.0,
            "query and key are one tensor and scale is not 1, which ends the building process; "
            "multiply the query by the scale first, and write scale = 1",
            Where(warns_on=("tensorrt",)),
        ),
        ("attention-mask-type", EITHER, ATTENTION): (
            _mask_type,
            "input 3 is the mask and is {}, expected bool or {}; cast it, or pass valid lengths of "
            "keys as input 5 of TRT_Attention",
        ),
        ("attention-needs-decomposable", EITHER, ATTENTION): (
            _unfused,
            "no fused kernel computes attention with {}; write TRT_decomposable = 1, or change it",
            Where(warns_on=("tensorrt",)),
        ),
        ("rotary-sizes", "RotaryEmbedding", f"{BUILDER}: rotaryEmbeddingNode.cpp"): (
            _rotary_sizes,
            "{} has the {} {}, and x has {}; expand it to that of x",
        ),
        ("trt-attention-attributes", OWN, OPERATORS): (
            _unknown_attribute,
            "TRT_Attention has no attribute {} and ignores it without an error; {}",
        ),
        ("trt-attention-lengths", OWN, OPERATORS): (
            _bad_lengths,
            "{}; pass the valid lengths of keys as input 5, in int32, and leave input 4 empty",
        ),
    }
)

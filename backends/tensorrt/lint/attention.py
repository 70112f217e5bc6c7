"""Rules about attention: ONNX Attention as the parser reads it, and TensorRT's own operators."""

from __future__ import annotations

from collections.abc import Iterator

from onnx.onnx_ml_pb2 import TensorProto

from irc.backends.tensorrt.lint.graph import Node, Size, dtype_name
from irc.backends.tensorrt.lint.rules import ATTENTION, BUILDER, OPERATORS, node_rule
from irc.backends.tensorrt.target import Target

PLAIN, OWN, QUANTIZED = "Attention", "TRT_Attention", "TRT_QuantizedAttention"
NARROWEST, WIDEST = 9, 256  # head sizes that fused kernels have
_ATTRIBUTES: dict[str, tuple[str, ...]] = {  # of TRT_Attention, with the values of its texts
    "causal_kind": ("none", "upper_left", "lower_right"),
    "query_form": ("padded_bhnd", "packed_nhd"),
    "kv_form": ("padded_bhnd", "packed_nhd"),
    "TRT_normalization_op": ("softmax", "none"),
    "TRT_decomposable": (),
    "nb_rank": (),
}
_INSTEAD = {
    "scale": "multiply the query by it before",
    "is_causal": 'write causal_kind "upper_left" or "lower_right"',
    "decomposable": "write TRT_decomposable",
    "normalization_op": "write TRT_normalization_op",
}
_KEEPS_SCALE = ("Transpose", "Reshape", "Cast", "Identity", "RotaryEmbedding", "Unsqueeze")


@node_rule(PLAIN, source=f"{ATTENTION}; ONNX Attention-24; {BUILDER}")
def attention_valid_lengths(node: Node, target: Target) -> Iterator[str]:
    """The parser reads inputs 0 to 5 of Attention and drops nonpad_kv_seqlen without an error."""
    if node.has(6):
        yield (
            "the parser drops nonpad_kv_seqlen (input 6), so that padding is attended to; write "
            "TRT_Attention with the lengths as input 5, and causal_kind lower_right if it is causal"
        )


@node_rule(PLAIN, source=f"{ATTENTION}; ONNX Attention-24", severity="warning")
def attention_causal_alignment(node: Node, target: Target) -> Iterator[str]:
    """is_causal becomes UPPER_LEFT: with fewer queries than keys a decoder sees the wrong keys."""
    if not node.number("is_causal", 0):
        return
    queries, keys = _tokens(node, 0), _tokens(node, 1)
    if queries is not None and keys is not None and queries != keys:
        yield (
            f"is_causal aligns the first of {queries} queries with the first of {keys} keys; in a "
            "decoder write TRT_Attention with causal_kind lower_right"
        )


@node_rule(PLAIN, source=ATTENTION)
def attention_past(node: Node, target: Target) -> Iterator[str]:
    """The parser refuses past_key and past_value."""
    if node.has(4) or node.has(5):
        yield "past_key and past_value are refused; update the caches with TensorScatter before"


@node_rule(PLAIN, source=f"{ATTENTION}; https://github.com/NVIDIA/TensorRT/issues/4738")
def attention_outputs(node: Node, target: Target) -> Iterator[str]:
    """The parser wants exactly one output, and counts even empty ones."""
    if len(node.outputs) > 1:
        yield (
            "only the first output is possible, without present_key, present_value and the "
            "product of query and key; take the caches from TensorScatter"
        )


@node_rule(PLAIN, source=f"{BUILDER}: ends the process", warns_on=("tensorrt",))
def attention_of_itself(node: Node, target: Target) -> Iterator[str]:
    """The builder ends the process if query and keys are one tensor and scale is not 1."""
    if node.input(0) == node.input(1) and node.real("scale", 0.0) != 1.0:
        yield (
            "query and keys are one tensor, which ends the process; multiply the query by the "
            "scale before, and write scale = 1"
        )


@node_rule(PLAIN, source=ATTENTION)
def attention_softcap(node: Node, target: Target) -> Iterator[str]:
    """The parser refuses a softcap."""
    if node.real("softcap", 0.0):
        yield "softcap is refused; write MatMul, Tanh and Softmax instead of Attention"


@node_rule(PLAIN, source=ATTENTION)
def attention_softmax_precision(node: Node, target: Target) -> Iterator[str]:
    """The parser refuses softmax_precision."""
    if "softmax_precision" in node.attributes:
        yield "softmax_precision is refused; leave it out, the kernels add up in f32"


@node_rule(PLAIN, OWN, source=f"{ATTENTION}; {BUILDER}")
def attention_mask_and_causal(node: Node, target: Target) -> Iterator[str]:
    """A mask and a causal kind exclude each other."""
    causal = node.number("is_causal", 0) if node.kind == PLAIN else _is_causal(node)
    if node.has(3) and causal:
        yield "a mask and causal attention exclude each other; put the causal part into the mask"


@node_rule(PLAIN, OWN, source=f"{ATTENTION}; {BUILDER}")
def attention_mask_type(node: Node, target: Target) -> Iterator[str]:
    """A mask of another float type than the query builds no kernel; integers are lengths."""
    mask, query = node.dtype(3), node.dtype(0)
    if not node.has(3) or not mask or mask == TensorProto.BOOL:
        return
    if mask in (TensorProto.INT32, TensorProto.INT64) and node.kind == OWN:
        yield (
            "input 3 is the mask, and this one holds integers; valid lengths of keys are input 5 "
            "(inputs 3 and 4 empty)"
        )
    elif query and mask != query:
        yield f"the mask is {dtype_name(mask)}; cast it to {dtype_name(query)} like the query"


@node_rule(PLAIN, OWN, source=f"{ATTENTION}; {BUILDER}")
def attention_mask_rank(node: Node, target: Target) -> Iterator[str]:
    """Masks have at most four dimensions."""
    shape = node.shape(3)
    if node.has(3) and shape is not None and len(shape) > 4:
        yield f"the mask has {len(shape)} dimensions; reshape it to 4"


@node_rule(PLAIN, OWN, source=BUILDER)
def attention_value_width(node: Node, target: Target) -> Iterator[str]:
    """Keys and values have one shape: no value width of its own."""
    keys, values = node.shape(1), node.shape(2)
    if keys is None or values is None:
        return
    if len(keys) == len(values) and any(map(_differ, keys, values)):
        yield (
            f"keys are {list(keys)} and values {list(values)}; pad both to one width, or write "
            "MatMul and Softmax"
        )


@node_rule(PLAIN, OWN, source=BUILDER)
def attention_heads(node: Node, target: Target) -> Iterator[str]:
    """The heads of the query are a multiple of those of the keys; 3-D operands need both counts."""
    queries, keys = _heads(node, 0), _heads(node, 1)
    if node.kind == PLAIN and len(node.shape(0) or ()) == 3 and 0 in (queries, keys):
        yield "operands of three dimensions need q_num_heads and kv_num_heads; write both"
    elif isinstance(queries, int) and isinstance(keys, int) and keys and queries % keys:
        yield f"the query has {queries} heads, no multiple of the {keys} of the keys; pad its heads"


@node_rule(PLAIN, OWN, source=f"{ATTENTION}; {BUILDER}", warns_on=("tensorrt",))
def attention_needs_decomposable(node: Node, target: Target) -> Iterator[str]:
    """No fused kernel has f32 or heads above 256, and without TRT_decomposable the build fails.

    Heads of 8 and less build only for a single query. ONNX Attention on operands of three
    dimensions, neither grouped nor causal, is decomposed anyway in f32.
    """
    if node.number("TRT_decomposable", 0):
        return
    width, query = _width(node), node.dtype(0)
    why = ""
    if query == TensorProto.FLOAT:
        why = "" if _decomposed_anyway(node) else "in f32"
    elif isinstance(width, int) and width > WIDEST:
        why = f"for heads of {width}"
    elif isinstance(width, int) and width < NARROWEST and _tokens(node, 0) != 1:
        why = f"for heads of {width} and more than one query"
    if why:
        yield f"no fused kernel does attention {why}; write TRT_decomposable = 1, or another type"


@node_rule(PLAIN, OWN, QUANTIZED, source=BUILDER, flavours=("tensorrt-rtx",))
def attention_ranks(node: Node, target: Target) -> Iterator[str]:
    """Context-parallel attention does not build on TensorRT-RTX."""
    if node.number("nb_rank", 1) > 1:
        yield "attention over several ranks (nb_rank) does not build; gather keys and values before"


@node_rule(OWN, source=f"{OPERATORS}; {BUILDER}")
def trt_attention_attributes(node: Node, target: Target) -> Iterator[str]:
    """Unknown attributes of TRT_Attention are ignored without a word: no scale, no causal mask."""
    for name in node.attributes:
        if name not in _ATTRIBUTES:
            instead = _INSTEAD.get(name, "leave it out")
            yield f"TRT_Attention has no attribute {name}, and ignores it; {instead}"
            continue
        values, given = _ATTRIBUTES[name], node.text(name)
        if values and given not in values:
            yield f"{name} is {given!r}; write one of {', '.join(values)}"


@node_rule(OWN, source=f"{OPERATORS}; {BUILDER}")
def trt_attention_lengths(node: Node, target: Target) -> Iterator[str]:
    """query_lengths are input 4, key_value_lengths input 5; later inputs are dropped."""
    for i in range(6, len(node.inputs)):
        if node.has(i):
            yield f"input {i} is ignored; valid lengths of keys are input 5"
    if node.has(4) and node.text("query_form", "padded_bhnd") == "padded_bhnd":
        yield (
            "input 4 are offsets of packed queries, and these queries are padded; give the valid "
            "lengths of keys as input 5, with input 4 empty"
        )
    for i in (4, 5):
        if node.has(i) and node.dtype(i) not in (0, TensorProto.INT32, TensorProto.INT64):
            yield f"the lengths (input {i}) are {dtype_name(node.dtype(i))}; cast them to int32"


@node_rule(OWN, source=BUILDER)
def trt_attention_rank(node: Node, target: Target) -> Iterator[str]:
    """Padded operands have the four dimensions [B, H, S, D]."""
    if node.text("query_form", "padded_bhnd") != "padded_bhnd":
        return
    for i, what in enumerate(("query", "keys", "values")):
        shape = node.shape(i)
        if shape is not None and len(shape) != 4:
            yield f"the {what} have {len(shape)} dimensions; reshape them to [B, H, S, D]"


@node_rule(OWN, source=BUILDER, flavours=("tensorrt-rtx",))
def trt_attention_packed(node: Node, target: Target) -> Iterator[str]:
    """Packed operands have no fused kernel on TensorRT-RTX, and no decomposition."""
    if "packed_nhd" in (node.text("query_form"), node.text("kv_form")):
        yield "packed_nhd has no kernel on this target; pad to [B, H, S, D] and give lengths"


@node_rule(OWN, source=OPERATORS, severity="warning")
def trt_attention_unscaled(node: Node, target: Target) -> Iterator[str]:
    """TRT_Attention does not scale: the query is to be multiplied by 1 / sqrt(D) before."""
    if node.graph.producer == "irc":
        return  # whose lowering scales
    made = node.producer(0)
    while made is not None and made.kind in _KEEPS_SCALE:
        made = made.producer(0)
    if made is None or made.kind not in ("Mul", "Div"):
        yield "TRT_Attention does not scale; multiply the query by 1 / sqrt(head size) before it"


@node_rule(QUANTIZED, source=f"{OPERATORS}; {BUILDER}")
def quantized_attention(node: Node, target: Target) -> Iterator[str]:
    """TRT_QuantizedAttention takes 5 to 7 inputs and operands of four dimensions."""
    if not 5 <= len(node.inputs) <= 7 or not node.has(4):
        yield f"it has {len(node.inputs)} inputs; give 5 to 7, the scale of the probabilities at 4"
    for i in range(3):
        shape = node.shape(i)
        if shape is not None and len(shape) != 4:
            yield f"operand {i} has {len(shape)} dimensions; reshape it to [B, H, S, D]"


@node_rule(
    OWN,
    source="https://github.com/NVIDIA/TensorRT-Model-Connect/issues/245",
    severity="warning",
    flavours=("tensorrt",),
    before=(11, 1),
    architectures=(103,),
)
def native_decode_attention(node: Node, target: Target) -> Iterator[str]:
    """TensorRT 11.0 failed to build decode attention with long caches on GB300."""
    if node.has(5) and not node.number("TRT_decomposable", 0):
        yield (
            f"{target} failed on attention over long caches; write TRT_decomposable = 1 if the "
            "build stops here"
        )


def _decomposed_anyway(node: Node) -> bool:
    flat = node.kind == PLAIN and len(node.shape(0) or ()) == 3
    return flat and _heads(node, 0) == _heads(node, 1) and not node.number("is_causal", 0)


def _is_causal(node: Node) -> bool:
    return node.text("causal_kind", "none") != "none"


def _differ(a: Size, b: Size) -> bool:
    return isinstance(a, int) and isinstance(b, int) and a != b


def _tokens(node: Node, i: int) -> Size:
    """How many queries or keys operand i has: [B, H, S, D] or [B, S, H*D]."""
    shape = node.shape(i)
    return shape[-2] if shape is not None and len(shape) in (3, 4) else None


def _heads(node: Node, i: int) -> Size:
    shape = node.shape(i)
    if shape is None:
        return None
    if len(shape) == 4:
        return shape[1]
    return node.number("q_num_heads" if i == 0 else "kv_num_heads", 0) if len(shape) == 3 else None


def _width(node: Node) -> Size:
    """The size of a head of the query."""
    shape, heads = node.shape(0), _heads(node, 0)
    if shape is None or len(shape) != 3:
        return shape[-1] if shape else None
    hidden = shape[-1]
    return hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None

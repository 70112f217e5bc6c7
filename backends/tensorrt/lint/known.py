"""Which operators the ONNX parser of TensorRT has importers for.

Read with `OnnxParser.supports_operator` of TensorRT-RTX 1.7.1.116 for every operator of onnx 1.23;
the parser of TensorRT 11 is built from the same source. A test compares this with the library that
is installed.
"""

from __future__ import annotations

import onnx.defs


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


ONNX = ("", "ai.onnx")  # the domain of ONNX's own operators
FOREIGN = ("com.microsoft", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training")

# Operators without an importer, by what to do instead.
_INSTEAD = {
    "compute it outside, or register a plugin of this name": (
        "AffineGrid BitCast Col2Im DFT DeformConv Det MaxRoiPool MaxUnpool TfIdfVectorizer"
    ),
    "process text and images outside the engine": (
        "ImageDecoder RegexFullMatch StringConcat StringNormalizer StringSplit"
    ),
    "compare, combine with And, Or, Xor or Not, and choose with Where": (
        "BitwiseAnd BitwiseNot BitwiseOr BitwiseXor"
    ),
    "pass tensors instead of sequences and optional values": (
        "ConcatFromSequence Optional OptionalGetElement OptionalHasElement SequenceAt "
        "SequenceConstruct SequenceEmpty SequenceErase SequenceInsert SequenceLength SequenceMap "
        "SplitToSequence"
    ),
    "use QuantizeLinear with a constant scale, DequantizeLinear, and Conv or MatMul": (
        "ConvInteger DynamicQuantizeLinear MatMulInteger QLinearConv QLinearMatMul"
    ),
    "leave the loss out of the model": "NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss",
    "compare RandomUniformLike, or TopK of logits with its noise": "Bernoulli Multinomial",
    "multiply or divide by a power of two": "BitShift",
    "use Slice and Pad": "CenterCropPad",
    "use Where or Gather with a fixed number of results": "Compress Unique",
    "use Exp of CumSum of Log": "CumProd",
    "multiply by a constant matrix": "MelWeightMatrix",
    "use Sigmoid and Mul": "SwiGLU",
}
UNSUPPORTED = {name: advice for advice, names in _INSTEAD.items() for name in names.split()}

# Operators whose importer looks for a plugin that the wheel of TensorRT-RTX does not ship.
NEED_PLUGINS: dict[str, str] = {
    "NonZero": "use Where or TopK with a fixed number of results",
    "MatMulNBits": "use DequantizeLinear on an INT4 constant, block along K, and MatMul",
    "GroupQueryAttention": "use TensorScatter and TRT_Attention",
    "QMoE": "use Gather on the experts' weights and MatMul",
    "LinearAttention": "use MatMul and CumSum",
    "CausalConvWithState": "use Concat and Conv",
}

# Operators of com.microsoft whose importers read what that domain defines.
MICROSOFT = _words(
    "MultiHeadAttention SimplifiedLayerNormalization SkipSimplifiedLayerNormalization "
    "Gelu QuantizeLinear DequantizeLinear"
)

# TensorRT's own, in any domain.
OWN = _words(
    "DistCollective TRT_Attention TRT_QuantizedAttention TRT_KVCacheUpdate TRT_MoE "
    "TRT_FP8QuantizeLinear TRT_FP8DequantizeLinear TRT_INT4QuantizeLinear "
    "TRT_INT4DequantizeLinear TRT_MXFP8QuantizeLinear TRT_MXFP8DequantizeLinear "
    "TRT_MXFP8DynamicQuantize TRT_FP4DynamicQuantize TRT_DynamicQuantize TRT_BlockQuantize "
    "TRT_BlockDequantize TRT_Scale TRT_Shuffle TRT_TopK_Min TRT_MatMul "
    "TRT_MaxAverageBlendPool TRT_Slice TRT_Gather"
)

# ONNX's own that the parser has.
STANDARD = frozenset(
    each.name
    for each in onnx.defs.get_all_schemas()
    if not each.domain and each.name not in {*UNSUPPORTED, *NEED_PLUGINS, *OWN}
)
IMPORTED = STANDARD | OWN | MICROSOFT | NEED_PLUGINS.keys()

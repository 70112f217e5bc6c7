"""Which operators the ONNX parser of TensorRT has importers for.

Read with `OnnxParser.supports_operator` of TensorRT-RTX 1.7.1.116 for every operator of onnx 1.23;
the parser of TensorRT 11 is built from the same source. tests/tensorrt compares this with the
library that is installed.
"""

from __future__ import annotations


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# What to write instead of an operator that has no importer; "" where nothing general can be said.
UNSUPPORTED: dict[str, str] = {
    "AffineGrid": "",
    "Bernoulli": "compare RandomUniformLike with the probability",
    "BitCast": "",
    "BitShift": "multiply or divide by a power of two",
    "BitwiseAnd": "compare with Less, GreaterOrEqual and And, then choose with Where",
    "BitwiseNot": "use Not on a condition, or -1 - x on integers",
    "BitwiseOr": "compare with Less, GreaterOrEqual and Or, then choose with Where",
    "BitwiseXor": "compare with Less, GreaterOrEqual and Xor, then choose with Where",
    "CenterCropPad": "use Slice and Pad",
    "Col2Im": "",
    "Compress": "use Where or Gather with a fixed number of indices",
    "ConcatFromSequence": "use Concat",
    "ConvInteger": "dequantize and use Conv",
    "CumProd": "use Exp of CumSum of Log",
    "DFT": "multiply by the matrix of the transform",
    "DeformConv": "",
    "Det": "",
    "DynamicQuantizeLinear": "use QuantizeLinear with a constant, calibrated scale",
    "ImageDecoder": "decode images outside the engine",
    "MatMulInteger": "use DequantizeLinear on the weight and MatMul",
    "MaxRoiPool": "",
    "MaxUnpool": "",
    "MelWeightMatrix": "store the matrix as a constant",
    "Multinomial": "use TopK on logits plus Gumbel noise from RandomUniformLike",
    "NegativeLogLikelihoodLoss": "leave the loss out of the model",
    "Optional": "give the value itself",
    "OptionalGetElement": "give the value itself",
    "OptionalHasElement": "give the value itself",
    "QLinearConv": "use QuantizeLinear, DequantizeLinear and Conv",
    "QLinearMatMul": "use QuantizeLinear, DequantizeLinear and MatMul",
    "RegexFullMatch": "treat text outside the engine",
    "SequenceAt": "use Gather or Split",
    "SequenceConstruct": "use Concat",
    "SequenceEmpty": "use Concat",
    "SequenceErase": "use Slice and Concat",
    "SequenceInsert": "use Concat",
    "SequenceLength": "write the number",
    "SequenceMap": "use Loop or Scan",
    "SoftmaxCrossEntropyLoss": "leave the loss out of the model",
    "SplitToSequence": "use Split",
    "StringConcat": "treat text outside the engine",
    "StringNormalizer": "treat text outside the engine",
    "StringSplit": "treat text outside the engine",
    "SwiGLU": "use Sigmoid and Mul",
    "TfIdfVectorizer": "treat text outside the engine",
    "Unique": "use a fixed number of slots",
}

# Importers that only look for a plugin, which the wheel of TensorRT-RTX does not bring.
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

# TensorRT's own; any domain will do.
OWN = _words(
    "DistCollective TRT_Attention TRT_QuantizedAttention TRT_KVCacheUpdate TRT_MoE "
    "TRT_FP8QuantizeLinear TRT_FP8DequantizeLinear TRT_INT4QuantizeLinear "
    "TRT_INT4DequantizeLinear TRT_MXFP8QuantizeLinear TRT_MXFP8DequantizeLinear "
    "TRT_MXFP8DynamicQuantize TRT_FP4DynamicQuantize TRT_DynamicQuantize TRT_BlockQuantize "
    "TRT_BlockDequantize TRT_Scale TRT_Shuffle TRT_TopK_Min TRT_MatMul "
    "TRT_MaxAverageBlendPool TRT_Slice TRT_Gather"
)

STANDARD = _words(
    """
    Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh Attention AveragePool
    BatchNormalization BlackmanWindow Cast CastLike Ceil Celu Clip Concat Constant
    ConstantOfShape Conv ConvTranspose Cos Cosh CumSum DepthToSpace DequantizeLinear Div Dropout
    Einsum Elu Equal Erf Exp Expand EyeLike Flatten Floor GRU Gather GatherElements GatherND
    Gelu Gemm GlobalAveragePool GlobalLpPool GlobalMaxPool Greater GreaterOrEqual GridSample
    GroupNormalization HammingWindow HannWindow HardSigmoid HardSwish Hardmax Identity If
    InstanceNormalization IsInf IsNaN LRN LSTM LayerNormalization LeakyRelu Less LessOrEqual Log
    LogSoftmax Loop LpNormalization LpPool MatMul Max MaxPool Mean MeanVarianceNormalization Min
    Mish Mod Mul Neg NonMaxSuppression Not OneHot Or PRelu Pad Pow QuantizeLinear
    RMSNormalization RNN RandomNormal RandomNormalLike RandomUniform RandomUniformLike Range
    Reciprocal ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin
    ReduceProd ReduceSum ReduceSumSquare Relu Reshape Resize ReverseSequence RoiAlign
    RotaryEmbedding Round STFT Scan Scatter ScatterElements ScatterND Selu Shape Shrink Sigmoid
    Sign Sin Sinh Size Slice Softmax Softplus Softsign SpaceToDepth Split Sqrt Squeeze Sub Sum
    Swish Tan Tanh TensorScatter ThresholdedRelu Tile TopK Transpose Trilu Unsqueeze Upsample
    Where Xor
    """
)

IMPORTED = STANDARD | OWN | MICROSOFT | NEED_PLUGINS.keys()

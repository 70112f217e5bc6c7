"""The names of nodes that irc writes for TensorRT and ONNX does not have."""

from __future__ import annotations

ATTENTION, CACHE_UPDATE = "trt::TRT_Attention", "TensorScatter"
# What is written in place of nodes on which the library's compiler fails, by kind.
PLAINER = {"TRT_Attention": "MatMul and Softmax", CACHE_UPDATE: "ScatterElements"}
COLLECTIVE_PLUGIN, NAMESPACE, VERSION = "IrcCollective", "irc", "1"

"""The names of nodes that irc writes for TensorRT and ONNX does not have."""

from __future__ import annotations

ATTENTION = "trt::TRT_Attention"
COLLECTIVE_PLUGIN, NAMESPACE, VERSION = "IrcCollective", "irc", "1"

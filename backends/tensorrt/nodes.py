"""The names of nodes that irc writes for TensorRT and ONNX does not have."""

from __future__ import annotations

ATTENTION = "trt::TRT_Attention"
COLLECTIVE_PLUGIN, NAMESPACE, VERSION = "IrcCollective", "irc", "1"

# The collectives, as DistCollective and our plugin name them, and which of them reduce or have a
# root.
OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
)
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce", "gather", "scatter")

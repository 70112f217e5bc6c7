"""Nodes that neither TensorRT nor a file of the user's own knows."""

from __future__ import annotations

from typing import Any

from onnx import ModelProto

from irc.backends.tensorrt.plugins import attributes_of
from tests.tensorrt.lint_models import Case, model, node


def one(kind: str, domain: str = "", /, **fields: Any) -> ModelProto:
    """One node."""
    return model(node(kind, "x", "y", domain, **fields), "x:f16[4,8]")


MINE = {"plugin_version": "1", "plugin_namespace": "mine"}
OURS = {"operation": "all_reduce", "reduce_op": "sum", "group": "tp", "ways": 2}
UNKNOWN = [
    Case("unknown-plugin", one("Nonesuch", **MINE), one("Relu"), refused="parse"),
    Case("unknown-plugin", one("Nonesuch"), refused="parse"),
    Case("unknown-plugin", one("Nonesuch", "mine"), refused="parse"),
    Case("unknown-plugin", one("Relu", **MINE), refused=""),  # computed as ONNX's Relu
    Case(
        "unknown-plugin",
        one("Nonesuch", **MINE),
        one("IrcCollective", **attributes_of("IrcCollective", OURS)),
        target="tensorrt-11.4/sm_90",
    ),
]

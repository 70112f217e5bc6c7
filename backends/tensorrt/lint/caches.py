"""Rules about key-value caches, which TensorRT updates in place, and about DistCollective nodes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from onnx.onnx_ml_pb2 import TensorProto as T

from irc.backends.tensorrt.lint.graph import Graph, Node, dtype_name
from irc.backends.tensorrt.lint.rules import BUILDER, GRAPH, Where, table

UPDATE = "TensorScatter"
_NATIVE = Where(flavour="tensorrt", since=(11, 1), before=(11, 3))
_MODEL_CONNECT = "https://github.com/NVIDIA/TensorRT-Model-Connect/issues/955"
_GUIDE = "https://docs.nvidia.com/deeplearning/tensorrt/latest (multi-device inference)"
_SUBGROUPS = "https://github.com/pytorch/TensorRT/pull/4380 (TensorRT 11.2.1.2)"
COLLECTIVE = "DistCollective"
_QUANTIZED = (T.FLOAT8E4M3FN, T.FLOAT4E2M1, T.INT4)


def _origin(node: Node) -> str:
    """Where the cache comes from, if it is not an input of the network."""
    if not node.has(0) or (node.graph.outer is None and node.input(0) in node.graph.inputs):
        return ""
    before = node.producer(0)
    return f"comes from {before.kind}" if before is not None else "is a constant"


def _updated_twice(graph: Graph, target: object) -> Iterator[tuple[Node, Any]]:
    first: dict[str, Node] = {}
    for node in graph.of_kind(UPDATE):
        before = first.setdefault(node.input(0), node)
        if before is not node:
            yield node, (before.label, node.input(0))


def _subgroups(graph: Graph, target: object) -> Iterator[tuple[Node, list[int]]]:
    """Nodes whose group is smaller than the largest one, which is taken for the communicator."""
    nodes = list(graph.of_kind(COLLECTIVE))
    groups = [node.get("groups", []) or list(range(node.get("nb_rank", 1))) for node in nodes]
    world = list(range(max(map(len, groups), default=0)))
    yield from ((node, group) for node, group in zip(nodes, groups, strict=True) if group != world)


def _first(graph: Graph, target: object) -> Iterator[tuple[Node, tuple[()]]]:
    yield from ((node, ()) for node in list(graph.of_kind(COLLECTIVE))[:1])


RULES = table(
    {
        ("cache-is-an-input", UPDATE, BUILDER): (
            _origin,
            "the cache {}, expected an input of the network; pass one directly, once per update",
        ),
        ("cache-is-an-output", UPDATE, BUILDER): (
            lambda node: bool(node.output) and node.output not in node.graph.outputs,
            "the updated cache is no output of the network; return it directly",
        ),
        ("cache-updated-twice", GRAPH, BUILDER): (
            _updated_twice,
            "{} updates {} too; join both updates into one",
        ),
        ("native-cache-wrong", UPDATE, _MODEL_CONNECT): (
            lambda node: True,
            "native caches gave wrong tokens on {target}; use TensorRT 11.3 or newer, or update "
            "them with ScatterElements",
            replace(_NATIVE, architectures=(121,)),
        ),
        ("native-cache-builds", UPDATE, _MODEL_CONNECT): (
            lambda node: True,
            "native caches failed to build on {target}; use TensorRT 11.3 if this one does too",
            replace(_NATIVE, severity="warning", architectures=(120,)),
        ),
        ("collective-dtype", COLLECTIVE, BUILDER): (
            lambda node: node.dtype(0) in _QUANTIZED and dtype_name(node.dtype(0)),
            "collectives do not take {}; dequantize first",
        ),
        ("collective-architecture", COLLECTIVE, _GUIDE): (
            lambda node: True,
            "collectives need sm_80, and the target is {target}; leave older architectures out",
            Where(architectures=(75,), warns_on=("tensorrt-rtx",)),
        ),
        ("collective-subgroup", GRAPH, _SUBGROUPS): (
            _subgroups,
            "the group {} is not all ranks of the engine, and TensorRT takes all of them; use the "
            "plugin IrcCollective (irc compile --collectives plugin)",
            Where(warns_on=("tensorrt-rtx",)),
        ),
        ("collective-silent", GRAPH, "https://github.com/pytorch/TensorRT/issues/4381"): (
            _first,
            "{target} built engines whose collectives did nothing; use a newer TensorRT or the "
            "plugin IrcCollective, and keep the self-test at load",
            Where(severity="warning", flavour="tensorrt", before=(11, 1)),
        ),
    }
)

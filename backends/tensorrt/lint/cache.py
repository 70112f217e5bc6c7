"""Rules about key-value caches, which TensorRT updates where they lie."""

from __future__ import annotations

from collections.abc import Iterator

from onnx.onnx_ml_pb2 import TensorProto

from irc.backends.tensorrt.lint.graph import Graph, Node, dtype_name
from irc.backends.tensorrt.lint.rules import BUILDER, IMPORTERS, Complaint, graph_rule, node_rule
from irc.backends.tensorrt.target import Target

UPDATES = ("TensorScatter", "TRT_KVCacheUpdate")
_DTYPES = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)


@node_rule(*UPDATES, source=f"{IMPORTERS}; {BUILDER}")
def cache_axis(node: Node, target: Target) -> Iterator[str]:
    """The parser updates along the last but one dimension and no other."""
    axis = node.number("axis", -2)
    shape = node.shape(0)
    rank = len(shape) if shape is not None else 4
    if axis not in (-2, rank - 2):
        yield f"axis is {axis}; lay the cache out as [B, H, S, D] and write axis = -2"


@node_rule(*UPDATES, source=f"{IMPORTERS}; {BUILDER}")
def cache_rank(node: Node, target: Target) -> Iterator[str]:
    """A cache has the four dimensions [B, H, S, D]."""
    shape = node.shape(0)
    if shape is not None and len(shape) != 4:
        yield f"the cache has {len(shape)} dimensions; make its input [B, H, S, D]"


@node_rule(*UPDATES, source=f"{IMPORTERS}; {BUILDER}")
def cache_capacity(node: Node, target: Target) -> Iterator[str]:
    """The number of slots is static."""
    shape = node.shape(0)
    if shape is not None and len(shape) == 4 and not isinstance(shape[2], int):
        yield f"the cache has {shape[2] or 'a dynamic number of'} slots; fix the number"


@node_rule("TensorScatter", source=f"{IMPORTERS}; {BUILDER}")
def cache_mode(node: Node, target: Target) -> Iterator[str]:
    """Caches are linear: no ring."""
    mode = node.text("mode", "linear")
    if mode != "linear":
        yield f'mode is {mode!r}; write "linear", and restart or shift the cache where it is full'


@node_rule(*UPDATES, source=BUILDER)
def cache_dtype(node: Node, target: Target) -> Iterator[str]:
    """Caches are f32, f16 or bf16: no FP8 through this operator."""
    if node.dtype(0) and node.dtype(0) not in _DTYPES:
        yield (
            f"the cache is {dtype_name(node.dtype(0))}; make it float16 or bfloat16, the operator "
            "has no other type"
        )


@node_rule(*UPDATES, source=BUILDER)
def cache_is_an_input(node: Node, target: Target) -> Iterator[str]:
    """The cache is an input of the network itself, with nothing in between."""
    if not node.has(0) or node.input(0) in _inputs(node.graph):
        return
    before = node.producer(0)
    how = f"comes from {before.kind}" if before is not None else "is a constant"
    if before is not None and before.kind in UPDATES:
        how = "is that of another update; join both updates into one"
    yield f"the cache {how}; give the input of the network itself, laid out as [B, H, S, D]"


@node_rule(*UPDATES, source=BUILDER)
def cache_is_an_output(node: Node, target: Target) -> Iterator[str]:
    """The updated cache is an output of the network itself, with nothing in between."""
    if node.outputs and node.outputs[0] not in node.graph.outputs:
        yield "the updated cache is no output of the network; return it as it is, nothing between"


@graph_rule(source=BUILDER)
def cache_updated_twice(graph: Graph, target: Target) -> Iterator[Complaint]:
    """One cache has one update: an input can share its address with one output only."""
    first: dict[str, Node] = {}
    for node in graph.of_kind(*UPDATES):
        before = first.setdefault(node.input(0), node)
        if before is not node:
            yield node, f"{before.label} updates {node.input(0)} too; join both updates into one"


@graph_rule(
    source="TensorRT: functional updates build, and are not in place; " + BUILDER,
    severity="warning",
)
def cache_copied(graph: Graph, target: Target) -> Iterator[Complaint]:
    """A cache that is an input, concatenated with new entries and returned, is copied each step."""
    inputs = set(graph.inputs)
    for node in graph.of_kind("Concat"):
        shape, outputs = node.shape(0), set(graph.outputs)
        if shape is None or len(shape) != 4 or node.input(0) not in inputs:
            continue
        if node.outputs[0] in outputs and len(node.inputs) == 2:
            yield (
                node,
                f"the cache {node.input(0)} is copied in every step; update it with TensorScatter",
            )


@node_rule(
    *UPDATES,
    source="https://github.com/NVIDIA/TensorRT-Model-Connect/issues/955",
    flavours=("tensorrt",),
    since=(11, 1),
    before=(11, 3),
    architectures=(121,),
)
def native_cache_wrong(node: Node, target: Target) -> Iterator[str]:
    """TensorRT 11.1 and 11.2 wrote wrong tokens with native caches on sm_121."""
    yield (
        f"native caches gave wrong tokens on {target}; use TensorRT 11.3 or newer, or update them "
        "with ScatterElements"
    )


@node_rule(
    *UPDATES,
    source="https://github.com/NVIDIA/TensorRT-Model-Connect/issues/955",
    severity="warning",
    flavours=("tensorrt",),
    since=(11, 1),
    before=(11, 3),
    architectures=(120,),
)
def native_cache_builds(node: Node, target: Target) -> Iterator[str]:
    """TensorRT 11.1 and 11.2 failed to build native caches on sm_120."""
    yield f"native caches failed to build on {target}; use TensorRT 11.3 if this one does too"


def _inputs(graph: Graph) -> list[str]:
    return graph.inputs if graph.outer is None else []

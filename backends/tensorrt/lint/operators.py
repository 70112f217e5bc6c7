"""Rules about which operators the parser knows, and what it takes an operator for."""

from __future__ import annotations

from collections.abc import Iterator

from irc.backends.tensorrt.lint.graph import Graph, Node
from irc.backends.tensorrt.lint.known import (
    IMPORTED,
    MICROSOFT,
    NEED_PLUGINS,
    STANDARD,
    UNSUPPORTED,
)
from irc.backends.tensorrt.lint.rules import BUILDER, IMPORTERS, Complaint, graph_rule, node_rule
from irc.backends.tensorrt.target import Target

PLUGIN_ATTRIBUTES = ("plugin_version", "plugin_namespace")
_OURS = ("", "ai.onnx")  # the domain of ONNX's own operators
_FOREIGN = "com.microsoft"
FOREIGN = (_FOREIGN, "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training")
_DISPATCH = "https://github.com/onnx/onnx-tensorrt/blob/main/ModelImporter.cpp"
LARGEST_K = 3840
DEEPEST = 24


@node_rule(source=f"{IMPORTERS}; OnnxParser.supports_operator of TensorRT-RTX 1.7.1.116")
def unsupported_operator(node: Node, target: Target) -> Iterator[str]:
    """The parser has no importer for the operator."""
    if node.domain not in _OURS or node.kind not in UNSUPPORTED or is_plugin(node):
        return
    if node.kind == "DFT" and target.flavour == "tensorrt" and target.version >= (11, 2):
        return  # comes with a plugin
    instead = UNSUPPORTED[node.kind] or "compute it outside, or register a plugin of this name"
    yield f"TensorRT has no {node.kind}; {instead}"


@node_rule(*NEED_PLUGINS, source=f"{BUILDER}: plugin creator was not found", warns_on=("tensorrt",))
def missing_plugin(node: Node, target: Target) -> Iterator[str]:
    """supports_operator says yes, but the importer needs a plugin that the wheel does not bring."""
    if not is_plugin(node):
        yield (
            f"{node.kind} needs a plugin that TensorRT does not bring, though its parser claims "
            f"to support it; {NEED_PLUGINS[node.kind]}"
        )


@node_rule(source=_DISPATCH)
def contrib_operator(node: Node, target: Target) -> Iterator[str]:
    """Nearly all of com.microsoft, and all of ONNX's other domains, has no importer."""
    if node.domain not in FOREIGN or node.kind in IMPORTED or is_plugin(node):
        return
    yield f"TensorRT has no {node.kind} of {node.domain}; export with plain ONNX operators"


@graph_rule(source=_DISPATCH)
def builtin_name(graph: Graph, target: Target) -> Iterator[Complaint]:
    """Only op_type is looked at: an operator of another domain is parsed as the one of that name.

    A local function, too: importers come before functions.
    """
    calls = [Node(proto, graph) for proto in graph.calls]
    for node in (*graph.nodes, *calls):
        if node.domain in _OURS or node.kind not in STANDARD:
            continue
        if "plugin_namespace" in node.attributes:  # a plugin goes before the importer then
            continue
        if node.domain == _FOREIGN and node.kind in MICROSOFT:
            continue
        yield (
            node,
            f"{node.domain}.{node.kind} is parsed as the {node.kind} of ONNX, because domains are "
            "not looked at; give it a name of its own",
        )


@node_rule("TopK", source=f"{BUILDER}: ITopKLayer")
def topk_limit(node: Node, target: Target) -> Iterator[str]:
    """TopK finds at most 3840."""
    k = node.constant(1)
    if k is not None and k.size and int(k.max()) > LARGEST_K:
        yield f"K is {int(k.max())}, and at most {LARGEST_K} are found; take fewer, or in two steps"


@node_rule("ScatterND", "ScatterElements", "Scatter", source=f"{IMPORTERS}; {BUILDER}")
def scatter_reduction(node: Node, target: Target) -> Iterator[str]:
    """Scatters overwrite: reductions are refused."""
    reduction = node.text("reduction", "none")
    if reduction != "none":
        yield f"the reduction {reduction!r} is refused; use OneHot and MatMul, or sum before"


@node_rule("LayerNormalization", source=f"{IMPORTERS}; {BUILDER}")
def normalization_outputs(node: Node, target: Target) -> Iterator[str]:
    """LayerNormalization has one output."""
    if len([name for name in node.outputs if name]) > 1:
        yield "mean and deviation are no outputs here; compute them with ReduceMean"


@node_rule(
    "LayerNormalization", "RMSNormalization", source=f"{BUILDER}: a warning", severity="warning"
)
def normalization_precision(node: Node, target: Target) -> Iterator[str]:
    """stash_type other than f32 computes the statistics in half precision."""
    if node.number("stash_type", 1) != 1:
        yield "the statistics are computed in half precision; leave stash_type out"


@node_rule("RotaryEmbedding", source=f"{IMPORTERS}; {BUILDER}")
def rotary_heads(node: Node, target: Target) -> Iterator[str]:
    """Operands of three dimensions need the number of heads."""
    shape = node.shape(0)
    if shape is not None and len(shape) == 3 and not node.number("num_heads", 0):
        yield "an operand of three dimensions needs num_heads; write it"


@node_rule("TRT_MoE", source=f"{BUILDER}: moe_lowering, Cannot decompose; NvInfer.h of TensorRT 11")
def moe_architecture(node: Node, target: Target) -> Iterator[str]:
    """Mixture-of-experts layers exist for sm_100 to sm_110 on the full TensorRT only."""
    others = [each for each in target.architectures if not 100 <= each < 120]
    if target.flavour == "tensorrt-rtx" or others:
        yield f"TRT_MoE does not build for {target}; use Gather on the weights and MatMul"


@node_rule("TRT_MoE", source=IMPORTERS)
def moe_activation(node: Node, target: Target) -> Iterator[str]:
    """activation_type defaults to none: SiLU is 1."""
    if node.number("activation_type", 0) != 1:
        yield "activation_type is not 1, so that there is no SiLU between the products; write 1"


@graph_rule(source=IMPORTERS)
def inner_depth(graph: Graph, target: Target) -> Iterator[Complaint]:
    """Graphs inside nodes nest at most 24 deep."""
    if graph.depth == DEEPEST + 1:
        yield None, f"graphs nest deeper than {DEEPEST}; unroll the inner loops"


def is_plugin(node: Node) -> bool:
    """Whether a node says that it is a plugin's."""
    return any(name in node.attributes for name in PLUGIN_ATTRIBUTES)


def is_builtin(node: Node) -> bool:
    """Whether the parser has an importer of the node's name."""
    return node.kind in IMPORTED

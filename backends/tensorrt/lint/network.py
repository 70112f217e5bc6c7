"""Rules about the network as a whole: its inputs, and weights among them."""

from __future__ import annotations

from collections.abc import Iterator

from irc.backends.tensorrt.lint.graph import Graph, Node
from irc.backends.tensorrt.lint.rules import BUILDER, Complaint, graph_rule
from irc.backends.tensorrt.target import Target

_IGNORED = {"CastLike": 1}  # the operand of which only the type is taken
_PRODUCTS = ("MatMul", "Gemm")


@graph_rule(source=f"{BUILDER}: 'Unused Input'")
def unused_input(graph: Graph, target: Target) -> Iterator[Complaint]:
    """An input that nothing reads is dropped: mostly the sign of an operand that was ignored."""
    if graph.outer is not None:
        return
    for name in graph.inputs:
        users = graph.consumers.get(name, [])
        if name in graph.outputs or any(_reads(node, name) for node in users):
            continue
        if users:
            yield users[0], f"{users[0].kind} takes only the type of the input {name}; use Cast"
        else:
            yield None, f"nothing reads the input {name}; take it out of the model, or use it"


@graph_rule(source="shape inference of ONNX", severity="warning")
def untyped(graph: Graph, target: Target) -> Iterator[Complaint]:
    """A model that ONNX itself cannot type: most rules have nothing to go by."""
    if graph.trouble and graph.outer is None:
        yield None, f"types cannot be told: {graph.trouble.strip()}; export the model again"


@graph_rule(source=BUILDER, severity="warning")
def tied_weights(graph: Graph, target: Target) -> Iterator[Complaint]:
    """A weight input that is looked up and multiplied transposed is copied in every step."""
    if graph.outer is not None:
        return
    for name in graph.inputs:
        users = graph.consumers.get(name, [])
        looked_up = any(node.kind == "Gather" and node.input(0) == name for node in users)
        turned = next((node for node in users if _turns(node, name)), None)
        if looked_up and turned is not None:
            yield (
                turned,
                f"{name} is looked up and transposed, so that a transposed copy is made in every "
                "step; declare two inputs, and bind both to one address",
            )


@graph_rule(source=f"{BUILDER}: shapes of profiles", severity="warning")
def empty_input(graph: Graph, target: Target) -> Iterator[Complaint]:
    """An input without elements makes an engine that computes nothing."""
    for name in graph.inputs if graph.outer is None else ():
        if 0 in (graph.tensor(name).shape or ()):
            yield None, f"the input {name} has a dimension of 0; give it a size, or leave it out"


def _reads(node: Node, name: str) -> bool:
    """Whether a node takes more of a value than its type."""
    ignored = _IGNORED.get(node.kind)
    return any(given == name and i != ignored for i, given in enumerate(node.inputs)) or (
        name not in node.inputs
    )


def _turns(node: Node, name: str) -> bool:
    """Whether a node takes the transposed weight for a product."""
    if node.kind == "Gemm":
        return node.input(1) == name and bool(node.number("transB", 0))
    return node.kind == "Transpose" and any(each.kind in _PRODUCTS for each in node.users())

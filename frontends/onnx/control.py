"""If and Loop: graphs inside nodes, read in place of the node as often as they run."""

from __future__ import annotations

import numpy as np

from irc import ops
from irc.errors import Error
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.entry import Content, Entry, Node
from irc.frontends.onnx.fold import content_of
from irc.frontends.onnx.rules import Made, reads
from irc.ir.dims import Dim


@reads("If", known="then_branch else_branch")
def branch(b: Builder, node: Node) -> Made:
    """The branch that is taken; both, and a choice of values, where only a run knows which."""
    condition, graphs = _single(node, 0), [node.attributes[f"{n}_branch"] for n in ("else", "then")]
    if condition is not None:
        return b.read_graph(graphs[bool(condition.item())], [])
    other, then = (b.read_graph(graph, []) for graph in graphs)
    chosen = b.reshaped(b.get(node.input(0)), ())
    types = [[f"{x.dtype}{list(x.shape)}" for x in many] for many in (then, other)]
    if types[0] != types[1]:
        raise Error(
            f"its branches give {' and '.join(', '.join(each) for each in types)}, and which one "
            "is taken is known only when the model runs; export it with a constant condition"
        )
    return [b.where(chosen, x, y) for x, y in zip(then, other, strict=True)]


@reads("Loop", known="body")
def loop(b: Builder, node: Node) -> Made:
    """One iteration after the other, then the elements that they give, stacked."""
    trips, condition = _single(node, 0), _single(node, 1)
    if (node.has(0) and trips is None) or (node.has(1) and condition is None):
        raise Error(
            "how often it runs is known only when the model runs; export it with a number of "
            "iterations and a condition that are constants"
        )
    count = trips.item() if trips is not None else None
    goes_on = condition if condition is not None else np.array(True, object)
    state, i = [node.input(at) for at in range(2, len(node.inputs))], 0
    steps: list[list[Entry]] = []
    while goes_on.item() and (count is None or i < count):
        number = Entry("i64", (), content=np.array(i, object))
        values = b.read_graph(
            node.attributes["body"], [number, Entry("bool", (), content=goes_on), *state]
        )
        if len(values) < 1 + len(state):
            raise Error(
                f"its body gives {len(values)} values for a condition and {len(state)} more"
            )
        after = content_of(values[0])
        if after is None or after.size != 1:
            raise Error(f"whether it goes on after iteration {i} is known only when the model runs")
        goes_on, state, i = after, values[1 : len(state) + 1], i + 1
        steps.append(values[len(state) + 1 :])
    if not steps and len(node.outputs) > len(state):
        raise Error("it has no iterations, so that the shape of what they would give is unknown")
    return [*state, *(_stacked(b, many) for many in zip(*steps, strict=True))]


def _stacked(b: Builder, many: tuple[Entry, ...]) -> Entry:
    return b.entry(b.value(ops.Stack([b.get(each) for each in many], dim=0)))


def _single(node: Node, at: int) -> Content | None:
    """The one element of an input, where it is known while reading."""
    content = content_of(node.optional(at))
    if content is not None and content.size != 1:
        raise Error(f"input {at} of {node.kind} has {content.size} elements, expected 1")
    return None if content is None or isinstance(content.item(), Dim) else content

"""EmbeddingBag of torch, which torch.onnx.export writes as a Loop over the bags.

The body of a Loop is written as one expression and compared with those of the exporters. Where it
is one of them, the Loop becomes one node that sums, averages or maximizes rows between offsets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from irc import ops
from irc.errors import Error
from irc.frontends.onnx.builder import Builder
from irc.frontends.onnx.entry import Entry, Node
from irc.frontends.onnx.fold import content_of
from irc.frontends.onnx.rules import Made, made_by, reads
from irc.frontends.onnx.tensors import Files
from irc.ir.core import Op
from irc.ir.dims import DimLike, exact_divide

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto

DOMAIN = "irc.torch"
# In the text of a body, i is the number of the bag, s and e are its offset and that of the next,
# q is the sequence of results, c the condition and k the count of the Loop.
# What the exporter of graphs appends for a bag; the last one ends where the rows end.
_LAST, _MANY = r"(?:Sub\(@\d+,1\)|\d+)", r"(?:@\d+|Shape\(@\d+(?:,\w+=\d)*\)|\d+)"
_ROWS, _SAME = r"Slice\(@(?P<rows>\d+),s,e\)", r"Slice\(@(?P=rows),s,e\)"
_APPENDED = {
    "Sum": rf"ReduceSum\({_ROWS},0\)",
    "Max": rf"ReduceMax\(If\(Equal\(i,{_LAST}\),{_ROWS[:-3]}{_MANY}\),{_SAME}\),0\)",
    "Mean": rf"If\(Equal\(i,{_LAST}\),If\(Greater\(Sub\({_MANY},s\),0\),Div\(ReduceSum\({_ROWS},0"
    rf"\),Cast\(Sub\({_MANY},s\),to=1\)\),ReduceSum\({_SAME},0\)\),ReduceMean\({_SAME},0\)\)",
}
# What the exporter of scripts gives for a bag: rows of a table, which weights may multiply.
_SCANNED = (
    r"Reduce(?P<mode>Sum|Mean|Max)\((?P<m>Mul\()?Gather\(@(?P<table>\d+),Slice\(@(?P<ids>\d+),"
    r"s,e,0\)\)(?(m),Unsqueeze\(Slice\(@(?P<by>\d+),s,e,0\),1\)\))(?:,0|,axes=\[0\]),keepdims=0\)"
)
_DEFAULTS = ("keepdims=1", "noop_with_empty_axes=0", "axis=0")
_INT = 2  # AttributeProto.INT
_DEEPEST = 30


def with_bags(model: ModelProto, files: Files) -> None:
    """Replace the loops over bags, in place."""
    graph = model.graph
    joins = {n.input[0]: n for n in graph.node if n.op_type == "ConcatFromSequence" and n.input}
    new: dict[str, list[NodeProto]] = {}
    for loop in graph.node:
        if loop.op_type == "Loop" and loop.output and loop.attribute:
            nodes = _bags(_Body(graph, loop, files), loop, joins)
            new |= {loop.output[-1]: nodes} if nodes else {}
    if not new:
        return
    bags = {name for nodes in new.values() for node in nodes for name in node.output}
    old = [n for n in graph.node if n.op_type != "ConcatFromSequence" or n.output[0] not in bags]
    nodes = list(chain(*(new.get(n.output[-1], [n]) if n.output else [n] for n in old)))
    used = {name for node in nodes for name in node.input}
    del graph.node[:]
    graph.node.extend(n for n in nodes if n.op_type != "SequenceEmpty" or n.output[0] in used)


def _bags(body: _Body, loop: NodeProto, joins: Mapping[str, NodeProto]) -> list[NodeProto]:
    """The nodes that compute what a Loop over bags does; none where it does something else."""
    texts = [body.text(value.name) for value in body.graph.output]
    if len(texts) == 3 and len(loop.input) == 4 and len(loop.output) == 2:
        return _appended(body, loop, texts, joins)
    if len(texts) != 2 or len(loop.input) != 2 or texts[0] not in ("c", "1", "Cast(1,to=9)"):
        return []
    ends = re.search(r"Slice\(@\d+,Gather\(@(\d+),i\),Gather\(@(\d+),i\)", texts[1])
    if ends is None:
        return []
    starts, stops = (body.names[int(n)] for n in ends.groups())
    cut = body.outside.get(stops)
    slice_ = [] if cut is None else [cut.input[0], *(body.text(name) for name in cut.input[1:])]
    if slice_ != [starts, "1", str((1 << 63) - 1), "0", "1"]:
        return []
    row = texts[1].replace(f"Gather(@{ends[1]},i)", "s").replace(f"Gather(@{ends[2]},i)", "e")
    match = re.fullmatch(_SCANNED, row)
    return _looked_up(body, loop, match, starts) if match else []


def _appended(
    body: _Body, loop: NodeProto, texts: list[str], joins: Mapping[str, NodeProto]
) -> list[NodeProto]:
    """The node for bags whose rows are appended to a sequence, which is joined after the Loop."""
    at = 1 + (body.place == 1)  # of the sequence among the results of the body
    join, going = joins.get(loop.output[at - 1]), body.inside.get(body.graph.output[0].name)
    start = re.search(r"Slice\(@(\d+),i,Add\(i,1\)\)", texts[at])
    counts = re.fullmatch(r"Less\(Add\(i,1\),@?\d+\)", texts[0]) and texts[3 - at] == "Add(i,1)"
    if not (join and going and start and counts and body.text(loop.input[1 + body.place]) == "0"):
        return []
    row = texts[at].replace(start[0], "s")
    row = row.replace(f"Slice(@{start[1]},Add(i,1),Add(i,2))", "e")
    for mode, reduced in _APPENDED.items():
        match = re.fullmatch(rf"SequenceInsert\(q,If\(Equal\(s,e\),zeros,{reduced}\)\)", row)
        if match:
            rows, offsets = (body.names[int(n)] for n in (match["rows"], start[1]))
            return [_bag_node(loop, mode, [rows, offsets, going.input[1]], join.output[0])]
    return []


def _bag_node(loop: NodeProto, mode: str, operands: list[str], out: str) -> NodeProto:
    from onnx import helper

    node = helper.make_node(f"EmbeddingBag{mode}", operands, [out], loop.name, domain=DOMAIN)
    node.metadata_props.extend(loop.metadata_props)
    return node


def _looked_up(body: _Body, loop: NodeProto, match: re.Match[str], starts: str) -> list[NodeProto]:
    """The rows of all bags, times their weights, and the node for the bags."""
    from onnx import helper

    out, rows = loop.output[0], f"{loop.output[0]}.rows"
    table, ids = (body.names[int(match[n])] for n in ("table", "ids"))
    nodes = [helper.make_node("Gather", [table, ids], [rows])]
    if match["by"] is not None:
        axis: Any = {"value_ints": [1]}
        nodes += [
            helper.make_node("Constant", [], [f"{out}.one"], **axis),
            helper.make_node(
                "Unsqueeze", [body.names[int(match["by"])], f"{out}.one"], [f"{out}.by"]
            ),
            helper.make_node("Mul", [rows, f"{out}.by"], [f"{out}.scaled"]),
        ]
        rows = f"{out}.scaled"
    return [*nodes, _bag_node(loop, match["mode"], [rows, starts, loop.input[0]], out)]


class _Body:
    """The body of a Loop as text, in which values from outside are @ and a number."""

    def __init__(self, graph: GraphProto, loop: NodeProto, files: Files) -> None:
        self.graph, self.files = loop.attribute[0].g, files
        self.names: list[str] = []
        self.outside = {name: node for node in graph.node for name in node.output}
        self.tensors = {tensor.name: tensor for tensor in graph.initializer}
        self.inside: dict[str, NodeProto] = {}
        self._enter(self.graph)
        parameters = [value.name for value in self.graph.input]
        symbols = ["i", "c"] if len(parameters) == 2 else ["k", "c", "i", "q"]
        self.place = 1 if len(loop.input) == 4 and self._is_empty(loop.input[3]) else 2
        if self.place == 2:  # torch writes the number of the bag and the sequence in any order
            symbols[2:] = symbols[:1:-1]
        self.texts = dict(zip(parameters, symbols, strict=False))

    def _is_empty(self, name: str) -> bool:
        return name in self.outside and self.outside[name].op_type == "SequenceEmpty"

    def _enter(self, graph: GraphProto) -> None:
        self.tensors.update((tensor.name, tensor) for tensor in graph.initializer)
        for node in graph.node:
            self.inside.update(dict.fromkeys(node.output, node))
            for attribute in node.attribute:
                self._enter(attribute.g)

    def text(self, name: str, depth: int = 0) -> str:
        """What a value is, by the parameters of the body and values from outside."""
        if name not in self.texts:
            node = self.inside.get(name)
            if depth > _DEEPEST:
                return "?"
            self.texts[name] = self._outer(name) if node is None else self._inner(node, depth + 1)
        return self.texts[name]

    def _inner(self, node: NodeProto, depth: int) -> str:
        kind, parts = node.op_type, [self.text(name, depth) for name in node.input]
        first = parts[0] if parts else ""
        if kind == "Constant":
            return self._constant(node)
        if kind == "Identity" or (kind == "CastLike" and first.isdecimal()):
            return first
        if (kind, first, parts[1:]) == ("Reshape", "i", ["-1"]) or (
            kind == "Unsqueeze" and parts[1:] == ["0"] and re.fullmatch(r"Gather\(@\d+,i\)", first)
        ):
            return first
        if kind == "If":
            ends = {a.name: value.name for a in node.attribute for value in a.g.output}
            parts += [self.text(ends.get(f"{n}_branch", ""), depth) for n in ("then", "else")]
        else:
            words = [f"{a.name}={a.i if a.type == _INT else list(a.ints)}" for a in node.attribute]
            parts += [text for text in words if text not in _DEFAULTS]
        text = f"{kind}({','.join(parts)})"
        return text if len(text) < 1000 else "?"

    def _outer(self, name: str) -> str:
        node = self.outside.get(name)
        while node is not None and node.op_type == "Identity":
            name = node.input[0]
            node = self.outside.get(name)
        number = "?"
        if name in self.tensors:
            number = self._number(self.tensors[name])
        elif node is not None and node.op_type == "Constant":
            number = self._constant(node)
        if number != "?":
            return number
        if name not in self.names:
            self.names.append(name)
        return f"@{self.names.index(name)}"

    def _constant(self, node: NodeProto) -> str:
        """What `_number` says of a node Constant."""
        return next((self._number(attribute.t) for attribute in node.attribute), "?")

    def _number(self, tensor: TensorProto) -> str:
        """An integer, or zeros."""
        array = self.files.data(tensor).read() if tensor.data_type else None
        if array is None or (array.size != 1 and array.any()):
            return "?"
        is_whole = array.size == 1 and array.dtype.kind in "biu"
        return str(int(array.item())) if is_whole else "?" if array.any() else "zeros"


_REDUCE: dict[str, type[Op]] = {"Sum": ops.ReduceSum, "Mean": ops.ReduceMean, "Max": ops.ReduceMax}


@reads("EmbeddingBagSum", "EmbeddingBagMean", "EmbeddingBagMax", domain=DOMAIN)
def embedding_bag(b: Builder, node: Node) -> Made:
    """The sum, mean or maximum of the rows [N, D] from each offset to the next; 0 without rows.

    Bags of one size are a dimension. Others are scattered: each row to its bag, whose number is
    how many bags start up to it.
    """
    rows, offsets, many = node.shaped(0, 2, 2), node.shaped(1, 1, 1), content_of(node.input(2))
    mode, (count, width) = node.kind.removeprefix("EmbeddingBag"), rows.shape
    bags = offsets.shape[0] - 1
    if many is None or many.size != 1 or many.item() != bags:
        raise Error(f"this EmbeddingBag has {offsets.shape[0]} offsets for another number of bags")
    size = _size(offsets, count)
    if size is not None:
        grouped = b.reshaped(b.get(rows), (bags, size, width))
        return b.op(_REDUCE[mode], grouped, dims=(1,))
    places = b.cast(offsets, "i64")
    ones = b.value(ops.Full(value=1, shape=offsets.shape, dtype="i64"))
    marks = b.value(ops.Full(value=0, shape=(count + 1,), dtype="i64"))
    marks = b.op(ops.ScatterElements, marks, places, ones, dim=0, reduction="add")
    bag = b.op(ops.Slice, b.op(ops.Cumsum, marks, dim=0), dim=0, start=0, stop=count)
    bag = b.op(ops.Expand, b.op(ops.Unsqueeze, bag, dims=(1,)), shape=(count, width))
    least = float("-inf") if mode == "Max" else 0.0
    blank = b.value(ops.Full(value=least, shape=(bags + 2, width), dtype=rows.dtype))
    how = "max" if mode == "Max" else "add"
    joined = b.op(ops.ScatterElements, blank, bag, rows, dim=0, reduction=how)
    joined = b.op(ops.Slice, joined, dim=0, start=1, stop=bags + 1)
    ends = b.op(ops.Slice, places, dim=0, start=1, stop=bags + 1)
    sizes = b.op(ops.Sub, ends, b.op(ops.Slice, places, dim=0, start=0, stop=bags))
    sizes = b.op(ops.Unsqueeze, sizes, dims=(1,))
    if mode == "Max":
        return b.where(b.op(ops.Eq, sizes, 0), 0.0, joined)
    if mode == "Sum":
        return joined
    return b.op(ops.Div, joined, b.cast(b.op(ops.Maximum, sizes, 1), rows.dtype))


def _size(offsets: Entry, count: DimLike) -> DimLike | None:
    """The size of all bags, where it is one that is known and not 0."""
    bags = offsets.shape[0] - 1
    size = exact_divide(count, bags) if bags != 0 else None
    content, joined = content_of(offsets), made_by(offsets, "Concat")
    ranged = made_by(joined.optional(0), "Range") if joined and len(joined.inputs) == 2 else None
    if size is None or size == 0:
        return None
    if content is not None:
        return size if content.tolist() == [i * size for i in range(len(content))] else None
    if joined is None or ranged is None:
        return None
    ends = [content_of(ranged.input(0)), content_of(ranged.input(2)), content_of(joined.input(1))]
    numbers = [None if end is None or end.size != 1 else end.item() for end in ends]
    return size if numbers == [0, size, count] else None

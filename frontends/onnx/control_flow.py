"""Graphs inside nodes and recurrences: If and Loop, EmbeddingBag of torch, GRU, LSTM and RNN.

All are read in place, as often as they run. But for the Loop over bags that torch.onnx.export
writes for EmbeddingBag: its body is written as one expression and compared with those of the
exporters, and becomes one node that sums, averages or maximizes rows between offsets.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from irc import ops
from irc.errors import Error
from irc.frontends.onnx.builder import Builder, Content, ImportedValue, Node
from irc.frontends.onnx.files import Files
from irc.frontends.onnx.fold import content_of
from irc.frontends.onnx.protobuf import replace_nodes
from irc.frontends.onnx.rules import Results, computed, imports, only, produced_by
from irc.ir.core import Op
from irc.ir.dims import Dim, DimLike, Shape, exact_divide

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto, TensorProto


@imports("If", attributes="then_branch else_branch")
def branch(b: Builder, node: Node) -> Results:
    """The branch that is taken; both, and a choice of values, where only a run knows which."""
    condition, graphs = _single(node, 0), [node.attributes[f"{n}_branch"] for n in ("else", "then")]
    if condition is not None:
        return b.read_graph(graphs[bool(condition.item())], [])
    other, then = (b.read_graph(graph, []) for graph in graphs)
    chosen = b.reshaped(node.input(0), ())
    types = [[f"{x.dtype}{list(x.shape)}" for x in many] for many in (then, other)]
    if types[0] != types[1]:
        raise Error(
            f"its branches give {' and '.join(', '.join(many) for many in types)}, and which one "
            "is taken is known only when the model runs; export it with a constant condition"
        )
    return [b.where(chosen, x, y) for x, y in zip(then, other, strict=True)]


@imports("Loop", attributes="body")
def loop(b: Builder, node: Node) -> Results:
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
    steps: list[list[ImportedValue]] = []
    while goes_on.item() and (count is None or i < count):
        number = ImportedValue("i64", (), content=np.array(i, object))
        inputs = [number, ImportedValue("bool", (), content=goes_on), *state]
        values = b.read_graph(node.attributes["body"], inputs)
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
    return [*state, *(b.op(ops.Stack, values, dim=0) for values in zip(*steps, strict=True))]


def _single(node: Node, at: int) -> Content | None:
    """The one element of an input, where it is known while reading."""
    content = content_of(node.optional(at))
    if content is not None and content.size != 1:
        raise Error(f"input {at} of {node.kind} has {content.size} elements, expected 1")
    return None if content is None or isinstance(content.item(), Dim) else content


_BAGS = "irc.torch"  # the domain of the nodes for EmbeddingBag
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
    kept = [n for n in nodes if n.op_type != "SequenceEmpty" or n.output[0] in used]
    replace_nodes(model, kept)


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
    operands = [] if cut is None else [cut.input[0], *(body.text(name) for name in cut.input[1:])]
    if operands != [starts, "1", str((1 << 63) - 1), "0", "1"]:
        return []
    row = texts[1].replace(f"Gather(@{ends[1]},i)", "s").replace(f"Gather(@{ends[2]},i)", "e")
    match = re.fullmatch(_SCANNED, row)
    if match is None:
        return []
    table, *lookup = (body.names[int(match[n])] for n in ("table", "ids", "by") if match[n])
    operands = [table, starts, loop.input[0], *lookup]
    return [_bag_node(loop, match["mode"], operands, loop.output[0])]


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

    node = helper.make_node(f"EmbeddingBag{mode}", operands, [out], loop.name, domain=_BAGS)
    node.metadata_props.extend(loop.metadata_props)
    return node


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
        last = self.outside.get(loop.input[3]) if len(loop.input) == 4 else None
        self.place = 1 if last is not None and last.op_type == "SequenceEmpty" else 2
        if self.place == 2:  # torch writes the number of the bag and the sequence in any order
            symbols[2:] = symbols[:1:-1]
        self.texts = dict(zip(parameters, symbols, strict=False))

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


@imports(*(f"EmbeddingBag{mode}" for mode in _REDUCE), domain=_BAGS)
def embedding_bag(b: Builder, node: Node) -> Results:
    """The sum, mean or maximum of the rows [N, D] from each offset to the next; 0 without rows.

    The rows may be those of a table by ids, times weights. Bags of one size are a dimension. Others
    are scattered: each row to its bag, whose number is how many bags start up to it.
    """
    rows, offsets, many = node.shaped(0, 2, 2), node.shaped(1, 1, 1), content_of(node.input(2))
    if node.has(3):
        lookup = replace(node, kind="Gather", domain="", inputs=[rows, node.input(3)])
        (rows,) = [x for x in computed(b, lookup) if x is not None]
    if node.has(4):
        rows = rows * b.op(ops.Unsqueeze, node.input(4), dims=(1,))
    mode, (count, width) = node.kind.removeprefix("EmbeddingBag"), rows.shape
    bags = offsets.shape[0] - 1
    if many is None or many.size != 1 or many.item() != bags:
        raise Error(f"this EmbeddingBag has {offsets.shape[0]} offsets for another number of bags")
    size = _bag_size(offsets, count)
    if size is not None:
        return b.op(_REDUCE[mode], b.reshaped(rows, (bags, size, width)), dims=(1,))
    places = b.cast(offsets, "i64")
    ones = b.op(ops.Full, value=1, shape=offsets.shape, dtype="i64")
    marks = b.op(ops.Full, value=0, shape=(count + 1,), dtype="i64")
    marks = b.op(ops.ScatterElements, marks, places, ones, dim=0, reduction="add")
    bag = b.op(ops.Slice, b.op(ops.Cumsum, marks, dim=0), dim=0, start=0, stop=count)
    bag = b.op(ops.Expand, b.op(ops.Unsqueeze, bag, dims=(1,)), shape=(count, width))
    least = float("-inf") if mode == "Max" else 0.0
    blank = b.op(ops.Full, value=least, shape=(bags + 2, width), dtype=rows.dtype)
    how = "max" if mode == "Max" else "add"
    joined = b.op(ops.ScatterElements, blank, bag, rows, dim=0, reduction=how)
    joined = b.op(ops.Slice, joined, dim=0, start=1, stop=bags + 1)
    ends = b.op(ops.Slice, places, dim=0, start=1, stop=bags + 1)
    sizes = ends - b.op(ops.Slice, places, dim=0, start=0, stop=bags)
    sizes = b.op(ops.Unsqueeze, sizes, dims=(1,))
    if mode == "Max":
        return b.where(b.op(ops.Eq, sizes, 0), 0.0, joined)
    if mode == "Sum":
        return joined
    return joined / b.cast(b.op(ops.Maximum, sizes, 1), rows.dtype)


def _bag_size(offsets: ImportedValue, count: DimLike) -> DimLike | None:
    """The size of all bags, where it is one that is known and not 0."""
    bags = offsets.shape[0] - 1
    size = exact_divide(count, bags) if bags != 0 else None
    content, joined = content_of(offsets), produced_by(offsets, "Concat")
    if size is None or size == 0:
        return None
    if content is not None:
        return size if content.tolist() == [i * size for i in range(len(content))] else None
    ranged = produced_by(joined.optional(0), "Range") if joined else None
    if joined is None or ranged is None or len(joined.inputs) != 2:
        return None
    ends = [content_of(ranged.input(0)), content_of(ranged.input(2)), content_of(joined.input(1))]
    numbers = [None if end is None or end.size != 1 else end.item() for end in ends]
    return size if numbers == [0, size, count] else None


_MOST = 1024  # steps
_ACTIVATIONS: dict[str, type[Op]] = {"Sigmoid": ops.Sigmoid, "Tanh": ops.Tanh, "Relu": ops.Relu}
_GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}
_DEFAULT = {"GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"], "RNN": ["Tanh"]}
_RECURRENT = "activations direction hidden_size layout"


@imports("RNN", attributes=_RECURRENT)
@imports("GRU", attributes=f"{_RECURRENT} linear_before_reset")
@imports("LSTM", attributes=f"{_RECURRENT} input_forget", refuses=only("input_forget", 0))
def recurrent(b: Builder, node: Node) -> Results:
    """All states [steps, directions, batch, hidden], and the last ones."""
    x, weights = node.shaped(0, 3, 3), node.shaped(1, 3, 3)
    if node.integer("layout", 0):
        x = b.op(ops.Transpose, x, order=(1, 0, 2))
    steps, batch = x.shape[:2]
    if not isinstance(steps, int) or not 0 < steps <= _MOST:
        raise Error(
            f"{node.kind} over {steps} steps: irc unrolls recurrences of 1 to {_MOST} steps; "
            "export the model with a sequence length that is a number"
        )
    ways = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}
    turned = ways.get(node.text("direction", "forward"), [])
    gates, hidden = _GATES[node.kind], node.shaped(2, 3, 3).shape[2]
    if weights.shape[:2] != (len(turned), gates * hidden):
        raise Error(f"{node.kind} has weights {list(weights.shape)} for {len(turned)} directions")
    active = _active(b, node, steps)
    wide = (len(turned), batch, hidden)
    states = [_state(b, node, i, x.dtype, wide) for i in ((5, 6) if node.kind == "LSTM" else (5,))]
    outputs: list[ImportedValue] = []  # all states of each direction
    last: list[list[ImportedValue]] = []
    for way, backwards in enumerate(turned):
        run = _Direction(b, node, way, hidden)
        mine = [run.part(state) for state in states]
        inputs = b.results(ops.Split, run.inputs(x), dim=0, sizes=(1,) * steps)
        shown: list[ImportedValue] = []
        for t in reversed(range(steps)) if backwards else range(steps):
            new = run.step(b.reshaped(inputs[t], (batch, gates * hidden)), *mine)
            shown.append(new[0] if active is None else b.where(active[t], new[0], 0.0))
            if active is not None:
                new = [b.where(active[t], n, old) for n, old in zip(new, mine, strict=True)]
            mine = new
        outputs.append(b.op(ops.Stack, shown[::-1] if backwards else shown, dim=0))
        last.append(mine)
    ends = [b.op(ops.Stack, state, dim=0) for state in zip(*last, strict=True)]
    results = [b.op(ops.Stack, outputs, dim=1), *ends]
    if node.integer("layout", 0):
        orders = [(2, 0, 1, 3), (1, 0, 2), (1, 0, 2)]
        pairs = zip(results, orders, strict=False)
        results = [b.op(ops.Transpose, result, order=order) for result, order in pairs]
    return results


def _active(b: Builder, node: Node, steps: int) -> list[ImportedValue] | None:
    """For each step, which rows [batch, 1] are that long; None where all are."""
    lengths = node.optional(4)
    content = content_of(lengths)
    if lengths is None or (content is not None and all(n == steps for n in content.flat)):
        return None
    column = b.op(ops.Unsqueeze, lengths, dims=(1,))
    return [column > t for t in range(steps)]


def _state(b: Builder, node: Node, at: int, dtype: str, shape: Shape) -> ImportedValue:
    """An initial state [directions, batch, hidden]."""
    state = node.optional(at)
    if state is None:
        return b.op(ops.Full, value=0.0, shape=shape, dtype=dtype)
    return b.op(ops.Transpose, state, order=(1, 0, 2)) if node.integer("layout", 0) else state


class _Direction:
    """The weights of one direction, and a step with them."""

    def __init__(self, b: Builder, node: Node, way: int, hidden: DimLike) -> None:
        self.b, self.node, self.way, self.hidden = b, node, way, hidden
        self.gates = _GATES[node.kind]
        self.weight, self.recurrence = self.part(node.input(1)), self.part(node.input(2))
        bias, peephole = node.optional(3), node.optional(7)
        self.biases = None if bias is None else self.split(self.part(bias), 2 * self.gates)
        self.peephole = None if peephole is None else self.split(self.part(peephole), 3)
        self.resets_last = node.kind == "GRU" and bool(node.integer("linear_before_reset", 0))
        names = node.attributes.get("activations") or _DEFAULT[node.kind] * (way + 1)
        count = len(_DEFAULT[node.kind])
        mine = names[way * count : (way + 1) * count]
        if len(mine) != count or any(name not in _ACTIVATIONS for name in mine):
            raise Error(f"{node.kind} with activations {', '.join(names)}")
        self.acts = [_ACTIVATIONS[name] for name in mine]

    def part(self, x: ImportedValue) -> ImportedValue:
        """What belongs to this direction."""
        one = self.b.op(ops.Slice, x, dim=0, start=self.way, stop=self.way + 1)
        return self.b.reshaped(one, x.shape[1:])

    def split(self, x: ImportedValue, count: int, dim: int = -1) -> list[ImportedValue]:
        """Equal parts of a dimension."""
        return self.b.results(ops.Split, x, dim=dim, sizes=(self.hidden,) * count)

    def inputs(self, x: ImportedValue) -> ImportedValue:
        """What the inputs of all steps add to the gates: [steps, batch, gates * hidden].

        The biases of the recurrence are in it too, but for the one that GRU multiplies.
        """
        b, bias = self.b, self.biases
        product = b.op(ops.Linear, x, self.weight)
        if bias is None:
            return product
        sums = [b.op(ops.Add, *pair) for pair in zip(bias, bias[self.gates :], strict=False)]
        if self.resets_last:
            sums[2] = bias[2]
        return product + b.op(ops.Concat, sums, dim=0)

    def step(
        self, given: ImportedValue, h: ImportedValue, c: ImportedValue | None = None
    ) -> list[ImportedValue]:
        """The states after a step."""
        b = self.b
        if self.node.kind == "GRU":
            return [self._gru(given, h)]
        total = given + b.op(ops.Linear, h, self.recurrence)
        if c is None:
            return [b.op(self.acts[0], total)]
        first, second, third = self.acts
        i, o, f, new = self.split(total, 4)
        p = self.peephole
        if p is not None:
            i = i + c * p[0]
            f = f + c * p[2]
        new = b.op(first, i) * b.op(second, new)
        c = b.op(first, f) * c + new
        if p is not None:
            o = o + c * p[1]
        return [b.op(first, o) * b.op(third, c), c]

    def _gru(self, given: ImportedValue, h: ImportedValue) -> ImportedValue:
        b, (first, second) = self.b, self.acts
        z, r, new = self.split(given, 3)
        if self.resets_last:
            rz, rr, rest = self.split(b.op(ops.Linear, h, self.recurrence), 3)
            if self.biases is not None:
                rest = rest + self.biases[5]
            r = b.op(first, r + rr)
            rest = r * rest
        else:
            wz, wr, wh = self.split(self.recurrence, 3, dim=0)
            rz = b.op(ops.Linear, h, wz)
            r = b.op(first, r + b.op(ops.Linear, h, wr))
            rest = b.op(ops.Linear, r * h, wh)
        z = b.op(first, z + rz)
        new = b.op(second, new + rest)
        return new + z * (h - new)

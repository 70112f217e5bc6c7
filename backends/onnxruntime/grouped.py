"""Attention over caches as GroupQueryAttention of ONNX Runtime, where that means the same.

The files of the ONNX backend have standard operators. But the time of ONNX Runtime's Attention
depends on the whole capacity of the caches of all rows, and that of GroupQueryAttention on the
tokens of each row; nor does it need transposed operands. A step of a 1B Llama (`w4a16`, 2 threads,
ONNX Runtime 1.32) takes 25 instead of 29 ms for one row of 140 tokens, 175 instead of 180 ms for 16
rows of 150, and 173 instead of 246 ms where their caches have room for 1088.
"""

from __future__ import annotations

import numpy as np
from onnx.onnx_ml_pb2 import ModelProto, NodeProto, TensorProto

from irc.backends.onnx.graph import DTYPES, Graph, Node
from irc.backends.onnxruntime.segments import required_by

_DOMAIN = "com.microsoft"
_ABSENT = [""] * 9  # operands of GroupQueryAttention between those that are given


def with_grouped_attention(data: bytes) -> bytes:
    """A model with GroupQueryAttention for causal attention over caches that the model updates."""
    model = ModelProto.FromString(data)
    layers = _Layers(model)
    for node in model.graph.node:
        if node.op_type == "Attention":
            layers.replace(node)
    if not layers.replaced:
        return data
    grouped = layers.new.model("", {}).graph
    nodes: list[NodeProto] = []
    for node in model.graph.node:
        place = layers.replaced.get(node.name)
        nodes += [node] if place is None else grouped.node[place]
    outputs = [output.name for output in model.graph.output]
    copies = [NodeProto.FromString(n.SerializeToString()) for n in required_by(outputs, nodes)]
    del model.graph.node[:]
    model.graph.node.extend(copies)
    model.graph.initializer.extend(grouped.initializer)
    if all(entry.domain != _DOMAIN for entry in model.opset_import):
        model.opset_import.add(domain=_DOMAIN, version=1)
    return model.SerializeToString()


class _Layers:
    """The layers of a model; `replaced` has the places in `new` of what replaces a node, by its
    name."""

    def __init__(self, model: ModelProto) -> None:
        graph, self.new = model.graph, Graph(prefix="grouped attention")
        self.replaced: dict[str, slice] = {}
        self._makers = {name: node for node in graph.node for name in node.output}
        self._users: dict[str, list[NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                self._users.setdefault(name, []).append(node)
        types = {v.name: v.type.tensor_type for v in (*graph.value_info, *graph.input)}
        self._shapes = {n: [dim.dim_value for dim in t.shape.dim] for n, t in types.items()}
        floats = {name for name, t in types.items() if t.elem_type == TensorProto.FLOAT}
        self._caches = floats.intersection(value.name for value in graph.input)
        self._counts: dict[str, list[str]] = {}  # operands, by the lengths of Attention

    def replace(self, attention: NodeProto) -> None:
        """Replace an Attention without mask or bias, with the updates of its caches, which nothing
        else reads, and the Transpose after it."""
        attributes = {entry.name: entry for entry in attention.attribute}
        if len(attention.input) != 7 or any(attention.input[3:6]) or "is_causal" not in attributes:
            return
        lengths, after = attention.input[6], self._users.get(attention.output[0], [])
        added = self._maker(lengths, "Add")
        updates = [
            update
            for name in attention.input[1:3]
            if (update := self._maker(name, "TensorScatter")) and len(self._users[name]) == 1
            if update.input[0] in self._caches and added and update.input[2] == added.input[0]
        ]
        names = [attention.input[0], *(update.input[1] for update in updates)]
        transposes = [self._maker(name, "Transpose") for name in names]
        reshapes = [self._maker(node.input[0], "Reshape") for node in transposes if node]
        operands = [r for r in reshapes if r and self._shapes.get(r.input[0], [0])[-1]]
        if len(operands) < 3 or [user.op_type for user in after] != ["Transpose"]:
            return
        shape, other = (self._shapes[update.input[0]] for update in updates)
        if shape != other or shape[3] % 8:  # the kernel takes heads of a multiple of 8 features
            return
        begin = len(self.new.nodes)
        inputs = [self._by_token(node) for node in operands]
        inputs += [*(update.input[0] for update in updates), *self._counted(lengths)]
        sizes = {
            "num_heads": self._shapes[operands[0].input[0]][-1] // shape[3],
            "kv_num_heads": shape[1],
            "scale": attributes["scale"].f,
            "softcap": attributes["softcap"].f if "softcap" in attributes else 0.0,
        }
        outputs = [after[0].output[0], *attention.input[1:3]]
        self.new.nodes.append(Node(f"{_DOMAIN}::GroupQueryAttention", inputs, outputs, {**sizes}))
        self.replaced |= {node.name: slice(0) for node in (*updates, *after)}
        self.replaced[attention.name] = slice(begin, len(self.new.nodes))

    def _maker(self, name: str, kind: str) -> NodeProto | None:
        node = self._makers.get(name)
        return node if node is not None and node.op_type == kind else None

    def _by_token(self, reshape: NodeProto) -> str:
        """[B, S, H * D] of what a Reshape makes [B, S, H, D]; it may be a matrix."""
        *rows, features = self._shapes[reshape.input[0]]
        if len(rows) == 2:
            return reshape.input[0]
        shape = self.new.constant(np.array([0, 0, features]))
        return self.new.add("Reshape", reshape.output[0], shape)

    def _counted(self, lengths: str) -> list[str]:
        """How many keys each row sees, less one; the most of a row; and the new ones of each."""
        if lengths not in self._counts:
            add, past = self.new.add, self._makers[lengths].input[0]
            last = add("Sub", lengths, self.new.constant(np.array([1])))
            numbers = (last, add("ReduceMax", lengths, keepdims=0), add("Sub", lengths, past))
            last, most, count = (add("Cast", name, to=DTYPES["i32"]) for name in numbers)
            self._counts[lengths] = [last, most, *_ABSENT, count]
        return self._counts[lengths]

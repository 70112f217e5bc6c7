"""A small builder of ONNX graphs: nodes as plain records, made into protobuf at the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from onnx.onnx_ml_pb2 import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    OperatorSetIdProto,
    StringStringEntryProto,
    TensorProto,
    TypeProto,
    ValueInfoProto,
)

from irc.ir.dims import Dim, DimLike
from irc.ir.dtypes import DTYPES as IR_DTYPES
from irc.ir.dtypes import dtype_of
from irc.ir.types import Axes
from irc.onnx_format.operators import COLLECTIVE as COLLECTIVE
from irc.onnx_format.operators import DOMAIN as DOMAIN

OPSET, IR_VERSION = 24, 11  # the newest whose operators ONNX Runtime 1.31 all runs
DTYPES: dict[str, int] = {name: dtype.onnx for name, dtype in IR_DTYPES.items()}

Attribute: TypeAlias = int | float | str | Sequence[int] | TensorProto


@dataclass
class Node:
    """One ONNX node; `name` and `where` tell which IR operation it belongs to.

    `kind` is the operator, as `domain::operator` where it is not one of ONNX itself.
    """

    kind: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Attribute]
    name: str = ""
    where: str = ""


@dataclass
class Graph:
    """Nodes, initializers and typed values under construction. Every value has one name.

    `positions` are the initializers that hold a rank's position along mesh axes, `groups` the axes
    of every DistCollective, in order: `per_rank.py` fills both in.
    """

    nodes: list[Node] = field(default_factory=list)
    initializers: dict[str, TensorProto] = field(default_factory=dict)
    inputs: list[ValueInfoProto] = field(default_factory=list)
    outputs: list[ValueInfoProto] = field(default_factory=list)
    values: dict[str, ValueInfoProto] = field(default_factory=dict)
    positions: dict[str, Axes] = field(default_factory=dict)
    groups: list[Axes] = field(default_factory=list)
    taken: dict[str, int] = field(default_factory=dict)  # name -> the last number that followed it
    renamed: dict[str, str] = field(default_factory=dict)
    prefix: str = ""  # of the names that get no other
    node_name: str = ""
    where: str = ""

    def fresh(self, base: str) -> str:
        """`base`, or `base.1`, ... where that is taken; taken from now on."""
        name, n = base, self.taken.get(base, 0)
        while name in self.taken:
            n += 1
            name = f"{base}.{n}"
        self.taken[name], self.taken[base] = 0, n
        return name

    def several(self, count: int, kind: str, *inputs: str, **attributes: Attribute) -> list[str]:
        """Add a node of `count` outputs; returns their names."""
        plain = kind.rpartition("::")[2]
        names = [self.fresh(f"{self.prefix}/{plain}") for _ in range(count)]
        given = list(inputs)
        while given and not given[-1]:
            given.pop()  # an absent input at the end is not written
        self.nodes.append(Node(kind, given, names, attributes, self.node_name, self.where))
        return [*names]

    def add(self, kind: str, *inputs: str, **attributes: Attribute) -> str:
        """Add a node of one output; returns the name of the output."""
        return self.several(1, kind, *inputs, **attributes)[0]

    def constant(self, values: np.ndarray) -> str:
        """An initializer inside the model, named after its few numbers; equal ones are shared."""
        proto = tensor(values)
        shown = ",".join(map(str, values.reshape(-1)[:8].tolist()))
        more = ",..." if values.size > 8 else ""
        text = f"{dtype_of(values)}[{shown}{more}]" if values.ndim else str(values[()])
        base = text if values.ndim else f"{dtype_of(values)}:{text}"
        name, n = base, 0
        while name in self.initializers and not _same(self.initializers[name], proto):
            n += 1
            name = f"{base}.{n}"
        if name not in self.initializers:
            name = self.fresh(name)
            proto.name = name
            self.initializers[name] = proto
        return name

    def rename(self, old: str, new: str) -> None:
        """The value `old` gets another name, wherever it is used."""
        self.renamed[old] = new

    def now(self, name: str) -> str:
        """The final name of a value."""
        while name in self.renamed:
            name = self.renamed[name]
        return name

    def model(self, name: str, metadata: Mapping[str, str]) -> ModelProto:
        """Everything as protobuf."""
        proto = GraphProto(name=name)
        proto.node.extend(self._node(node) for node in self.nodes)
        proto.initializer.extend(self.initializers.values())
        proto.input.extend(self.inputs)
        proto.output.extend(self.outputs)
        shown = {v.name for v in (*self.inputs, *self.outputs)}
        for old, value in self.values.items():
            value.name = self.now(old)
            if value.name not in shown:
                shown.add(value.name)
                proto.value_info.append(value)
        model = ModelProto(ir_version=IR_VERSION, producer_name="irc", graph=proto)
        opset = 26 if any(node.op_type == "BitCast" for node in proto.node) else OPSET
        model.opset_import.append(OperatorSetIdProto(domain="", version=opset))
        for domain in sorted({node.domain for node in proto.node if node.domain}):
            model.opset_import.append(OperatorSetIdProto(domain=domain, version=1))
        model.metadata_props.extend(entries(metadata))
        return model

    def _node(self, node: Node) -> NodeProto:
        domain, _, kind = node.kind.rpartition("::")
        proto = NodeProto(op_type=kind, domain=domain)
        proto.input.extend(self.now(i) for i in node.inputs)
        proto.output.extend(self.now(o) for o in node.outputs)
        proto.name = f"{node.name}/{kind}.{proto.output[0]}"
        for key, value in node.attributes.items():
            proto.attribute.append(attribute(key, value))
        if node.where:
            proto.metadata_props.extend(entries({"loc": node.where}))
        return proto


def _same(a: TensorProto, b: TensorProto) -> bool:
    return (a.data_type, list(a.dims), a.raw_data) == (b.data_type, list(b.dims), b.raw_data)


def entries(pairs: Mapping[str, str]) -> Iterable[StringStringEntryProto]:
    """Pairs of strings as protobuf."""
    return [StringStringEntryProto(key=key, value=value) for key, value in pairs.items()]


def tensor(values: np.ndarray) -> TensorProto:
    """An array as bytes inside the model."""
    proto = TensorProto(data_type=DTYPES[dtype_of(values)])
    proto.dims.extend(values.shape)
    proto.raw_data = np.ascontiguousarray(values).tobytes()
    return proto


def attribute(name: str, value: Attribute) -> AttributeProto:
    """A node's attribute, typed by its Python value."""
    proto = AttributeProto(name=name)
    if isinstance(value, TensorProto):
        proto.type = AttributeProto.TENSOR
        proto.t.CopyFrom(value)
    elif isinstance(value, float):
        proto.type, proto.f = AttributeProto.FLOAT, value
    elif isinstance(value, int):
        proto.type, proto.i = AttributeProto.INT, int(value)
    elif isinstance(value, str):
        proto.type, proto.s = AttributeProto.STRING, value.encode()
    else:
        proto.type = AttributeProto.INTS
        proto.ints.extend(value)
    return proto


def value_info(name: str, dtype: str, shape: Sequence[DimLike]) -> ValueInfoProto:
    """A typed value; a symbolic dimension is written as its text."""
    type = TypeProto()
    type.tensor_type.elem_type = DTYPES[dtype]
    type.tensor_type.shape.SetInParent()  # of rank 0 where no dimension follows
    for dim in shape:
        entry = type.tensor_type.shape.dim.add()
        if isinstance(dim, Dim):
            entry.dim_param = str(dim)
        else:
            entry.dim_value = dim
    return ValueInfoProto(name=name, type=type)

"""The text of a module in the metadata of the ONNX file that irc wrote of it, and its checksum.

In the text every weight is `unbound("NAME")`, where NAME is the initializer (or input) that holds
its bytes, with a slice where padding follows them. The checksum covers the graph that the text
describes, so that a file that was edited afterwards is read by its nodes. Nothing here imports
onnx: messages of protobuf are only read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

from ..ir.core import Function, Module, Weight, reached
from ..text.printer import print_module
from ..weights import Ref

TEXT, CHECKSUM = "irc.text", "irc.checksum"


def text_of(module: Module, function: Function, held: Callable[[Weight], Ref]) -> str:
    """The text of one function and those it calls; `held` refers to the initializer of a weight."""
    part = Module(module.name, module.mesh, module.dims, module.local)
    used = {op.attributes["callee"] for op in reached(function, set()) if op.opname == "call"}
    for callee in module.functions.values():
        if callee in used:
            part.add_function(callee)
    part.add_function(function)
    needed = {v for op in part.ops() for v in op.operands if isinstance(v, Weight)}
    for weight in module.weights.values():
        if weight in needed:
            part.weights[weight.name] = Weight(weight.type, weight.name, held(weight))
    return print_module(part, locs=True)


def checksum(graph: Any, constant: Callable[[Any], bytes]) -> str:
    """The SHA-256 of nodes, inputs, outputs and constants of a GraphProto, in hexadecimal.

    `constant` gives the bytes of an initializer that lies inside the file; of those outside only
    name, dtype and shape count.
    """
    digest = hashlib.sha256()
    many: Iterable[Any] = (*graph.node, *graph.input, *graph.output)
    for message in many:
        digest.update(message.SerializeToString(deterministic=True))
    for tensor in graph.initializer:
        digest.update(f"{tensor.name} {tensor.data_type} {list(tensor.dims)}".encode())
        if not any(entry.key == "location" and entry.value for entry in tensor.external_data):
            digest.update(constant(tensor))
    return digest.hexdigest()

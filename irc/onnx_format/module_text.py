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
    found = Module(module.name, module.mesh, module.dims, module.local)
    used = {op.attributes["callee"] for op in reached(function, set()) if op.opname == "call"}
    for each in module.functions.values():
        if each in used:
            found.add_function(each)
    found.add_function(function)
    needed = {v for op in found.ops() for v in op.operands if isinstance(v, Weight)}
    for weight in module.weights.values():
        if weight in needed:
            found.weights[weight.name] = Weight(weight.type, weight.name, held(weight))
    return print_module(found, locs=True)


def checksum(graph: Any, constant: Callable[[Any], bytes]) -> str:
    """The SHA-256 of nodes, inputs, outputs and constants of a GraphProto, in hexadecimal.

    `constant` gives the bytes of an initializer that lies inside the file; of those outside only
    name, dtype and shape count.
    """
    found = hashlib.sha256()
    many: Iterable[Any] = (*graph.node, *graph.input, *graph.output)
    for message in many:
        found.update(message.SerializeToString(deterministic=True))
    for tensor in graph.initializer:
        found.update(f"{tensor.name} {tensor.data_type} {list(tensor.dims)}".encode())
        if not any(each.key == "location" and each.value for each in tensor.external_data):
            found.update(constant(tensor))
    return found.hexdigest()

"""Checks of any ONNX file: how its names fit together, where its data may be, what is text.

Nothing here imports onnx: protobuf messages are only read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import Any, TypeAlias

Wires: TypeAlias = tuple[Sequence[str], Sequence[str]]  # the operands and results of a node

_STRING, _MESSAGE = 9, 11  # FieldDescriptor.type, which the encoding of protobuf fixes


@dataclass(frozen=True)
class Wiring:
    """How the names of a graph fit together; nodes count from 0.

    `missing` are (node, operand that nothing computes). `duplicates` are (node, result whose name
    another value has); the node is -1 for two inputs. `cycle` are values that each depend on the
    one before, and the first on the last. `unordered` says that a node precedes one it depends on.
    """

    missing: tuple[tuple[int, str], ...]
    duplicates: tuple[tuple[int, str], ...]
    cycle: tuple[str, ...]
    unordered: bool


def wiring(defined: Iterable[str], nodes: Sequence[Wires]) -> Wiring:
    """How nodes fit together; `known` are inputs and constants, and "" is an absent operand."""
    names, duplicates = {""}, list[tuple[int, str]]()
    for name in defined:
        duplicates += [(-1, name)] if name in names else []
        names.add(name)
    makers: dict[str, int] = {}
    for i, (_, results) in enumerate(nodes):
        for name in filter(None, results):
            if name in names or name in makers:
                duplicates.append((i, name))
            makers.setdefault(name, i)
    missing = [
        (i, name)
        for i, (operands, _) in enumerate(nodes)
        for name in dict.fromkeys(operands)
        if name not in names and name not in makers
    ]
    needs = [
        {makers[name]: name for name in operands if name in makers and name not in names}
        for operands, _ in nodes
    ]
    unordered = any(maker >= i for i, needed in enumerate(needs) for maker in needed)
    return Wiring(tuple(missing), tuple(duplicates), _cycle(needs), unordered)


def _cycle(needs: Sequence[dict[int, str]]) -> tuple[str, ...]:
    """The values of one cycle, if there is any; `needs` are each node's makers and their values."""
    try:
        TopologicalSorter({i: needed.keys() for i, needed in enumerate(needs)}).prepare()
    except CycleError as error:
        nodes: list[int] = error.args[1]  # each is a maker for the next; the last is the first
        return tuple(needs[user][maker] for maker, user in pairwise(nodes))
    return ()


def leaves_folder(location: str) -> bool:
    """Whether external data is outside the folder that its location starts from."""
    return os.path.isabs(location) or ".." in location.split("/")


def is_text(message: Any) -> bool:
    """Whether all strings of a protobuf message are UTF-8; others are read as bytes."""
    for field, value in message.ListFields():
        if field.type not in (_STRING, _MESSAGE):
            continue
        many = [value] if isinstance(value, (str, bytes)) or hasattr(value, "ListFields") else value
        if field.type == _STRING and not all(isinstance(item, str) for item in many):
            return False
        if field.type == _MESSAGE and not all(map(is_text, many)):
            return False
    return True

"""What holds of every ONNX file, whoever reads it: how names fit together, where data may lie.

Nothing here imports onnx: messages of protobuf are taken as they come.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Wires: TypeAlias = tuple[Sequence[str], Sequence[str]]  # what a node takes, what it makes

_STRING, _MESSAGE = 9, 11  # FieldDescriptor.type, as the encoding of protobuf fixes them


@dataclass(frozen=True)
class Wiring:
    """How the names of a graph fit together; nodes are counted from 0.

    `lost` are (node, value): taken, and made by nothing. `twice` are (node, value): made although
    another value has the name; the node is -1 where both are inputs. `circle` are values each of
    which needs the one before, and the first the last. `early` says that some node stands before
    one that it needs.
    """

    lost: tuple[tuple[int, str], ...]
    twice: tuple[tuple[int, str], ...]
    circle: tuple[str, ...]
    early: bool


def wiring(given: Iterable[str], nodes: Sequence[Wires]) -> Wiring:
    """How nodes fit together; `given` are inputs and constants, and "" stands for no value."""
    known, twice = {""}, list[tuple[int, str]]()
    for name in given:
        twice += [(-1, name)] if name in known else []
        known.add(name)
    makers: dict[str, int] = {}
    for i, (_, outputs) in enumerate(nodes):
        for name in filter(None, outputs):
            if name in known or name in makers:
                twice.append((i, name))
            makers.setdefault(name, i)
    lost = [
        (i, name)
        for i, (inputs, _) in enumerate(nodes)
        for name in dict.fromkeys(inputs)
        if name not in known and name not in makers
    ]
    needs = [
        {name: makers[name] for name in inputs if name in makers and name not in known}
        for inputs, _ in nodes
    ]
    early = any(maker >= i for i, needed in enumerate(needs) for maker in needed.values())
    return Wiring(tuple(lost), tuple(twice), _circle(needs) if early else (), early)


def _circle(needs: Sequence[Mapping[str, int]]) -> tuple[str, ...]:
    """The values of one circle, if there is any."""
    waiting = [set(needed.values()) for needed in needs]
    users: dict[int, list[int]] = {}
    for i, makers in enumerate(waiting):
        for maker in makers:
            users.setdefault(maker, []).append(i)
    ready = [i for i, makers in enumerate(waiting) if not makers]
    while ready:
        done = ready.pop()
        for user in users.get(done, ()):
            waiting[user].discard(done)
            if not waiting[user]:
                ready.append(user)
    at = next((i for i, makers in enumerate(waiting) if makers), None)
    path: dict[int, str] = {}  # node -> the value that it waits for
    while at is not None and at not in path:
        path[at], at = next((n, m) for n, m in needs[at].items() if m in waiting[at])
    places = list(path)
    return tuple(reversed([path[i] for i in places[places.index(at) :]])) if at is not None else ()


def leaves_folder(location: str) -> bool:
    """Whether external data lies outside the folder that its location starts from."""
    return os.path.isabs(location) or ".." in location.split("/")


def is_text(message: Any) -> bool:
    """Whether all strings of a message of protobuf are UTF-8; those that are not come as bytes."""
    for field, value in message.ListFields():
        if field.type not in (_STRING, _MESSAGE):
            continue
        many = [value] if isinstance(value, (str, bytes)) or hasattr(value, "ListFields") else value
        if field.type == _STRING and not all(isinstance(each, str) for each in many):
            return False
        if field.type == _MESSAGE and not all(map(is_text, many)):
            return False
    return True

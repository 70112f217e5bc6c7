"""Where a node came from, by what exporters leave in its name and metadata."""

from __future__ import annotations

import re
from collections.abc import Mapping

from irc.frontends.onnx.entry import Node
from irc.source import Loc

_PLACE = re.compile(r"(.*):(\d+)")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_SCOPES = ("pkg.torch.onnx.name_scopes", "namespace")


def locate(node: Node, metadata: Mapping[str, str], file: str) -> None:
    """Fill in the location of a node, and in a file of our own the operation that it was for.

    What tells no line is located in the ONNX file, at the number of the node.
    """
    if node.own:
        _own(node)
    scope = _scope(node, metadata)
    place = _place(metadata)
    node.loc = Loc(*place, scope) if place is not None else Loc(file, node.number, scope)


def _own(node: Node) -> None:
    """Our nodes are called `scope/opname/Kind.output`."""
    first = node.outputs[0] if node.outputs else ""
    end = f"/{node.kind}.{first}"
    if not node.name.endswith(end):
        return
    node.opname = node.name[: -len(end)].rpartition("/")[2]
    inner = re.fullmatch(rf"(?s).*/{re.escape(node.kind)}(\.\d+)?", first)
    node.final = inner is None and node.opname != "return"


def _scope(node: Node, metadata: Mapping[str, str]) -> str:
    if node.own:
        return node.name.rpartition(f"/{node.opname}/")[0] if node.opname else ""
    text = metadata.get(_SCOPES[0])
    if text is not None:  # a list of names, each longer than the one before; the last is the node
        names = re.findall(r"'([^']*)'", text)
        if len(names) > 1:
            return names[-2]
    path = node.name.strip("/").split("/")
    return ".".join(part for part in path[:-1] if part)


def _place(metadata: Mapping[str, str]) -> tuple[str, int] | None:
    found = _PLACE.fullmatch(metadata.get("loc", ""))
    if found is not None:
        return found[1], int(found[2])
    frames = _FRAME.findall(metadata.get("pkg.torch.onnx.stack_trace", ""))
    return (frames[-1][0].rpartition("/")[2], int(frames[-1][1])) if frames else None

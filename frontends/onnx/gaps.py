"""Everything of a file that cannot be read, found before anything is built."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from irc.errors import Error
from irc.frontends.onnx.entry import Node
from irc.frontends.onnx.rules import refusal

_SHOWN = 20  # kinds of nodes; what is left is counted


def check(nodes: Iterable[Node], path: Path) -> None:
    """An Error that lists the nodes without a reading, by kind and reason."""
    found: dict[tuple[str, str], list[Node]] = {}
    for node in nodes:
        reason = refusal(node)
        if reason is not None:
            kind = f"{node.domain}.{node.kind}" if node.domain else node.kind
            found.setdefault((kind, reason), []).append(node)
    if not found:
        return
    count = sum(map(len, found.values()))
    error = Error(f"{path} has {count} node{'s' * (count != 1)} that irc cannot read:")
    for (kind, reason), group in list(found.items())[:_SHOWN]:
        error.add_note(f"{kind} ({len(group)}): {reason}; {_where(group)}")
    if len(found) > _SHOWN:
        error.add_note(f"and {len(found) - _SHOWN} kinds more")
    raise error


def _where(group: list[Node]) -> str:
    """The first nodes of a group, with their place."""
    shown = [f"{node.name or f'node {node.number}'!s}{_line(node)}" for node in group[:3]]
    more = f" and {len(group) - 3} more" if len(group) > 3 else ""
    return ", ".join(shown) + more


def _line(node: Node) -> str:
    return f" at {node.loc.where()}" if node.loc is not None else ""

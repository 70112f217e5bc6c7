"""The nodes of a file that cannot be read, collected while all others are read."""

from __future__ import annotations

from pathlib import Path

from irc.errors import Error
from irc.frontends.onnx.entry import Node

_SHOWN = 20  # kinds of nodes; the others are counted


class Unsupported:
    """The nodes that are refused, by kind and reason; nodes that need their results are skipped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[tuple[str, str], list[Node]] = {}
        self.nodes: set[Node] = set()
        self.values: set[str] = set()  # the results of nodes that were not read
        self.behind = 0
        self.hint = ""  # a note for refusals by rules
        self._errors: list[Error | None] = []  # of every node; None where its kind is refused

    def add(self, node: Node, reason: str, error: Error | None = None) -> None:
        """Note that a node cannot be read; `error` is what its rule raised."""
        kind = f"{node.domain}.{node.kind}" if node.domain else node.kind
        self.found.setdefault((kind, reason), []).append(node)
        self.nodes.add(node)
        self.values.update(node.outputs)
        self._errors.append(error)

    def skips(self, node: Node, inputs: list[str]) -> bool:
        """Whether a node is refused itself, or takes a result of one that is."""
        if node in self.nodes:
            return True
        if self.values.isdisjoint(filter(None, inputs)):
            return False
        self.values.update(node.outputs)
        self.behind += 1
        return True

    def check(self) -> None:
        """Raise an Error that lists all nodes, if any; a sole refusal by a rule as it is."""
        if not self.nodes:
            return
        sole = self._errors[0] if len(self._errors) == 1 else None
        error = sole or self._listed()
        if self.behind:
            were = "needs them and was" if self.behind == 1 else "need them and were"
            error.add_note(f"{_count(self.behind, 'node')} more {were} not checked")
        if self.hint and any(self._errors):
            error.add_note(self.hint)
        raise error from (error.__cause__ if sole else None)

    def _listed(self) -> Error:
        error = Error(f"{self.path} has {_count(len(self.nodes), 'node')} that irc cannot read:")
        for (kind, reason), group in list(self.found.items())[:_SHOWN]:
            error.add_note(f"{kind} ({len(group)}): {reason}; {_where(group)}")
        if len(self.found) > _SHOWN:
            error.add_note(f"and {len(self.found) - _SHOWN} kinds more")
        return error


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _where(group: list[Node]) -> str:
    """The first nodes of a group, with their places."""
    shown = [
        (node.name or f"node {node.number}") + (f" at {node.loc.where()}" if node.loc else "")
        for node in group[:3]
    ]
    more = f" and {len(group) - 3} more" if len(group) > 3 else ""
    return ", ".join(shown) + more

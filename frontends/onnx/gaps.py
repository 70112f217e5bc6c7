"""Everything of a file that cannot be read, collected while what does not need it is read."""

from __future__ import annotations

from pathlib import Path

from irc.errors import Error
from irc.frontends.onnx.entry import Node

_SHOWN = 20  # kinds of nodes; what is left is counted


class Gaps:
    """The nodes that are refused, by kind and reason; what needs them is left out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[tuple[str, str], list[Node]] = {}
        self.nodes: set[Node] = set()
        self.values: set[str] = set()  # what nodes that were not read would have made
        self.behind = 0
        self.hint = ""  # what may help where a rule refuses
        self._ruled = False
        self._only: Error | None = None

    def add(self, node: Node, reason: str) -> None:
        """A node cannot be read."""
        kind = f"{node.domain}.{node.kind}" if node.domain else node.kind
        self.found.setdefault((kind, reason), []).append(node)
        self.nodes.add(node)
        self.values.update(node.outputs)
        self._only = None

    def refused(self, node: Node, error: Error) -> None:
        """The rule of a node refused it."""
        first, self._ruled = not self.nodes, True
        self.add(node, error.message)
        self._only = error if first else None

    def skips(self, node: Node, inputs: list[str]) -> bool:
        """Whether a node has to be left out, itself refused or in need of one that is."""
        if node in self.nodes:
            return True
        if self.values.isdisjoint(filter(None, inputs)):
            return False
        self.values.update(node.outputs)
        self.behind += 1
        return True

    def check(self) -> None:
        """An Error that lists all of it, if there is any; a sole refusal of a rule is the Error."""
        if not self.nodes:
            return
        error = self._only or self._listed()
        if self.behind:
            were = "was" if self.behind == 1 else "were"
            error.add_note(f"{_count(self.behind, 'node')} behind them {were} not looked at")
        if self.hint and self._ruled:
            error.add_note(self.hint)
        raise error from (error.__cause__ if error is self._only else None)

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
    """The first nodes of a group, with their place."""
    shown = [f"{node.name or f'node {node.number}'!s}{_line(node)}" for node in group[:3]]
    more = f" and {len(group) - 3} more" if len(group) > 3 else ""
    return ", ".join(shown) + more


def _line(node: Node) -> str:
    return f" at {node.loc.where()}" if node.loc is not None else ""

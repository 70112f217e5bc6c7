"""Turns the events of the builder's process into an Error with the user's line."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from irc.artifact.manifest import Progress
from irc.backends.tensorrt.builder.model import Model, Node
from irc.backends.tensorrt.builder.process import Ended
from irc.errors import Error
from irc.source import Loc

_KIND = re.compile(r"([A-Za-z]+) (?:operation|operator|layer|node)\b")
_SCARCE = re.compile(r"workspace|out ?of ?memory|requested size", re.IGNORECASE)
_COMPILER = re.compile(r"myelin|could not find any implementation", re.IGNORECASE)
_SHOWN = 3  # nodes listed that an error may be about


class CompilerFailure(Error):
    """The library's compiler failed on a graph that its parser took; `kinds` are those of the nodes
    that it may be about."""

    def __init__(self, message: str, kinds: Iterable[str], loc: Loc | None = None) -> None:
        super().__init__(message, loc=loc)
        self.kinds = frozenset(kinds)


@dataclass
class Events:
    """The events of one build; `limited`: whether the user limited the workspace."""

    model: Model
    library: str  # `TensorRT-RTX 1.7.1.116`
    engine: str
    progress: Progress
    limited: bool = False
    done: dict[str, Any] | None = None
    failures: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    def add(self, event: dict[str, Any]) -> None:
        """Process one event of `child.py`."""
        match event["event"]:
            case "progress":
                self.progress(f"building {self.engine}", event["fraction"])
            case "done":
                self.done = event
            case kind:
                self.failures[kind] = event

    def problem(self, ended: Ended) -> Error | OSError | None:
        """Why the build failed, or None if it succeeded."""
        match self.failures:
            case {"plugin": plugin}:  # raised, whatever the library made of it afterwards
                return self._in_plugin(plugin["text"])
            case {"error": error}:
                return Error(error["text"])
            case {"disk": disk}:
                return OSError(disk["number"], disk["text"])
            case {"unused": unused}:
                return self._unused(unused["names"])
            case {"refused": refused}:
                return self._refused(refused["step"], refused["errors"], ended)
            case _:
                return self._crashed(ended) if ended.status or self.done is None else None

    def _refused(self, step: str, errors: list[dict[str, str]], ended: Ended) -> Error:
        found = list(dict.fromkeys(self._attribute(each) for each in errors))
        if not found:
            found = [((), ended.last_line or "the library gave no reason")]
        advice = ""
        if self.limited and any(_SCARCE.search(reason) for _, reason in found):
            advice = "; raise --workspace, or leave it out"
        (nodes, reason), *others = found
        node = nodes[0] if len(nodes) == 1 else None
        what = str(node) if node else f"{self.engine} ({step})"
        more = [f"\n  {_label(about) or step}: {_shown(about, text)}" for about, text in others]
        reason = _shown(nodes, reason)
        text = f"{self.library} cannot build {what}: {reason}{''.join(more)}{advice}"
        loc = node.loc if node else None
        if advice or not _COMPILER.search(text):
            return Error(text, loc=loc)
        named = {each.kind for about, _ in found for each in about}
        return CompilerFailure(text, named or self._kinds, loc)

    @property
    def _kinds(self) -> set[str]:
        return {node.kind for node in self.model.nodes.values()}

    def _attribute(self, error: dict[str, str]) -> tuple[tuple[Node, ...], str]:
        """(the nodes that an error may be about, its text).

        The parser names the node. The builder does so only in the text, or mentions its kind, as
        in `Attention operation`.
        """
        text = error["text"]
        node = self.model.nodes.get(error["node"])
        found = [node] if node is not None else self.model.mentioned(text) or self._of_kinds(text)
        return tuple(found), text

    def _of_kinds(self, text: str) -> list[Node]:
        """The nodes of the kinds that a text mentions."""
        words = {word.lower() for word in _KIND.findall(text)}
        return [
            node
            for node in self.model.nodes.values()
            if node.kind.removeprefix("TRT_").removesuffix("Linear").lower() in words
        ]

    def _crashed(self, ended: Ended) -> Error:
        if ended.status == -signal.SIGKILL:
            return Error(
                f"the process that built {self.engine} was killed, most likely because memory ran "
                "out; free some, or compile with --weights outside"
            )
        output = f", with the output {ended.last_line!r}" if ended.last_line else ""
        return CompilerFailure(
            f"{self.library} crashed ({_signal(ended.status)}{output}) while building "
            f"{self.engine}; use another version of the library, or other operations there",
            self._kinds,
        )

    def _unused(self, names: list[str]) -> Error:
        """The inputs that the parser ignored, with the nodes that should read them."""
        lines: list[str] = []
        for name in names:
            readers = [node for node in self.model.nodes.values() if name in node.inputs]
            if not readers:
                lines.append(f"{name}, which no node reads")
            for node in readers:
                position = node.inputs.index(name)
                lines.append(f"{name}, which is input {position} of {node.label}")
        return Error(
            f"{self.library} ignores inputs of {self.model.path.name}, so the engine would compute "
            "something else:" + "".join(f"\n  {line}" for line in lines)
        )

    def _in_plugin(self, text: str) -> Error:
        node = next(iter(self.model.mentioned(text)), None)
        if node is None:
            return Error(f"a plugin of {self.model.path.name} failed: {text}")
        return Error(f"{node} failed: {text.removeprefix(f'{node.name}: ')}", loc=node.loc)


def _label(nodes: tuple[Node, ...]) -> str:
    return nodes[0].label if len(nodes) == 1 else ""


def _shown(nodes: tuple[Node, ...], text: str) -> str:
    """The text of an error, with the nodes that it may be about if they are several."""
    if len(nodes) <= 1:
        return text
    more = f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else ""
    return f"{text}; it may be about {', '.join(each.label for each in nodes[:_SHOWN])}{more}"


def _signal(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"

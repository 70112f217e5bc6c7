"""The Error of a build that failed: what the library cannot build, with the user's line."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from irc.backends.tensorrt.builder.model import Model, Node
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


@dataclass(frozen=True)
class Ended:
    """How the building process ended: its last event if it sent one, its status (negative: the
    signal), and the last line that it printed."""

    event: Mapping[str, Any]
    status: int
    line: str


def failure_of(
    model: Model, library: str, engine: str, limited: bool, ended: Ended
) -> Error | OSError:
    """Why there is no engine; `limited`: whether the user limited the workspace."""
    if "errno" in ended.event:
        return OSError(ended.event["errno"], ended.event["text"])
    if "text" in ended.event:
        return Error(f"cannot build {engine}: {ended.event['text']}")
    if not ended.event:
        return _crash(model, library, engine, ended)
    errors = ended.event["errors"]
    nodes = list(dict.fromkeys(node for error in errors for node in _nodes(model, error)))
    texts = dict.fromkeys(error["text"] for error in errors if error["text"])
    reason = "; ".join(texts) or ended.line or "the library gives no reason"
    node = nodes[0] if len(nodes) == 1 else None
    what = str(node) if node else f"{engine} ({ended.event['step']})"
    message = f"{library} cannot build {what}: {reason}"
    if len(nodes) > 1:
        more = f" and {len(nodes) - _SHOWN} more" if len(nodes) > _SHOWN else ""
        message += f"; it may be about {', '.join(map(_place, nodes[:_SHOWN]))}{more}"
    loc = node.loc if node else None
    if limited and _SCARCE.search(message):
        return Error(f"{message}; raise --workspace, or leave it out", loc=loc)
    if not _COMPILER.search(message):
        return Error(message, loc=loc)
    return CompilerFailure(message, {node.kind for node in nodes or model.nodes.values()}, loc)


def _nodes(model: Model, error: Mapping[str, str]) -> list[Node]:
    """The nodes that an error is about: the parser names one, or ignores an input of the network.
    The builder names them only in the text, or mentions their kind, as in `Attention operation`."""
    if error["node"] in model.nodes:
        return [model.nodes[error["node"]]]
    nodes = model.nodes.values()
    if error["input"]:
        return [node for node in nodes if error["input"] in node.inputs]
    words = {word.lower() for word in _KIND.findall(error["text"])}
    return model.mentioned(error["text"]) or [node for node in nodes if _word(node.kind) in words]


def _word(kind: str) -> str:
    return kind.removeprefix("TRT_").removesuffix("Linear").lower()


def _place(node: Node) -> str:
    """The node after its place, `model.py:12 in layers.0: `, if that is known."""
    return f"{node.loc.where()}: {node}" if node.loc is not None else str(node)


def _crash(model: Model, library: str, engine: str, ended: Ended) -> Error:
    if ended.status == -signal.SIGKILL:
        return Error(
            f"the process that built {engine} was killed, most likely because memory ran out; free "
            "some, or compile with --weights outside"
        )
    status = signal.strsignal(-ended.status) if ended.status < 0 else f"exit status {ended.status}"
    output = f", with the output {ended.line!r}" if ended.line else ""
    return CompilerFailure(
        f"{library} crashed ({status}{output}) while building {engine}; use another version of the "
        "library, or other operations there",
        {node.kind for node in model.nodes.values()},
    )

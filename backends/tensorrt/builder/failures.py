"""Makes sentences of what goes wrong in the builder's process, with the user's line."""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from irc.artifact import Progress
from irc.backends.tensorrt.builder import messages
from irc.backends.tensorrt.builder.model import Model, Node
from irc.backends.tensorrt.builder.process import Ended
from irc.errors import Error

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PLUGIN = re.compile(r"\[ERROR\] Exception (?:thrown from|caught in) \w+\(\):? (?P<text>.*)")
_KIND = re.compile(r"([A-Za-z]+) (?:operation|operator|layer|node)\b")
_SCARCE = re.compile(r"workspace|out ?of ?memory|requested size", re.IGNORECASE)
_SHOWN = 3  # nodes that one message of the library is attributed to
_LONGEST = 200  # characters shown of a layer's name


@dataclass
class Hearing:
    """What the builder's process has said so far, and what it is working on.

    `limited`: whether the user has limited the memory of kernels.
    """

    model: Model
    library: str  # `TensorRT-RTX 1.7.1.116`
    engine: str
    progress: Progress
    limited: bool = False
    parsing: tuple[str, str] = ("", "")
    layer: str = ""
    unused: list[str] = field(default_factory=list[str])
    last: dict[str, Any] = field(default_factory=dict[str, Any])
    plugin: str = ""  # what a plugin raised
    done: dict[str, Any] | None = None

    def hear(self, event: dict[str, Any]) -> None:
        """Take one event of `child.py`."""
        match event["event"]:
            case "stage":
                self.parsing = ("", "")
                self.progress(f"building {self.engine}", event["fraction"])
            case "node":
                self.parsing = (event["name"], event["kind"])
            case "layer":
                self.layer = event["name"]
            case "unused":
                self.unused.append(event["name"])
            case "plugin":
                self.plugin = event["text"]
            case "done":
                self.done = event
            case _:
                self.last = event

    def problem(self, ended: Ended) -> Error | None:
        """What went wrong, or None where an engine was built that is as it should be."""
        unused = [name for name in self.unused if name in self.model.inputs]
        printed = _PLUGIN.search(ended.words)
        raised = self.plugin or (printed["text"] if printed else "")
        if raised:
            return self._in_plugin(raised)
        if self.last:
            return self._refused(self.last, ended)
        if ended.status or self.done is None:
            return self._crashed(ended)
        if unused:
            return self._unused(unused)
        return None

    def _refused(self, said: dict[str, Any], ended: Ended) -> Error:
        if said["event"] == "error":
            return Error(said["text"])
        if said["event"] == "disk":
            return _disk(said, self.engine)
        found = [self._finding(each) for each in said["errors"]] or [(None, "it gave no reason")]
        found = list(dict.fromkeys(found))
        nodes = [node for node, _ in found if node is not None]
        if len(found) == 1:
            node, reason = found[0]
            what = f"{node}" if node else f"{self.engine} ({said['doing']})"
            text = f"{self.library} cannot build {what}: {reason}{self._advice([reason])}"
            return Error(text, loc=_loc(node))
        lines = [f"  {_place(node)}{node or said['doing']}: {reason}" for node, reason in found]
        what = f"{len(nodes)} nodes of {self.model.path.name}" if nodes else self.engine
        advice = self._advice([reason for _, reason in found])
        return Error(f"{self.library} cannot build {what}:\n" + "\n".join(lines) + advice)

    def _advice(self, reasons: Iterable[str]) -> str:
        """What the user can do about reasons where memory was limited."""
        scarce = self.limited and any(_SCARCE.search(reason) for reason in reasons)
        return "; raise --workspace, or leave it out" if scarce else ""

    def _finding(self, said: dict[str, str]) -> tuple[Node | None, str]:
        """The node that one of the library's errors is about, and the reason in its words."""
        reason = messages.reason(said["text"])
        node = self.model.find(said["node"])
        if node is not None:
            return node, reason
        mentioned = self.model.mentioned(said["text"]) or self._suspects(reason)
        if len(mentioned) == 1:
            return mentioned[0], reason
        if mentioned:
            shown = [f"{_place(each)}{each}" for each in mentioned[:_SHOWN]]
            return None, f"{reason}; it may be about {', '.join(shown)}"
        return None, f"{reason} (while building {self._layer()})" if self.layer else reason

    def _suspects(self, reason: str) -> list[Node]:
        """The nodes in work whose kind a message speaks of, as in `Attention operation`."""
        words = {word.lower() for word in _KIND.findall(reason)}
        return [
            node
            for node in self._in_work()
            if node.kind.removeprefix("TRT_").removesuffix("Linear").lower() in words
        ]

    def _in_work(self) -> list[Node]:
        """The nodes that became the layer in work.

        TensorRT calls what it compiles as one `{ForeignNode[first...last]}`.
        """
        nodes = [*self.model.nodes.values()]
        named = {id(node) for node in self.model.mentioned(self.layer)}
        places = [i for i, node in enumerate(nodes) if id(node) in named]
        return nodes[places[0] : places[-1] + 1] if places else []

    def _layer(self) -> str:
        """The layer in work, in words."""
        nodes = self._in_work()
        if not nodes:
            return self.layer[:_LONGEST]
        first, last = (f"{_place(node)}{node}" for node in (nodes[0], nodes[-1]))
        return f"the kernels from {first} to {last}" if len(nodes) > 1 else first

    def _crashed(self, ended: Ended) -> Error:
        node = self.model.find(self.parsing[0])
        verb = "parsing" if node is not None else "building"
        if node is None and len(nodes := self._in_work()) == 1:
            node = nodes[0]
        at = str(node) if node is not None else self._layer() if self.layer else ""
        doing = f"while {verb} {at}" if at else f"while starting on {self.model.path.name}"
        if ended.status == -signal.SIGKILL:
            return Error(
                f"the process that built {self.engine} was killed {doing}, most likely because "
                "memory ran out; free some, or compile with --weights outside",
                loc=_loc(node),
            )
        words = [line for line in ended.words.strip().splitlines() if line.strip()]
        said = f", saying {words[-1].strip()!r}" if words else ""
        return Error(
            f"{self.library} crashed ({_signal(ended.status)}{said}) {doing}; write that "
            "operation another way, or build with another version of the library",
            loc=_loc(node),
        )

    def _unused(self, names: list[str]) -> Error:
        lines: list[str] = []
        node = None
        for name in names:
            readers = self.model.readers(name)
            if not readers:
                lines.append(f"{name} is read by no node; leave it out of {self.model.path.name}")
            for node, position in readers:
                lines.append(
                    f"{_place(node)}{name} is input {position} of {node}, which does not read it, "
                    "so the engine would compute something else; lower that operation another way"
                )
        what = f"the input {names[0]}" if len(names) == 1 else f"{len(names)} inputs"
        if len(lines) == 1:
            text = lines[0].removeprefix(_place(node))
            return Error(f"{self.library} drops {what}: {text}", loc=_loc(node))
        return Error(f"{self.library} drops {what}:\n  " + "\n  ".join(lines))

    def _in_plugin(self, text: str) -> Error:
        """An exception in a plugin, which the library prints and may go on after."""
        mentioned = self.model.mentioned(text)
        node = mentioned[0] if mentioned else None
        if node is None:
            return Error(f"a plugin of {self.model.path.name} failed: {text}")
        return Error(f"{node} failed: {text.removeprefix(f'{node.name}: ')}", loc=_loc(node))


def _loc(node: Node | None) -> Any:
    return node.loc if node is not None else None


def _place(node: Node | None) -> str:
    return f"{node.loc.where()}: " if node is not None and node.loc is not None else ""


def _signal(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"


def _disk(said: dict[str, Any], engine: str) -> Error:
    if said["number"] in _FULL:
        return Error(
            f"the disk is full ({said['text']}) and {engine} was not written; free some space, "
            "or choose a folder on another disk with -o"
        )
    return Error(f"cannot write {engine}: {said['text']}; nothing was left behind")

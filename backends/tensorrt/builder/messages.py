"""What TensorRT says: one logger per process, which passes each message to whoever listens."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeAlias

Listener: TypeAlias = Callable[[str, str], None]  # severity ("error"), text

SEVERE = ("internal_error", "error")
# Without a GPU every error is followed by one about the driver that is not there.
_NOISE = re.compile(r"catchCudaError.*cudaError 35\b", re.DOTALL)
_UNUSED = re.compile(r"Unused Input: (?P<name>.+)")
_PARSING = re.compile(r"(?:Static check for p|P)arsing node: (?P<name>.*) \[(?P<kind>[^\]\s]*)\]$")
_LAYER = re.compile(r"=+ Computing costs for (?P<name>.+)|-+ Timing Runner: (?P<runner>.+) \(")
_TAIL = re.compile(r"\s+In \w+ at /_src/\S*")

# The library takes the first logger of a process and ignores all later ones, so per module there
# is one, kept here for as long as the process lives.
_loggers: dict[str, Any] = {}
_listeners: dict[str, list[Listener]] = {}
_lock = threading.Lock()


def logger(trt: Any) -> Any:
    """The `ILogger` of a module `tensorrt` or `tensorrt_rtx` that this whole process uses."""
    name = trt.__name__
    with _lock:
        if name not in _loggers:
            listeners = _listeners.setdefault(name, [])
            _loggers[name] = _make(trt, listeners)
        return _loggers[name]


@contextmanager
def listening(trt: Any, listener: Listener) -> Generator[Any]:
    """The logger, whose messages `listener` hears as long as the block runs."""
    found = logger(trt)
    listeners = _listeners[trt.__name__]
    with _lock:
        listeners.append(listener)
    try:
        yield found
    finally:
        with _lock:
            listeners.remove(listener)


def _make(trt: Any, listeners: list[Listener]) -> Any:
    class Dispatcher(trt.ILogger):
        """Every message of the library, at every severity."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, text: str) -> None:
            """Called by the library, from any thread."""
            if not listeners or is_noise(text):
                return
            name = severity.name.lower()
            for listener in tuple(listeners):
                listener(name, text)

    return Dispatcher()


def is_noise(text: str) -> bool:
    """Whether a message only repeats that there is no GPU."""
    return _NOISE.search(text) is not None


def unused_input(text: str) -> str | None:
    """The input that the parser says it does not use."""
    found = _UNUSED.fullmatch(text.strip())
    return found["name"] if found else None


def node_in_work(text: str) -> tuple[str, str] | None:
    """(name, kind) of the node whose parsing a message announces."""
    found = _PARSING.match(text)
    return (found["name"], found["kind"]) if found else None


def layer_in_work(text: str) -> str | None:
    """The layer that the builder says it works on."""
    found = _LAYER.match(text)
    return (found["name"] or found["runner"]) if found else None


def reason(text: str) -> str:
    """A message without the places in TensorRT's own source, and without what repeats it."""
    text = "\n".join(line for line in text.splitlines() if line.strip() and not is_noise(line))
    text = _TAIL.sub("", text).strip()
    text = re.sub(r"^\w+::\w+: Error Code \d+: ", "", text)
    return text.removeprefix("Assertion failed: ").rstrip(". ")

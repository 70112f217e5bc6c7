"""The events of a rank's sessions, from the profiles that ONNX Runtime writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnxruntime

from irc.backends.recorder import Event, Recorder

_NODE = re.compile(r".*?/(\w+)\.(.+)")  # scope/operation/Kind.output, see onnx/graph.py
_SUFFIX = "_kernel_time"
PROVIDERS = ["CPUExecutionProvider"]


def value_of(node: str) -> tuple[str, str]:
    """The kind of a node and the value that it computes, from its name."""
    match = _NODE.fullmatch(node)
    return (match[1], f"%{match[2]}") if match else (node, "")


class Profiles:
    """The profiles of the sessions of one rank, which are deleted once they are read."""

    def __init__(self, recorder: Recorder, rank: int) -> None:
        self._rank, self._folder = rank, TemporaryDirectory(prefix="irc-profile-")
        self._sessions: list[onnxruntime.InferenceSession] = []
        recorder.sources.append(self._events)

    def open(self, data: bytes, options: onnxruntime.SessionOptions) -> Any:
        """A session with a profile."""
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(self._folder.name) / str(len(self._sessions)))
        self._sessions.append(onnxruntime.InferenceSession(data, options, PROVIDERS))
        return self._sessions[-1]

    def _events(self) -> Iterator[Event]:
        for session in self._sessions:
            start = session.get_profiling_start_time_ns()
            for entry in json.loads(Path(session.end_profiling()).read_bytes()):
                if entry["cat"] == "Node" and entry["name"].endswith(_SUFFIX):
                    kind, value = value_of(entry["name"].removesuffix(_SUFFIX))
                    begin = start + int(entry["ts"] * 1000)
                    yield Event(self._rank, kind, value, begin, float(entry["dur"]))
        self._folder.cleanup()

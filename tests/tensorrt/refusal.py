"""The steps at which TensorRT-RTX refuses models.

`python -m tests.tensorrt.refusal FOLDER` tries FOLDER/*.onnx, each for the architectures after the
last dash of its name and in a process of its own, since some models crash it. It prints a JSON
object: file to "parsing", "building", "unused", "crash", or "" where the engine is built.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from onnx import ModelProto

from irc.backends.tensorrt.builder.request import Profile
from irc.backends.tensorrt.target import Target
from tests.tensorrt.graphs import profile

RTX = "tensorrt-rtx-1.7/sm_80+sm_89+sm_120"
NEWEST = "tensorrt-rtx-1.7/sm_120"
FULL = "tensorrt-11.4/sm_90"


@dataclass(frozen=True)
class Example:
    """A model with a fault that a rule of the linter finds, and a similar model without it.

    `refused` is the step at which the bad model is refused, "" where it builds, None if it is not
    tried. The good one must then build.
    """

    bad: ModelProto
    good: ModelProto | None = None
    refused: str | None = None
    target: str = RTX


def refusal(data: bytes, target: Target, profiles: Sequence[Profile]) -> tuple[str, str]:
    """(step, errors) of a model that is refused; ("", "") where the engine is built."""
    trt, logger = _library()
    logger.messages.clear()
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(data):
        return "parsing", "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
    config = builder.create_builder_config()
    config.num_compute_capabilities = len(target.architectures)
    for i, each in enumerate(target.architectures):
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{each}"), i)
    for each in profiles:
        made = builder.create_optimization_profile()
        for name, shapes in each.shapes.items():
            made.set_shape(name, *shapes)
        config.add_optimization_profile(made)
    if builder.build_serialized_network(network, config) is None:
        return "building", "; ".join(logger.messages)
    unused = "; ".join(each for each in logger.messages if "Unused Input" in each)
    return ("unused", unused) if unused else ("", "")


@cache
def _library() -> tuple[Any, Any]:
    """The module and the one logger of this process."""
    trt: Any = import_module("tensorrt_rtx")

    class Logger(trt.ILogger):
        messages: ClassVar[list[str]] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.Logger.WARNING and "cudaError" not in message:
                self.messages.append(message)

    return trt, Logger()


def main(folder: Path) -> None:
    """Try every model in a fork of this process."""
    _library()
    found: dict[str, str] = {}
    for path in sorted(folder.resolve().glob("*.onnx")):
        reader, writer = os.pipe()
        if os.fork() == 0:
            known = profile("all", path)
            target = Target.parse(f"tensorrt-rtx/{path.stem.rpartition('-')[2]}")
            step, _ = refusal(path.read_bytes(), target, [known] if known.shapes else [])
            os.write(writer, step.encode() or b"built")
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            answer = pipe.read()
        os.wait()
        found[path.name] = {"built": "", "": "crash"}.get(answer, answer)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

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
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from irc.backends.tensorrt.builder.request import Profile
from irc.backends.tensorrt.target import Target
from tests.tensorrt.graphs import profile


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
    for i, chip in enumerate(target.architectures):
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{chip}"), i)
    for bounds in profiles:
        shapes = builder.create_optimization_profile()
        for name, shape in bounds.shapes.items():
            shapes.set_shape(name, *shape)
        config.add_optimization_profile(shapes)
    if builder.build_serialized_network(network, config) is None:
        return "building", "; ".join(logger.messages)
    unused = "; ".join(text for text in logger.messages if "Unused Input" in text)
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
    steps: dict[str, str] = {}
    for path in sorted(folder.resolve().glob("*.onnx")):
        reader, writer = os.pipe()
        if os.fork() == 0:
            bounds = profile("all", path)
            target = Target.parse(f"tensorrt-rtx/{path.stem.rpartition('-')[2]}")
            step, _ = refusal(path.read_bytes(), target, [bounds] if bounds.shapes else [])
            os.write(writer, step.encode() or b"built")
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            answer = pipe.read()
        os.wait()
        steps[path.name] = {"built": "", "": "crash"}.get(answer, answer)
    print(json.dumps(steps))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

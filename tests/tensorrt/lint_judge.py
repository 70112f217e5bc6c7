"""The steps at which TensorRT-RTX refuses models, each in its own process, since some crash it.

`python -m tests.tensorrt.lint_judge FOLDER` reads FOLDER/*.onnx, each with the architectures after
the last dash of its name, and prints a JSON object: file to "parse", "build", "crash" or "".
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def judge(trt: Any, logger: Any, data: bytes, architectures: list[int]) -> str:
    """`parse` or `build` where the model is refused; "" where an engine is built."""
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    if not trt.OnnxParser(network, logger).parse(data):
        return "parse"
    config = builder.create_builder_config()
    config.num_compute_capabilities = len(architectures)
    for i, each in enumerate(architectures):
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{each}"), i)
    profile = builder.create_optimization_profile()
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    for tensor in inputs:
        if -1 in tensor.shape:
            shapes = [[n if d == -1 else d for d in tensor.shape] for n in (1, 4, 8)]
            profile.set_shape(tensor.name, *shapes)
    if any(-1 in tensor.shape for tensor in inputs):
        config.add_optimization_profile(profile)
    return "build" if builder.build_serialized_network(network, config) is None else ""


def main(folder: Path) -> None:
    """Judge every model in a fork of this process."""
    import tensorrt_rtx

    trt: Any = tensorrt_rtx

    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.onnx")):
        data = path.read_bytes()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            chips = [int(each) for each in path.stem.rpartition("-")[2].split("+")]
            os.write(writer, judge(trt, logger, data, chips).encode() or b"built")
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            answer = pipe.read()
        os.waitpid(child, 0)
        found[path.name] = {"built": "", "": "crash"}.get(answer, answer)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

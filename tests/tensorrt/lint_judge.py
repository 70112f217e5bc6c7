"""What TensorRT-RTX says to models: where it refuses each, with its own words.

Run in a process of its own, one per model: some faults end the process.
`python -m tests.tensorrt.lint_judge FOLDER` reads FOLDER/*.onnx, each with the architectures after
the last dash of its name, and prints a JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def judge(trt: Any, logger: Any, data: bytes, architectures: list[int]) -> str:
    """`parse` or `build`, where the model is refused; "" where an engine is made."""
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    if not trt.OnnxParser(network, logger).parse(data):
        return "parse"
    config = builder.create_builder_config()
    config.num_compute_capabilities = len(architectures)
    for i, each in enumerate(architectures):
        config.set_compute_capability(getattr(trt.ComputeCapability, f"SM{each}"), i)
    profile = builder.create_optimization_profile()
    for i in range(network.num_inputs):
        tensor = network.get_input(i)
        if -1 in tensor.shape:
            shapes = [[n if d == -1 else d for d in tensor.shape] for n in (1, 4, 8)]
            profile.set_shape(tensor.name, *shapes)
    if any(-1 in network.get_input(i).shape for i in range(network.num_inputs)):
        config.add_optimization_profile(profile)
    return "build" if builder.build_serialized_network(network, config) is None else ""


def main(folder: Path) -> None:
    """Judge every model in a process of its own, made from this one."""
    import tensorrt_rtx

    trt: Any = tensorrt_rtx

    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*.onnx")):
        ways, data = os.pipe(), path.read_bytes()
        child = os.fork()
        if child == 0:
            chips = [int(each) for each in path.stem.rpartition("-")[2].split("+")]
            os.write(ways[1], judge(trt, logger, data, chips).encode() or b"built")
            os._exit(0)
        os.close(ways[1])
        with os.fdopen(ways[0]) as answer:
            said = answer.read()
        os.waitpid(child, 0)
        found[path.name] = {"built": "", "": "crash"}.get(said, said)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Loading a Llama of real shape onto a GPU, beside safetensors; the first token of irc generate.

    python -m benchmarks.load_gpu [--model 8b] [--folder DIR] [--quantize SCHEME]

The checkpoint has random numbers, and has just been written: its files are in memory. Every time is
of a process of its own. Those of loading begin when the process has a CUDA context.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from benchmarks.checkpoints import SHAPES, make
from benchmarks.process import measure, python

_RUNS = 2
_PROMPT = ["--prompt", "1 2 3 4", "--raw-ids", "--max-new-tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=SHAPES, default="8b")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is kept")
    parser.add_argument("--quantize", metavar="SCHEME")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        kind, folder = options.child
        print(json.dumps({"irc": load_irc, "safetensors": load_torch}[kind](Path(folder))))
        return
    with TemporaryDirectory() as place:
        compare(options, Path(place))


def compare(options: argparse.Namespace, place: Path) -> None:
    """Print all times."""
    checkpoint = make(options.model, options.folder or place / "checkpoint")
    size = (checkpoint / "model.safetensors").stat().st_size
    print(f"{options.model}, {size / 1e9:.2f} GB of bf16 weights", flush=True)
    artifact, words = place / "artifact", ["--backend", "cuda", "--next-tokens"]
    words += ["--quantize", options.quantize, "--bundle"] if options.quantize else []
    command = ["compile", checkpoint, *words, "-o", artifact]
    print(f"irc compile                          {measure(python('irc', *command)).seconds:6.2f} s")
    cold, cache = {"IRC_CACHE": str(place / "cold")}, {"IRC_CACHE": str(place / "cache")}
    print(f"first token, kernels to be compiled  {first_token(artifact, cold):6.2f} s", flush=True)
    first_token(artifact, cache)
    for _ in range(_RUNS):
        print(f"first token, kernels cached          {first_token(artifact, cache):6.2f} s")
        for kind, folder in (("irc", artifact), ("safetensors", checkpoint)):
            found = measure(python("benchmarks.load_gpu", "--child", kind, folder), cache)
            print(line(kind, json.loads(found.output.splitlines()[-1])), flush=True)


def line(kind: str, found: dict[str, float]) -> str:
    """One load."""
    parts = [f"{name} {seconds:.2f} s" for name, seconds in found.items() if name != "bytes"]
    longest = found.get("weights", found["all"])
    return f"{kind:12} {', '.join(parts)}: {found['bytes'] / 1e9 / longest:.1f} GB/s of weights"


def first_token(artifact: Path, environment: dict[str, str]) -> float:
    """Seconds from the start of irc generate to its first output."""
    start = time.perf_counter()
    process = subprocess.Popen(
        python("irc", "generate", artifact, *_PROMPT, "2"),
        stdout=subprocess.PIPE,
        env=os.environ | environment,
    )
    assert process.stdout is not None
    found = process.stdout.read(1)
    seconds = time.perf_counter() - start
    process.stdout.read()
    if process.wait() or not found:
        sys.exit("irc generate failed")
    return seconds


def load_irc(folder: Path) -> dict[str, float]:
    """Seconds of loading an artifact, and of its weights."""
    import irc
    from irc.backends.cuda.device import CudaDriver
    from irc.backends.cuda.execute.weights import DeviceWeights

    add, seconds = DeviceWeights.add, {"weights": 0.0, "bytes": 0.0}

    def timed(weights: DeviceWeights, *arguments: Any) -> None:
        start = time.perf_counter()
        add(weights, *arguments)
        seconds["weights"] += time.perf_counter() - start
        seconds["bytes"] = weights.bytes

    driver = CudaDriver(0)
    driver.free(driver.allocate(1))
    with patch.object(DeviceWeights, "add", timed):
        start = time.perf_counter()
        _ = irc.load(folder).program
        seconds["all"] = time.perf_counter() - start
    return seconds


def load_torch(folder: Path) -> dict[str, float]:
    """Seconds of loading a checkpoint."""
    import torch
    from safetensors.torch import load_file

    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    tensors = load_file(folder / "model.safetensors", device="cuda")
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return {"all": seconds, "bytes": float(sum(each.nbytes for each in tensors.values()))}


if __name__ == "__main__":
    main()

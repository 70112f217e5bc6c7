"""Checkpoint folder to 4-bit weights: seconds, also of all cores, and memory, beside peers.

    python -m benchmarks.quantize [--work FOLDER] [--peers PYTHON] [--skip-peers] [--shapes 1b 8b]

Blocks of 128, symmetric. Every tool is a process of its own, import and start-up included. At 1B
the peers run too: the onnxruntime-genai builder from the same folder, and onnxruntime.quantization
from an f32 model that the builder writes first, which is not counted. `--peers` is an interpreter
that has them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from benchmarks.checkpoints import make
from benchmarks.compile import genai, irc_run
from benchmarks.process import Run, measure, python

SCHEMES = ("w4a16", "w4a16_asym", "w8a16", "fp8")
MOST_SECONDS, MOST_MB = 180, 1500  # limits at 8B, on two cores
QUANTIZER = "onnxruntime.quantization.matmul_nbits_quantizer"


def irc_rows(checkpoint: Path, work: Path, shape: str) -> list[tuple[str, Run]]:
    """`irc compile --quantize` by every scheme at 1B, by the first one at 8B."""
    return [
        (f"irc {shape} {scheme}", irc_run(checkpoint, work / "irc", "--quantize", scheme))
        for scheme in SCHEMES[: 1 if shape == "8b" else None]
    ]


def peer_rows(checkpoint: Path, work: Path, shape: str, peers: str) -> list[tuple[str, Run]]:
    """The builder's int4, and the quantizer's on the builder's f32 model."""
    blocks = ("--extra_options", "int4_block_size=128")
    run = genai(checkpoint, work / "genai-int4", "int4", *blocks, interpreter=peers)
    genai(checkpoint, work / "genai-f32", interpreter=peers)
    out = work / "ort"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    words = ["--input_model", work / "genai-f32" / "model.onnx", "--output_model"]
    words += [out / "model.onnx", "--block_size", "128", "--symmetric", "true"]
    quantized = measure(python(QUANTIZER, *words, interpreter=peers))
    for folder in (out, work / "genai-f32"):
        shutil.rmtree(folder)
    return [
        (f"onnxruntime-genai builder {shape} int4", run),
        (f"onnxruntime.quantization {shape} int4", quantized),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--peers", default=sys.executable)
    parser.add_argument("--skip-peers", action="store_true")
    parser.add_argument("--shapes", nargs="+", choices=("tiny", "1b", "8b"), default=["1b", "8b"])
    options = parser.parse_args()
    work = options.work.resolve()
    rows: list[tuple[str, Run]] = []
    for shape in options.shapes:
        checkpoint = make(shape, work / f"{shape}-bf16")
        rows += irc_rows(checkpoint, work, shape)
        if shape != "8b" and not options.skip_peers:
            rows += peer_rows(checkpoint, work, shape, options.peers)
    print(f"{'on ' + str(os.cpu_count()) + ' CPUs':44s}{'seconds':>9s}{'CPU s':>9s}{'peak MB':>9s}")
    for name, run in rows:
        print(f"{name:44s}{run.seconds:9.1f}{run.cpu_seconds:9.1f}{run.peak_mb:9.0f}")
    for name, run in rows:
        if "8b" in name and (run.seconds > MOST_SECONDS or run.peak_mb > MOST_MB):
            raise SystemExit(f"{name} takes more than {MOST_SECONDS} s or {MOST_MB} MB")


if __name__ == "__main__":
    main()

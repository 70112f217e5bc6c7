"""Prefill and decode tokens/s on CPU beside onnxruntime-genai and transformers, equal threads.

    python -m benchmarks.run_cpu [--shape 1b] [--threads 2] [--prompt 128] [--new 32] [--rounds 6]
        [--quantize w4a16 w4a8_int8]

In f32, or quantized from bf16 by some schemes, beside onnxruntime-genai's int4 in its own blocks of
32. The same random weights, the same prompt, batch 1. Every engine is a process of its own; rounds
alternate between the engines, and the table shows each engine's best round, since noise on a
shared machine only ever slows a run down.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks import compile as compiling
from benchmarks.checkpoints import make
from benchmarks.process import measure, python

ENGINES = ("irc", "genai", "transformers")


def prepare(
    shape: str, work: Path, engines: Sequence[str], schemes: Sequence[str]
) -> dict[str, tuple[str, Path]]:
    """What to run by its label: an engine, and what it loads."""
    dtype, precision = ("bf16", "int4") if schemes else ("f32", "fp32")
    checkpoint = make(shape, work / f"{shape}-{dtype}", dtype)
    runs: dict[str, tuple[str, Path]] = {}
    for scheme in schemes or ("",):
        label = f"irc {scheme}".strip()
        runs[label] = "irc", work / label.replace(" ", "-")
        flags = ["--quantize", scheme] if scheme else []
        compiling.irc_run(checkpoint, runs[label][1], *flags)
    if "genai" in engines:
        runs["genai"] = "genai", work / f"genai-run-{precision}"
        if not (runs["genai"][1] / "genai_config.json").exists():
            compiling.genai(checkpoint, runs["genai"][1], precision)
    if "transformers" in engines and not schemes:
        runs["transformers"] = "transformers", checkpoint
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="1b", choices=("tiny", "1b"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--work", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--quantize", nargs="+", default=[], metavar="SCHEME")
    options = parser.parse_args()
    runs = prepare(options.shape, options.work.resolve(), options.engines, options.quantize)
    results: dict[str, list[dict[str, float]]] = {label: [] for label in runs}
    sizes = [str(n) for n in (options.threads, options.prompt, options.new)]
    for _ in range(options.rounds):
        for label, (engine, folder) in runs.items():
            run = measure(python("benchmarks.peers.run", engine, folder, *sizes))
            found = json.loads(run.output.strip().splitlines()[-1])
            results[label].append(found | {"peak_mb": run.peak_mb})
    print(f"{'':14s}{'load s':>8s}{'prefill t/s':>13s}{'decode t/s':>12s}{'peak MB':>9s}")
    best: dict[str, dict[str, float]] = {}
    for label, rounds in results.items():
        best[label] = {
            "load": min(r["load"] for r in rounds),
            "prefill": options.prompt / min(r["prefill"] for r in rounds),
            "decode": 1 / min(r["decode"] for r in rounds),
            "peak": max(r["peak_mb"] for r in rounds),
        }
        b = best[label]
        print(f"{label:14s}{b['load']:8.2f}{b['prefill']:13.1f}{b['decode']:12.2f}{b['peak']:9.0f}")
    peers = [b for label, b in best.items() if not label.startswith("irc")]
    for label in (label for label in best if peers and label.startswith("irc")):
        for figure, choose in (("load", min), ("prefill", max), ("decode", max), ("peak", min)):
            ratio = best[label][figure] / choose(p[figure] for p in peers)
            print(f"{figure}: {label} at {100 * ratio:.0f} % of the best peer")


if __name__ == "__main__":
    main()

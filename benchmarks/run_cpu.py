"""Prefill and decode tokens/s on CPU beside onnxruntime-genai and transformers, f32, equal threads.

    python -m benchmarks.run_cpu [--shape 1b] [--threads 2] [--prompt 128] [--new 32] [--rounds 6]

The same random weights, the same prompt, batch 1. Every engine is a process of its own; rounds
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


def prepare(shape: str, work: Path, engines: Sequence[str]) -> dict[str, Path]:
    """What each engine loads."""
    checkpoint = make(shape, work / f"{shape}-f32", "f32")
    compiling.irc_run(checkpoint, work / "irc")
    if "genai" in engines and not (work / "genai" / "genai_config.json").exists():
        compiling.genai(checkpoint, work)
    return {"irc": work / "irc", "genai": work / "genai", "transformers": checkpoint}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="1b", choices=("tiny", "1b"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--work", type=Path, default=Path("build/benchmarks"))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    options = parser.parse_args()
    folders = prepare(options.shape, options.work.resolve(), options.engines)
    results: dict[str, list[dict[str, float]]] = {engine: [] for engine in options.engines}
    sizes = [str(n) for n in (options.threads, options.prompt, options.new)]
    for _ in range(options.rounds):
        for engine in options.engines:
            run = measure(python(f"benchmarks.peers.run_{engine}", folders[engine], *sizes))
            found = json.loads(run.output.strip().splitlines()[-1])
            results[engine].append(found | {"peak_mb": run.peak_mb})
    print(f"{'':14s}{'load s':>8s}{'prefill t/s':>13s}{'decode t/s':>12s}{'peak MB':>9s}")
    best: dict[str, dict[str, float]] = {}
    for engine, rounds in results.items():
        best[engine] = {
            "load": min(r["load"] for r in rounds),
            "prefill": options.prompt / min(r["prefill"] for r in rounds),
            "decode": 1 / min(r["decode"] for r in rounds),
            "peak": max(r["peak_mb"] for r in rounds),
        }
        b = best[engine]
        print(
            f"{engine:14s}{b['load']:8.1f}{b['prefill']:13.1f}{b['decode']:12.2f}{b['peak']:9.0f}"
        )
    peers = [b for engine, b in best.items() if engine != "irc"]
    for phase in ("prefill", "decode"):
        if peers and "irc" in best:
            ratio = best["irc"][phase] / max(p[phase] for p in peers)
            print(f"{phase}: irc at {100 * ratio:.0f} % of the faster peer")


if __name__ == "__main__":
    main()

"""Decode and prefill steps of language models on GPUs, compiled by `irc compile --backend cuda`.

    python -m benchmarks.decode_gpu                     8B and 1B, every scheme, batch 1 and 16
    python -m benchmarks.decode_gpu --models 8B --schemes bf16 --rows 1 --profile
    python -m benchmarks.decode_gpu --models 8B --schemes bf16 --prefill 2048 --peers
    python -m benchmarks.decode_gpu --models 8B --schemes bf16 --rows 1 --tp 2 --generate
    python -m benchmarks.decode_gpu --models gemma-2-2b qwen2.5-7b llama-2-7b --schemes bf16

Weights are repeated random numbers, in caches filled up to the context. Times are medians of
replays that follow each other. The floor of a step is the bytes of weights and caches that it
reads, by the rate at which a plain kernel reads in the same run. `--profile` times the launches of
each kernel alone, one after the other, beside the floor of their bytes. `--peers` adds
torch.compile (CUDA graphs, static cache) and eager transformers, of 8B and 1B in bf16.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.decode_gpu_models import (
    HEAD8,
    MODELS,
    PLAIN,
    Case,
    Measured,
    compile_model,
    opened,
    timing,
)
from benchmarks.process import run_ranks
from irc.backends.ranks.communicator import Communicator

SCHEMES = (PLAIN, "w8a16_fp8", "w8a16", "w4a16", HEAD8)
_FOUND = "found.json"


def main() -> None:
    options = arguments()
    print(f"{datetime.date.today()}, {' '.join(sys.argv[1:]) or 'no arguments'}")
    with TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "options.json").write_text(json.dumps(vars(options)))
        for model in options.models:
            for scheme in options.schemes:
                if model != "1B" or scheme != HEAD8:  # its head is the table of its embedding
                    measure_model(folder, options, model, scheme)
    if options.peers:
        peers(options)


def arguments() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--models", nargs="+", choices=("8B", "1B", *MODELS), default=["8B", "1B"])
    add("--schemes", nargs="+", default=list(SCHEMES), help=f"{', '.join(SCHEMES)} or any other")
    add("--rows", nargs="*", type=int, default=[1, 16])
    add("--context", nargs="+", type=int, default=[512])
    add("--prefill", nargs="*", type=int, default=[], help="lengths of prompts, of one sequence")
    add("--tp", type=int, default=1)
    add("--replays", type=int, default=200)
    add("--profile", action="store_true")
    add("--generate", action="store_true", help="steps that feed their tokens back, too")
    add("--no-early", dest="early", action="store_false", help="no programmatic launches")
    add("--peers", action="store_true", help="torch.compile and eager transformers too")
    return parser.parse_args()


def cases(options: argparse.Namespace, model: str, scheme: str) -> list[Case]:
    """The steps of one artifact."""
    decode = [Case(model, scheme, r, 1, c) for c in options.context for r in options.rows]
    return decode + [Case(model, scheme, 1, length, 0) for length in options.prefill]


def measure_model(folder: Path, options: argparse.Namespace, model: str, scheme: str) -> None:
    """Compile one artifact and print what its steps take."""
    longest = max(case.sizes["C"] for case in cases(options, model, scheme))
    artifact = compile_model(model, scheme, options.tp, longest, folder)
    words = [str(folder), str(artifact), model, scheme]
    if options.tp == 1:
        run(None, words)
        return
    run_ranks(options.tp, "benchmarks.decode_gpu", *words)


def run(host: Communicator | None, words: Sequence[str]) -> None:
    """One rank, which measures the steps of an artifact; the first one prints."""
    folder, artifact, model, scheme = words
    options = argparse.Namespace(**json.loads((Path(folder) / "options.json").read_text()))
    with opened(Path(artifact), host, options.early) as program:
        rank = program.rank
        rate = timing(rank).read_rate(rank.kernels) * 1e6
        if rank.rank == 0:
            print(f"\n{rank.driver.gpu.name}, reads {rate / 1e12:.3f} TB/s", flush=True)
        for case in cases(options, model, scheme):
            measured = Measured(program, case)
            ms = measured.ms(options.replays)
            if rank.rank == 0:
                print(row(case, ms, measured, rate), flush=True)
            if options.generate and case.tokens == 1:
                token = measured.token_ms(options.replays)
                if rank.rank == 0:
                    print(f"  {token:.4f} ms a token, {1e3 * (token - ms):+.1f} us", flush=True)
            if options.profile:
                lines = profile(measured, rate)
                if rank.rank == 0:
                    print("\n".join(lines), flush=True)
            measured.close()


def row(case: Case, ms: float, measured: Measured, rate: float) -> str:
    """A line of the table."""
    floor = measured.nbytes / rate * 1e3
    text = f"{case!s:42} {ms:8.3f} ms, {len(measured.plan.steps)} launches"
    if case.tokens > 1:
        return f"{text}, {measured.flops / ms / 1e9:.0f} TFLOP/s"
    return f"{text}, floor {floor:.3f} ({measured.nbytes / 1e9:.2f} GB), {floor / ms:.0%}"


def profile(measured: Measured, rate: float) -> list[str]:
    """A line per kernel: its launches alone, beside the floor of what they read and write."""
    lines = [f"  {'launches':>8} {'us each':>8} {'floor':>7} {'all, ms':>8}  kernel"]
    total = 0.0
    for part in measured.parts():
        count = len(part.steps)
        us = measured.chain_us(part)
        total += us * count / 1e3
        floor = part.nbytes / count / rate * 1e6
        text = f"  {count:8} {us:8.2f} {floor:7.2f} {us * count / 1e3:8.3f}"
        lines.append(f"{text}  {part.name[:80]}")
    return [*lines, f"  {'sum':>8} {'':16} {total:8.3f}"]


def peers(options: argparse.Namespace) -> None:
    """Print the times of torch: a process per step, compiled at once, timed one by one."""
    line = [sys.executable, "-m", "benchmarks.decode_gpu_peers"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen(
            [*line, case.model, *map(str, (case.rows, case.tokens, case.context, options.replays))],
            **pipes,
        )
        for model in options.models
        for case in cases(options, model, PLAIN)
    ]
    about = ""
    for process in processes:
        assert process.stdout is not None
        about = process.stdout.readline()  # which comes once all is compiled
    print(f"\n{about}", end="")
    for process in processes:
        print(process.communicate("\n")[0], end="", flush=True)
        if process.returncode:
            raise SystemExit("torch failed")


if __name__ == "__main__":
    main()

"""`irc calibrate`: gathers statistics of the inputs of a model's linears, for quantization."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from typing import Any

from ..report import Report
from .arguments import add_json, add_source, given_settings, whole_number
from .console import Progress, answer

EXAMPLES = """
  irc calibrate examples/outlier_llama --data text.txt -o build/calibration
  irc calibrate Meta-Llama-3-8B --data texts/ -o build/calibration --gram --batches 64
  irc calibrate model.onnx --data inputs.npz -o build/calibration --batch-size 32
  irc compile Meta-Llama-3-8B -o build/llama --quantize fp8 --calibration build/calibration
"""

_SOURCE = ("checkpoint", "adapter", "dtype", "settings", "random_weights", "dims")


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc calibrate`."""
    add = parser.add_argument
    add("source", metavar="SRC", help="script.py[:factory], a checkpoint folder, or a module")
    what = "a .txt or .npz file (an array per input), or a folder of such"
    add("--data", metavar="DATA", required=True, help=what)
    what = "the folder to write; one that was interrupted is continued"
    add("-o", "--output", metavar="FOLDER", required=True, help=what)
    what = "gather gram matrices too, which the algorithms of AWQ, GPTQ and auto need"
    add("--gram", action="store_true", help=what)
    add("--batches", metavar="N", type=whole_number(1), default=0, help="at most so many")
    what = "rows of a batch (default: 1 of text, 8 of arrays)"
    add("--batch-size", metavar="N", type=whole_number(1), default=0, help=what)
    what = "tokens of a row of text (default: up to 512)"
    add("--length", metavar="N", type=whole_number(1), default=0, help=what)
    what = "for statistics and observed values; with less, data is read again (default: 2048)"
    add("--memory", metavar="MIB", type=whole_number(1), default=2048, help=what)
    add_source(parser, *_SOURCE)
    add_json(parser)


def run(args: Namespace) -> int:
    """Calibrate, and print a summary."""
    from ..driver.calibration import calibrate

    began = time.perf_counter()
    with Progress() as progress:
        statistics = calibrate(
            args.source,
            args.data,
            args.output,
            gram=args.gram,
            batches=args.batches,
            batch_size=args.batch_size,
            length=args.length,
            memory=args.memory,
            progress=progress,
            **given_settings(args, _SOURCE),
        )
    seconds = time.perf_counter() - began
    ranges = {site: float(statistics.largest(site).max()) for site in statistics.sites()}
    facts: dict[str, Any] = {
        "folder": args.output,
        "model": statistics.facts.model,
        "tokens": statistics.facts.tokens,
        "batches": statistics.facts.batches,
        "gram": statistics.facts.gram,
        "largest": ranges,
        "seconds": seconds,
    }
    largest = max(ranges, key=lambda site: ranges[site])
    lines = [
        f"{statistics.facts.model}: {statistics.facts.tokens:,} tokens in "
        f"{statistics.facts.batches} batches, "
        f"{len(ranges)} sites; largest input {ranges[largest]:.4g} at {largest}",
        f"wrote {args.output} in {seconds:.1f} s",
    ]
    return answer(args, Report(facts, lines))

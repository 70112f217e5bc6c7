"""`irc compile`: a script, a checkpoint folder or a module becomes an artifact folder."""

from __future__ import annotations

import argparse
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..units import amount
from .arguments import (
    Usage,
    add_json,
    add_parallel,
    add_setting,
    parallel_options,
    setting,
    whole_number,
    word_of,
)
from .console import Progress, print_json, table
from .engines import add_engine, engine_options

if TYPE_CHECKING:
    from ..driver import Prepared
    from ..instruments import Timing
    from ..pipeline import Instrument

EXAMPLES = """
  irc compile examples/llama.py --checkpoint examples/tiny_llama -o build/tiny_llama
  irc compile Meta-Llama-3-8B -o build/llama --dtype bf16 --dims B=1:1:4,C=1:4096:8192
  irc compile Meta-Llama-3-8B -o build/llama --mesh tp=2,pp=2 --explain
  irc compile Meta-Llama-3-8B -o build/llama --mesh tp=2 --backend tensorrt-rtx --dtype bf16
  irc compile model.onnx -o build/model --dims batch=1:1:8
  irc compile model.irc -o build/model --pipeline "cse, dce" --dump-dir dumps
  irc compile my_model.py:build_small --set layers=2 --random-weights 0 --dry-run
"""

HINT = "irc compile --help tells more"
Range = tuple[int, int, int]


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc compile`."""
    add = parser.add_argument
    add(
        "source",
        metavar="SRC",
        help="script.py[:factory], a checkpoint folder, module.irc, model.onnx, or an artifact",
    )
    add("-o", "--output", metavar="DIR", help="the artifact folder; an older artifact is replaced")
    add("--checkpoint", metavar="DIR", help="the folder with the weights of a script or module")
    add("--random-weights", metavar="SEED", type=whole_number(), help="in place of a checkpoint")
    add_parallel(parser)
    add(
        "--backend",
        metavar="NAME",
        help="what to compile for: onnx, tensorrt-rtx, tensorrt, reference (onnx, or what an "
        "artifact was compiled for)",
    )
    add("--pipeline", metavar="TEXT", help="the passes, in place of the backend's own")
    add("--dtype", type=word_of("f32", "f16", "bf16"), help="compute in f32, f16 or bf16")
    add_setting(add)
    add(
        "--dims",
        metavar="B=1:4:16,...",
        type=ranges,
        default={},
        help="min:typical:max of symbolic dimensions, or one number",
    )
    add("--dump-dir", metavar="D", help="write the module after every pass into the folder D")
    add("--bundle", action="store_true", help="copy the weights: an artifact that stands alone")
    add(
        "--dry-run",
        action="store_true",
        help="run the passes and, for engines, the linter over their graphs; write nothing",
    )
    add("--explain", action="store_true", help="print what the passes decided, and why")
    add("--no-verify", action="store_true", help="do not verify the module after every pass")
    add_json(parser)
    add_engine(parser)


def ranges(text: str) -> dict[str, Range]:
    """`B=1:4:16,S=128` as {"B": (1, 4, 16), "S": (128, 128, 128)}."""
    found: dict[str, Range] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, value = setting(item)
        numbers = value.split(":")
        if len(numbers) not in (1, 3) or not all(n.strip().isdecimal() for n in numbers):
            raise argparse.ArgumentTypeError(f"{item!r} is not name=min:typical:max")
        if name in found:
            raise argparse.ArgumentTypeError(f"{name} is given twice")
        low, typical, high = (int(n) for n in (numbers if len(numbers) == 3 else numbers * 3))
        found[name] = (low, typical, high)
    return found


def run(args: Namespace) -> int:
    """Compile, and say what was made of what."""
    from ..driver import check, prepare, write
    from ..instruments import Timing

    output: str | None = None if args.dry_run else args.output
    if output is None and not args.dry_run:
        raise Usage("say where the artifact goes with -o DIR, or give --dry-run", HINT)
    began = time.perf_counter()
    timing = Timing()
    with Progress() as progress:
        prepared = prepare(
            args.source,
            **parallel_options(args),
            backend=args.backend or "",
            checkpoint=args.checkpoint,
            pipeline=args.pipeline,
            dtype=args.dtype,
            settings=dict(args.settings),
            engine=engine_options(args),
            dims=args.dims,
            random_weights=args.random_weights,
            instruments=_instruments(args, timing),
            progress=progress,
        )
        if output is None:
            progress("checking the graphs", 0.0)
            notes = check(prepared)
        else:
            artifact = write(prepared, output, bundle=args.bundle, progress=progress)
            notes = artifact.notes
    seconds = time.perf_counter() - began
    facts = _facts(output, prepared, timing, seconds, args.explain)
    facts["notes"] = notes
    if args.json:
        print_json(facts)
    else:
        _say(facts)
    return 0


def _instruments(args: Namespace, timing: Timing) -> list[Instrument]:
    from ..instruments import DumpDir, Reproducer, VerifyEach

    files = [*args.load, *args.plugin]  # either may declare operations
    chosen: list[Instrument] = [Reproducer(args.dump_dir, files)]
    chosen += [] if args.no_verify else [VerifyEach()]
    if args.dump_dir is not None:
        chosen.append(DumpDir(args.dump_dir, files))
    return [*chosen, timing]


def _facts(
    output: str | None, prepared: Prepared, timing: Timing, seconds: float, explain: bool
) -> dict[str, Any]:
    from ..report import statistics

    stats = statistics(prepared.module)
    files = [path for path in Path(output).rglob("*") if path.is_file()] if output else []
    return {
        "artifact": output,
        "name": stats["name"],
        "backend": prepared.backend.name,
        "ranks": prepared.module.mesh.ranks,
        "operations": stats["operations"],
        "parameters": stats["parameters"],
        "weight_bytes": stats["weight_bytes"],
        "folder_bytes": sum(path.stat().st_size for path in files),
        "passes": [
            {
                "pass": row.pass_,
                "seconds": row.seconds,
                "operations": [row.ops_before, row.ops_after],
                "did": str(step.stats),
                "notes": step.stats.notes if explain else [],
            }
            for row, step in zip(timing.rows, prepared.steps, strict=True)
        ],
        "seconds": seconds,
    }


def _say(facts: dict[str, Any]) -> None:
    rows = [
        (
            f"  {each['pass']}",
            "{} -> {} ops".format(*each["operations"]),
            f"{each['seconds'] * 1e3:.1f} ms",
            each["did"],
        )
        for each in facts["passes"]
    ]
    size = f"{facts['parameters']:,} parameters, {amount(facts['weight_bytes'])}"
    if facts["ranks"] > 1:
        size += f" on each of {facts['ranks']} ranks"
    print(f"{facts['name']}: {facts['operations']} operations, {size}")
    if rows:
        print(table(rows))
    for each in facts["passes"]:
        for note in each["notes"]:
            print(f"  {each['pass'].partition('{')[0]}: {note}")
    for note in facts["notes"]:
        print(f"  {note}")
    if facts["artifact"] is None:
        print(f"nothing written (dry run), {facts['seconds']:.1f} s")
        return
    place = f"{facts['artifact']} for {facts['backend']}"
    print(f"wrote {place}: {amount(facts['folder_bytes'])} in {facts['seconds']:.1f} s")

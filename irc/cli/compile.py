"""`irc compile`: writes an artifact folder from a script, a checkpoint folder or a module."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..analysis.units import amount
from ..artifact.manifest import add_facts
from ..errors import Error, printable
from ..ir.core import Module
from .arguments import (
    Parser,
    Usage,
    add_compilation,
    add_json,
    add_passes,
    add_tensorrt_llm,
    compilation_options,
    parallel_options,
    pass_instruments,
    whole_number,
)
from .console import Progress, print_json, table
from .engines import add_engine, engine_options

if TYPE_CHECKING:
    from ..driver import Prepared
    from ..frontends.tensorrt_llm.script import Run
    from ..pipeline.instruments import Timing

EXAMPLES = """
  irc compile examples/llama.py --checkpoint examples/tiny_llama -o build/tiny_llama
  irc compile Meta-Llama-3-8B -o build/llama --dtype bf16 --dims B=1:1:4,C=1:4096:8192
  irc compile Meta-Llama-3-8B -o build/llama --mesh tp=2,pp=2 --explain
  irc compile Meta-Llama-3-8B -o build/llama --mesh tp=2 --backend tensorrt-rtx --dtype bf16
  irc compile Meta-Llama-3-8B -o build/llama --quantize w4a16 --weight-errors
  irc compile Meta-Llama-3-8B -o build/llama --quantize w4a16 --group 64 --kv-cache fp8
  irc compile model.onnx -o build/model --dims batch=1:1:8
  irc compile model.irc -o build/model --pipeline "cse, dce" --dump-dir dumps
  irc compile my_model.py:build_small --set layers=2 --random-weights 0 --dry-run
  irc compile tensorrt_llm_build.py -o build/llama -- Llama-2-7b
"""


_HINT = "irc compile --help lists the options"


def configure(parser: Parser) -> None:
    """The arguments of `irc compile`; those behind -- are a script's."""
    parser.takes_rest = True
    add = parser.add_argument
    what = (
        "script.py[:factory], a build script of TensorRT-LLM with its arguments behind --, "
        "a checkpoint folder, module.irc, model.onnx, or an artifact"
    )
    add("source", metavar="SRC", help=what)
    add("-o", "--output", metavar="DIR", help="the artifact folder; an older artifact is replaced")
    add_tensorrt_llm(parser)
    what = "run a TensorRT-LLM script N times, as mpirun -n N would (default: 1)"
    add("--processes", metavar="N", type=whole_number(1), default=1, help=what)
    add("--random-weights", metavar="SEED", type=whole_number(), help="in place of a checkpoint")
    targets = (
        "onnx, cuda, tensorrt-rtx, tensorrt, reference (default: that of an artifact, else onnx)"
    )
    add_compilation(parser, f"what to compile for: {targets}")
    add("--bundle", action="store_true", help="copy the weights into the artifact")
    what = "genai: also write what onnxruntime-genai loads, with --bundle"
    add("--layout", choices=("genai",), default="", help=what)
    what = "copy what SRC refers to outside its folder: you trust who wrote SRC"
    add("--trust", action="store_true", help=what)
    what = "run the passes and, for engines, the linter over their graphs; write nothing"
    add("--dry-run", action="store_true", help=what)
    add("--explain", action="store_true", help="print what the passes decided, and why")
    what = "measure and print the error of every quantized weight, which reads all of them"
    add("--weight-errors", action="store_true", help=what)
    add_passes(parser)
    add_json(parser)
    add_engine(parser)
    parser.set_defaults(limits={})  # of rewrites per pass, which irc build may set


def run(args: Namespace) -> int:
    """Compile, and print a summary of each artifact."""
    output: str | None = None if args.dry_run else args.output
    if _is_build_script(args.source):
        from ..frontends.tensorrt_llm.script import run_script

        options = compilation_options(args) | {"engine": engine_options(args)}
        options |= {"random_weights": args.random_weights}
        script = run_script(
            args.source,
            args.rest,
            args.tensorrt_llm,
            args.processes,
            output=Path(output) if output else None,
            options=options,
            dry_run=args.dry_run,
            sources=Path(args.tensorrt_llm_sources) if args.tensorrt_llm_sources else None,
        )
        return _build(args, script, output)
    _check_unused(args)
    if output is None and not args.dry_run:
        raise Usage("no artifact folder: give -o DIR, or --dry-run", _HINT)
    facts = _compile(args, args.source, output)
    if args.json:
        print_json(facts)
    return 0


def _is_build_script(source: str) -> bool:
    from ..frontends.script import mentions_tensorrt_llm

    if not mentions_tensorrt_llm(source):
        return False  # without importing the front end
    from ..frontends.tensorrt_llm.lint import is_build_script

    return is_build_script(source)


def _build(args: Namespace, script: Run, output: str | None) -> int:
    """Compile every engine of a script: into `output`, or a folder in it each of several.

    Engines that the script itself has saved need no output.
    """
    engines = script.session.engines
    missing = [name for name in script.engines if engines[name].artifact is None]
    if output is None and not args.dry_run and missing:
        raise Usage(f"the script does not save the engine {missing[0]}: give -o DIR", _HINT)
    found: list[dict[str, Any]] = []
    for name, module in script.engines.items():
        if output is None and not args.dry_run:
            found.append({"artifact": str(engines[name].artifact), "name": name})
            continue
        place = f"{output}/{name}" if len(script.engines) > 1 else output
        found.append(_compile(args, module, output and place))
        if place:  # for the scripts that run engines
            add_facts(Path(place), engines[name].config.to_dict())
    notes = script.session.notes
    if args.json:
        print_json({"engines": found, "notes": notes})
        return 0
    for facts in found if output is None and not args.dry_run else ():
        print(f"{facts['name']}: the script wrote {facts['artifact']}")
    for note in notes:
        print(f"note: {note}")
    return 0


def _check_unused(args: Namespace) -> None:
    """An Error about what only build scripts of TensorRT-LLM take."""
    given = "--tensorrt-llm" if args.tensorrt_llm else "--processes" if args.processes > 1 else ""
    given = given or (f"-- {args.rest[0]}" if args.rest else "")
    if given:
        raise Error(
            f"{given} is for a build script, which imports tensorrt_llm and not irc; "
            f"{args.source} is none, so leave it out (--set gives arguments to a factory)"
        )


def _compile(args: Namespace, source: str | Module, output: str | None) -> dict[str, Any]:
    """Compile one source into a folder, or check it where there is none, and print the facts.

    A module refers to files of the script that traced it, so that its weights are copied.
    """
    from ..driver import check, prepare, write
    from ..pipeline.instruments import Limit, Timing

    began = time.perf_counter()
    timing, limits = Timing(), [Limit(args.limits)] if args.limits else []
    with Progress() as progress:
        prepared = prepare(
            source,
            output,
            **parallel_options(args),
            **compilation_options(args),
            engine=engine_options(args),
            random_weights=args.random_weights,
            weight_errors=args.weight_errors,
            trust=args.trust,
            instruments=[*pass_instruments(args, [*args.load, *args.plugin]), *limits, timing],
            progress=progress,
        )
        if output is None:
            progress("checking the graphs", 0.0)
            notes, opens = check(prepared), ""
        else:
            bundle = args.bundle or isinstance(source, Module)
            artifact = write(prepared, output, bundle=bundle, layout=args.layout, progress=progress)
            notes = artifact.notes
            opens = _opens(artifact.manifest)
    seconds = time.perf_counter() - began
    facts = _facts(output, prepared, timing, seconds, args.explain)
    facts |= {"notes": notes, "opens": opens}
    facts["quantization"] = prepared.quantization.as_json()
    if args.json:
        return facts
    _print(facts)
    if args.weight_errors and prepared.quantization.rows:
        header, *rows = prepared.quantization.table()
        print(table(rows, header))
    return facts


def _facts(
    output: str | None, prepared: Prepared, timing: Timing, seconds: float, explain: bool
) -> dict[str, Any]:
    from ..artifact.report import statistics

    stats = statistics(prepared.module)
    files = [path for path in Path(output).rglob("*") if path.is_file()] if output else []
    return {
        "artifact": output,
        "backend": prepared.backend.name,
        "ranks": prepared.module.mesh.ranks,
        **{key: stats[key] for key in ("name", "operations", "parameters", "weight_bytes")},
        "folder_bytes": sum(path.stat().st_size for path in files),
        "passes": [
            {
                "pass": row.pass_,
                "seconds": row.seconds,
                "operations": [row.ops_before, row.ops_after],
                "did": str(step.stats),
                "notes": step.stats.notes if explain else [],
                "summary": step.stats.summary,
            }
            for row, step in zip(timing.rows, prepared.steps, strict=True)
        ],
        "seconds": seconds,
    }


def _print(facts: dict[str, Any]) -> None:
    rows: list[list[str]] = []
    for each in facts["passes"]:
        before, after = each["operations"]
        took = f"{each['seconds'] * 1e3:.1f} ms"
        rows.append([f"  {each['pass']}", f"{before} -> {after} ops", took, each["did"]])
    size = f"{facts['parameters']:,} parameters, {amount(facts['weight_bytes'])}"
    if facts["ranks"] > 1:
        size += f" on each of {facts['ranks']} ranks"
    print(f"{facts['name']}: {facts['operations']} operations, {size}")
    if rows:
        print(table(rows))
    for each in facts["passes"]:
        for note in each["notes"]:
            print(f"  {each['pass'].partition('{')[0]}: {printable(note)}")
    summaries = (pass_["summary"] for pass_ in facts["passes"])
    for note in filter(None, (*facts["notes"], *summaries)):
        print(f"  {printable(note)}")
    if facts["artifact"] is None:
        print(f"nothing written (dry run), {facts['seconds']:.1f} s")
        return
    place = f"{facts['artifact']} for {facts['backend']}"
    print(f"wrote {place}: {amount(facts['folder_bytes'])} in {facts['seconds']:.1f} s")
    if facts["opens"]:
        print(facts["opens"])


def _opens(manifest: Mapping[str, Any]) -> str:
    """What opens the ONNX files of an artifact for CPUs; nothing about other backends."""
    if manifest["backend"] != "onnx":
        return ""
    if len(manifest["program"]["ranks"]) > 1:
        return "irc runs its ranks; ONNX Runtime has no collectives, so it opens none of the files"
    if manifest["weights"]:
        return "irc opens it; rank0.onnx opens in plain ONNX Runtime if compiled with --bundle"
    return "irc opens it, and plain ONNX Runtime opens rank0.onnx"

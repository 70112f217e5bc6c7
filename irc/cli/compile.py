"""`irc compile`: writes an artifact folder from a script, a checkpoint folder or a module."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..analysis.units import amount
from ..artifact.manifest import add_facts
from ..errors import Error, printable
from ..ir.core import Module
from ..report import Report, Table, table
from .arguments import (
    Parser,
    Usage,
    add_compilation,
    add_json,
    add_passes,
    add_tensorrt_llm,
    given_settings,
    pass_instruments,
    whole_number,
)
from .console import Progress, answer

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
    names = add_compilation(parser, backends=True)
    what = "run the passes and, for engines, the linter over their graphs; write nothing"
    add("--dry-run", action="store_true", help=what)
    add("--explain", action="store_true", help="print what the passes decided, and why")
    add_passes(parser)
    add_json(parser)
    parser.set_defaults(names=names, limits={})  # of rewrites per pass, which irc build may set


def run(args: Namespace) -> int:
    """Compile, and print a summary of each artifact."""
    output: str | None = None if args.dry_run else args.output
    if _is_build_script(args.source):
        from ..frontends.tensorrt_llm.script import run_script

        script = run_script(
            args.source,
            args.rest,
            args.tensorrt_llm,
            args.processes,
            output=Path(output) if output else None,
            options=given_settings(args, args.names),
            dry_run=args.dry_run,
            sources=Path(args.tensorrt_llm_sources) if args.tensorrt_llm_sources else None,
        )
        return _build(args, script, output)
    _check_unused(args)
    if output is None and not args.dry_run:
        raise Usage("no artifact folder: give -o DIR, or --dry-run", _HINT)
    return answer(args, _compile(args, args.source, output))


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
    reports: list[Report] = []
    for name, module in script.engines.items():
        if output is None and not args.dry_run:
            facts = {"artifact": str(engines[name].artifact), "name": name}
            line = f"{name}: the script wrote {facts['artifact']}"
            reports.append(Report(facts, [line]))
            continue
        place = f"{output}/{name}" if len(script.engines) > 1 else output
        reports.append(_compile(args, module, output and place))
        if place:  # for the scripts that run engines
            add_facts(Path(place), engines[name].config.to_dict())
    notes = script.session.notes
    facts = {"engines": [report.facts for report in reports], "notes": notes}
    lines = [part for report in reports for part in report.text]
    return answer(args, Report(facts, [*lines, *(f"note: {note}" for note in notes)]))


def _check_unused(args: Namespace) -> None:
    """An Error about what only build scripts of TensorRT-LLM take."""
    given = "--tensorrt-llm" if args.tensorrt_llm else "--processes" if args.processes > 1 else ""
    given = given or (f"-- {args.rest[0]}" if args.rest else "")
    if given:
        raise Error(
            f"{given} is for a build script, which imports tensorrt_llm and not irc; "
            f"{args.source} is none, so leave it out (--set gives arguments to a factory)"
        )


def _compile(args: Namespace, source: str | Module, output: str | None) -> Report:
    """Compile one source into a folder, or check it where there is none.

    A module refers to files of the script that traced it, so that its weights are copied.
    """
    from ..driver import check, prepare, write
    from ..pipeline.instruments import Limit, Timing

    began = time.perf_counter()
    timing, limits = Timing(), [Limit(args.limits)] if args.limits else []
    options = given_settings(args, args.names)
    files = [*args.load, *options.get("plugins", ())]
    with Progress() as progress:
        options |= {"bundle": True} if isinstance(source, Module) else {}
        instruments = [*pass_instruments(args, files), *limits, timing]
        prepared = prepare(source, output, **options, instruments=instruments, progress=progress)
        if output is None:
            progress("checking the graphs", 0.0)
            notes, opens = check(prepared), ""
        else:
            artifact = write(prepared, output, progress=progress)
            notes, opens = artifact.notes, prepared.backend.opens(artifact.manifest)
    seconds = time.perf_counter() - began
    facts = _facts(output, prepared, timing, seconds, args.explain)
    facts |= {"notes": notes, "opens": opens, "quantization": prepared.quantization.as_json()}
    errors = prepared.quantization.rows and options.get("weight_errors")
    header, *rows = prepared.quantization.table() if errors else ((),)
    return Report(facts, [*_lines(facts), table(rows, header)])


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


_PASSES = {
    "pass": "  {pass}",
    "operations": "{operations[0]} -> {operations[1]} ops",
    "took": "{seconds:ms}",
    "did": "{did}",
}


def _lines(facts: dict[str, Any]) -> list[str | Table]:
    size = f"{facts['parameters']:,} parameters, {amount(facts['weight_bytes'])}"
    if facts["ranks"] > 1:
        size += f" on each of {facts['ranks']} ranks"
    lines: list[str | Table] = [f"{facts['name']}: {facts['operations']} operations, {size}"]
    lines.append(Table(facts["passes"], _PASSES, headings=False))
    for step in facts["passes"]:
        name = step["pass"].partition("{")[0]
        lines += [f"  {name}: {printable(note)}" for note in step["notes"]]
    summaries = (step["summary"] for step in facts["passes"])
    lines += [f"  {printable(note)}" for note in filter(None, (*facts["notes"], *summaries))]
    if facts["artifact"] is None:
        return [*lines, f"nothing written (dry run), {facts['seconds']:.1f} s"]
    place = f"{facts['artifact']} for {facts['backend']}"
    wrote = f"wrote {place}: {amount(facts['folder_bytes'])} in {facts['seconds']:.1f} s"
    return [*lines, wrote, facts["opens"]]

"""`irc bisect`: the rewrite of a pass, or the kernel, that breaks a module."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import Error
from ..report import Report
from .arguments import add_json, real_number, whole_number, with_comma
from .arrays import add_inputs
from .console import Progress, answer

if TYPE_CHECKING:
    from ..debug.bisect import Found
    from ..ir.core import Module
    from ..pipeline import Pipeline

EXAMPLES = """
  irc bisect build/llama                                    an artifact, or a folder of --dump-dir
  irc bisect build/llama --load my_pass.py --check "python check.py {}"
  irc bisect model.irc --pipeline "canonicalize, fuse-norm, cse"
  irc bisect build/llama --backend onnx                     its kernels, where its passes are right
"""


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc bisect`."""
    add, either = parser.add_argument, parser.add_mutually_exclusive_group()
    what = "an artifact folder, a folder of --dump-dir, or with --pipeline any module"
    add("source", metavar="SOURCE", help=what)
    what = "the passes (default: those that made the artifact or the dumps)"
    add("--pipeline", metavar="TEXT", join=with_comma, help=what)
    what = "a shell command that exits with 0 where the module in the file {} is good"
    either.add_argument("--check", metavar="COMMAND", help=what)
    what = "where the passes are right, find the kernel of this backend that is wrong"
    either.add_argument("--backend", metavar="NAME", help=what)
    what = "trust the first N passes, as those that round: compare with the module after them"
    add("--good", metavar="N", type=whole_number(), default=0, help=what)
    add_inputs(parser, required=False)
    what = "allowed difference of results without --check, as that of irc opt --check-numerics"
    add("--tolerance", metavar="X", type=real_number, help=what)
    add_json(parser)


def run(args: Namespace) -> int:
    """0 if a rewrite or a kernel is found, 1 if there is nothing to find."""
    from ..debug.bisect import bisect, bisect_kernels
    from ..debug.checks import Command, Numerics
    from ..npz import read_npz
    from ..pipeline import run_pipeline
    from ..text import parse_module
    from ..text.printer import print_module

    module, pipeline, file = _subject(args)
    if (count := len(pipeline)) <= args.good and args.backend is None:
        raise Error("the pipeline has no passes to search")
    with Progress() as progress:
        progress("looking for a pass")
        if args.check is None:
            trusted = parse_module(print_module(module, locs=True))
            run_pipeline(trusted, pipeline.passes[: args.good])
            inputs = None if args.inputs is None else read_npz(Path(args.inputs))
            check = Numerics(trusted, inputs, args.tolerance, args.random or 0)
        else:
            check = Command(args.check)
        found = bisect(module, pipeline, check, args.good)
        if found is None and isinstance(check, Numerics) and args.backend is not None:
            progress(f"looking for a kernel of {args.backend}")
            found = bisect_kernels(module, pipeline, check.on(args.backend))
    if found is not None:
        return answer(args, _report(args, found, file))
    passes = "1 pass" if count == 1 else f"all {count} passes"
    message = f"nothing to find: the module after {passes} is good"
    message += "; those between were not checked" * (count > 1)
    if args.check is None:
        kernels = f"{args.backend} is right too" if args.backend else "see --backend for kernels"
        message += f"; {kernels}"
    return answer(args, Report({"found": None, "reason": message}, [message], 1))


def _subject(args: Namespace) -> tuple[Module, Pipeline, str]:
    """The module before the passes, the passes, and the file of the module."""
    from .. import passes  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers them)
    from ..artifact.manifest import INPUT
    from ..driver.history import recorded_run
    from ..driver.sources import find_source
    from ..pipeline import parse_pipeline
    from ..pipeline.instruments.record import INPUT as DUMPED

    files = [Path(args.source, name) for name in (DUMPED, INPUT)]
    file = next((str(path) for path in files if path.is_file()), None)
    given = None if args.pipeline is None else parse_pipeline(args.pipeline)
    if file is not None:
        module, recorded = recorded_run(args.source)
        return module, recorded if given is None else given, file
    if given is None:
        raise Error(
            f"{args.source} does not say which passes to search; give --pipeline, or an artifact"
        )
    return find_source(args.source).module, given, args.source


def _report(args: Namespace, found: Found, file: str) -> Report:
    """What was found, what the rewrite changes, and the commands that repeat it."""
    from ..pipeline.instruments import Replay
    from ..text.diff import differences

    _, total, before, after = found
    index, last = len(after.pipeline), after.pipeline.passes[-1]
    by_design = ", which changes numbers by design" * last.changes_numbers
    problem, number = after.problem or before.problem, f"{found.number} of {total}"
    lines = [f"pass {index}, {last}{by_design}: {problem}"]
    if not after.problem:
        opname = after.rule.removeprefix("expand ")
        lines = [f"the kernel of {opname} on {args.backend}, at {after.where}: {problem}"]
        lines += [f"expanded ({number}) it is right"]
    elif found.number:
        lines += [f"{last.name} rewrite {number}, rule {after.rule}, at {after.where}"]
    else:
        lines += [f"{last.name} as a whole, no single rewrite of it"]
    lines += [f"see --good {index} and --tolerance"] if by_design else []
    loads = [word for path in args.load for word in ("--load", os.path.abspath(path))]
    states = {"before": before, "after": after}
    commands = {k: Replay(loads, s.limit).command(file, s.pipeline) for k, s in states.items()}
    diff = [*differences(before.text, after.text or before.text, *commands, context=1)]
    facts = {"pass": str(last), "index": index, "number": found.number, "total": total}
    facts |= {"rule": after.rule, "where": after.where, "reason": problem}
    lines += diff + [f"{title}: {text}" for title, text in commands.items()]
    return Report({"found": facts | {"diff": diff, "commands": commands}}, lines)

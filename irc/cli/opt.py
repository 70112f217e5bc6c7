"""`irc opt`: a module through passes, text to text."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from functools import partial
from typing import TYPE_CHECKING

from .arguments import add_script, script_options
from .console import warn
from .sources import STDIN, read_module, weights_folder

if TYPE_CHECKING:
    from ..instruments import Instrument

EXAMPLES = """
  irc opt model.irc                                          verify and print
  irc opt model.irc --passes "canonicalize, cse, dce" --stats
  irc opt scorer.py --set hidden=128 --passes "expand, cse"
  irc show build/llama | irc opt --passes fuse-gated-mlp --diff > fused.irc
  irc opt model.irc --passes fuse-gated-mlp --why-not fuse-gated-mlp
  irc opt model.irc --load my_pass.py --passes my-pass --check-numerics
"""


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc opt`."""
    add = parser.add_argument
    add(
        "source",
        metavar="FILE",
        nargs="?",
        default=STDIN,
        help="a module, script.py[:factory], model.onnx, an artifact folder; if absent, the text "
        "on standard input",
    )
    add("--passes", metavar="TEXT", default="", help="the pipeline; without it, verify and print")
    add("--locs", action="store_true", help="print the source line of each operation")
    add("--diff", action="store_true", help="show on standard error what each pass changes")
    add("--time", action="store_true", help="show on standard error how long each pass takes")
    add("--stats", action="store_true", help="show on standard error what passes and rules did")
    add("--dump-dir", metavar="D", help="write the module after every pass into the folder D")
    add("--why-not", metavar="PASS", help="show where the rules of a pass nearly applied")
    add(
        "--limit",
        metavar="PASS=N",
        action="append",
        default=[],
        help="let a pass make N rewrites at most; may be repeated",
    )
    add(
        "--check-numerics",
        action="store_true",
        help="evaluate the module before and after every pass, and compare",
    )
    add("--no-verify", action="store_true", help="do not verify the module after every pass")
    add_script(parser)


def run(args: Namespace) -> int:
    """Read, run, report on standard error, print."""
    from .. import passes  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers them)
    from ..pipeline import parse_pipeline, run_pipeline
    from ..text.printer import print_module

    pipeline = parse_pipeline(args.passes)
    instruments, reports = _instruments(args)
    module = read_module(args.source, **script_options(args))
    run_pipeline(module, pipeline, instruments)
    for report in reports:
        warn(str(report))
    print(print_module(module, args.locs), end="")
    return 0


def _instruments(args: Namespace) -> tuple[list[Instrument], list[Instrument]]:
    """(all, those that are printed at the end)."""
    from ..instruments import (
        CheckNumerics,
        DumpDir,
        Limit,
        PrintDiff,
        Reproducer,
        Statistics,
        Timing,
        VerifyEach,
        WhyNot,
        parse_limit,
    )

    chosen: list[Instrument] = [Reproducer(args.dump_dir, args.load)]
    chosen += [] if args.no_verify else [VerifyEach()]
    if args.dump_dir is not None:
        chosen.append(DumpDir(args.dump_dir, args.load))
    if args.diff:
        chosen.append(PrintDiff(sys.stderr))
    if args.check_numerics:
        from ..backends.reference import evaluate

        chosen.append(CheckNumerics(partial(evaluate, base=weights_folder(args.source))))
    if args.limit:
        chosen.append(Limit(dict(map(parse_limit, args.limit))))
    reports: list[Instrument] = [WhyNot(args.why_not)] if args.why_not is not None else []
    reports += [Statistics()] if args.stats else []
    reports += [Timing()] if args.time else []  # last, so that the others are not in the time
    return chosen + reports, reports

"""`irc opt`: a module through passes, text to text."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from functools import partial
from typing import TYPE_CHECKING

from .arguments import SCRIPT, add_passes, add_source, given_settings, pass_instruments, with_comma
from .console import warn
from .sources import STDIN, load_module, weights_folder

if TYPE_CHECKING:
    from ..pipeline.instruments import Instrument

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
    what = "a module, script.py[:factory], model.onnx or an artifact folder (default: -)"
    add("source", metavar="FILE", nargs="?", default=STDIN, help=what)
    what = "the pipeline; without it, verify and print"
    from ..driver.sources import disjoint

    add("--passes", metavar="TEXT", default="", join=with_comma, help=what)
    add("--locs", action="store_true", help="print the source line of each operation")
    add("--diff", action="store_true", help="show on standard error what each pass changes")
    add("--time", action="store_true", help="show on standard error how long each pass takes")
    add("--stats", action="store_true", help="show on standard error what passes and rules did")
    add("--why-not", metavar="PASS", help="show where the rules of a pass nearly applied")
    what = "let a pass make N rewrites at most; may be repeated"
    add("--limit", metavar="PASS=N", type=limit, default={}, join=disjoint, help=what)
    what = "evaluate the module before and after every pass, and compare"
    add("--check-numerics", action="store_true", help=what)
    add_passes(parser)
    add_source(parser, *SCRIPT)


def limit(text: str) -> dict[str, int]:
    """`PASS=N` as an entry."""
    from ..pipeline.instruments import parse_limit

    return dict([parse_limit(text)])


def run(args: Namespace) -> int:
    """Read, run, report on standard error, print."""
    from .. import passes  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers them)
    from ..pipeline import parse_pipeline, run_pipeline
    from ..text.printer import print_module

    pipeline = parse_pipeline(args.passes)
    instruments, reports = _instruments(args)
    module = load_module(args.source, **given_settings(args, SCRIPT))
    run_pipeline(module, pipeline, instruments)
    for report in reports:
        warn(str(report))
    print(print_module(module, args.locs), end="")
    return 0


def _instruments(args: Namespace) -> tuple[list[Instrument], list[Instrument]]:
    """All instruments, and those of them that are printed at the end."""
    from ..pipeline.instruments import CheckNumerics, Limit, PrintDiff, Statistics, Timing, WhyNot

    limit = Limit(args.limit) if args.limit else None
    checks, base = ["--check-numerics"] * args.check_numerics, weights_folder(args.source)
    chosen = pass_instruments(args, args.load, checks, limit, os.path.abspath(base))
    if args.diff:
        chosen.append(PrintDiff(sys.stderr))
    if args.check_numerics:
        from ..backends.reference import evaluate

        chosen.append(CheckNumerics(partial(evaluate, base=base)))
    chosen += [] if limit is None else [limit]
    reports: list[Instrument] = [WhyNot(args.why_not)] if args.why_not is not None else []
    reports += [Statistics()] if args.stats else []
    reports += [Timing()] if args.time else []  # last, so that the others are not in the time
    return chosen + reports, reports

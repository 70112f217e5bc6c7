"""`irc opt`: a module through passes, text to text."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..artifact.atomic import whole_file
from ..errors import Error
from .arguments import (
    SCRIPT,
    Usage,
    add_passes,
    add_source,
    given_settings,
    pass_instruments,
    real_number,
    with_comma,
)
from .console import warn
from .sources import STDIN, load_module, weights_folder

if TYPE_CHECKING:
    from ..ir.core import Module
    from ..pipeline.instruments import Instrument

EXAMPLES = """
  irc opt model.irc                                          verify and print
  irc opt model.irc --passes "canonicalize, cse, dce" --stats
  irc opt scorer.py --set hidden=128 --passes "expand, cse"
  irc show build/llama | irc opt --passes fuse-gated-mlp --diff > fused.irc
  irc opt model.irc --passes fuse-gated-mlp --why-not fuse-gated-mlp
  irc opt model.irc --load my_pass.py --passes my-pass --check-numerics --tolerance 1e-6
  irc opt model.irc --passes "cse, dce" -o smaller.irc
"""


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc opt`."""
    add = parser.add_argument
    what = "a module, script.py[:factory], model.onnx or an artifact folder (default: -)"
    add("source", metavar="FILE", nargs="?", default=STDIN, help=what)
    what = "the pipeline; without it, verify and print"
    from ..driver.sources import disjoint

    add("--passes", metavar="TEXT", default="", join=with_comma, help=what)
    what = "write the module to the file F, complete or not at all, instead of printing it"
    add("-o", metavar="F", dest="output", help=what)
    add("--locs", action="store_true", help="print the source line of each operation")
    add("--diff", action="store_true", help="show on standard error what each pass changes")
    add("--time", action="store_true", help="show on standard error how long each pass takes")
    add("--stats", action="store_true", help="show on standard error what passes and rules did")
    add("--why-not", metavar="PASS", help="show where the rules of a pass nearly applied")
    what = "let a pass make N rewrites at most; may be repeated"
    add("--limit", metavar="PASS=N", type=limit, default={}, join=disjoint, help=what)
    what = "evaluate the module before and after every pass, and compare"
    add("--check-numerics", action="store_true", help=what)
    what = "how far floats may differ, relative to the largest number of a result (default: 1e-4, "
    what += "with 16-bit weights or arguments 2e-2)"
    add("--tolerance", metavar="X", type=real_number, help=what)
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

    if args.tolerance is not None and not args.check_numerics:
        raise Usage("--tolerance is for --check-numerics; give both")
    check_output(args.output, args.source)
    pipeline = parse_pipeline(args.passes)
    instruments, reports = _instruments(args)
    module = load_module(args.source, **given_settings(args, SCRIPT))
    run_pipeline(module, pipeline, instruments)
    for report in reports:
        warn(str(report))
    if args.output is None:
        print(print_module(module, args.locs), end="")
        return 0
    _move_files(module, weights_folder(args.source), args.output)
    with whole_file(Path(args.output)) as file:
        file.write(print_module(module, args.locs).encode())
    return 0


def check_output(output: str | None, source: str) -> None:
    """An Error where the file to write belongs to what is read, or lies in no folder."""
    if output is None:
        return
    path = Path(os.path.realpath(output))
    if Path(os.path.realpath(source)) in (path, path.parent):
        raise Error(f"-o {output} would replace the input {source}; choose another file")
    if path.is_dir() or not path.parent.is_dir():
        raise Error(f"-o takes a file in a folder that exists, not {output}")


def _move_files(module: Module, base: Path, output: str) -> None:
    """Name the files of weights, which are relative to `base`, from the folder of the output."""
    folder = os.path.dirname(os.path.realpath(output))
    for name, path in module.files.items():
        if not os.path.isabs(path):
            module.files[name] = os.path.relpath(os.path.realpath(base / path), folder)


def _instruments(args: Namespace) -> tuple[list[Instrument], list[Instrument]]:
    """All instruments, and those of them that are printed at the end."""
    from ..pipeline.instruments import CheckNumerics, Limit, PrintDiff, Statistics, Timing, WhyNot

    limit = Limit(args.limit) if args.limit else None
    checks, base = ["--check-numerics"] * args.check_numerics, weights_folder(args.source)
    checks += [] if args.tolerance is None else ["--tolerance", f"{args.tolerance:g}"]
    chosen = pass_instruments(args, args.load, checks, limit, os.path.abspath(base))
    if args.diff:
        chosen.append(PrintDiff(sys.stderr))
    if args.check_numerics:
        from ..backends.reference import evaluate

        chosen.append(CheckNumerics(partial(evaluate, base=base), tolerance=args.tolerance))
    chosen += [] if limit is None else [limit]
    reports: list[Instrument] = [WhyNot(args.why_not)] if args.why_not is not None else []
    reports += [Statistics()] if args.stats else []
    reports += [Timing()] if args.time else []  # last, so that the others are not in the time
    return chosen + reports, reports

"""`irc show`: prints the text of a module or of a scope, or its statistics, or an HTML page."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial
from pathlib import Path
from typing import cast

from ..analysis.units import amount
from ..errors import Error, did_you_mean
from ..report import Report, table
from .arguments import SCRIPT, add_dims, add_json, add_source, given_settings
from .console import answer
from .sources import read_module

EXAMPLES = """
  irc show build/llama | head
  irc show build/llama --scope model.layers.0.mlp --locs
  irc show model.irc --stats
  irc show build/llama --html llama.html
  irc show build/engines --kernels --scope model.layers.0
  irc show build/llama --plan --dims B=1,S=1
  irc show model.onnx --stats
  irc show scorer.py:build --set hidden=128
"""


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc show`."""
    from ..backends import command_parts

    add = parser.add_argument
    what = "a module, script.py[:factory], model.onnx, an artifact folder, or -"
    add("source", metavar="FILE|DIR", help=what)
    add("--scope", metavar="S", help="only this module path, such as model.layers.0.mlp")
    add("--locs", action="store_true", help="print the source line of each operation")
    add("--html", metavar="F", help="write a page about the module to the file F")
    add("--stats", action="store_true", help="count operations and weights instead")
    for part in command_parts():
        for flag, what in part.shows.items():
            add(f"--{flag}", action="append_const", dest="parts", const=(part, flag), help=what)
    add_dims(parser, "sizes of symbols for --plan (default: the typical ones)")
    add_source(parser, *SCRIPT)
    add_json(parser)


def run(args: Namespace) -> int:
    """Print the text, the statistics or the kernels, or write the page."""
    from ..artifact.report import page, statistics
    from ..backends.commands import Shown
    from ..driver.sources import artifact_of
    from ..text.printer import print_module

    for part, flag in args.parts or ():
        shown = Shown(args.source, partial(read_module, args.source), args.scope, args.dims)
        return answer(args, part.show(flag, shown))
    module = read_module(args.source, **given_settings(args, SCRIPT))
    if args.html is not None:
        artifact = artifact_of(args.source) if Path(args.source).is_dir() else None
        manifest = artifact.manifest if artifact else None
        Path(args.html).write_text(page(module, manifest), encoding="utf-8")
        return 0
    if args.scope is not None:
        _check_scope(args.scope, [op.loc.scope for op in module.ops() if op.loc is not None])
    if args.stats or args.json:
        stats = statistics(module)
        text = {} if args.stats else {"text": print_module(module, args.locs)}
        return answer(args, Report(stats | text, [table(_stats(stats))]))
    print(print_module(module, args.locs, args.scope), end="")
    return 0


def _check_scope(scope: str, scopes: list[str]) -> None:
    """An Error where no operation is in `scope`."""
    named = dict.fromkeys(
        ".".join(path.split(".")[:n]) for path in scopes for n in range(1, path.count(".") + 2)
    )
    if scope not in named:
        top = ", ".join([path for path in named if path and "." not in path][:10])
        there = f"; at the top there are {top}" if top else "; no operation here has a scope"
        raise Error(f"no operation is in the scope {scope!r}{did_you_mean(scope, named)}{there}")


def _stats(stats: dict[str, object]) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in stats.items():
        if isinstance(value, dict):
            counts = cast("dict[str, int]", value)
            rows.append((key, str(len(counts))))
            rows += [(f"  {name}", str(count)) for name, count in counts.items()]
        elif key == "weight_bytes" and isinstance(value, int):
            rows.append((key, f"{value} ({amount(value)})"))
        else:
            rows.append((key, str(value)))
    return rows

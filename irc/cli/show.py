"""`irc show`: prints the text of a module or of a scope, or its statistics, or an HTML page."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import cast

from ..analysis.units import amount
from ..analysis.weights import weight_table
from ..errors import Error, did_you_mean
from ..ir.core import Module
from ..report import Report, table
from .arguments import SCRIPT, add_dims, add_json, add_source, given_settings
from .console import answer, warn
from .sources import read_module

EXAMPLES = """
  irc show build/llama | head
  irc show build/llama --scope model.layers.0.mlp --locs
  irc show model.irc --stats
  irc show build/llama --weights
  irc show build/llama --html llama.html --overlay errors.json
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
    what = "write a page to the file F: the passes, graphs, times, memory, kernels, decisions"
    add("--html", metavar="F", help=what)
    what = "numbers by scope or value to show on that page: a file of compare, bench or your own"
    add("--overlay", metavar="F", action="append", default=[], help=what)
    what = "list the weights by size, how the ranks hold them, and why some are replicated"
    add("--weights", action="store_true", help=what)
    add("--stats", action="store_true", help="count operations and weights instead")
    for part in command_parts():
        for flag, what in part.shows.items():
            add(f"--{flag}", action="append_const", dest="parts", const=(part, flag), help=what)
    add_dims(parser, "sizes of symbols for --plan (default: the typical ones)")
    add_source(parser, *SCRIPT)
    add_json(parser)


def run(args: Namespace) -> int:
    """Print the text, the statistics or the kernels, or write the page."""
    from ..artifact.folder import ArtifactFolder
    from ..artifact.report import statistics
    from ..backends import describe
    from ..backends.commands import Shown
    from ..text.printer import print_module

    for part, flag in args.parts or ():
        shown = Shown(args.source, partial(read_module, args.source), args.scope, args.dims)
        return answer(args, part.show(flag, shown))
    if args.html is not None:
        return _write_page(args)
    if args.overlay:
        raise Error("--overlay is for the page of --html; give that too, or leave it out")
    module = read_module(args.source, **given_settings(args, SCRIPT))
    if args.scope is not None:
        _check_scope(args.scope, [op.loc.scope for op in module.ops() if op.loc is not None])
    if args.weights:
        return answer(args, _weights(module, args.source, args.scope))
    if args.stats or args.json:
        stats: dict[str, object] = statistics(module)
        stats |= describe(ArtifactFolder.find(Path(args.source)))
        text = {} if args.stats else {"text": print_module(module, args.locs)}
        return answer(args, Report(stats | text, [table(_stats(stats))]))
    print(print_module(module, args.locs, args.scope), end="")
    return 0


def _write_page(args: Namespace) -> int:
    """Write the page; of what no passes are known of, with one state."""
    from ..driver.history import history_of, replay
    from ..driver.sources import artifact_of
    from ..page.write import page, read_overlays

    folder = Path(args.source)
    artifact = artifact_of(folder) if folder.is_dir() else None
    overlays = [each for file in args.overlay for each in read_overlays(Path(file))]
    history = None
    if folder.is_dir():
        try:
            history = replay(folder)
        except Error as error:
            if artifact is None:
                raise
            warn(f"the page has no passes: {error}")
    if history is None:
        history = history_of(read_module(args.source, **given_settings(args, SCRIPT)), "")
    text = page(history, args.source, artifact.manifest if artifact else None, overlays)
    Path(args.html).write_text(text, encoding="utf-8")
    return 0


def _weights(module: Module, source: str, scope: str | None) -> Report:
    """The table of the weights; of an artifact with the reasons of the pass shard."""
    reasons, notes = _reasons(module, source)
    groups, several = weight_table(module, reasons, scope), module.mesh.ranks > 1
    cells = [
        [
            group.name + f" × {group.count}" * (group.count > 1),
            f"{group.dtype}{[*group.shape]}",
            *(amount(group.nbytes * group.count), f"{group.share:.1%}"),
            *([amount(group.rank_nbytes), group.layout] * several),
            group.source,
        ]
        for group in groups
    ]
    header = ("weight", "type", "bytes", "share", *("per rank", "layout") * several, "read from")
    total = sum(group.nbytes * group.count for group in groups)
    text = f"{sum(group.count for group in groups)} weights, {amount(total)}"
    facts = {"weights": [asdict(group) for group in groups], "nbytes": total}
    return Report(facts, [table(cells, header), text], notes=notes)


def _reasons(module: Module, source: str) -> tuple[list[str], list[str]]:
    """Notes of the pass shard of an artifact of several ranks; and why there are none."""
    from ..artifact.folder import ArtifactFolder
    from ..driver.history import replay

    if module.mesh.ranks == 1 or not Path(source).is_dir() or not ArtifactFolder.find(Path(source)):
        return [], []
    try:
        steps = replay(source).steps
    except Error as error:
        return [], [f"the reasons to replicate weights are not known: {error}"]
    return [note for step in steps for note in step.notes if step.name == "shard"], []


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

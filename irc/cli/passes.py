"""`irc passes`: lists the passes, or the options of one."""

from __future__ import annotations

import inspect
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from ..errors import Error, did_you_mean
from ..extensions.user_files import origin
from ..report import Report, Table, table
from .arguments import add_json
from .console import answer, option_lines

if TYPE_CHECKING:
    from ..pipeline import Pass

EXAMPLES = """
  irc passes
  irc passes fuse-gated-mlp
  irc passes --load my_pass.py --json
"""


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc passes`."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="one pass, with its options")
    add_json(parser)


def run(args: Namespace) -> int:
    """Print a line per pass, or one pass in full."""
    from .. import passes  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers them)
    from ..backends import get, names
    from ..extensions.entry_points import load_installed
    from ..pipeline import GROUP, PASSES

    load_installed(GROUP)
    if args.name is not None and args.name not in PASSES:
        raise Error(f"no pass called {args.name!r}{did_you_mean(args.name, PASSES)}")
    chosen = sorted(PASSES) if args.name is None else [args.name]
    rows = [described(PASSES[name]) for name in chosen]
    pipelines = {name: get(name).default_pipeline for name in names()}
    if args.name is not None:
        return answer(args, Report(rows[0], _page(rows[0])))
    listed = [{"name": name, "passes": text or "(none)"} for name, text in pipelines.items()]
    text = [
        Table(rows, {"name": "{name}", "summary": "{summary}"}, headings=False),
        "\ndefault pipelines:",
        Table(listed, {"name": "  {name}", "passes": "{passes}"}, headings=False),
    ]
    return answer(args, Report({"passes": rows, "default_pipelines": pipelines}, text))


def described(cls: type[Pass]) -> dict[str, Any]:
    """Name, documentation and options of a pass."""
    from ..pipeline import describe_options

    text = inspect.getdoc(cls) or ""
    options = [
        {"name": name, "takes": takes, "default": default or None, "flag": flag or None}
        for name, takes, default, flag in describe_options(cls)
    ]
    return {
        "name": cls.name,
        "summary": text.partition("\n")[0],
        "text": text,
        "options": options,
        "values": cls.known_values(),
        "module": origin(cls),
    }


def _page(facts: dict[str, Any]) -> list[str | Table]:
    lines: list[str | Table] = [f"{facts['name']}  ({facts['module']})\n\n{facts['text']}"]
    lines += option_lines("options", facts["options"]) or ["\nIt has no options."]
    for option, values in facts["values"].items():
        lines.append(f"\n{option}:")
        lines.append(table((f"  {name}", what) for name, what in values.items()))
    return lines

"""`irc plugins`: the registered plugins of engines, and the page about one."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from ..errors import Error, did_you_mean
from ..report import Report, Table
from .arguments import add_json, add_plugin
from .console import answer

EXAMPLES = """
  irc plugins
  irc plugins IrcCollective
  irc plugins SoftCap --plugin examples/custom_plugin.py
"""


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc plugins`."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="one plugin, in full, as Markdown")
    add_plugin(parser)
    add_json(parser)


def run(args: Namespace) -> int:
    """All plugins with a line each, or the page about one."""
    from ..backends import command_parts

    parts = command_parts()
    for part in parts if args.plugins else ():
        part.load_plugins(args.plugins)
    pages = [page for part in parts for page in part.plugins()]
    if args.name is None:
        rows = Table([vars(page) for page in pages], _COLUMNS)
        return answer(args, Report([page.facts for page in pages], [rows]))
    chosen = [page for page in pages if args.name in page.names]
    if not chosen:
        names = [name for page in pages for name in page.names]
        near = did_you_mean(args.name, names, "name the file that registers it with --plugin")
        raise Error(f"no plugin called {args.name!r}{near}")
    text = "\n".join(page.text for page in chosen)
    return answer(args, Report([page.facts for page in chosen], [text.rstrip()]))


_COLUMNS = {"plugin": "{name}", "version": "{version}", "summary": "{summary}"}

"""`irc cache`: engines, kernels and choices that are kept, their size, and how to delete them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ..report import Report
from .arguments import add_json, word_of
from .console import answer

EXAMPLES = """
  irc cache
  irc cache size
  irc cache clear
"""


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc cache`."""
    what = (
        "list (the default), size, or clear: delete the kernels and choices of the backend cuda, "
        "and all engines that no process is using"
    )
    kind = word_of("list", "size", "clear")
    parser.add_argument("action", metavar="ACTION", nargs="?", type=kind, default="list", help=what)
    what = "another folder than $IRC_CACHE, or engines and kernels in ~/.cache/irc"
    parser.add_argument("--cache", metavar="DIR", type=Path, help=what)
    add_json(parser)


def run(args: Namespace) -> int:
    """List, measure or delete; artifacts keep their engines."""
    from ..backends import command_parts

    answers = [part.cache(args.cache, args.action) for part in command_parts()]
    reports = [report for report in answers if report is not None]
    facts = {name: value for report in reports for name, value in report.facts.items()}
    return answer(args, Report(facts, [part for report in reports for part in report.text]))

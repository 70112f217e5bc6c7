"""`irc models`: lists the families of models, and what of them tests compare with transformers."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Any

from ..errors import Error, did_you_mean
from ..report import Report, Table
from .arguments import add_json
from .console import answer

EXAMPLES = """
  irc models
  irc models falcon
  irc models --load examples/custom_llm.py --json
"""

_ABOUT = """
checked: tests compare tiny models with transformers, in these dtypes on one rank, in f32 on these
meshes, and with these schemes; what is not listed is not compared. irc models NAME: the classes.
"""
_LISTS = ("states", "dtypes", "meshes", "schemes")


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc models`."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="one model_type of config.json")
    add_json(parser)


def run(args: Namespace) -> int:
    """Print a line per model_type, or one in full."""
    from ..frontends.models import described

    rows = described()
    if args.name is None:
        return answer(
            args,
            Report(
                [*rows.values()], [Table([*map(_texts, rows.values())], _COLUMNS), _ABOUT.rstrip()]
            ),
        )
    if args.name not in rows:
        raise Error(f"no model_type called {args.name!r}{did_you_mean(args.name, rows)}")
    row = rows[args.name]
    texts = [{"name": name, "value": text} for name, text in _texts(row).items()]
    return answer(args, Report(row, [Table(texts, {"": "{name}", " ": "{value}"}, headings=False)]))


def _texts(row: dict[str, Any]) -> dict[str, Any]:
    """A row as texts; - where nothing is checked."""
    classes = ", ".join(row["architectures"])
    return {**row, "architectures": classes} | {key: ", ".join(row[key]) or "-" for key in _LISTS}


_COLUMNS = {
    "model_type": "{model_type}",
    "kind": "{kind}",
    "states": "{states}",
    "checked: dtypes": "{dtypes}",
    "meshes": "{meshes}",
    "schemes": "{schemes}",
}

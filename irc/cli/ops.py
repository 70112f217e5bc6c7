"""`irc ops`: lists the operations and the backends that have them."""

from __future__ import annotations

import inspect
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from ..errors import Error, did_you_mean
from ..report import Report, Table, markdown_table, table
from .arguments import add_json
from .console import answer, option_lines

if TYPE_CHECKING:
    from ..ir.core import Op

EXAMPLES = """
  irc ops
  irc ops attention
  irc ops --markdown
  irc ops --target tensorrt-rtx-1.7/sm_89
"""


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc ops`."""
    add = parser.add_argument
    add("name", metavar="NAME", nargs="?", help="one operation, in full")
    add("--markdown", action="store_true", help="a table by group, as Markdown")
    add("--target", metavar="T", help="the lowerings for TensorRT, as in tensorrt-rtx-1.7/sm_89")
    add_json(parser)


def run(args: Namespace) -> int:
    """Print the table, or one operation in full."""
    from .. import ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers them)
    from ..ir.declare import REGISTRY, load_installed_operations

    load_installed_operations()
    if args.name is not None and args.name not in REGISTRY:
        raise Error(f"no operation called {args.name!r}{did_you_mean(args.name, REGISTRY)}")
    if args.target is not None:
        from ..backends import command_parts

        wanted = args.target, args.name, args.markdown
        reports = (part.lowerings(*wanted) for part in command_parts())
        return answer(args, next(report for report in reports if report is not None))
    chosen = sorted(REGISTRY) if args.name is None else [args.name]
    rows_of_facts = [described(REGISTRY[name]) for name in chosen]
    columns = list(rows_of_facts[0]["backends"])
    if args.name is not None:
        return answer(args, Report(rows_of_facts[0], _page(rows_of_facts[0])))
    if args.markdown:
        text = markdown_table(grouped(rows_of_facts), ["group", "operations", *columns])
    else:
        rows = [
            [facts["name"], *facts["backends"].values(), facts["summary"]]
            for facts in rows_of_facts
        ]
        text = table(rows, ["operation", *columns, "summary"])
    return answer(args, Report(rows_of_facts, [text]))


def grouped(rows_of_facts: list[dict[str, Any]]) -> list[list[str]]:
    """A row per group of operations: their names, and per backend which of them it has."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for facts in rows_of_facts:
        groups.setdefault(facts["group"], []).append(facts)
    return [
        [group, _names(members), *(_coverage(members, name) for name in members[0]["backends"])]
        for group, members in sorted(groups.items())
    ]


def _names(members: list[dict[str, Any]]) -> str:
    return ", ".join(f"`{facts['name']}`" for facts in members)


def _coverage(members: list[dict[str, Any]], backend: str) -> str:
    lacking = [facts for facts in members if facts["backends"][backend] == "no"]
    if not lacking:
        return "yes"
    return "no" if len(lacking) == len(members) else f"all but {_names(lacking)}"


def described(cls: type[Op]) -> dict[str, Any]:
    """The declaration of an operation, and its backends."""
    from ..backends import get, names
    from ..ir.attributes import kind_name
    from ..ir.facts import facts_text
    from ..text.printer import literal

    text = inspect.getdoc(cls) or ""
    defaults = cls.attribute_defaults
    without = "expanded" if cls.composite else "no"
    return {
        "name": cls.opname,
        "group": cls.__module__.rpartition(".")[2],
        "summary": text.partition("\n")[0],
        "text": text,
        "operands": [f"{name}..." if _repeats(cls, name) else name for name in cls.operand_names],
        "optional": list(cls.optional_names),
        "attributes": [
            {
                "name": name,
                "takes": kind_name(kind),
                "default": literal(defaults[name]) if name in defaults else None,
            }
            for name, kind in cls.attribute_types.items()
        ],
        "sharding": cls.sharding,
        "facts": facts_text(cls),
        "composite": cls.composite,
        "backends": {name: "yes" if get(name).covers(cls) else without for name in names()},
    }


def _repeats(cls: type[Op], name: str) -> bool:
    return cls.variadic and name == cls.operand_names[-1]


def _page(facts: dict[str, Any]) -> list[str | Table]:
    operands = [f"%{name}" for name in facts["operands"]]
    operands += [f"[{name}=%{name}]" for name in facts["optional"]]
    head = f"{facts['name']} {', '.join(operands)}".rstrip()
    lines: list[str | Table] = [head, f"\n{facts['text']}"]
    lines += option_lines("attributes", facts["attributes"])
    lines += [f"\n{key}: {facts[key]}" for key in ("sharding", "facts") if facts[key]]
    backends = ", ".join(f"{name} {how}" for name, how in facts["backends"].items())
    return [*lines, f"\nbackends: {backends}"]

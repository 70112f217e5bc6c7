"""`irc plugins`: the plugins of engines that there are, and the page about one."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from ..errors import Error, did_you_mean
from .arguments import add_json, add_plugin
from .console import print_json, table

if TYPE_CHECKING:
    from ..backends.tensorrt.plugins import PluginSpec

EXAMPLES = """
  irc plugins
  irc plugins IrcCollective
  irc plugins SoftCap --plugin examples/custom_plugin.py
"""


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc plugins`."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="one plugin, in full, as Markdown")
    add_plugin(parser.add_argument)
    add_json(parser)


def run(args: Namespace) -> int:
    """All plugins with a line each, or all about one."""
    from ..backends.tensorrt.plugins import SPECS, describe, load, shown

    load(args.plugin)
    found = {shown(*key): spec for key, spec in sorted(SPECS.items())}
    if args.name is not None:
        found = _named(args.name, found)
    if args.json:
        print_json([_facts(spec) for spec in found.values()])
    elif args.name is not None:
        print("\n".join(describe(spec) for spec in found.values()), end="")
    else:
        rows = [(name, spec.version, _summary(spec)) for name, spec in found.items()]
        print(table(rows, ["plugin", "version", "what it is"]))
    return 0


def _named(name: str, known: dict[str, PluginSpec]) -> dict[str, PluginSpec]:
    """The plugin called `name`, or those, where it leaves the namespace out."""
    found = {each: spec for each, spec in known.items() if name in (each, spec.name)}
    if not found:
        names = [*known, *(spec.name for spec in known.values())]
        near = did_you_mean(name, names, "name the file that registers it with --plugin")
        raise Error(f"no plugin called {name!r}{near}")
    return found


def _summary(spec: PluginSpec) -> str:
    return spec.doc.strip().partition("\n")[0]


def _facts(spec: PluginSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "namespace": spec.namespace,
        "version": spec.version,
        "reads": sorted(spec.reads),
        "operation": spec.operation or None,
        "summary": _summary(spec),
        "fields": [
            {
                "name": field.name,
                "type": field.type,
                "default": None if field.required else field.encode(field.default),
                "choices": list(field.choices),
                "what": field.doc,
            }
            for field in spec.fields
        ],
    }

"""`irc plugins`: the registered plugins of engines, and the page about one."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING, Any

from ..errors import Error, did_you_mean
from .arguments import add_json, add_plugin
from .console import markdown_table, print_json, table

if TYPE_CHECKING:
    from ..backends.tensorrt.plugins import Field, PluginSpec

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
    """All plugins with a line each, or the page about one."""
    from ..backends.tensorrt.plugins import SPECS, display_name, load

    load(args.plugin)
    found = {display_name(*key): spec for key, spec in sorted(SPECS.items())}
    if args.name is not None:
        found = _named(args.name, found)
    if args.json:
        print_json([_facts(spec) for spec in found.values()])
    elif args.name is not None:
        print("\n".join(page(spec) for spec in found.values()), end="")
    else:
        rows = [(name, spec.version, _summary(spec)) for name, spec in found.items()]
        print(table(rows, ["plugin", "version", "summary"]))
    return 0


def _named(name: str, known: dict[str, PluginSpec]) -> dict[str, PluginSpec]:
    """The plugin called `name`, in every namespace unless it names one."""
    found = {each: spec for each, spec in known.items() if name in (each, spec.name)}
    if not found:
        names = [*known, *(spec.name for spec in known.values())]
        near = did_you_mean(name, names, "name the file that registers it with --plugin")
        raise Error(f"no plugin called {name!r}{near}")
    return found


def _summary(spec: PluginSpec) -> str:
    return spec.doc.strip().partition("\n")[0]


def page(spec: PluginSpec) -> str:
    """Markdown: the doc of a plugin, its fields, its tensors."""
    about = f"version {spec.version}, namespace `{spec.namespace}`"
    parts = [f"# {spec.name}", about, spec.doc.strip()]
    if spec.fields:
        rows = [(f"`{each.name}`", each.type, *_details(each)) for each in spec.fields]
        parts.append("## Fields (string attributes of the node)")
        parts.append(markdown_table(rows, ("name", "type", "default", "what")))
    parts += ["## Tensors", _tensors(spec)]
    kinds = [(f"`{name}`", " ".join(types)) for name, types in spec.types.items()]
    if kinds:
        parts.append(markdown_table(kinds, ("dtype", "one of")))
    if spec.operation:
        parts.append(f"Nodes in ONNX files are imported as the operation `{spec.operation}`.")
    return "\n\n".join(parts) + "\n"


def _details(field: Field) -> tuple[str, str]:
    default = "required" if field.default is None else f"`{field.encode(field.default)}`"
    return default, field.doc + (f" ({', '.join(field.choices)})" if field.choices else "")


def _tensors(spec: PluginSpec) -> str:
    rows: list[tuple[str, ...]] = []
    for kind, tensors in (("input", spec.inputs), ("output", spec.outputs)):
        if callable(tensors):
            rows.append((kind, "", "", "depends on the fields, see above"))
        else:
            rows += [(kind, f"`{each.name}`", each.dtype, each.doc) for each in tensors]
    return markdown_table(rows, ("", "name", "dtype", "what"))


def _facts(spec: PluginSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "namespace": spec.namespace,
        "version": spec.version,
        "operation": spec.operation or None,
        "summary": _summary(spec),
        "fields": [
            {
                "name": field.name,
                "type": field.type,
                "default": None if field.default is None else field.encode(field.default),
                "choices": list(field.choices),
                "what": field.doc,
            }
            for field in spec.fields
        ],
    }

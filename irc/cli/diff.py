"""`irc diff`: the differences of two modules, as a summary and as lines of text.

Values of the second module have the names of those of the first that they correspond to.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterable

from ..ir.core import Function, Module
from ..report import paint
from ..text.diff import bodies, differences, with_names_of
from ..text.printer import print_module
from .arguments import add_json
from .console import print_json
from .sources import read_module

EXAMPLES = """
  irc diff before.irc after.irc
  irc diff build/f32 build/bf16 --summary
  irc opt m.irc --passes "cse, dce" | irc diff m.irc -
"""


def configure(parser: ArgumentParser) -> None:
    """The arguments of `irc diff`."""
    parser.add_argument("before", metavar="A", help="a module, a script, an artifact folder, or -")
    parser.add_argument("after", metavar="B", help="another one; exit status 1 if they differ")
    parser.add_argument("--summary", action="store_true", help="without the lines of text")
    add_json(parser)


def run(args: Namespace) -> int:
    """0 if the two print the same text, 1 if they differ."""
    before, after = read_module(args.before), read_module(args.after)
    old, new = print_module(before), print_module(after)
    same = old == new
    renamed = with_names_of(old, new)
    was, now = bodies(old), bodies(renamed)
    changed = [name for name, body in was.items() if now.get(name, body) != body]
    changes = [] if renamed == old else compare(before, after, changed)
    if args.json:
        print_json({"same": same, "same_structure": not changes, "changes": changes})
        return int(not same)
    if same:
        return 0
    for change in changes or ["only the names of values differ"]:
        print(change)
    if not args.summary:
        print()
        print("\n".join(map(_coloured, differences(old, new, args.before, args.after))))
    return 1


def compare(before: Module, after: Module, changed: Iterable[str]) -> list[str]:
    """A line per difference; `changed` are the functions of both whose bodies differ."""
    was, now = _facts(before), _facts(after)
    lines = [f"{what}: gone" for what in was if what not in now]
    lines += [f"{what}: new" for what in now if what not in was]
    both = [what for what in was if what in now and was[what] != now[what]]
    lines += [f"{what}: {was[what]} -> {now[what]}" for what in both]
    lines += [_operations(before.functions[name], after.functions[name]) for name in changed]
    return lines or ["the same entries in another order"]


def _facts(module: Module) -> dict[str, str]:
    """Everything but the bodies of functions, by what it is."""
    return {
        "name": module.name,
        "mesh": str(module.mesh) or "one rank",
        "view": "local" if module.local else "global",
        **{f"dim {name}": str(bounds) for name, bounds in module.dims.items()},
        **{f"file {name}": path for name, path in module.files.items()},
        **{
            f"weight {name}": f"{weight.type} = {weight.ref}"
            for name, weight in module.weights.items()
        },
        **{f"function {name}": _signature(function) for name, function in module.functions.items()},
    }


def _signature(function: Function) -> str:
    args = ", ".join(f"{arg.name}: {arg.type}" for arg in function.args)
    results = zip(function.result_names(), function.returned, strict=True)
    return f"({args}) -> ({', '.join(f'{name}: {value.type}' for name, value in results)})"


def _operations(before: Function, after: Function) -> str:
    old, new = (Counter(op.opname for op in function) for function in (before, after))
    changed = [op for op in dict.fromkeys([*old, *new]) if old[op] != new[op]]
    if not changed:
        return f"@{before.name}: the same operations, with other operands, attributes or order"
    counts = ", ".join(f"{op} {old[op]} -> {new[op]}" for op in changed)
    return f"@{before.name}: {old.total()} -> {new.total()} operations: {counts}"


def _coloured(line: str) -> str:
    """A line of a unified diff, in its colour on a terminal."""
    style = {"+": "green", "-": "red", "@": "dim"}.get(line[:1])
    return paint(line, style) if style and line[:3] not in ("+++", "---") else line
